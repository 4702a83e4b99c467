"""Plan + model + batch → Trace of the planned step, on fake tensors: nothing is allocated."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..memory.cuda.calibrate import learn_convolutions
from ..techniques.base import Setup
from ..techniques.plan import Plan
from ..torch_private.fake_tensors import FakeTensorMode
from ..trace.answers import Answers, with_answers
from ..trace.attributes import held_by
from ..trace.batches import tensors_of
from ..trace.capture import Loss, RecordedStep, freeze, named_failures
from ..trace.compiled import uncompiled
from ..trace.cuda import CudaKernels
from ..trace.draws import at_worst
from ..trace.fakes import (
    OptimizerLike,
    default_to_foreach,
    fake_batch,
    fake_model,
    make_optimizer,
)
from ..trace.graph import Phase, Trace, live_bytes
from ..trace.outside import Outside
from ..trace.recorder import Recorder
from ..trace.split import cut, examples_of
from ..trace.untouched import nothing_changes
from ..trace.values import forget_varied
from .graph import not_capturable
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
    trained_by: torch.optim.Optimizer | None = None,
    captured: bool | None = None,
) -> Trace:
    """One steady step by the plan, as `trace.capture` records a plain one.

    Of several microbatches the second stands for all: it meets the gradients that the first one
    left, so its peak is the step's. If it is the last and smaller, both are recorded. `trained`
    names the parameters that get a gradient; `watch` is shown the model and the recorder before the
    step. Without an optimizer there is no update, nor state; without `passes` there is only the
    update. `trained_by` is the optimizer of the step where another one, or none, is traced.

    On CUDA a step may become a graph. While it is captured nothing can be read, and Hugging Face
    makes masks it would not make otherwise; but the first step runs eagerly. The larger one counts,
    or the one that is asked for by `captured`.
    """
    size = plan.examples_at_once(batch)
    examples = examples_of(batch) if size is not None else None
    if size is not None and (examples is None or 2 * size > examples):
        size = None
    request = _Request(
        plan, model, batch, loss, optimizer, device, passes, trained, watch, trained_by, size
    )
    if captured is not None:
        return _with_convolutions(request.trace(captured=captured)[0], device)
    known = _captured_needs_more.setdefault(model, {})
    kind = tuple(t.name for t in plan.techniques if not (t.revisable or t.leaves_passes))
    made, differs = request.trace(captured=known.get(kind, False))
    if kind not in known and differs:
        as_graph, _ = request.trace(captured=True)
        known[kind] = live_bytes(as_graph) > live_bytes(made)
        if known[kind]:
            made = as_graph
        elif watch is not None:  # it shall have seen the trace that counts
            made, _ = request.trace(captured=False)
    return _with_convolutions(made, device)


def _with_convolutions(made: Trace, device: str) -> Trace:
    """Their workspaces measured, where there is a GPU."""
    if device == "cuda" and torch.cuda.is_available():
        learn_convolutions(made)
    return made


_captured_needs_more: weakref.WeakKeyDictionary[nn.Module, dict[Any, bool]]
_captured_needs_more = weakref.WeakKeyDictionary()
"""Models whose captured steps differ from eager ones, by techniques that change the passes."""


@dataclass(frozen=True)
class _Request:
    """What `capture_step` was asked for."""

    plan: Plan
    model: nn.Module
    batch: Any
    loss: Loss
    optimizer: OptimizerLike
    device: str
    passes: bool
    trained: Collection[str]
    watch: Callable[[nn.Module, Recorder], None] | None
    trained_by: torch.optim.Optimizer | None
    size: int | None
    """Examples that run at once, if fewer than half of the batch."""

    def trace(self, *, captured: bool) -> tuple[Trace, bool]:
        """The step run eagerly, or as a graph is captured, and whether these differ."""
        differs = False

        def once(answers: Answers | None) -> Trace:
            nonlocal differs
            made, differs = self._traced(answers, captured)
            return made

        def answered() -> Trace:
            return with_answers(once, self.model, self.batch, self.loss, self.size)

        return at_worst(self.model, answered, live_bytes), differs

    def _traced(self, answers: Answers | None, captured: bool) -> tuple[Trace, bool]:
        plan, model, batch, loss, optimizer = (
            self.plan, self.model, self.batch, self.loss, self.optimizer
        )  # fmt: skip
        device, passes, size = self.device, self.passes, self.size
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with warnings.catch_warnings(), nothing_changes(model, loss):
            warnings.simplefilter("ignore")
            twin, mapping = fake_model(model, mode)
            data = fake_batch(batch, mode)
            updates = make_optimizer(optimizer or "sgd-plain", twin, mapping)
            assert updates is not None
            recorder, outside = Recorder(), Outside(mode, answers=answers)
            asked = nullcontext() if answers is None else answers.following(twin)
            kernels: AbstractContextManager[Any] = (
                CudaKernels() if device == "cuda" else nullcontext()
            )
            with named_failures(recorder), uncompiled(recorder), asked, mode, outside, kernels:
                step = apply_alone(Plan.of(plan), twin, updates, loss=loss)
                capturable = self._becomes_a_graph(step._setup)
                if device == "cuda":
                    default_to_foreach(updates)
                if capturable and captured:
                    outside.stop_asking()
                if size is not None:
                    forget_varied(data)
                    if step._setup.adds_apart or step._setup.updates_in_backward:
                        # The third part meets all gradients; those of the last one go early.
                        data = cut(data, 0, min(3 * size, examples_of(data) or size))
                    else:
                        later = step._setup.updates_in_backward  # the second part updates
                        data = cut(data, 0, 2 * size if later else size)
                        if (
                            passes and not later
                        ):  # gradients as they are: one may be a part of a larger tensor
                            step._setup.backward(step._setup.run(data))
                elif passes and step._setup.first_run_differs:
                    for part, _ in step._setup.split(data):
                        step._setup.run(part)
                if passes and step._setup.updates_in_backward:
                    self._make_state(step, data)
                if not passes:
                    _leave_gradients(step, self.trained)
                if self.watch is not None:
                    self.watch(twin, recorder)
                with (
                    _only_new_garbage(),
                    recorder,
                ):  # not following functions: techniques have hooks
                    recorded = _record(recorder, step, data, passes, update=optimizer is not None)
        made = freeze(recorder, twin, updates, recorded, device)
        return replace(made, capturable=capturable), capturable and outside.was_asked

    def _make_state(self, step: Step, data: Any) -> None:
        """The optimizer's, which a step that updates in its backward pass finds there."""
        if not self.trained:
            step._compute(data)
            return
        _leave_gradients(step, self.trained)
        step._setup.update()
        step._drop_gradients()

    def _becomes_a_graph(self, setup: Setup) -> bool:
        """On CUDA, by the optimizer that really trains."""
        if self.device != "cuda":
            return False
        own = any(technique.updates_on_device for technique in self.plan.techniques)
        optimizer = self.trained_by or setup.optimizer
        on_device = own or setup.update_on_device
        setup = replace(setup, optimizer=optimizer, update_on_device=on_device)
        return not_capturable(setup) is None


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
    if setup.updates_in_backward and update:
        made.note_state(recorder, step.optimizer, named)
    recorder.recording = True
    before = [held_by(module) for module in step.model.modules()]

    def entering(phase: Phase) -> None:
        recorder.phase = phase
        if phase is Phase.BACKWARD:
            made.backward_start = made.backward_start or len(recorder.ops)
        if phase is Phase.OPTIMIZER:
            made.note_gradients(recorder, named)

    plain_update = setup.update

    def updates() -> None:  # the first makes the state, the second is the steady one
        recorder.recording = False
        if not update or (setup.updates_in_backward and passes):
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
    recorder.recording = False
    made.note_moved(step.model, before, lambda: setup.run(batch))
    gc.collect()
    return made
