"""Plan + model + batch → Trace of the planned step, on fake tensors: nothing is allocated."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from ..memory.cuda.calibrate import learn_convolutions
from ..techniques.base import Setup
from ..techniques.plan import Plan
from ..torch_private.fake_tensors import FakeTensorMode, converted_in_place
from ..trace.answers import Answers, with_answers
from ..trace.batches import tensors_of
from ..trace.compiled import uncompiled
from ..trace.cuda import CudaKernels
from ..trace.draws import at_worst
from ..trace.failures import named_failures, other_model
from ..trace.fakes import (
    OptimizerLike,
    default_to_foreach,
    fake_batch,
    fake_model,
    make_optimizer,
)
from ..trace.freezing import RecordedStep, freeze
from ..trace.garbage import only_new_garbage
from ..trace.graph import Phase, Trace, live_bytes
from ..trace.outside import Outside
from ..trace.recorder import Recorder
from ..trace.settling import FirstPasses, growing
from ..trace.split import cut, examples_of
from ..trace.tracing import Loss
from ..trace.untouched import nothing_changes
from ..trace.values import forget_varied
from .graph import not_capturable
from .step import Step, apply_alone


def trace_plan(
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
    waiting: bool = False,
) -> Trace:
    """One steady step by the plan, as `trace_model` traces a plain one.

    Of several microbatches the second stands for all: it meets the gradients that the first one
    left, so its peak is the step's. If it is the last and smaller, both are recorded. `trained`
    names the parameters that get a gradient; `watch` is shown the model and the recorder before the
    step. Without an optimizer there is no update, nor state; without `passes` there is only the
    update. Where gradients of earlier batches are `waiting`, the passes add to them. `trained_by`
    is the optimizer of the step where another one, or none, is traced.

    On CUDA a step may become a graph. While it is captured nothing can be read, and Hugging Face
    makes masks it would not make otherwise; but the first step runs eagerly. The larger one counts,
    or the one that is asked for by `captured`.
    """
    size = plan.examples_at_once(batch)
    examples = examples_of(batch) if size is not None else None
    if size is not None and (examples is None or 2 * size > examples):
        size = None
    request = _Request(
        plan, model, batch, loss, optimizer, device, passes, trained, watch, trained_by, size,
        waiting,
    )  # fmt: skip
    if captured is not None:
        return _with_convolutions(request.trace(captured=captured)[0], device)
    known = _captured_needs_more.setdefault(model, {})
    kind = tuple(t.name for t in plan.techniques if not (t.revisable or t.leaves_passes))
    if kind not in known and passes and model in _asks and request.becomes_a_graph():
        known[kind] = request.forward_bytes(captured=True) > request.forward_bytes(captured=False)
    made, differs = request.trace(captured=known.get(kind, False))
    if kind not in known and differs:
        known[kind] = request.forward_bytes(captured=True) > request.forward_bytes(captured=False)
        if known[kind]:
            made, _ = request.trace(captured=True)
    return _with_convolutions(made, device)


def _with_convolutions(made: Trace, device: str) -> Trace:
    """Their workspaces measured, where there is a GPU."""
    if device == "cuda" and torch.cuda.is_available():
        learn_convolutions(made)
    return made


_captured_needs_more: weakref.WeakKeyDictionary[nn.Module, dict[Any, bool]]
_captured_needs_more = weakref.WeakKeyDictionary()
"""Models whose captured steps differ from eager ones, by techniques that change the passes."""
_asks: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that ask what cannot be read while a graph is captured."""


_T = TypeVar("_T")


@dataclass(frozen=True)
class _OnFakes:
    """A plan that is applied to fake tensors."""

    step: Step
    data: Any
    recorder: Recorder
    outside: Outside
    capturable: bool


