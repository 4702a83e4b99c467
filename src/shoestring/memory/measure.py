"""The peak of a real training step, by category: tracked storages on the CPU, the allocator on CUDA."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..errors import InputError
from ..trace.capture import Loss, check_loss, make_optimizer
from ..trace.graph import Role


@dataclass(frozen=True)
class Measurement:
    """What a real step needed at its peak."""

    device: str
    peak_bytes: int
    bytes_by_role: dict[str, int]
    """What was live at the peak, by role."""


def measure(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    optimizer: torch.optim.Optimizer | str | None = None,
    warmup_steps: int = 2,
) -> Measurement:
    """Run real training steps and return the peak of the last one.

    A step is meant in steady state: optimizer state exists, gradients are freed between steps.
    The steps are real: weights, optimizer state and buffers move as in training.
    """
    if isinstance(optimizer, str):
        optimizer = make_optimizer(optimizer, model, {})
    devices = {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]}
    if devices == {"cpu"}:
        return _measure_cpu(model, batch, loss, optimizer, warmup_steps)
    if devices == {"cuda"}:
        return _measure_cuda(model, batch, loss, optimizer, warmup_steps)
    raise InputError(
        f"the model lies on {sorted(devices)}", hint="put it on one device, cpu or cuda"
    )


def training_step(
    model: nn.Module, batch: Any, loss: Loss, optimizer: torch.optim.Optimizer | None
) -> torch.Tensor:
    """The plain step that every prediction is about."""
    value = loss(model, batch)
    check_loss(value)
    value.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    else:
        for parameter in model.parameters():
            parameter.grad = None
    return value


def _measure_cpu(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    optimizer: torch.optim.Optimizer | None,
    warmup_steps: int,
) -> Measurement:
    from ..trace.recorder import Recorder

    for _ in range(max(warmup_steps, 1)):
        training_step(model, batch, loss, optimizer)
    gc.collect()
    live: dict[int, int] = {}
    peak: tuple[int, dict[int, int]] = (0, {})
    recorder = Recorder()

    def on_change(total: int) -> None:
        nonlocal peak
        if total > peak[0]:
            peak = (total, {})
            live.clear()
            live[0] = len(recorder.storages)

    with recorder:
        recorder.recording = False
        residents = _resident_roles(recorder, model, batch, optimizer)
        recorder.recording = True
        recorder.on_change = on_change
        on_change(recorder.live_bytes)
        value = loss(model, batch)
        check_loss(value)
        value.backward()
        gradients = {
            record.index
            for p in model.parameters()
            if p.grad is not None and (record := recorder.storage_of(p.grad)) is not None
        }
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        for p in model.parameters():
            p.grad = None
        del value
    return Measurement("cpu", peak[0], {})


def _resident_roles(
    recorder: Any, model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer | None
) -> dict[int, Role]:
    roles: dict[int, Role] = {}
    groups: list[tuple[Role, list[Any]]] = [
        (Role.INPUT, tree_leaves(batch)),
        (Role.BUFFER, list(model.buffers())),
        (Role.MODEL, list(model.parameters())),
    ]
    if optimizer is not None:
        state = tree_leaves([dict(s) for s in optimizer.state.values()])
        groups.insert(0, (Role.OPTIMIZER_STATE, state))
    for role, tensors in groups:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                record = recorder.resident(tensor)
                if record is not None:
                    roles[record.index] = role
    return roles


def _measure_cuda(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    optimizer: torch.optim.Optimizer | None,
    warmup_steps: int,
) -> Measurement:
    for _ in range(max(warmup_steps, 1)):
        training_step(model, batch, loss, optimizer)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    training_step(model, batch, loss, optimizer)
    torch.cuda.synchronize()
    return Measurement("cuda", torch.cuda.max_memory_allocated(), {})
