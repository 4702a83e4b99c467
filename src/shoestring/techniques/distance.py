"""How far tensors of planned training are from those of plain training, in units of rounding.

All distances are L2 norms of one tensor at a time. What counts as rounding is measured (`noise`):
the same step in FP64 says how far plain training itself is from exact. A tensor may differ by a
multiple of its own noise, or of the noise of all tensors together on its scale, whichever is more;
one element's noise can be zero by luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = Mapping[Any, torch.Tensor]

ROUNDING_MULTIPLE = 8.0
"""Of the measured rounding noise, what still counts as rounding."""
NEAR_MULTIPLE = 4.0
"""Of the noise that 16 bits make in this very step, what a step in 16 bits may differ by."""
NEAR_SPREAD = 8.0
"""The same of the noise of all tensors together: a ReLU that switches changes a small one much."""
NEAR_LARGEST = 0.2
"""In L2 over all gradients: rounding that changes them by more is not near, however measured."""
GAIN = 0.75
"""Of 16 bits' epsilon, what all gradients together may be longer or shorter by."""
EXACT = 1e-6
"""Relative, between two steps in FP64."""
EXACT_NARROW = 1e-3
"""The same where an operation has no FP64."""
SMALL_TENSOR = 1e-4
"""A tensor has at least this fraction of the scale of all: one that is zero but for rounding (the
gradient of a bias before BatchNorm) has no scale of its own."""
_LEAST = {torch.float16: 4.0, torch.bfloat16: 2.0}
"""Multiples of a type's epsilon that are rounding whatever was measured; 16 for wider ones."""


@dataclass(frozen=True)
class RoundingNoise:
    """Rounding noise of each tensor, and of all tensors of a kind relative to their norm."""

    norms: dict[Any, float] = field(default_factory=dict)
    relative: float = 0.0
    """Of all tensors, or of those whose kind is not in `kinds`."""
    kinds: dict[Any, float] = field(default_factory=dict)
    """Kinds of optimizer state are on scales of their own: counts do not round, squares do."""

    @classmethod
    def between(cls, exact: Tensors, rounded: Tensors) -> RoundingNoise:
        """Of tensors that were computed in fewer bits."""
        apart = {name: _apart(exact[name], rounded[name]) for name in exact if name in rounded}
        apart = {name: norm for name, norm in apart.items() if math.isfinite(norm)}

        def relative(names: Iterable[Any]) -> float:
            held = list(names)
            scale = _norm([_norm_of(exact[name]) for name in held])
            return min(_norm([apart[name] for name in held]) / scale, 1.0) if scale else 0.0

        kinds = {_kind(name) for name in apart}
        each = {kind: relative(n for n in apart if _kind(n) == kind) for kind in kinds}
        return cls(apart, relative(apart), each)

    def bound(self, name: Any, scale: float, multiple: float, spread: float | None = None) -> float:
        """The largest distance of a tensor of this scale that is still `multiple` of this noise."""
        relative = self.kinds.get(_kind(name), self.relative)
        of_all = relative * scale * (multiple if spread is None else spread)
        return max(multiple * self.norms.get(name, 0.0), of_all)

    def __or__(self, other: RoundingNoise) -> RoundingNoise:
        names = self.norms.keys() | other.norms.keys()
        norms = {n: max(self.norms.get(n, 0.0), other.norms.get(n, 0.0)) for n in names}
        kinds = {
            k: max(self.kinds.get(k, self.relative), other.kinds.get(k, other.relative))
            for k in self.kinds.keys() | other.kinds.keys()
        }
        return RoundingNoise(norms, max(self.relative, other.relative), kinds)


@dataclass(frozen=True)
class Distance:
    """Of all tensors of one kind, the one that is farthest in terms of its bound."""

    equal: bool
    """To the bit."""
    relative: float
    """||planned − plain|| / ||plain|| of that tensor; infinite where something is not finite."""
    bound: float
    """Its bound, relative to the same norm."""
    name: str = ""
    """Of that tensor."""
    undefined: bool = False
    """Plain training itself is not finite."""

    @property
    def within(self) -> bool:
        """No tensor is farther than it may be."""
        return not self.undefined and self.relative <= self.bound


