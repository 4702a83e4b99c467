"""Checkpointing: run parts of the forward pass again instead of keeping them (Section 3.4)."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace

from torch import nn

from ...errors import InputError, NoEffectWarning
from ...memory.schedule import STRATEGIES
from ...trace.blocks import block_paths
from ...trace.graph import Trace
from ..base import Setup, WholeBatch
from .wrap import every_node, group_blocks, without_cheap_outputs


@dataclass(frozen=True)
class Checkpointing(WholeBatch):
    """One of the report's strategies: none, no-bn, every-M, residual-M, residual-M*.

    `blocks` names the modules that count as blocks; by default they are found.
    """

    strategy: str
    blocks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        pattern = r"none|no-bn|every-[1-9]\d*|residual-[1-9]\d*\*?"
        if not isinstance(self.strategy, str) or not re.fullmatch(pattern, self.strategy):
            raise InputError(
                f"unknown checkpointing strategy {self.strategy!r}", hint=f"one of {STRATEGIES}"
            )

    def predict(self, trace: Trace) -> Trace:
        """The schedule of the backward pass changes; sizes do not."""
        return replace(trace, checkpoint=self.strategy)

    def check(self, setup: Setup) -> None:
        """The blocks must be there."""
        if self.strategy.startswith("residual"):
            self._find(setup.model)

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

    def apply(self, setup: Setup) -> None:
        """Wrap the blocks, or the whole run, in regions."""
        if self.strategy == "none":
            return
        if self.strategy == "no-bn":
            setup.run, touched = without_cheap_outputs(setup.model, setup.run)
            if not touched:
                warnings.warn(
                    "no-bn: the model has no normalisation or activation module",
                    NoEffectWarning,
                    stacklevel=2,
                )
            return
        size = int(re.findall(r"\d+", self.strategy)[0])
        if self.strategy.startswith("every"):
            setup.run = every_node(setup.model, setup.run, size)
            return
        nested = self.strategy.endswith("*")
        setup.undo.append(group_blocks(setup.model, self._find(setup.model), size, nested))
