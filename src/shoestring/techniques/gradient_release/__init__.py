"""Gradients that never exist together: each goes as soon as its parameter is updated."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch

from ...errors import InputError, NoEffectWarning
from ...memory.device import device_timeline
from ...trace.cuda import on_cuda
from ...trace.fakes import hooks_its_step, is_fake
from ...trace.graph import Phase, Trace
from ..base import Flag, Setup, Technique
from ..claims import MOVED, Circumstances, Claim, Level
from ..host import check_folder, check_room, folder_for, pinned_size
from ..offers import Context, Offer, Update, Updates
from ..optimizers import whole_elements
from ..registry import register
from .folding import can_fold
from .release import Release
from .sums import HostSums, SumLink, buffer_bytes

__all__ = ["GradientRelease"]

_CALL = 12
"""Kernels that start in the time of one call of an optimizer's step, on the host."""
_LAST = 0.95
"""Of the forward pass, where the last layers begin, whose gradients meet all activations."""
_LEAST = 0.05
"""Of what the plain step holds, what gradients must be for a planner to add them up on the host."""
_ADDS = 6
"""Kernels that start in the time that one gradient's way to the host takes it."""
_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


@register
@dataclass(frozen=True)
class GradientRelease(Technique):
    """Update each parameter in the backward pass, as soon as its gradient is final, and free it.

    Args:
        wanted: False changes nothing.
        fold: With microbatches, True adds the gradients of SGD with momentum (not Nesterov's) to
            the momentum itself; False sums them until the last microbatch, as for other
            optimizers. "all" also adds them to Adam's moments, to the second one as squares of
            the parts.
        sum: Where gradients of parts that are not folded add up: "device" or "host", which is
            pinned memory beside a GPU and mapped files beside the CPU.
        smallest: Sums of fewer elements stay on the device.
        folder: Of the mapped files; by default the folder of temporary files if it is on a disk.

    Examples:
        >>> step = ss.apply([ss.GradientRelease()], model, optimizer, loss=loss)
    """

    name: ClassVar[str] = "gradient_release"
    same_state: ClassVar[bool] = True
    order: ClassVar[int] = 45
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "release", "wanted", bool, "Update each parameter in the backward pass.", False,
            explained=("update in the backward pass", True),
        ),
        Flag(
            "gradient_sum", "sum", str, "Where released gradients of parts add up: device, host.",
            "device", label="gradients add up on the",
        ),
    )  # fmt: skip
    revisable: ClassVar[bool] = True
    updates_in_backward: ClassVar[bool] = True

    wanted: bool = True
    fold: bool | Literal["all"] = True
    sum: Literal["device", "host"] = "device"
    smallest: int = 4096
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.sum not in ("device", "host"):
            raise InputError(f"gradients cannot add up on {self.sum!r}", hint="device or host")
        if type(self.smallest) is not int or self.smallest < 1:
            raise InputError(
                f"smallest {self.smallest!r} is not a whole number from 1",
                hint="sums of fewer elements stay",
            )
        if self.fold not in (True, False, "all"):
            raise InputError(f"cannot fold {self.fold!r}", hint="True, False or 'all'")

    @property
    def is_neutral(self) -> bool:
        """As a flag that is off."""
        return not self.wanted

    def short(self) -> str:
        """Its name."""
        if not self.wanted:
            return "kept gradients"
        folded, there = ", folded" * (self.fold == "all"), ", summed on the host"
        return f"released gradients{folded}{there if self.sum == 'host' else ''}"

    def describe(self) -> tuple[str, str]:
        """The text for plans and tables."""
        done = "each update runs in the backward pass, and its gradient goes"
        return self.short(), done + "; parts add up on the host" * (self.sum == "host")

    @classmethod
    def from_flags(cls, given: Mapping[str, Any], unit: str = "examples") -> Self | None:
        """Nothing is released to add up on the device."""
        if given.get("gradient_sum") == "device":
            given = {**given, "gradient_sum": None}
        return super().from_flags(given, unit)

    def refuses(self, other: Technique) -> str | None:
        """A loss scale is judged by all gradients before any update."""
        if self.wanted and other.scales_loss:
            return f"{self.name} updates before {other.name} knows whether a gradient overflowed"
        return None

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        """Where there is more than one gradient."""
        if hooks_its_step(context.optimizer):
            return
        if sum(p.has_gradient for p in context.trace.parameters) > 1:
            yield Offer(cls(), "each gradient goes as soon as its parameter is updated")
            if not can_fold(context.optimizer, True) and _matters(context, cls.smallest):
                on_disk = context.device == "cpu"
                place = "in mapped files" if on_disk else "on the host"
                why = f"each gradient goes; those of microbatches add up {place}"
                # No GPU has run its streams yet: there only if `allow` names it.
                yield Offer(cls(sum="host"), why, last=on_disk, of_parts=True, asked=not on_disk)
            if can_fold(context.optimizer, "all") and not can_fold(context.optimizer, True):
                why = "gradients of microbatches go, too, into Adam's moments"
                yield Offer(cls(fold="all"), why, lossiness=0.1)

    def claims(self, at: Circumstances) -> Iterable[Claim]:
        """The same update, earlier; parts are added in another order."""
        if at.split and self.wanted and self.fold == "all":
            why = "Adam's second moment adds squares of parts, not the square of their sum"
            yield Claim(Level.LOSSY, why, (*MOVED, "loss", "buffers"))
        elif at.split and self.wanted and self.fold:
            yield Claim(Level.ROUNDING, "gradients are added to the momentum part by part", MOVED)

    def folds_parts(self, optimizer: torch.optim.Optimizer) -> bool:
        """As far as the optimizer tells; what is added up on the host goes, too."""
        return self.sum == "host" or can_fold(optimizer, self.fold)

    def estimate_update(self, updates: Updates) -> Update | None:
        """One tensor at a time."""
        if not self.wanted or not updates.trained:
            return None
        whole = updates.without(self)
        share = max(updates.trained.values()) / sum(updates.trained.values())
        passing = whole.passing_bytes
        if updates.context.device == "cuda":  # an optimizer takes all tensors together there
            passing = int(passing * share)
        alone = len(updates.trained)
        whole = self._with_sums(updates, whole)
        return replace(
            whole,
            gradient_bytes=int(whole.gradient_bytes * share),
            passing_bytes=passing,
            early_bytes=_early_bytes(updates.context.trace),
            work=replace(whole.work, launches=max(whole.work.launches, alone)),
            host_launches=whole.host_launches + _CALL * alone,
        )

    def _with_sums(self, updates: Updates, whole: Update) -> Update:
        """Sums pass over the link for each part before the last, through two buffers."""
        each = sum(updates.trained.values()) / max(whole.gradient_bytes, 1)
        moved = [int(n / each) for n in updates.trained.values()]
        if self.sum == "device" or can_fold(updates.context.optimizer, self.fold) or not moved:
            return whole
        there = updates.context.device == "cuda"
        return replace(
            whole,
            part_link_bytes=whole.part_link_bytes + sum(moved),
            lasting_bytes=whole.lasting_bytes + (2 * buffer_bytes(moved) if there else 0),
            part_launches=whole.part_launches + _ADDS * len(moved),
        )

    def predict(self, trace: Trace) -> Trace:
        """Only the largest gradient is counted."""
        if not self.wanted:
            return trace
        trained = [p for p in trace.parameters if p.has_gradient]
        largest = max(trained, key=lambda p: p.numel * p.dtype.itemsize, default=None)
        return replace(
            trace,
            parameters=tuple(
                p if p is largest else replace(p, has_gradient=False) for p in trace.parameters
            ),
        )

    def check_ranks(self, setup: Setup, kind: str) -> None:
        """Ranks add whole gradients, not parts of them; they are not asked of the host."""
        if self.wanted and self.sum == "host":
            raise InputError(
                "ranks add up gradients on the device, and these wait on the host",
                hint="GradientRelease(sum='device')",
            )
        if self.wanted and can_fold(setup.optimizer, self.fold):
            raise InputError(
                "ranks add up gradients of the whole batch, and folded ones are gone before",
                hint="GradientRelease(fold=False)",
            )

    def check(self, setup: Setup) -> None:
        """Only optimizers that take each parameter by itself, and whose step is theirs."""
        if not self.wanted:
            return
        name = type(setup.optimizer).__name__
        if type(setup.optimizer) not in _OPTIMIZERS:
            raise InputError(
                f"the updates of {name} are not known to be independent",
                hint="SGD, Adam or AdamW can release gradients",
            )
        setup.check_step("released gradients")
        moving = self._moving(setup)
        if not moving or any(is_fake(p) or p.is_meta for p in moving):
            return
        folder = None if any(p.is_cuda for p in moving) else folder_for(self.folder)
        if folder is not None:
            check_folder(folder)
        sizes = [pinned_size(p.nbytes) if p.is_cuda else p.nbytes for p in moving]
        check_room(sum(sizes), folder, what="the sum of gradients")

    def _moving(self, setup: Setup) -> list[torch.Tensor]:
        """Parameters whose gradients add up on the host."""
        return [
            p
            for group in setup.optimizer.param_groups
            for p in group["params"]
            if self.sum == "host" and p.requires_grad and whole_elements(p) >= self.smallest
        ]

    def _sums(self, setup: Setup) -> HostSums | None:
        """Room for them on the host, and what a CUDA graph must know of its streams."""
        if self.sum == "device":
            return None
        moving = self._moving(setup)
        if not moving:
            warnings.warn(
                f"{self.short()}: no gradient has {self.smallest} elements",
                NoEffectWarning,
                stacklevel=3,
            )
            return None
        way = SumLink(moving) if any(on_cuda(p) for p in moving) else None
        if way is not None:
            setup.before_graph.append(way.wait)
            setup.in_capture.append(way.captured)
        return HostSums(folder_for(self.folder), self.smallest, way)

    def apply(self, setup: Setup) -> None:
        """Hooks on the parameters."""
        if not self.wanted:
            return
        if setup.adds_apart:
            raise InputError(
                "compensated accumulation keeps gradients until the end of the batch",
                hint="accumulate='parameter'",
            )

        lists: list[list[Any]] = [setup.before_update, setup.before_graph, setup.in_capture]
        lengths = [len(calls) for calls in lists]

        def undo() -> None:
            setup.updates_in_backward, setup.gradients_gone, setup.clips = False, "", False
            setup.sums = None
            for calls, length in zip(lists, lengths, strict=True):
                del calls[length:]

        setup.undo.append(undo)
        sums = self._sums(setup)
        Release(setup, fold=self.fold, sums=sums)
        setup.updates_in_backward = setup.clips = True
        if sums is None or can_fold(setup.optimizer, self.fold):
            setup.gradients_gone = f"{self.name} updates each parameter in the backward pass"


def _matters(context: Context, smallest: int) -> bool:
    """Whether gradients are much of what the plain step holds."""
    sizes = [
        p.numel * p.dtype.itemsize
        for p in context.trace.parameters
        if p.has_gradient and p.numel >= smallest
    ]
    held = int(device_timeline(context.trace).totals.max(initial=0))
    return context.accounting == "device" and sum(sizes) > _LEAST * held


def _early_bytes(trace: Trace) -> int:
    """Of gradients that are there with all activations: the largest of the last layers', and those
    with a part from either end of the model, of which the first waits for the last."""
    forward = [op for op in trace.ops if op.phase is Phase.FORWARD]
    read: dict[int, list[int]] = {}
    for number, op in enumerate(forward):
        for _, spec in op.inputs:
            read.setdefault(trace.values[spec.value].storage, []).append(number)
    waiting, last = 0, 0
    for p in trace.parameters:
        if p.has_gradient and (at := read.get(p.storage)):
            own = p.numel * p.dtype.itemsize
            if at[-1] - at[0] > len(forward) / 2:
                waiting += own
            elif at[0] >= _LAST * len(forward):
                last = max(last, own)
    return waiting + last