@dataclass(frozen=True)
class _Request:
    """The arguments of `trace_plan`."""

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
    waiting: bool

    def trace(self, *, captured: bool) -> tuple[Trace, bool]:
        """The step run eagerly, or as a graph is captured, and whether these differ."""
        differs = False

        def once(answers: Answers | None) -> Trace:
            nonlocal differs
            made, differs = self._traced(answers, captured)
            return made

        return self._at_worst(once, live_bytes), differs

    def forward_bytes(self, *, captured: bool) -> int:
        """All that the forward pass of one part allocates, run eagerly or as it is captured."""

        def once(answers: Answers | None) -> int:
            with self._on_fakes(answers, captured) as on:
                data = on.data
                if self.size is not None:
                    forget_varied(data)
                    data = cut(data, 0, self.size)
                part, _ = next(iter(on.step._setup.split(data)))
                with on.recorder:
                    on.step._setup.run(part)
            return sum(record.nbytes for record in on.recorder.storages if record.birth >= 0)

        return self._at_worst(once, int)

    def becomes_a_graph(self) -> bool:
        """Whether the step can be captured, which is known once the plan is applied."""
        with self._on_fakes(None, False) as on:
            return on.capturable

    def _at_worst(self, once: Callable[[Answers | None], _T], size: Callable[[_T], int]) -> _T:
        """With answers to what the model asks, and the largest of what it may draw."""

        def answered() -> _T:
            return with_answers(once, self.model, self.batch, self.loss, self.size)

        return at_worst(self.model, answered, size)

    @contextmanager
    def _on_fakes(self, answers: Answers | None, captured: bool) -> Iterator[_OnFakes]:
        """The plan applied to fake tensors; inside, the step runs on them."""
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with (
            only_new_garbage(),
            warnings.catch_warnings(),
            nothing_changes(self.model, self.loss),
        ):
            warnings.simplefilter("ignore")
            fake, mapping = fake_model(self.model, mode)
            data = fake_batch(self.batch, mode)
            updates = make_optimizer(self.optimizer or "sgd-plain", fake, mapping)
            assert updates is not None
            recorder, outside = Recorder(), Outside(mode, answers=answers)
            asked = nullcontext() if answers is None else answers.following(fake)
            kernels: AbstractContextManager[Any] = (
                CudaKernels() if self.device == "cuda" else nullcontext()
            )
            with (
                named_failures(recorder),
                uncompiled(recorder),
                converted_in_place(),
                asked,
                mode,
                outside,
                kernels,
            ):
                step = apply_alone(Plan.of(self.plan), fake, updates, loss=self.loss)
                capturable = self._becomes_a_graph(step._setup)
                if self.device == "cuda":
                    default_to_foreach(updates)
                if capturable and captured:
                    outside.stop_asking()
                yield _OnFakes(step, data, recorder, outside, capturable)
        if outside.was_asked:
            _asks.add(self.model)

    def _traced(self, answers: Answers | None, captured: bool) -> tuple[Trace, bool]:
        with self._on_fakes(answers, captured) as on:
            step, setup, recorder = on.step, on.step._setup, on.recorder
            trained = self.trained or (frozenset() if answers is None else answers.trained)
            data = on.data
            if self.size is not None:
                data = self._few_parts(step, data, trained, answered=answers is not None)
            if self.size is None and self.passes and setup.first_run_differs:
                for part, _ in setup.split(data):
                    setup.run(part)
            if self.passes and setup.updates_in_backward:
                self._make_state(step, data, trained)
            if not self.passes or self.waiting:
                self._leave_sparse(step, data)
                _leave_gradients(step, self.trained)
            if self.watch is not None:
                self.watch(step.model, recorder)
            first = FirstPasses(self.model, step.model)

            def run() -> None:
                for part, _ in setup.split(data):
                    setup.backward(setup.run(part))
                if answers is not None:
                    answers.rewind()

            moved = first.moved if self.passes else None
            if moved is not None:
                first.make_state(run)
            update = self.optimizer is not None
            with recorder:  # not following functions: techniques have hooks
                recorded = _record(recorder, step, data, self.passes, update=update, moved=moved)
            made = freeze(recorder, step.model, step.optimizer, recorded, self.device)
            again = self.passes and first.again(run, made)
        if again:
            return self._traced(answers, captured)
        made = replace(made, capturable=on.capturable, warnings=growing(self.model))
        return made, on.capturable and on.outside.was_asked

    def _few_parts(self, step: Step, data: Any, trained: Collection[str], *, answered: bool) -> Any:
        """The examples that stand for all, and gradients as the parts before leave them.

        Answers to what the model asks are of a whole part.
        """
        assert self.size is not None
        forget_varied(data)
        if step._setup.adds_apart or step._setup.updates_in_backward:
            # The third part meets all gradients; those of the last one, which may be smaller, go
            # early.
            examples = examples_of(data) or self.size
            rest = 0 if answered else examples % self.size
            return cut(data, 0, min(3 * self.size + rest, examples))
        parts = -(-(examples_of(data) or self.size) // self.size)
        data = cut(data, 0, self.size)
        if self.passes:  # gradients as they are: one may be a part of a larger tensor
            step._setup.backward(step._setup.run(data))
            _lengthen_sparse(step.model, parts - 1)
            for name, parameter in step.model.named_parameters():
                if name in trained and parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)  # of an expert for other parts
        return data

    def _leave_sparse(self, step: Step, data: Any) -> None:
        """Those of embeddings that have some rows only, as the passes leave them."""
        sparse = [m for m in step.model.modules() if getattr(m, "sparse", False) is True]
        if not sparse or step._setup.updates_in_backward:
            return
        step._setup.backward(step._setup.run(data))
        for parameter in step.model.parameters():
            if parameter.grad is not None and parameter.grad.layout is torch.strided:
                parameter.grad = None

    def _make_state(self, step: Step, data: Any, trained: Collection[str]) -> None:
        """The optimizer's, which a step that updates in its backward pass finds there."""
        if not trained:
            step._compute(data)
            return
        _leave_gradients(step, trained)
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
def _noting_released(
    made: RecordedStep, recorder: Recorder, step: Step, named: dict[str, nn.Parameter]
) -> Iterator[None]:
    """Gradients that go before the end: those of which a hook before an update can tell."""
    folds = any(t.folds_parts(step.optimizer) for t in step.plan.techniques)
    if folds or not step._setup.updates_in_backward:
        yield
        return

    names = {id(parameter): name for name, parameter in named.items()}

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        made.note_gradients(recorder, {names[id(p)]: p for p in stepped if id(p) in names})

    note.each_parameter = True  # type: ignore[attr-defined] # it may see one at a time
    handle = step.optimizer.register_step_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _leave_gradients(step: Step, trained: Collection[str]) -> None:
    """The gradients of all parts, of these parameters."""
    for name, parameter in step.model.named_parameters():
        if not parameter.requires_grad or (trained and name not in trained):
            parameter.grad = None
        elif parameter.grad is None:  # else it is sparse
            parameter.grad = torch.empty_like(parameter)


