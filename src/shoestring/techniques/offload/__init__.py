"""The host as a place: optimizer state in pinned memory beside a GPU, in files beside the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from ...errors import InputError, NoEffectWarning
from ...trace.cuda import on_cuda
from ...trace.fakes import is_fake
from ...trace.graph import Trace
from ..base import Flag, Meaning, Setup, Technique
from ..host import check_folder, check_room, folder_for, pinned_size
from ..offers import Context, Offer, Update, Updates
from ..optimizers import ELEMENTWISE, whole_elements
from ..registry import register
from .link import buffer_sizes, chunk_bytes, which_move
from .state import OffloadedState, keep_on_host
from .update import MappedUpdate, StreamedUpdate

__all__ = ["Offload"]

_SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 1.0)
"""Of the state, what a planner tries to let go."""
_CALL = 16
"""Kernels that start in the time that one tensor's way to the device and back takes the host."""


@register
@dataclass(frozen=True)
class Offload(Technique):
    """Keep the optimizer's state on the host.

    For a model on a GPU it is in pinned memory and streamed during the update, for a model on the
    CPU in mapped files.

    Args:
        what: "state".
        smallest: Tensors of fewer elements stay on the device.
        folder: Of the mapped files; by default the folder of temporary files if it is on a disk.
        share: How much of the state leaves the device, that of tensors evenly apart.

    Examples:
        >>> step = ss.apply([ss.Offload()], model, optimizer, loss=loss)
    """

    name: ClassVar[str] = "offload"
    order: ClassVar[int] = 27
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag("offload", "what", str, "Tensors to keep on the host: state.", label="on the host"),
    )
    updates_apart: ClassVar[bool] = True

    what: Literal["state"] = "state"
    smallest: int = 4096
    folder: str | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.what != "state":
            raise InputError(f"cannot offload {self.what!r}", hint="state")
        if type(self.smallest) is not int or self.smallest < 1:
            raise InputError(
                f"smallest {self.smallest!r} is not a whole number from 1",
                hint="tensors of fewer elements stay",
            )
        if type(self.share) not in (int, float) or not 0 < self.share <= 1:
            raise InputError(f"cannot offload a share of {self.share!r}", hint="above 0, at most 1")

    def short(self) -> str:
        """The name of the tensors kept on the host."""
        part = "" if self.share == 1 else f"{100 * self.share:.3g}% of "
        return f"{part}state on the host"

    def describe(self) -> tuple[str, str]:
        """The text for plans and tables."""
        return self.short(), "the optimizer's state is streamed around the update"

    def refuses(self, other: Technique) -> str | None:
        """Elements that move are indexed on the device."""
        if other.moves_elements and not other.is_neutral:
            return f"{self.name} cannot follow elements that {other.name} moves"
        return None

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        """Where there is state large enough, and a device that it can leave."""
        if context.accounting != "device":
            return
        largest = max((p.numel for p in context.trace.parameters if p.has_gradient), default=0)
        if largest >= cls.smallest and _has_state(context.optimizer):
            on_disk = context.device == "cpu"
            place = "in mapped files" if on_disk else "on the host"
            for share in _SHARES:
                part = "" if share == 1 else "as much as must of "
                yield Offer(
                    cls(share=share),
                    f"{part}the optimizer's state lies {place}",
                    refuses=lambda other: other.scales_loss and not on_disk,
                    last=on_disk,
                )

    def estimate_update(self, updates: Updates) -> Update | None:
        """The same update; what is on the host passes through a few buffers."""
        whole = updates.without(self)
        total = sum(updates.trained.values())
        if not whole.state_bytes or not total:
            return whole
        optimizer, names = updates.context.optimizer, _names(updates.context.model)
        leaving = [names.get(id(p), "") for p in self._leaving(_held(optimizer))]
        moved = [updates.trained[name] for name in leaving if name in updates.trained]
        each = whole.state_bytes / total
        on_host = int(each * sum(moved))
        passing = whole.passing_bytes
        buffers: tuple[int, ...] = ()
        if updates.context.device == "cuda":
            chunk = chunk_bytes(_held(optimizer))
            buffers = buffer_sizes([int(each * nbytes) for nbytes in moved], chunk)
            share = max(buffers, default=0) / max(whole.state_bytes, 1)
            passing = int(passing * min(share, 1))
        return replace(
            whole,
            state_bytes=whole.state_bytes - on_host,
            passing_bytes=passing,
            lasting_bytes=whole.lasting_bytes + sum(buffers),
            link_bytes=whole.link_bytes + on_host,
            host_launches=whole.host_launches + _CALL * len(moved),
        )

    def predict(self, trace: Trace) -> Trace:
        """State of large tensors takes nothing."""
        leaving = {p.name for p in self._leaving(trace.parameters)}
        return replace(
            trace,
            parameters=tuple(
                replace(p, state_elements=()) if p.name in leaving else p for p in trace.parameters
            ),
        )

    def _leaving(self, parameters: Sequence[Any]) -> list[Any]:
        """Those whose state leaves the device."""
        large = [p for p in parameters if p.requires_grad and _elements(p) >= self.smallest]
        chosen = which_move([_elements(p) for p in large], self.share)
        return [p for number, p in enumerate(large) if number in chosen]

    def check(self, setup: Setup) -> None:
        """Only optimizers that treat every parameter alone, and whose step is theirs."""
        name = type(setup.optimizer).__name__
        if type(setup.optimizer) not in ELEMENTWISE:
            raise InputError(
                f"the updates of {name} are not known to be independent",
                hint="PyTorch's own SGD, Adam, AdamW, RMSprop and so on can be offloaded",
            )
        setup.check_step("state on the host")
        parameters = _held(setup.optimizer)
        if any(is_fake(p) or p.is_meta for p in parameters):
            return
        folder = None if any(p.is_cuda for p in parameters) else folder_for(self.folder)
        if folder is not None:
            check_folder(folder)
        check_room(self._needed(setup, plain=False), folder)

    def apply(self, setup: Setup) -> None:
        """Move what state there is; put the streaming around the update."""
        optimizer = setup.optimizer
        held = _held(optimizer)
        leaving = self._leaving(held)
        large = bool(leaving)
        if not large or not _has_state(optimizer):
            why = "keeps no state" if large else f"holds no tensor of {self.smallest} elements"
            warnings.warn(f"{self.short()}: the optimizer {why}", NoEffectWarning, stacklevel=2)
            return
        streams = any(on_cuda(p) for p in held)
        if streams and setup.loss_scale is not None:
            raise InputError(
                "state on the host is updated chunk by chunk, before a loss scale has seen all "
                "gradients",
                hint="use bf16",
            )
        plain = not setup.update_on_device
        if not any(is_fake(p) for p in held):
            check_room(
                self._needed(setup, plain=plain), None if streams else folder_for(self.folder)
            )
        kept = frozenset(held).difference(leaving) if self.share < 1 else frozenset()
        setup.undo.append(keep_on_host(optimizer, folder_for(self.folder), self.smallest, kept))
        if not streams:
            setup.update = MappedUpdate(optimizer, setup.update, plain=plain)
            return
        update = StreamedUpdate(setup)
        setup.update, setup.update_streams = update, True
        setup.before_graph.append(update.wait)
        setup.in_capture.append(update.captured)
        setup.after_update.append(update.finish)
        setup.meanings.append(_OnHost())

    def _needed(self, setup: Setup, *, plain: bool) -> int:
        """Bytes that will lie on the host, at least; the optimizer's own state, or one in codes."""
        if isinstance(setup.optimizer.state, OffloadedState) or not _has_state(setup.optimizer):
            return 0
        moments = 2 if isinstance(setup.optimizer, (torch.optim.Adam, torch.optim.AdamW)) else 1
        leaving = self._leaving(_held(setup.optimizer))
        each = moments if plain else 0.5 * moments
        sizes = [int(each * p.numel() * (p.element_size() if plain else 1)) for p in leaving]
        return sum(
            pinned_size(nbytes) if p.is_cuda else nbytes
            for p, nbytes in zip(leaving, sizes, strict=True)
        )


class _OnHost(Meaning):
    """State as the plain optimizer has it: beside its parameter."""

    def state(
        self, like: torch.Tensor, key: str, held: torch.Tensor, beside: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """On the parameter's device."""
        return held.to(like.device) if held.dim() else held


def _held(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _names(model: torch.nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _elements(one: Any) -> int:
    return whole_elements(one) if isinstance(one, torch.Tensor) else int(one.numel)


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    sgd = isinstance(optimizer, torch.optim.SGD)
    return any(group["momentum"] for group in optimizer.param_groups) if sgd else True
