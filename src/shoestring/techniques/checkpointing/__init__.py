"""Checkpointing: run parts of the forward pass again instead of keeping them (Section 3.4)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Self

import torch
from torch import nn

from ...errors import InputError
from ...memory.items import LEAVES, Item, leaves, read, write
from ...memory.schedule import STRATEGIES
from ...trace.blocks import block_paths
from ...trace.compiled import compiled_path
from ...trace.graph import Trace
from ..base import Flag, Setup, Technique
from ..batch_norm import lean_batch_norm
from ..offers import Context, Offer
from ..registry import register
from .caches import caches_off, without_caches
from .compared import compared_at_first, explained, uncompared
from .scheduler import BlockScheduler, summary
from .wrap import every_node, grouped_blocks, without_cheap_outputs, wrap_blocks


@register
@dataclass(frozen=True)
class Checkpointing(Technique):
    """Keep some activations for the backward pass and recompute the others.

    Args:
        strategy: One of the report's, "none", "no-bn", "every-M", "residual-M" or "residual-M*"; or
            "per-block".
        blocks: Names of the modules that count as blocks; by default they are found.
        schedule: For "per-block": what happens to each of them, as text (`memory.items`), such as
            ("keep*3", "recompute*8").

    Examples:
        >>> step = ss.apply([ss.Checkpointing("every-2")], model, optimizer, loss=loss)
    """

    name: ClassVar[str] = "checkpointing"
    same_state: ClassVar[bool] = True
    order: ClassVar[int] = 30
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "checkpoint",
            "strategy",
            str,
            "none, no-bn, every-M, residual-M, `residual-M*` or `keep*3, recompute*9`.",
            neutral="none",
            explained=("recompute every block (gradient checkpointing)", "residual-1"),
        ),
    )
    revisable: ClassVar[bool] = True
    changes_update: ClassVar[bool] = False
    proof: ClassVar[Any] = "without"
    suspects: ClassVar[Mapping[str, str]] = {
        "buffers": "moved twice by BatchNorm that was recomputed",
        "random stream": "more or fewer numbers were drawn: a dropout mask drawn again",
        "gradients": "a dropout mask drawn again, or a hook",
        "loss": "another forward pass",
        "checkpointing": "statistics moved twice, or a dropout mask drawn again",
    }

    strategy: str
    blocks: tuple[str, ...] = ()
    schedule: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        pattern = r"none|no-bn|every-[1-9]\d{0,8}|residual-[1-9]\d{0,8}\*?|per-block"
        if not isinstance(self.strategy, str) or not re.fullmatch(pattern, self.strategy):
            raise InputError(
                f"unknown checkpointing strategy {self.strategy!r}", hint=f"one of {STRATEGIES}"
            )
        if isinstance(self.schedule, str):
            object.__setattr__(self, "schedule", (self.schedule,))
        if (self.strategy == "per-block") != bool(self.schedule):
            raise InputError(
                f"{self.strategy} {'with' if self.schedule else 'without'} a schedule",
                hint="Checkpointing('per-block', schedule=('keep*3', 'recompute*8'))",
            )
        if self.schedule:
            read(self.schedule)

    @property
    def is_neutral(self) -> bool:
        """Whether nothing is recomputed."""
        return self.strategy == "none"

    @property
    def inside_blocks(self) -> bool:
        """Whether single functions are recomputed, not whole blocks."""
        if self.schedule:
            return any(map(_of_functions, read(self.schedule)))
        return not re.fullmatch(r"none|residual-\d+", self.strategy)

    @property
    def _text(self) -> str:
        return ", ".join(self.schedule) or self.strategy

    def short(self) -> str:
        """The strategy, or the first of the schedule."""
        return self._text if len(self._text) <= 48 else f"{self._text[:45]}..."

    def describe(self) -> tuple[str, str]:
        """The schedule and what it recomputes."""
        shown = self._text if len(self._text) <= 40 else f"{self._text[:37]}..."
        if not self.schedule:
            return shown, "recomputed in the backward pass"
        return shown, summary(read(self.schedule))

    @classmethod
    def from_flags(cls, given: Mapping[str, Any], unit: str = "examples") -> Self | None:
        """A strategy by its name, or a schedule."""
        text = given.get("checkpoint")
        return None if text is None else cls.parse(text)

    @classmethod
    def to_flags(cls, given: Mapping[str, Any], batch: Any = None) -> dict[str, Any]:
        """The strategy, or the schedule as text."""
        by_block = ", ".join(given.get("schedule", ()))
        return {"checkpoint": by_block or given.get("strategy", "none")}

    @classmethod
    def told_by_flags(cls) -> frozenset[str]:
        """Its flag says a schedule, too."""
        return super().told_by_flags() | {"schedule"}

    @classmethod
    def offers_untraced(cls, context: Context) -> Iterable[Offer]:
        """The first half of the repeated blocks, each of them, and regions of several."""
        paths = block_paths(context.model)
        count = len(paths)
        several = math.isqrt(count)
        tried: dict[tuple[Item, ...], float] = {}
        if count > 1:
            half = count // 2
            tried[(*((("keep",),) * half), *(("keep",) * (count - half)))] = half / count
        if count:
            tried[(("keep",),) * count] = 1.0
        if several > 1:
            starts = range(0, count, several)
            tried[tuple(("keep",) * min(several, count - s) for s in starts)] = 1.0
        for items, share in tried.items():
            made = cls.of(items, paths)
            shown, why = made.describe()
            yield Offer(made, why, shown=shown, recomputed=share)

    @classmethod
    def scheduler(cls, context: Context) -> BlockScheduler | None:
        """Finds the schedule for any room; of a compiled model the compiler does."""
        if compiled_path(context.model) is not None:
            return None
        return BlockScheduler(context, cls.of, cls)

    @classmethod
    def parse(cls, text: str) -> Self:
        """A strategy by its name, or what `per-block` does: "keep*3, recompute*8"."""
        by_block = re.match(r"\s*(keep|cheap|lean|recompute|\[)", text)
        return cls("per-block", schedule=(text,)) if by_block else cls(text)

    @classmethod
    def of(cls, items: Sequence[Item], blocks: tuple[str, ...] = ()) -> Self:
        """The technique that does this with the blocks."""
        return cls("per-block", blocks, write(items))

    def predict(self, trace: Trace) -> Trace:
        """The schedule of the backward pass changes; sizes do not."""
        return replace(trace, checkpoint=self._text, checkpoint_blocks=self.blocks)

    def untraced_bytes(self, device: str, draws: bool = True) -> int:
        """On the CPU: states of the random generator. Regions of a schedule share them until
        something is drawn; one more is there while a region is recomputed."""
        kept = sum(map(_random_states, read(self.schedule))) if self.schedule else 0
        if kept:
            kept = 1 + (kept if draws else 1)
        return kept * torch.get_rng_state().nbytes if device == "cpu" else 0

    def check(self, setup: Setup) -> None:
        """The blocks must be there, as many as the schedule is for, and run as they are written."""
        if not self.is_neutral and (where := compiled_path(setup.model)):
            raise InputError(
                f"{where} is compiled, and decides itself what is recomputed",
                hint="leave out torch.compile, or checkpointing",
            )
        if self.strategy.startswith(("residual", "per-block")):
            self._items(setup.model, self._find(setup.model))

    def _find(self, model: nn.Module) -> list[str]:
        known = dict(model.named_modules())
        missing = [path for path in self.blocks if path not in known]
        if missing:
            raise InputError(
                f"the model has no module {missing[0]!r} to use as a block",
                hint="blocks are named by their path, such as 'layers.0'",
            )
        found = list(self.blocks) or list(block_paths(model))
        if not found:
            raise InputError(
                f"{self.strategy}: no repeated blocks were found in the model",
                hint="name them, blocks=('stage1', 'stage2'), or use every-M",
            )
        return found

    def comparable(self, model: nn.Module) -> AbstractContextManager[None]:
        """Without caches: what is recomputed must not find its first pass there."""
        return _comparable(model)

    def gathered(self, model: nn.Module) -> list[tuple[str, ...]]:
        """Paths of the blocks that run as one; each alone where only functions are recomputed."""
        if not self.strategy.startswith(("residual", "per-block")):
            return [(path,) for path in block_paths(model)]
        paths = self._find(model)
        ends = accumulate(leaves(item) for item in self._items(model, paths))
        return [tuple(paths[start:end]) for start, end in pairwise([0, *ends])]

    def apply(self, setup: Setup) -> None:
        """Wrap the blocks, or the whole run, in regions."""
        if self.strategy == "none":
            return
        lean_batch_norm(setup)
        if self.strategy == "no-bn":
            setup.run = without_cheap_outputs(setup.run)
            return
        if self.strategy.startswith("every"):
            setup.run = every_node(setup.run, self._size)
            return
        paths = self._find(setup.model)
        setup.undo.append(wrap_blocks(setup.model, paths, self._items(setup.model, paths)))
        setup.run = without_caches(setup.model, setup.run)
        setup.run = compared_at_first(setup)
        setup.backward = explained(setup.backward)

    @property
    def keeps_gathered(self) -> bool:
        """Recipes of these run functions of an earlier block, which then needs its parameters."""
        return self.strategy == "no-bn" or self.strategy.startswith("every")

    @property
    def _size(self) -> int:
        return int(re.findall(r"\d+", self.strategy)[0])

    def _items(self, model: nn.Module, paths: list[str]) -> tuple[Item, ...]:
        """The schedule: one item for each block."""
        if self.strategy == "per-block":
            items = read(self.schedule)
            if leaves(items) != len(paths):
                raise InputError(
                    f"the schedule is for {leaves(items)} blocks, the model has {len(paths)}",
                    hint="one item for each block; keep*3 stands for three",
                )
            return items
        groups = grouped_blocks(model, paths, self._size)
        if not self.strategy.endswith("*"):
            return tuple(("keep",) * len(group) for group in groups)
        return tuple(
            (("cheap",),) * len(group) if len(group) > 1 else ("cheap",) for group in groups
        )


@contextmanager
def _comparable(model: nn.Module) -> Iterator[None]:
    with caches_off(model), uncompared():
        yield


def _of_functions(item: Item) -> bool:
    return item in LEAVES[1:] if isinstance(item, str) else any(map(_of_functions, item))


def _random_states(item: Item, *, inside: bool = False) -> int:
    """How often a region and those within keep one; one of several blocks twice (`run_first`)."""
    if isinstance(item, str):
        return 0
    again = 1 if leaves(item) > 1 and not inside else 0
    return 1 + again + sum(_random_states(one, inside=True) for one in item)
