"""The peak of a real training step, by role: tracked storages on the CPU, the allocator on CUDA."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ...errors import InputError
from ...plain_values import PlainValues
from ...torch_private.storages import held_in
from ...trace.batches import check_layouts, tensors_of
from ...trace.failures import check_loss, check_module, closure_named, user_code
from ...trace.fakes import (
    check_optimizer,
    late_in_training,
    make_optimizer,
    span,
    unwrapped,
)
from ...trace.freezing import role_by_life
from ...trace.graph import Phase, Role
from ...trace.hooked import OURS
from ...trace.recorder import Recorder
from ...trace.settling import kept_bytes, kept_tensors
from ...trace.tracing import Loss
from ...trace.untouched import Untouched, as_it_was, hooks_of
from ..cpu.scratch import scratch_bytes

Optimizer = torch.optim.Optimizer


@dataclass(frozen=True)
class Measurement(PlainValues):
    """The peak of a real step.

    Examples:
        >>> ss.measure(model, batch, loss=loss, optimizer=optimizer).bytes_by_role["gradient"]
    """

    device: str
    """Where it ran."""
    peak_bytes: int
    """On the CPU of tensors, on CUDA allocated."""
    bytes_by_role: dict[str, int]
    """Live bytes at the peak, by role; the sum is the peak."""
    scratch_bytes: int = 0
    """On the CPU, what kernels take beside tensors at most, by rule (`memory.cpu.scratch`)."""


def measure(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    optimizer: Optimizer | str | None = None,
    warmup_steps: int = 2,
) -> Measurement:
    """Run real training steps and return the peak of the last one.

    The step is in steady state: optimizer state exists, gradients are freed between steps.
    Afterwards `measure` restores weights, gradients, optimizer state, buffers and random streams.
    On the CPU the peak counts tensors. It leaves out the scratch memory of kernels, which can be
    large for oneDNN's convolutions (they copy their arguments to another layout).

    Args:
        model: Runs, and is restored.
        batch: One batch, as your training loop has it.
        loss: `(model, batch) -> scalar`.
        optimizer: Yours, a name such as "adamw", or None for a step without update.
        warmup_steps: Steps before the measured one.

    Returns:
        The peak, and the live bytes at the peak by role.

    Examples:
        >>> ss.measure(model, batch, loss=loss, optimizer=optimizer).peak_bytes
    """
    check_module(model)
    device = _device_of(model, batch)
    check_layouts(tensors_of(batch))
    updates: Optimizer | None
    if optimizer is None or isinstance(optimizer, str):
        updates = make_optimizer(optimizer, model, {})
    else:
        check_optimizer(optimizer)
        updates = unwrapped(optimizer)
    with as_it_was(model, Untouched([loss, *hooks_of(model)])):
        with user_code():
            for _ in range(max(warmup_steps, 1)):
                training_step(model, batch, loss, updates)
        if updates is not None:
            late_in_training(updates)
        gc.collect()
        on_device = _measure_cpu if device == "cpu" else _measure_cuda
        return on_device(model, batch, loss, updates)


def training_step(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    optimizer: Optimizer | None,
    entering: Callable[[Phase], None] = lambda phase: None,
) -> torch.Tensor:
    """The plain step that predictions describe; calls `entering` with each phase."""
    entering(Phase.FORWARD)
    value = loss(model, batch)
    check_loss(value)
    entering(Phase.BACKWARD)
    value.backward()
    entering(Phase.OPTIMIZER)
    if optimizer is not None:
        with closure_named(optimizer):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    for parameter in model.parameters():
        parameter.grad = None
    return value


def _device_of(model: nn.Module, batch: Any) -> str:
    """The one device the model and its batch lie on."""
    devices = {str(t.device) for t in [*model.parameters(), *model.buffers()]}
    kinds = {device.partition(":")[0] for device in devices}
    if len(devices) != 1 or not kinds <= {"cpu", "cuda"}:
        raise InputError(
            f"the model lies on {', '.join(sorted(devices)) or 'no device'}",
            hint="put it on one device, cpu or cuda",
        )
    (device,), (kind,) = devices, kinds
    elsewhere = sorted({str(t.device) for t in tensors_of(batch)} - devices)
    if elsewhere:
        raise InputError(
            f"the batch lies on {', '.join(elsewhere)}, the model on {device}",
            hint=f"move the batch with .to({device!r})",
        )
    return kind


def _residents(
    model: nn.Module, batch: Any, optimizer: Optimizer | None
) -> list[tuple[Role, list[torch.Tensor]]]:
    """Tensors that exist between two steps. Of roles that share a tensor the last one counts."""
    state = [] if optimizer is None else tensors_of([dict(s) for s in optimizer.state.values()])
    waiting = [p.grad for p in model.parameters() if p.grad is not None]  # to be added to
    return [
        (Role.INPUT, tensors_of(batch)),
        (Role.GRADIENT, waiting),
        (Role.OPTIMIZER_STATE, state),
        (Role.BUFFER, list(model.buffers())),
        (Role.MODEL, list(model.parameters())),
    ]


def _report(device: str, bytes_by_role: dict[Role, int]) -> Measurement:
    return Measurement(
        device,
        sum(bytes_by_role.values()),
        {str(role): bytes_by_role.get(role, 0) for role in Role if role is not Role.WORKSPACE},
    )


# -- CPU -------------------------------------------------------------------------------------------


def _measure_cpu(
    model: nn.Module, batch: Any, loss: Loss, optimizer: Optimizer | None
) -> Measurement:
    return track(
        lambda entering: training_step(model, batch, loss, optimizer, entering),
        model,
        batch,
        optimizer,
    )


def track(
    step: Callable[[Callable[[Phase], None]], Any],
    model: nn.Module,
    batch: Any,
    optimizer: Optimizer | None,
) -> Measurement:
    """The peak of one call of `step`, storage by storage; it says which phase it enters."""
    recorder = Recorder()
    roles: dict[int, Role] = {}
    backward_start = 0

    def entering(phase: Phase) -> None:
        nonlocal backward_start
        recorder.phase = phase
        if phase is Phase.BACKWARD:
            backward_start = backward_start or len(recorder.ops)
        if phase is Phase.OPTIMIZER:
            note_gradients()

    def note_gradients() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                for record in recorder.storages_of(parameter.grad):
                    roles[record.index] = Role.GRADIENT

    for role, tensors in _residents(model, batch, optimizer):
        for tensor in tensors:
            record = recorder.resident(tensor)
            if record is not None:
                roles[record.index] = role
    before_bytes = kept_bytes(model)
    for index in _noted(recorder, model):
        roles.setdefault(index, Role.BUFFER)
    with recorder:
        step(entering)
    replaced = kept_bytes(model) <= before_bytes
    latest = _noted(recorder, model) if replaced else set()
    note_gradients()  # those that wait for a later step to update from them

    # Roles are known only now, so the peak is found afterwards, tick by tick of births and deaths.
    deltas = np.zeros(recorder.clock + 1, dtype=np.int64)
    for record in recorder.storages:
        if record.died is not None:
            deltas[record.died] -= record.nbytes
        elif roles.get(record.index) is not Role.GRADIENT and record.index not in latest:
            record.born = 0  # made once and kept: there from the second step on
        deltas[record.born] += record.nbytes
    totals = deltas.cumsum()
    instant = len(totals) - 1 - int(totals[::-1].argmax())
    bytes_by_role = dict.fromkeys(Role, 0)
    for record in recorder.storages:
        if record.born <= instant and (record.died is None or record.died > instant):
            role = roles.get(record.index) or role_by_life(record, backward_start)
            bytes_by_role[role] += record.nbytes
    unseen = _unseen_bytes(batch)
    bytes_by_role[Role.INPUT] -= unseen
    found = _report("cpu", bytes_by_role)
    return replace(found, scratch_bytes=_scratch_above(recorder, found.peak_bytes + unseen))


def _noted(recorder: Recorder, model: nn.Module) -> set[int]:
    """Records of what modules keep; they may assign over it."""
    records = (recorder.storage_of(tensor) for tensor in kept_tensors(model).values())
    return {record.index for record in records if record is not None}


def _scratch_above(recorder: Recorder, peak_bytes: int) -> int:
    """Scratch that kernels add to the peak, on top of the tensors live while they run."""
    deltas = np.zeros(len(recorder.ops) + 2, dtype=np.int64)
    for record in recorder.storages:
        deltas[max(record.birth, 0)] += record.nbytes
        if record.death is not None:
            deltas[record.death] -= record.nbytes
    totals = deltas.cumsum()
    above = (int(totals[op.index]) + scratch_bytes(op) for op in recorder.ops)
    return max(max(above, default=0) - peak_bytes, 0)


def _unseen_bytes(batch: Any) -> int:
    """Bytes of storages of which the batch shows only a part: not the step's, but its owner's."""
    groups: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors_of(batch):
        groups.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    unseen = 0
    for group in groups.values():
        start, end = span(group)
        unseen += group[0].untyped_storage().nbytes() - (end - start) * group[0].element_size()
    return unseen


# -- CUDA ------------------------------------------------------------------------------------------


def _measure_cuda(
    model: nn.Module, batch: Any, loss: Loss, optimizer: Optimizer | None
) -> Measurement:
    """The allocator's own peak; of gradients, those finished when it was reached."""
    bytes_by_role: dict[Role, int] = {}
    seen: set[int] = set()
    for role, tensors in reversed(_residents(model, batch, optimizer)):
        bytes_by_role[role] = _storage_bytes([t for t in tensors if t.is_cuda], seen)

    highest: list[tuple[int, int]] = []
    finished_bytes = 0

    def gradient_made(parameter: torch.Tensor) -> None:
        nonlocal finished_bytes
        highest.append((torch.cuda.max_memory_allocated(), finished_bytes))
        if parameter.grad is not None:
            finished_bytes += _storage_bytes(held_in(parameter.grad), set())

    setattr(gradient_made, OURS, True)
    hooks = [
        parameter.register_post_accumulate_grad_hook(gradient_made)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    try:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        training_step(model, batch, loss, optimizer)
        torch.cuda.synchronize()
    finally:
        for hook in hooks:
            hook.remove()
    peak_bytes = torch.cuda.max_memory_allocated()
    at_peak = [finished for reached, finished in highest if reached == peak_bytes]
    bytes_by_role[Role.GRADIENT] = at_peak[0] if at_peak else finished_bytes
    rest = Role.FORWARD_ACTIVATION if at_peak else Role.TRANSIENT
    bytes_by_role[rest] = peak_bytes - sum(bytes_by_role.values())
    return _report("cuda", bytes_by_role)


def _storage_bytes(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    """Bytes of the storages behind the tensors, each counted once."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total