def distance(
    expected: Tensors,
    found: Tensors,
    noise: RoundingNoise,
    multiple: float,
    spread: float | None = None,
) -> Distance:
    """Planned beside plain tensors, by name; `spread` multiplies the noise of all together."""
    if expected.keys() != found.keys():
        lacking = sorted(map(str, expected.keys() ^ found.keys()))
        return Distance(False, math.inf, 0.0, f"only on one side: {lacking[0]}")
    if any(not bool(torch.isfinite(t).all()) for t in expected.values() if _is_real(t)):
        return Distance(False, math.inf, 0.0, _first_infinite(expected), undefined=True)
    if all(_same(expected[name], found[name]) for name in expected):
        return Distance(True, 0.0, 0.0)
    worst = Distance(False, 0.0, 0.0)
    ratio = -1.0
    usual = _usual_elements(expected)
    for name, plain in expected.items():
        apart = _apart(plain, found[name])
        alike = usual[_kind(name)] * math.sqrt(plain.numel())
        own = max(_norm_of(plain), SMALL_TENSOR * alike, 1e-300)
        bound = max(noise.bound(name, own, multiple, spread), _least(found[name]) * own)
        if apart / bound > ratio:
            ratio = apart / bound
            worst = Distance(False, apart / own, bound / own, str(name))
    return worst


def _kind(name: Any) -> Any:
    """Optimizer state has several tensors a parameter, each kind on a scale of its own."""
    return name[1] if isinstance(name, tuple) else ""


def _usual_elements(tensors: Tensors) -> dict[Any, float]:
    """Root mean square of all elements of a kind."""
    squares: dict[Any, float] = {}
    counts: dict[Any, int] = {}
    for name, tensor in tensors.items():
        squares[_kind(name)] = squares.get(_kind(name), 0.0) + _norm_of(tensor) ** 2
        counts[_kind(name)] = counts.get(_kind(name), 0) + tensor.numel()
    return {kind: math.sqrt(squares[kind] / max(counts[kind], 1)) for kind in squares}


def total(expected: Tensors, found: Tensors) -> float:
    """||found − expected|| / ||expected|| over all tensors together."""
    return RoundingNoise.between(expected, found).relative


def gain(expected: Tensors, found: Tensors) -> float:
    """By how much all of it is longer: ⟨found, expected⟩ / ⟨expected, expected⟩ − 1.

    Rounding averages out here, so a common factor shows that is smaller than rounding.
    """
    product = square = 0.0
    for name, plain in expected.items():
        wide = plain.detach().double().flatten()
        product += float(wide @ found[name].detach().double().flatten().to(wide.device))
        square += float(wide @ wide)
    return product / square - 1 if square else 0.0


def longer(
    expected: Tensors, found: Tensors, emulated: Callable[[int | None], Tensors], epsilon: float
) -> float:
    """A common factor of all gradients that 16 bits do not explain; 0 where there is none.

    `emulated` gives gradients in 16 bits, rounded at random by a seed: where all of them hang on
    one number (the last layer's), or rounding is large, their own factors differ by more.
    """
    here, usual = gain(expected, found), gain(expected, emulated(None))
    if abs(here - usual) <= GAIN * epsilon:
        return 0.0
    usually = [usual, *(gain(expected, emulated(seed)) for seed in range(4))]
    span = max(usually) - min(usually)
    return 0.0 if min(usually) - span <= here <= max(usually) + span else here - usual


def relative_error(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest ||a − b|| / ||a|| of any pair; infinite where something is not finite."""
    named = dict(enumerate(a for a, _ in pairs)), dict(enumerate(b for _, b in pairs))
    scale = _norm([_norm_of(a) for a, _ in pairs])
    apart = [(_apart(named[0][n], named[1][n]), _norm_of(named[0][n])) for n in named[0]]
    return max((d / max(own, SMALL_TENSOR * scale, 1e-300) for d, own in apart), default=0.0)


def _least(tensor: torch.Tensor) -> float:
    if not tensor.is_floating_point():
        return 1e-12
    return _LEAST.get(tensor.dtype, 16.0) * torch.finfo(tensor.dtype).eps


def _apart(expected: torch.Tensor, found: torch.Tensor) -> float:
    if expected.shape != found.shape:
        return math.inf
    norm = _norm_of(expected.detach().double() - found.detach().double().to(expected.device))
    return norm if math.isfinite(norm) else math.inf


def _norm_of(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().double())) if tensor.numel() else 0.0


def _norm(norms: list[float]) -> float:
    return math.sqrt(sum(norm * norm for norm in norms))


def _is_real(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _first_infinite(tensors: Tensors) -> str:
    return str(next(n for n, t in tensors.items() if not bool(torch.isfinite(t).all())))


def _same(expected: torch.Tensor, found: torch.Tensor) -> bool:
    if expected.dtype is not found.dtype or expected.shape != found.shape:
        return False
    return bool((expected == found.to(expected.device)).all())
