"""Saved activations on the host: copied out behind the forward pass, back ahead of backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from ...errors import InputError, NoEffectWarning
from ...memory.device import device_timeline
from ...memory.timeline import resident_bytes
from ...trace.cuda import on_cuda
from ...trace.fakes import is_fake
from ...trace.graph import Trace
from ..base import Flag, Setup, Technique
from ..host import check_folder, folder_for
from ..offers import Context, Offer, Scales
from ..registry import register
from .saving import Host, SavingOnHost

__all__ = ["ActivationOffload"]

_DEPTH = {"inputs": 1, "all": 4}
"""Storages under way each way: while a block runs, one goes; a block saves a dozen."""
_LEAST = 0.05
"""Of what is there when every block is recomputed, so much must be their kept inputs."""
_BYTES = 2
"""Of an element, at least."""


@register
@dataclass(frozen=True)
class ActivationOffload(Technique):
    """Keep saved activations on the host between the forward and the backward pass.

    For a model on a GPU they are in pinned memory, for one on the CPU in mapped files.

    Args:
        what: "inputs", from which blocks are recomputed, or "all" that autograd saves.
        smallest: Tensors of fewer elements stay on the device.
        folder: Of the mapped files; by default the folder of temporary files if it is on a disk.

    Examples:
        >>> step = ss.apply([ss.ActivationOffload("all")], model, optimizer, loss=loss)
    """

    name: ClassVar[str] = "activation_offload"
    order: ClassVar[int] = 37
    flags: ClassVar[tuple[Flag, ...]] = (
        Flag(
            "offload_activations", "what", str,
            "Saved activations on the host: inputs (of recomputed blocks) or all.",
            label="activations on the host",
        ),
    )  # fmt: skip
    same_state: ClassVar[bool] = True
    revisable: ClassVar[bool] = True
    changes_update: ClassVar[bool] = False
    runs_eagerly: ClassVar[bool] = True
    proof: ClassVar[Any] = "without"

    what: Literal["inputs", "all"] = "inputs"
    smallest: int = 65536
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.what not in _DEPTH:
            raise InputError(
                f"cannot offload {self.what!r} of what is saved", hint=" or ".join(_DEPTH)
            )
        if type(self.smallest) is not int or self.smallest < 1:
            raise InputError(
                f"smallest {self.smallest!r} is not a whole number from 1",
                hint="tensors of fewer elements stay",
            )

    def short(self) -> str:
        """The name of the tensors kept on the host."""
        return f"{_SHOWN[self.what]} on the host"

    def describe(self) -> tuple[str, str]:
        """The text for plans and tables."""
        return self.short(), "saved for backward on the host, and fetched ahead"

    @classmethod
    def offers(cls, context: Context) -> Iterable[Offer]:
        """The kept inputs, where they are much of what is left when all blocks are recomputed."""
        if context.accounting != "device" or not _matters(context, cls.smallest):
            return
        on_disk = context.device == "cpu"
        place = "in mapped files" if on_disk else "on the host"
        yield Offer(
            cls(),
            f"the inputs of recomputed blocks lie {place} until backward",
            Scales(inputs_here=1 if on_disk else 2),
            last=on_disk,
        )

    def predict(self, trace: Trace) -> Trace:
        """Between the passes they take nothing."""
        return replace(trace, on_host=self.what)

    def check(self, setup: Setup) -> None:
        """Beside the CPU there must be a disk."""
        first = next(setup.model.parameters())
        if not first.is_cuda and not is_fake(first):
            check_folder(self.folder)

    def apply(self, setup: Setup) -> None:
        """Hooks around the forward pass."""
        host = Host(folder_for(self.folder), _DEPTH[self.what])
        run, model, first = setup.run, setup.model, True

        def saving(batch: Any) -> torch.Tensor:
            nonlocal first
            with SavingOnHost(
                model, batch, host, everything=self.what == "all", smallest=self.smallest
            ) as saved:
                loss = run(batch)
            host.warn()
            if first and torch.is_grad_enabled():
                first = False
                self._warn(saved.seen)
            return loss

        setup.run = saving
        before = setup.not_captured
        if on_cuda(next(model.parameters())):
            setup.not_captured = before or "saved activations are copied to the host and back"
            setup.undo.append(lambda: setattr(setup, "not_captured", before))

    def _warn(self, seen: int) -> None:
        if not seen:
            what = "kept to recompute a block" if self.what == "inputs" else "saved"
            warnings.warn(
                f"{self.short()}: no tensor of {self.smallest} elements is {what}",
                NoEffectWarning,
                stacklevel=4,
            )


_SHOWN = {"inputs": "kept inputs", "all": "saved activations"}


def _matters(context: Context, smallest: int) -> bool:
    """Whether the blocks' inputs are much of what is left when all of them are recomputed."""
    inputs: tuple[int, ...] = context.found.get("region_inputs", ())
    if not inputs or max(inputs) < smallest * _BYTES:
        return False
    timeline = device_timeline(context.trace)
    resident = resident_bytes(timeline)
    of_one_block = (int(timeline.totals.max(initial=0)) - resident) // len(inputs)
    return sum(inputs) > _LEAST * (resident + of_one_block + sum(inputs))