def _lengthen_sparse(model: nn.Module, parts: int) -> None:
    """Sparse gradients as so many parts leave them: one after another, until they are read."""
    for parameter in model.parameters():
        one = parameter.grad
        if one is not None and one.layout is torch.sparse_coo and parts > 1:
            indices, values = one._indices().repeat(1, parts), one._values()
            values = values.repeat(parts, *[1] * (values.dim() - 1))
            parameter.grad = torch.sparse_coo_tensor(
                indices, values, one.shape, check_invariants=False
            )


def _record(
    recorder: Recorder,
    step: Step,
    batch: Any,
    passes: bool,
    *,
    update: bool,
    moved: frozenset[str] | None = None,
) -> RecordedStep:
    made = RecordedStep()
    setup = step._setup
    named = dict(step.model.named_parameters())
    recorder.recording = False
    for name, parameter in named.items():
        record = recorder.resident(parameter, name.rpartition(".")[0])
        if record is not None:
            made.parameters[name] = record
    made.note_gradients(recorder, named)
    made.note_buffers(recorder, step.model)
    for tensor in tensors_of(batch):
        record = recorder.resident(tensor)
        if record is not None:
            made.inputs.append(record)
    made.settle(recorder, step.model, moved)
    if setup.updates_in_backward and update:
        made.note_state(recorder, step.optimizer, named)
    recorder.recording = True
    before = made.before(step.model)

    def entering(phase: Phase) -> None:
        recorder.phase = phase
        if phase is Phase.BACKWARD:
            made.backward_start = made.backward_start or len(recorder.ops)
        if phase is Phase.OPTIMIZER:
            made.note_gradients(recorder, named)
            if not (made.gradients or setup.adds_apart or setup.updates_in_backward):
                raise other_model("the backward pass reaches no parameter of the model")

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
        with _noting_released(made, recorder, step, named):
            step._compute(batch, entering)
    else:
        entering(Phase.OPTIMIZER)
        updates()
        step.optimizer.zero_grad(set_to_none=True)
    recorder.recording, recorder.phase = False, Phase.FORWARD
    made.note_moved(step.model, before, lambda: setup.run(batch))
    gc.collect()
    return made
