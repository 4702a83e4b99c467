"""Weights on the host: a layer's weights are on the device only while something reads them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from ...errors import InputError, NoEffectWarning
from ...memory.device import device_timeline
from ...trace.compiled import compiled_path
from ...trace.cuda import on_cuda
from ...trace.fakes import is_fake
from ...trace.graph import Trace
from ..apart import hooks_once, run_alone, with_gradient
from ..base import Flag, Setup, Technique
from ..host import check_folder, check_room, folder_for, offloaded, pinned_size
from ..offers import Context, Offer, Update, Updates
from ..optimizers import ELEMENTWISE
from ..registry import register
from .parameters import SavingWeights, hosts, put_on_host, weight_on_host
from .store import HostWeight, HostWeights, set_data

__all__ = ["WeightOffload"]

_SHARES = (0.5, 1.0)
"""Of the weights, what a planner tries to let go."""
_LEAST = 0.05
"""Of what the plain step holds, what weights must be for a planner to move them."""
_CALL = 20
"""Kernels that start in the time that bringing one weight takes the host."""


@register
@dataclass(frozen=True)
class WeightOffload(Technique):
    """Keep weights on the host, and bring each to the device while a function reads it.

    For a model on a GPU they are in pinned memory and copied ahead, for one on the CPU in mapped
    files. Weights that train are updated one at a time, and copied back.

    Args:
        share: How much of the weights leave the device, evenly apart.
        smallest: Tensors of fewer elements stay on the device.
        folder: Of the mapped files; by default the folder of temporary files if it is on a disk.

    Examples:
        >>> plan = [ss.WeightOffload(smallest=4096)]
        >>> step = ss.apply(plan, model, optimizer, loss=loss)
    """

    name: ClassVar[str] = "weight_offload"
    order: ClassVar[int] = 26
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "offload_weights", "share", float, "Share of the weights to keep on the host.",
            label="weights on the host", explained=("weights on the host", 1.0),
        ),
    )  # fmt: skip
    changes_passes: ClassVar[bool] = True
    updates_apart: ClassVar[bool] = True
    runs_eagerly: ClassVar[bool] = True
    proof: ClassVar[Any] = "without"

    share: float = 1.0
    smallest: int = 65536
    folder: str | None = None

    def __post_init__(self) -> None:
        if type(self.share) not in (int, float) or not 0 < self.share <= 1:
            raise InputError(f"cannot offload a share of {self.share!r}", hint="above 0, at most 1")
        if type(self.smallest) is not int or self.smallest < 1:
            raise InputError(
                f"smallest {self.smallest!r} is not a whole number from 1",
                hint="tensors of fewer elements stay",
            )

    @property
    def inside_blocks(self) -> bool:
        """Always."""
        return True

    def short(self) -> str:
        """The name of the tensors kept on the host."""
        part = "" if self.share == 1 else f"{100 * self.share:.3g}% of "
        return f"{part}weights on the host"

    def describe(self) -> tuple[str, str]:
        """The text for plans and tables."""
        return self.short(), "each weight is on the device only while something reads it"

    def refuses(self, other: Technique) -> str | None:
        """A sparse weight is another tensor after each rewiring."""
        if other.moves_elements and not other.is_neutral:
            return f"{self.name} cannot follow elements that {other.name} moves"
        return None

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        """Where weights are much of what the step holds, and nothing else is enough."""
        if context.accounting != "device":
            return
        sizes = [p.nbytes for p in context.model.parameters() if p.numel() >= cls.smallest]
        state = 2 * sum(p.nbytes for p in context.model.parameters() if p.requires_grad)
        if sum(sizes) <= _LEAST * (
            int(device_timeline(context.trace).totals.max(initial=0)) + state
        ):
            return
        place = "in mapped files" if context.device == "cpu" else "on the host"
        for share in _SHARES:
            part = "" if share == 1 else "half of "
            why = f"{part}the weights lie {place} while no layer reads them"
            yield Offer(cls(share=share), why, last=True)

    def estimate_update(self, updates: Updates) -> Update | None:
        """The same update, one weight at a time; what is resident is in the trace of the passes."""
        whole = updates.without(self)
        if updates.context.device == "cpu" or not updates.trained:
            return whole
        moved = self.share * sum(updates.trained.values())
        largest = max(updates.trained.values())
        return replace(
            whole,
            passing_bytes=whole.passing_bytes + largest,
            link_bytes=whole.link_bytes + int(moved),
            host_launches=whole.host_launches + _CALL * len(updates.trained),
        )

    def predict(self, trace: Trace) -> Trace:
        """An ideal executor has one weight at a time on the device."""
        leaving = sorted(self._leaving(trace.parameters), key=lambda p: p.numel)[:-1]
        names = {p.name for p in leaving}
        return replace(
            trace,
            parameters=tuple(
                replace(p, on_host=True) if p.name in names else p for p in trace.parameters
            ),
        )

    def _leaving(self, parameters: Iterable[Any]) -> list[Any]:
        """Those that leave the device: large ones, evenly apart."""
        large = [p for p in parameters if _elements(p) >= self.smallest]
        return [
            p
            for number, p in enumerate(large)
            if int((number + 1) * self.share) > int(number * self.share)
        ]

    def check(self, setup: Setup) -> None:
        """There must be room on the host, and no compiled code that reads weights by itself."""
        if where := compiled_path(setup.model):
            raise InputError(
                f"{where} is compiled, and reads its weights where they were",
                hint="leave out torch.compile, or weight_offload",
            )
        found = list(self._movable(setup))
        if not found or any(is_fake(p) or p.is_meta for p in found):
            return
        if any(p.is_cuda for p in found):
            check_room(sum(pinned_size(p.nbytes) for p in found), None, what="weights")
            return
        check_folder(self.folder)
        check_room(sum(p.nbytes for p in found), folder_for(self.folder), what="weights")

    def check_ranks(self, setup: Setup, kind: str) -> None:
        """Ranks share weights by tensors that lie on the device."""
        raise InputError("weights on the host are for one process", hint="leave out weight_offload")

    def apply(self, setup: Setup) -> None:
        """Move the weights; bring them in the passes and in the update."""
        found = list(self._movable(setup))
        if not found:
            warnings.warn(
                f"{self.short()}: no floating-point weight of {self.smallest} elements can move",
                NoEffectWarning,
                stacklevel=2,
            )
            return
        folder = folder_for(self.folder)
        if not any(on_cuda(p) for p in found):
            for parameter in found:
                setup.undo.append(_map(parameter, folder))
            return
        store = HostWeights()
        weights: list[HostWeight] = []
        for parameter in found:
            try:
                there = offloaded(parameter, folder, pinned=parameter.is_cuda)
            except OSError as error:
                raise InputError(
                    f"no room for the weights on the host: {error}", hint="a smaller share"
                ) from None
            weights.append(HostWeight(store, parameter, there))
            setup.undo.append(put_on_host(parameter, weights[-1]))
        store.open(weights)
        setup.undo.append(store.close)
        for handle in _whole_states(setup.model, store):
            setup.undo.append(handle.remove)
        self._stream(setup, store)

    def _stream(self, setup: Setup, store: HostWeights) -> None:
        run, passes_back = setup.run, setup.backward
        update, optimizer = setup.update, setup.optimizer

        first = True

        def streamed(batch: Any) -> torch.Tensor:
            nonlocal first
            store.clear()
            with SavingWeights(store):
                loss = run(batch)
            if first and not is_fake(loss) and bool(loss.isnan()):
                raise InputError(
                    "the loss is NaN in the first step: plainly, too, or the model reads weights "
                    "past PyTorch's functions (torch.func.vmap does), which finds NaN there",
                    hint="leave out weight_offload",
                )
            first = False
            return loss

        def backward(value: torch.Tensor) -> None:
            passes_back(value)
            store.clear()

        def apart() -> None:
            work = list(with_gradient(optimizer))
            here = [one for one in work if weight_on_host(one[1]) is None]
            with hooks_once(optimizer):
                for group in optimizer.param_groups:
                    own = [p for its, p in here if its is group]
                    if own:
                        run_alone(optimizer, (group, own), update)
                for group, parameter in work:
                    weight = weight_on_host(parameter)
                    if weight is not None:
                        store.flush(but=[weight])
                        with store.brought([weight], [weight]):
                            run_alone(optimizer, (group, [parameter]), update)
            store.clear()

        setup.run, setup.backward = streamed, backward
        if any(weight_on_host(p) is not None for _, p in _held(optimizer)):
            setup.update = apart
        setup.not_captured = setup.not_captured or "weights are copied from the host"
        setup.after_update.append(store.rest)

    def _movable(self, setup: Setup) -> Iterator[torch.Tensor]:
        """Parameters that PyTorch's functions alone read, each once."""
        scripted = {
            id(p)
            for module in setup.model.modules()
            if isinstance(module, torch.jit.ScriptModule)
            for p in module.parameters()
        }
        trained = {id(p) for _, p in _held(setup.optimizer) if p.requires_grad}
        apart = (
            type(setup.optimizer) in ELEMENTWISE
            and setup.wrapper is None
            and setup.loss_scale is None
        )
        for parameter in self._leaving(setup.model.parameters()):
            if (
                hosts(parameter)
                and parameter.is_floating_point()
                and id(parameter) not in scripted
                and (apart or id(parameter) not in trained)
            ):
                yield parameter


def _held(optimizer: torch.optim.Optimizer) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield group, parameter


def _map(parameter: torch.Tensor, folder: str) -> Any:
    """Beside the CPU a weight is read where it lies, in a file."""
    before = parameter.data
    try:
        set_data(parameter, offloaded(parameter, folder, pinned=False))
    except OSError as error:
        raise InputError(
            f"no room for the weights in {folder}: {error}", hint="WeightOffload(folder=…)"
        ) from None
    shape, dtype = before.shape, before.dtype
    del before

    def undo() -> None:
        now = parameter.data
        set_data(parameter, torch.empty_strided(shape, now.stride(), dtype=dtype).copy_(now))

    return undo


def _whole_states(model: nn.Module, store: HostWeights) -> Iterator[Any]:
    """Hooks with which a state dict has the host's copies, and none is brought for it."""

    def begin(*_: Any) -> None:
        store.saving = True

    def end(*_: Any) -> None:
        store.saving = False

    yield model.register_state_dict_pre_hook(begin)
    yield model.register_state_dict_post_hook(end)


def _elements(one: Any) -> int:
    return int(one.numel() if isinstance(one, torch.Tensor) else one.numel)
