"""Sparsity: weights, gradients and optimizer state at the nonzeros only (Section 3.1)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Self

import torch
from torch import nn

from ...errors import InputError, NoEffectWarning
from ...memory.storage import nonzero_count
from ...trace.blocks import sparsifiable_names
from ...trace.compiled import compiled_path
from ...trace.graph import Trace
from ..base import Flag, Setup, Technique
from ..claims import VALUES, Circumstances, Claim, Level
from ..offers import Context, Offer
from ..registry import register
from .export import load_dense, to_dense
from .index import index_bytes
from .meaning import AtNonzeros
from .modules import install, make_sparse, sparse_tensors
from .ranks import SamePattern
from .rewiring import METHODS, REPORT_SCHEDULE, Rewiring, Schedule

__all__ = [
    "REPORT_SCHEDULE",
    "Sparsity",
    "index_bytes",
    "load_dense",
    "sparse_tensors",
    "to_dense",
]

_MATRIX_OPTIMIZERS = ("Muon", "SparseAdam", "LBFGS")
"""They need matrices, sparse gradients, or state that spans all parameters."""


DENSITIES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
"""Densities that the planner tries."""
_LOSSES = ((1.0, 0.0), (0.3, 0.45), (0.2, 0.75), (0.1, 2.1), (0.05, 5.0))
"""Points of accuracy lost at a density, WRN-28-2 on CIFAR-10. 0.3, 0.2 and 0.1 come from the
report's Table 3, where microbatches of 10 or 4 cost part of it: sparsity alone costs 0.3 at density
0.3, its introduction says. It gives no number for 0.05: that one continues the line by our own
guess. They order plans and promise nothing for another network."""


@register
@dataclass(frozen=True)
class Sparsity(Technique):
    """Keep a fraction of the elements of every sparsifiable tensor.

    Values of weight, gradient and optimizer state share one index. Predicted in the report's
    compressed sparse rows, ceil(log2(columns)) bits a nonzero and row pointers; stored as a
    bitmask or as columns of 8, 16 or 32 bits, whichever is smaller.

    Args:
        density: The fraction of elements kept, in (0, 1]; 1.0 changes nothing.
        method: How the pattern moves: "dsr" (the report's), "set" (each tensor for itself) or
            "static".
        tensors: Names of the parameters to make sparse; None: the report's rule.
        seed: Seed of the first pattern and of what grows.
        rewire_fraction: Fraction of the nonzeros that moves at a time.
        fraction_multiplier: Factor of that fraction.
        schedule: (last update, every so many updates), in order; after the last one never.
        frequency_multiplier: How much more often; 0 never rewires.
        threshold: Below it a weight is dropped; "dsr" doubles or halves it as it goes.

    Examples:
        >>> step = ss.apply([ss.Sparsity(0.3)], model, optimizer, loss=loss)
    """

    name: ClassVar[str] = "sparsity"
    order: ClassVar[int] = 10
    replaces_parameters: ClassVar[bool] = True
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "density",
            "density",
            float,
            "Fraction of weights kept, in (0, 1].",
            neutral=1.0,
            label="nonzeros",
            percent=True,
        ),
    )
    some_tell_all: ClassVar[bool] = False
    stores_weights: ClassVar[bool] = True
    moves_elements: ClassVar[bool] = True

    density: float
    method: str = "dsr"
    tensors: tuple[str, ...] | None = None
    seed: int = 0
    rewire_fraction: float = 0.01377866
    fraction_multiplier: float = 1.0
    schedule: Schedule = REPORT_SCHEDULE
    frequency_multiplier: float = 1.0
    threshold: float = 0.001

    def __post_init__(self) -> None:
        if not (isinstance(self.density, (int, float)) and math.isfinite(self.density)):
            raise InputError(f"density {self.density!r} is not a number", hint="a number in (0, 1]")
        if not 0 < self.density <= 1:
            raise InputError(
                f"density {self.density:g} lies outside (0, 1]",
                hint="0.3 keeps 30% of the elements",
            )
        if self.method not in METHODS:
            raise InputError(
                f"unknown sparsity method {self.method!r}", hint="one of " + ", ".join(METHODS)
            )
        if isinstance(self.tensors, str):
            raise InputError(f"tensors is the text {self.tensors!r}", hint=f"({self.tensors!r},)")
        for name in ("tensors", "schedule"):  # lists, as a plan's file has them
            given = getattr(self, name)
            if given is not None:
                items = tuple(tuple(i) if isinstance(i, list) else i for i in given)
                object.__setattr__(self, name, items)
        for name in ("rewire_fraction", "fraction_multiplier", "frequency_multiplier", "threshold"):
            given = getattr(self, name)
            least = "from 0" if name == "frequency_multiplier" else "above 0"
            if not (isinstance(given, (int, float)) and math.isfinite(given) and given >= 0) or (
                given == 0 and least == "above 0"
            ):
                raise InputError(f"{name} {given!r} is not a number {least}")
        _check_schedule(self.schedule)

    @property
    def is_neutral(self) -> bool:
        """All weights are kept."""
        return self.density == 1

    def plain_weights(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Dense, zero where there is no weight."""
        return to_dense(model)

    @property
    def inside_blocks(self) -> bool:
        """Each weight is filled in just before its function runs."""
        return True

    def short(self) -> str:
        """The density."""
        return f"density {self.density:g}"

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        """Fewer and fewer weights, where the model has any to leave out."""
        if any(p.sparsifiable for p in context.trace.parameters):
            for density in DENSITIES:
                yield Offer(cls(density), "another model", lossiness=lossiness(density))

    def between(self) -> tuple[Self, Self, float] | None:
        """Bytes and operations grow with the density, by a line."""
        high, low = DENSITIES[0], DENSITIES[-1]
        if not low < self.density < high:
            return None
        share = (self.density - high) / (low - high)
        return replace(self, density=high), replace(self, density=low), share

    def claims(self, at: Circumstances) -> Iterable[Claim]:
        """The gradients of another model are exact; all else is another model's."""
        if not self.is_neutral:
            yield Claim(Level.ROUNDING, "added in another order", ("gradients",))
            rest = tuple(what for what in VALUES if what != "gradients")
            yield Claim(Level.LOSSY, f"density {self.density:g} is another model", rest)

    def check_ranks(self, setup: Setup, kind: str) -> None:
        """Sizes change with every rewiring."""
        if kind == "fsdp" and not self.is_neutral:
            raise InputError(
                "fsdp cannot split sparse weights, whose sizes change when they are rewired",
                hint="parallel='ddp' reduces only their values",
            )

    def on_ranks(self, setup: Setup, kind: str) -> None:
        """All must have the same pattern."""
        if self.name in setup.state:
            setup.after_update.append(SamePattern(setup.model, setup.state[self.name]))

    def predict(self, trace: Trace) -> Trace:
        """The chosen parameters get this density."""
        if self.tensors is None:
            chosen = {p.name for p in trace.parameters if p.sparsifiable}
        else:
            chosen = set(self.tensors)
            _check_names(self.tensors, {p.name: p.name for p in trace.parameters})
        if self.density < 1 and not chosen:
            self._warn()
        return replace(
            trace,
            parameters=tuple(
                replace(p, density=self.density) if p.name in chosen else p
                for p in trace.parameters
            ),
        )

    def check(self, setup: Setup) -> None:
        """The tensors must be there, and be such that they can be stored by their nonzeros."""
        if self.density == 1:
            return
        if sparse_tensors(setup.model):
            raise InputError("the model is sparse already", hint="apply sparsity once")
        chosen = self._chosen(setup.model)
        if not chosen:
            self._warn()
            return
        if where := compiled_path(setup.model):
            raise InputError(
                f"{where} is compiled, and cannot make its weights from their nonzeros",
                hint="leave out torch.compile, or sparsity",
            )
        kind = type(setup.optimizer).__name__
        if kind in _MATRIX_OPTIMIZERS:
            raise InputError(
                f"{kind} cannot update values without their matrix",
                hint="SGD, Adam and other elementwise optimizers can",
            )
        for name, parameter in chosen.items():
            _check_state(name, parameter, setup.optimizer)
        thinned = {id(parameter) for parameter in chosen.values()}
        for path, module in setup.model.named_modules():
            owns = any(id(p) in thinned for p in module._parameters.values())
            if owns and (
                getattr(module, "max_norm", None) is not None or getattr(module, "sparse", False)
            ):
                raise InputError(
                    f"{path}: an embedding with max_norm or sparse=True cannot be sparse",
                    hint="leave it out with tensors=(…)",
                )

    def apply(self, setup: Setup) -> None:
        """Store the chosen tensors by their nonzeros, and rewire after updates."""
        chosen = self._chosen(setup.model) if self.density < 1 else {}
        if not chosen:
            return
        generator = torch.Generator().manual_seed(self.seed)
        tensors = []
        for name, parameter in chosen.items():
            nonzeros = nonzero_count(parameter.numel(), self.density)
            tensor, undo = make_sparse(name, parameter, nonzeros, setup.optimizer, generator)
            tensors.append(tensor)
            setup.undo.append(undo)
        setup.undo.append(install(setup.model, tensors))
        rewiring = Rewiring(
            tensors=[tensor for tensor in tensors if tensor.values.requires_grad],
            method=self.method,
            fraction=self.rewire_fraction * self.fraction_multiplier,
            schedule=self.schedule,
            frequency_multiplier=self.frequency_multiplier,
            threshold=self.threshold,
            generator=generator,
        )
        setup.state[self.name] = rewiring
        setup.meanings.append(AtNonzeros(setup.model))
        setup.after_update.append(rewiring)

    def _chosen(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Name and parameter, in the order of the model."""
        known = dict(model.named_parameters())
        if self.tensors is None:
            names = sparsifiable_names(model)
        else:
            first = {id(p): n for n, p in known.items()}
            aliases = {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
            _check_names(self.tensors, aliases)
            names = frozenset(self.tensors)
        return {name: p for name, p in known.items() if name in names}

    def _warn(self) -> None:
        warnings.warn(
            f"density {self.density:g}: the model has no tensor to sparsify",
            NoEffectWarning,
            stacklevel=3,
        )


def lossiness(density: float) -> float:
    """Expected points lost at a density, between the known ones by a line."""
    for (high, less), (low, more) in pairwise(_LOSSES):
        if density >= low:
            return less + (more - less) * (high - density) / (high - low)
    return _LOSSES[-1][1] / density * _LOSSES[-1][0]


def _check_names(given: Iterable[str], known: dict[str, str]) -> None:
    """Every name must be a parameter's, of a shared one the first."""
    for name in given:
        if name not in known:
            raise InputError(
                f"the model has no parameter {name!r} to make sparse",
                hint="parameters are named by their path, such as 'layers.0.weight'",
            )
        if known[name] != name:
            raise InputError(
                f"{name!r} is tied to {known[name]!r}", hint=f"name it {known[name]!r}"
            )


def _check_schedule(schedule: Schedule) -> None:
    last = 0
    for pair in schedule:
        whole = isinstance(pair, tuple) and all(isinstance(number, int) for number in pair)
        if not whole or len(pair) != 2 or pair[0] <= last or pair[1] < 1:
            raise InputError(
                f"schedule {pair!r} is not (last update, every so many updates), in order",
                hint="((12500, 100), (40000, 200)) rewires every 100, later every 200 updates",
            )
        last = pair[0]


def _check_state(name: str, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    for key, held in optimizer.state.get(parameter, {}).items():
        if isinstance(held, torch.Tensor) and held.dim() and held.shape != parameter.shape:
            raise InputError(
                f"the optimizer's {key} of {name} has the shape {tuple(held.shape)}",
                hint="apply sparsity before the first step of this optimizer",
            )
