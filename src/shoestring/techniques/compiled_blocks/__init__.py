"""Repeated blocks as compiled code: chains of element-wise functions become one kernel."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from ...errors import InputError, NoEffectWarning
from ...trace.blocks import block_paths
from ...trace.compiled import compiled_path
from ...trace.graph import Trace
from ..base import Flag, Setup, Technique
from ..claims import VALUES, Circumstances, Claim, Level
from ..offers import Context, Offer
from ..registry import register
from .blocks import Blocks

__all__ = ["CompiledBlocks"]


@register
@dataclass(frozen=True)
class CompiledBlocks(Technique):
    """Run the repeated blocks of a model through `torch.compile`, one compilation for equal ones.

    Args:
        wanted: False changes nothing.
        blocks: Names of the modules that count as blocks; by default they are found.

    Examples:
        >>> plan = ss.Plan([ss.CompiledBlocks(), ss.Checkpointing("residual-1")])
    """

    name: ClassVar[str] = "compiled_blocks"
    same_state: ClassVar[bool] = True
    order: ClassVar[int] = 29
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag("compile_blocks", "wanted", bool, "Compile each kind of repeated block.", False),
    )
    changes_update: ClassVar[bool] = False
    changes_passes: ClassVar[bool] = True
    proof: ClassVar[Any] = "alone"
    extrapolates: ClassVar[bool] = False

    wanted: bool = True
    blocks: tuple[str, ...] = ()

    @property
    def is_neutral(self) -> bool:
        """As a flag that is off."""
        return not self.wanted

    @property
    def inside_blocks(self) -> bool:
        """Always."""
        return True

    def short(self) -> str:
        """Its name."""
        return "compiled blocks" if self.wanted else "blocks not compiled"

    def describe(self) -> tuple[str, str]:
        """The text for plans and tables."""
        return self.short(), _WHY

    def refuses(self, other: Technique) -> str | None:
        """Compiled code shows nothing of what is inside of it."""
        if self.wanted and other.inside_blocks and not other.is_neutral:
            return (
                f"{other.name} ({other.short()}) works inside of blocks, and {self.name} compiles "
                "them whole: recompute whole blocks, as residual-1 does"
            )
        return None

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        """Where a user names it: no rule says how long compiling takes."""
        if context.accounting == "device" and block_paths(context.model):
            yield Offer(cls(), _WHY, asked=True)

    def claims(self, at: Circumstances) -> Iterable[Claim]:
        """Fused kernels round otherwise."""
        if self.wanted:
            why = "fused kernels keep in registers what plain ones round"
            yield Claim(Level.ROUNDING, f"blocks are compiled: {why}", VALUES)

    def check(self, setup: Setup) -> None:
        """The blocks must be there, and nothing of the model compiled yet."""
        known = dict(setup.model.named_modules())
        for path in self.blocks:
            if path not in known:
                raise InputError(
                    f"the model has no module {path!r} to compile",
                    hint="blocks are named by their path, such as 'layers.0'",
                )
        if self.wanted and (where := compiled_path(setup.model)):
            raise InputError(
                f"{where} is compiled already", hint="leave out torch.compile, or compiled_blocks"
            )

    def check_ranks(self, setup: Setup, kind: str) -> None:
        """Hooks that gather shared weights run inside of blocks."""
        if kind == "fsdp" and self.wanted:
            raise InputError("compiled blocks hold whole weights", hint="leave out compiled_blocks")

    def predict(self, trace: Trace) -> Trace:
        """The report's accounting has no kernels that could be one: nothing changes."""
        return trace

    def apply(self, setup: Setup) -> None:
        """Another `forward` for each block."""
        if not self.wanted:
            return
        modules = dict(setup.model.named_modules())
        paths = self.blocks or block_paths(setup.model)
        if not paths:
            warnings.warn(
                "compiled_blocks: no repeated blocks were found in the model; name them, "
                "blocks=('stage1', 'stage2')",
                NoEffectWarning,
                stacklevel=2,
            )
        made = Blocks()
        for path in paths:
            setup.undo.append(made.replace(path, modules[path]))


_WHY = "each block is compiled: chains of element-wise functions are one kernel"
