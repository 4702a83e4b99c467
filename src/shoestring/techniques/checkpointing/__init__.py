"""Checkpointing: run parts of the forward pass again instead of keeping them (Section 3.4)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from torch import nn

from ...errors import InputError, NoEffectWarning
from ...memory.items import Item, leaves, read, write
from ...memory.schedule import STRATEGIES
from ...trace.blocks import block_paths
from ...trace.graph import Trace
from ..base import Setup, WholeBatch
from ..batch_norm import lean_batch_norm
from .caches import without_caches
from .wrap import every_node, grouped_blocks, without_cheap_outputs, wrap_blocks


@dataclass(frozen=True)
class Checkpointing(WholeBatch):
    """One of the report's strategies: none, no-bn, every-M, residual-M, residual-M*; or per-block.

    `blocks` names the modules that count as blocks; by default they are found. `schedule` says
    what "per-block" does with each of them, as text (`memory.items`): ("keep*3", "recompute*8").
    """

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

    @classmethod
    def parse(cls, text: str) -> Checkpointing:
        """A strategy by its name, or what `per-block` does: "keep*3, recompute*8"."""
        by_block = re.match(r"\s*(keep|cheap|lean|recompute|\[)", text)
        return cls("per-block", schedule=(text,)) if by_block else cls(text)

    @classmethod
    def of(cls, items: Sequence[Item], blocks: tuple[str, ...] = ()) -> Checkpointing:
        """The technique that does this with the blocks."""
        return cls("per-block", blocks, write(items))

    def predict(self, trace: Trace) -> Trace:
        """The schedule of the backward pass changes; sizes do not."""
        strategy = ", ".join(self.schedule) or self.strategy
        return replace(trace, checkpoint=strategy, checkpoint_blocks=self.blocks)

    def check(self, setup: Setup) -> None:
        """The blocks must be there, as many as the schedule is for."""
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

    def groups(self, model: nn.Module) -> list[tuple[str, ...]]:
        """Paths of the blocks that run as one; each for itself where only functions run again."""
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
            setup.run, touched = without_cheap_outputs(setup.model, setup.run)
            if not touched:
                warnings.warn(
                    "no-bn: the model has no normalisation or activation module",
                    NoEffectWarning,
                    stacklevel=2,
                )
            return
        if self.strategy.startswith("every"):
            setup.run = every_node(setup.run, self._size)
            return
        paths = self._find(setup.model)
        setup.undo.append(wrap_blocks(setup.model, paths, self._items(setup.model, paths)))
        setup.run = without_caches(setup.model, setup.run)

    @property
    def _size(self) -> int:
        return int(re.findall(r"\d+", self.strategy)[0])

    def _items(self, model: nn.Module, paths: list[str]) -> tuple[Item, ...]:
        """What to do with each block."""
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
