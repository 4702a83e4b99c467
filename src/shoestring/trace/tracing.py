"""Model + batch + loss → Trace: one training step run on fake tensors, nothing allocated."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..torch_private.fake_tensors import FakeTensorMode, converted_in_place
from .answers import Answers, with_answers
from .batches import tensors_of
from .compiled import uncompiled
from .cuda import CudaKernels
from .draws import at_worst
from .failures import check_loss, check_trainable, closure_named, named_failures, other_model
from .fakes import (
    OptimizerLike,
    default_to_foreach,
    fake_batch,
    fake_model,
    make_optimizer,
    mode_of,
)
from .freezing import RecordedStep, freeze
from .garbage import only_new_garbage
from .graph import Phase, Trace, live_bytes
from .hooked import update_in_backward
from .outside import Outside
from .recorder import Recorder
from .settling import FirstPasses, growing
from .untouched import nothing_changes

Loss = Callable[[nn.Module, Any], torch.Tensor]


def trace_model(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    optimizer: OptimizerLike = None,
    device: str = "cpu",
) -> Trace:
    """Run one step of `loss(model, batch)` on fake tensors and return its frozen graph.

    `device="cuda"` records the operations CUDA would run instead of the CPU's (`trace.cuda`);
    neither needs the device. The model, batch and optimizer given are left as they are, and so
    are other modules that the loss uses.
    """
    if device not in ("cpu", "cuda"):
        raise InputError(f"unknown device {device!r}", hint="cpu or cuda")
    check_trainable(model)

    def trace(answers: Answers | None) -> Trace:
        return _traced(model, batch, loss, optimizer, device, answers)

    return at_worst(model, lambda: with_answers(trace, model, batch, loss, None), live_bytes)


def _traced(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    optimizer: OptimizerLike,
    device: str,
    answers: Answers | None,
) -> Trace:
    fake_mode = mode_of(model) or FakeTensorMode(allow_non_fake_inputs=True)
    with only_new_garbage(), warnings.catch_warnings(), nothing_changes(model, loss):
        warnings.simplefilter("ignore")
        fake, mapping = fake_model(model, fake_mode)
        data = fake_batch(batch, fake_mode)
        fake_optimizer = make_optimizer(optimizer, fake, mapping)
        within = update_in_backward(model, mapping)
        if device == "cuda" and fake_optimizer is not None:
            default_to_foreach(fake_optimizer)
        recorder, outside = Recorder(), Outside(fake_mode, answers=answers)
        asked = nullcontext() if answers is None else answers.following(fake)
        kernels: AbstractContextManager[Any] = CudaKernels() if device == "cuda" else nullcontext()
        with (
            named_failures(recorder),
            uncompiled(recorder),
            converted_in_place(),
            asked,
            fake_mode,
            outside,
            kernels,
            recorder.following(fake),
            recorder,
        ):
            first = FirstPasses(model, fake)

            def run() -> None:
                loss(fake, data).backward()
                if answers is not None:
                    answers.rewind()

            recorder.recording = False
            if first.moved is not None:
                first.make_state(run)
            step = _record_step(
                recorder, fake, data, loss, fake_optimizer, within, moved=first.moved
            )
            made = freeze(recorder, fake, fake_optimizer, step, device)
            again = first.again(run, made)
    if again:
        return _traced(model, batch, loss, optimizer, device, answers)
    return replace(made, warnings=growing(model))


def _record_step(
    recorder: Recorder,
    model: nn.Module,
    batch: Any,
    loss: Loss,
    optimizer: torch.optim.Optimizer | None,
    within: Sequence[torch.optim.Optimizer] = (),
    moved: frozenset[str] | None = None,
) -> RecordedStep:
    step = RecordedStep()
    named = dict(model.named_parameters())
    recorder.recording = False
    if within:  # hooks of the parameters update them: the first pass makes the state
        value = loss(model, batch)
        recorder.phase = Phase.OPTIMIZER
        value.backward()
        del value
        for own in within:
            step.note_state(recorder, own, named)
    for name, parameter in named.items():
        record = recorder.resident(parameter, name.rpartition(".")[0])
        if record is not None:
            step.parameters[name] = record
    step.note_buffers(recorder, model)
    for tensor in tensors_of(batch):
        record = recorder.resident(tensor)
        if record is not None:
            step.inputs.append(record)
    step.settle(recorder, model, moved)
    recorder.recording = True

    before = step.before(model)
    recorder.phase = Phase.FORWARD
    value = loss(model, batch)
    check_loss(value)
    spec = recorder.spec(value)
    step.loss_value = -1 if spec is None else spec.value
    recorder.phase = Phase.BACKWARD
    step.backward_start = len(recorder.ops)
    value.backward()

    if not within and all(parameter.grad is None for parameter in named.values()):
        raise other_model("the backward pass reaches no parameter of the model")
    step.note_gradients(recorder, named)
    if optimizer is not None:
        recorder.phase = Phase.OPTIMIZER
        recorder.recording = False  # the first step makes the state, the second is the steady one
        with closure_named(optimizer):
            optimizer.step()
        step.note_state(recorder, optimizer, named)
        recorder.recording = True
        optimizer.step()
        recorder.recording = False
        optimizer.zero_grad(set_to_none=True)
    for parameter in named.values():
        parameter.grad = None
    recorder.recording = False
    del value
    recorder.phase = Phase.FORWARD
    step.note_moved(model, before, lambda: loss(model, batch))
    gc.collect()
    return step
