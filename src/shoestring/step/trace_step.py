"""Plan + model + batch → Trace of the planned step, on fake tensors: nothing is allocated."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..memory.cuda.calibrate import learn_convolutions
from ..techniques.plan import Plan
from ..torch_private.fake_tensors import FakeTensorMode
from ..trace.batches import tensors_of
from ..trace.capture import Loss, RecordedStep, freeze, named_failures
from ..trace.cuda import CudaKernels
from ..trace.fakes import (
    OptimizerLike,
    default_to_foreach,
    fake_batch,
    fake_model,
    make_optimizer,
    same_random_streams,
)
from ..trace.graph import Phase, Trace
from ..trace.outside import Outside
from ..trace.recorder import Recorder
from ..trace.split import cut, examples_of
from ..trace.values import forget_varied
from .graph import is_capturable
from .step import Step, apply_alone


def capture_step(
    plan: Plan,
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    optimizer: OptimizerLike,
    device: str = "cpu",
    passes: bool = True,
    trained: Collection[str] = (),
    watch: Callable[[nn.Module, Recorder], None] | None = None,
) -> Trace:
    """One steady step by the plan, as `trace.capture` records a plain one.

    Of several microbatches the second stands for all: it meets the gradients that the first one
    left, so its peak is the step's. If it is the last and smaller, both are recorded. `trained`
    names the parameters that get a gradient; `watch` is shown the model and the recorder before the
    step. Without an optimizer there is no update, nor state; without `passes` there is only the
    update.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), same_random_streams():
        warnings.simplefilter("ignore")
        twin, mapping = fake_model(model, mode)
        data = fake_batch(batch, mode)
        updates = make_optimizer(optimizer or "sgd-plain", twin, mapping)
        assert updates is not None
        if device == "cuda":
            default_to_foreach(updates)
        recorder, outside = Recorder(), Outside(mode)
        kernels: AbstractContextManager[Any] = CudaKernels() if device == "cuda" else nullcontext()
        with named_failures(recorder), mode, outside, kernels:
            step = apply_alone(Plan.of(plan), twin, updates, loss=loss)
            # While a graph is captured nothing can be read, and Hugging Face does not ask.
            if device == "cuda" and is_capturable(step._setup):
                outside.stop_asking()
            size = plan.examples_at_once(data)
            examples = examples_of(data) if size is not None else None
            if size is not None and examples is not None and 2 * size <= examples:
                forget_varied(data)
                if step._setup.adds_apart:
                    data = cut(data, 0, min(3 * size, examples))  # the third meets all of them
                else:
                    data = cut(data, 0, size)
                    if passes:  # gradients as they are: one may be a part of a larger tensor
                        step._setup.backward(step._setup.run(data))
            elif passes and step._setup.first_run_differs:
                for part, _ in step._setup.split(data):
                    step._setup.run(part)
            if not passes:
                _leave_gradients(step, trained)
            if watch is not None:
                watch(twin, recorder)
            with _only_new_garbage(), recorder:  # not following functions: techniques have hooks
                recorded = _record(recorder, step, data, passes, update=optimizer is not None)
    trace = freeze(recorder, twin, updates, recorded, device)
    if device == "cuda" and torch.cuda.is_available():
        learn_convolutions(trace)
    return trace


@contextmanager
def _only_new_garbage() -> Iterator[None]:
    """Let the collector look at what is made from here on, which is all that matters and little."""
    ours = gc.get_freeze_count() == 0
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()


def _leave_gradients(step: Step, trained: Collection[str]) -> None:
    """What the microbatch before added up."""
    for name, parameter in step.model.named_parameters():
        if parameter.requires_grad and (not trained or name in trained):
            parameter.grad = torch.empty_like(parameter)


def _record(
    recorder: Recorder, step: Step, batch: Any, passes: bool, *, update: bool
) -> RecordedStep:
    made = RecordedStep()
    setup = step._setup
    named = dict(step.model.named_parameters())
    recorder.recording = False
    for name, parameter in named.items():
        record = recorder.resident(parameter, name.rpartition(".")[0])
        if record is not None:
            made.parameters[name] = record
        if parameter.grad is not None:
            recorder.resident(parameter.grad)
    for name, buffer in step.model.named_buffers():
        record = recorder.resident(buffer, name.rpartition(".")[0])
        if record is not None:
            made.buffers.append(record)
    for tensor in tensors_of(batch):
        record = recorder.resident(tensor)
        if record is not None:
            made.inputs.append(record)
    recorder.recording = True

    def entering(phase: Phase) -> None:
        recorder.phase = phase
        if phase is Phase.BACKWARD:
            made.backward_start = made.backward_start or len(recorder.ops)
        if phase is Phase.OPTIMIZER:
            made.note_gradients(recorder, named)

    plain_update = setup.update

    def updates() -> None:  # the first makes the state, the second is the steady one
        recorder.recording = False
        if not update:
            return
        plain_update()
        made.note_state(recorder, step.optimizer, named)
        recorder.recording = True
        plain_update()
        recorder.recording = False

    setup.update = updates
    if passes:
        step._compute(batch, entering)
    else:
        entering(Phase.OPTIMIZER)
        updates()
        step.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    return made
