"""Microbatching: parts of the minibatch one after the other, gradients added (Section 3.3)."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self, cast

import torch

from ...errors import InputError, NoEffectWarning, UnprovenWarning
from ...trace.batches import tensors_of
from ...trace.fakes import is_fake, readable
from ...trace.graph import Trace
from ...trace.hooked import gradient_hooks
from ...trace.split import cut, examples_of
from ..base import Flag, LossUnits, Setup, Technique
from ..claims import MOVED, VALUES, Circumstances, Claim, Level
from ..offers import Context, Offer, Scales
from ..registry import register
from ..splitting.find import tested_units
from ..splitting.units import AUTO, EXAMPLES, check_units, weights
from .accumulate import Compensated, Together, small_parameters
from .simulate import GroupedNormalization

_PARTS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_LOSSES = ((8, 0.1), (4, 0.8), (2, 3.0), (1, 10.0))
"""Points of accuracy lost when BatchNorm sees so many examples, WRN-28-2 on CIFAR-10: 10 and 4 from
the report's Table 2; 8, 2 and 1 are our guesses, it gives no number for them. They order plans and
promise nothing."""


Unit = Literal["examples", "tokens"]


@register
@dataclass(frozen=True)
class Microbatching(Technique):
    """Run some examples at a time; the last microbatch may be smaller and has less weight.

    Args:
        size: Examples at a time. With the unit "tokens" positions: as many sentences as fit, padded
            as they are in the minibatch, and at least one.
        weight: An older name of `units`.
        accumulate: "parameter" adds gradients as PyTorch does, "compensated" with Kahan's
            correction.
        simulated: Run the whole minibatch at once, normalized in groups of `size`.
        unit: "examples" or "tokens", counted by `size`.
        units: What the loss is averaged over: "auto" finds it on the first batch, and refuses a
            loss that is not the sum of its parts; "examples"; "sum" for a summed loss; a tensor
            of the batch, "labels[:, 1:] != -100"; or a function from a part to its number of
            units.

    Examples:
        >>> step = ss.apply([ss.Microbatching(8)], model, optimizer, loss=loss)
    """

    name: ClassVar[str] = "microbatching"
    same_state: ClassVar[bool] = True
    order: ClassVar[int] = 40
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "microbatch",
            "size",
            int,
            "Examples (or tokens) that run at once.",
            part_of="batch",
        ),
        Flag(
            "simulated",
            "simulated",
            bool,
            "Microbatches only for BatchNorm's statistics.",
            neutral=False,
        ),
    )
    allow: ClassVar[str | None] = "bn-microbatch"
    revisable: ClassVar[bool] = True
    changes_update: ClassVar[bool] = False
    proof: ClassVar[Any] = "alone"
    suspects: ClassVar[Mapping[str, str]] = {
        "buffers": "moved by every microbatch",
        "gradients": "a loss that does not split by its units",
        "loss": "a loss that does not split by its units",
        "microbatching": "a loss that does not split by its units",
    }

    size: int
    weight: LossUnits | None = None
    accumulate: Literal["parameter", "compensated"] = "parameter"
    simulated: bool = False
    unit: Unit = "examples"
    units: LossUnits = AUTO

    def __post_init__(self) -> None:
        if self.weight is not None:
            object.__setattr__(self, "units", self.weight)
            object.__setattr__(self, "weight", None)
        if self.unit not in ("examples", "tokens"):
            raise InputError(
                f"unknown microbatch unit {self.unit!r}", hint="'examples' or 'tokens'"
            )
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise InputError(
                f"microbatch {self.size!r} is not a whole number from 1",
                hint="10 runs ten examples at once",
            )
        check_units(self.units)
        if self.accumulate not in ("parameter", "compensated"):
            raise InputError(
                f"unknown accumulation {self.accumulate!r}", hint="'parameter' or 'compensated'"
            )
        if self.simulated and self.unit == "tokens":
            raise InputError("microbatches of tokens are not simulated", hint="unit='examples'")
        if self.simulated and self.accumulate == "compensated":
            raise InputError(
                "simulated microbatches accumulate nothing to compensate",
                hint="leave out simulated=True or accumulate='compensated'",
            )

    def short(self) -> str:
        """Its size."""
        return f"microbatch {self.size}"

    @classmethod
    def from_flags(cls, given: Mapping[str, Any], unit: str = "examples") -> Self | None:
        """So many examples, or tokens where the model counts those."""
        size, simulated = given.get("microbatch"), bool(given.get("simulated"))
        if size is None and simulated:
            raise InputError(
                "--simulated needs the size of the microbatches", hint="--microbatch 10"
            )
        if size is None:
            return None
        return cls(size, simulated=simulated, unit="tokens" if unit == "tokens" else "examples")

    @classmethod
    def to_flags(cls, given: Mapping[str, Any], batch: Any = None) -> dict[str, Any]:
        """Without microbatches the whole batch runs at once."""
        size, simulated = given.get("size", batch), given.get("simulated", False)
        return {"microbatch": size, "simulated": simulated}

    @property
    def loss_units(self) -> LossUnits:
        """As `units` says."""
        return self.units

    def check_ranks(self, setup: Setup, kind: str) -> None:
        """FSDP adds gradients up by itself."""
        if kind == "fsdp" and self.accumulate == "compensated":
            raise InputError(
                "fsdp accumulates gradients by itself, without compensation",
                hint="accumulate='parameter', or parallel='ddp'",
            )

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        """Parts of the minibatch from large to small; equal ones where statistics are kept.

        None where the loss was tested and does not split.
        """
        split = context.split
        if split.splits is False:
            return
        statistics, examples = context.keeps_statistics, context.examples
        for size in _sizes(examples, context.ragged and not statistics):
            assert examples is not None
            parts, rest = -(-examples // size), examples % size
            shown = f"{parts - bool(rest)} × {size}" + f" + {rest}" * bool(rest)
            why = f"gradients are added part by part; {split.why}"
            if statistics:
                why = f"statistics, as BatchNorm has them, are of {size} examples at a time"
            loss = lossiness(size) if statistics else 0.0
            scales = Scales(share=size / examples, parts=parts)
            yield Offer(cls(size, units=split.units), why, scales, loss, shown)

    @classmethod
    def offers_untraced(cls, context: Context) -> Iterable[Offer]:
        """The same: what the forward pass writes is all that a trace would tell."""
        return cls.offers(context)

    def claims(self, at: Circumstances) -> Iterable[Claim]:
        """Parts add up within rounding; statistics and masks are those of the parts."""
        if not at.split:
            return
        if not self.simulated:
            sums = (*VALUES[:2], *MOVED)
            yield Claim(Level.ROUNDING, "gradients are added part by part", sums)
        if at.batch_norm:
            yield Claim(Level.LOSSY, "BatchNorm sees one microbatch at a time")
        if at.drawn and not self.simulated:
            why = "each microbatch draws its own numbers; compared with those of the whole batch"
            yield Claim(Level.LOSSY, why, ("random stream",))

    def examples_at_once(self, batch: Any) -> int | None:
        """Of this batch: `size` itself, or as many as have so many tokens; simulated, all."""
        return None if self.simulated else self.cut_size(batch)

    @property
    def at_once(self) -> int | None:
        """Its size; simulated ones run all at once."""
        return None if self.simulated else self.size

    @property
    def tokens_at_once(self) -> int | None:
        """Its size if it counts tokens."""
        return self.at_once if self.unit == "tokens" else None

    def is_neutral_for(self, batch_size: int | None) -> bool:
        """One microbatch is the whole."""
        return self.size == batch_size and not self.simulated

    def weighted(self, units: LossUnits) -> Self:
        """By these units in place of examples."""
        return replace(self, units=units) if self.units in (AUTO, EXAMPLES) else self

    def counting(self, unit: str, each: int) -> Self:
        """In tokens, so that examples of other lengths take as much."""
        return replace(self, size=self.size * each, unit=cast(Unit, unit))

    def examples_together(self, batch: Any) -> int:
        """Simulated ones too are normalized together."""
        return self.cut_size(batch)

    def cut_size(self, batch: Any) -> int:
        """Examples of a microbatch."""
        if self.unit == "examples":
            return self.size
        lengths = [tensor.shape[1] for tensor in tensors_of(batch) if tensor.dim() > 1]
        return max(self.size // max(lengths, default=1), 1)

    def check_size(self, batch_size: int) -> None:
        """For a prediction the minibatch must be a whole number of microbatches."""
        if batch_size % self.size and not self.simulated:
            lower = max(d for d in range(1, self.size + 1) if batch_size % d == 0)
            raise InputError(
                f"a batch of {batch_size} does not divide into microbatches of {self.size}",
                hint=f"the next smaller size that does is {lower}",
            )

    def prepare(self, batch: Any) -> Any:
        """The first microbatch, or all of it where they are only simulated."""
        examples = examples_of(batch)
        if examples is None:
            return batch
        if self.unit == "examples" and self.size < examples:  # else all of it runs at once
            self.check_size(examples)
        return batch if self.simulated else cut(batch, 0, self.cut_size(batch))

    def predict(self, trace: Trace) -> Trace:
        """The trace is of one microbatch already; compensation is one more tensor per gradient."""
        if self.accumulate == "parameter":
            return trace
        parameters = tuple(
            replace(p, state_elements=(*p.state_elements, p.numel)) if p.has_gradient else p
            for p in trace.parameters
        )
        return replace(trace, parameters=parameters)

    def check(self, setup: Setup) -> None:
        """Whether a batch can be cut shows when there is one."""

    def apply(self, setup: Setup) -> None:
        """Split every batch, or normalize it in groups."""
        if self.simulated:
            groups = GroupedNormalization(setup, self.size)
            if not groups.paths:
                warnings.warn(
                    "simulated microbatches: the model has no BatchNorm, so nothing changes",
                    NoEffectWarning,
                    stacklevel=2,
                )
            return
        setup.split = _Split(self, setup)
        if self.accumulate == "compensated":
            Compensated(setup)
        elif small := small_parameters(setup.model):
            Together(setup, small)


def lossiness(size: int) -> float:
    """Expected points lost when BatchNorm sees so many examples; alike from 8 on."""
    return next(loss for least, loss in _LOSSES if size >= least)


def _sizes(examples: int | None, ragged: bool) -> Iterator[int]:
    """Microbatches worth trying, from large to small; those of equal parts alone if not ragged."""
    if examples is None:
        return
    counts = {n for n in _PARTS if n <= examples} | {examples}
    if not ragged:
        counts = {n for n in range(2, examples + 1) if examples % n == 0}
    seen = {examples}
    for count in sorted(counts):
        size = -(-examples // count)
        if size not in seen:
            seen.add(size)
            yield size


class _Split:
    """batch → microbatches with their weights."""

    def __init__(self, technique: Microbatching, setup: Setup) -> None:
        self._technique, self._units, self._before = technique, technique.units, setup.split
        self._setup = weakref.ref(setup)  # gradient hooks hold this, and are held by the model
        self._told = self._looked = False

    def __call__(self, batch: Any) -> Any:
        for whole, share in self._before(batch):
            examples = examples_of(whole)
            size = self._technique.cut_size(whole)
            if examples is None:
                self._say_whole(whole)
            if examples is None or examples <= size:
                yield whole, share
                continue
            if self._units == AUTO and not any(map(is_fake, tensors_of(whole))):
                setup = self._setup()
                assert setup is not None
                self._units = tested_units(setup, whole)
            starts = range(0, examples, size)
            parts = [cut(whole, start, min(start + size, examples)) for start in starts]
            self._tell_of_hooks(len(parts))
            for part, weight in zip(parts, weights(self._units, parts), strict=True):
                if not _is_zero(weight):  # no unit: its mean is 0/0
                    yield part, weight if share is None else weight * share

    def _tell_of_hooks(self, parts: int) -> None:
        setup = self._setup()
        assert setup is not None
        named = setup.model.named_parameters() if not self._looked else ()
        for name in [n for n, p in named if gradient_hooks(p)[1]][:1]:
            warnings.warn(
                f"microbatches: a hook on the gradient of {name} is called for each of {parts} "
                "parts, with the sum so far; to change the whole gradient, use "
                "optimizer.register_step_pre_hook",
                UnprovenWarning,
                stacklevel=3,
            )
        self._looked = True

    def _say_whole(self, batch: Any) -> None:
        if not self._told:
            warnings.warn(
                f"microbatches: a batch of type {type(batch).__name__} has no tensor with a first "
                "dimension, so it runs as a whole; give a tensor, or a tuple, dict or dataclass",
                NoEffectWarning,
                stacklevel=2,
            )
        self._told = True


def _is_zero(weight: float | torch.Tensor) -> bool:
    """Where that is known without waiting for a GPU."""
    if isinstance(weight, torch.Tensor) and not readable(weight):
        return False
    return bool(weight == 0)
