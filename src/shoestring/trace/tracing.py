"""Model + batch + loss → Trace: one training step run on fake tensors, nothing allocated."""

from __future__ import annotations

import gc
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import InputError, ShoestringError, TraceError
from ..torch_private.dispatch import inner_tensors
from ..torch_private.fake_tensors import (
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from ..torch_private.loggers import FAKE_TENSORS
from ..torch_private.trees import tree_leaves
from .answers import INSIDE, Answers, reads_values, with_answers
from .attributes import Held, held_by, moved_modules
from .batches import tensors_of
from .blocks import is_normalization, sparsifiable_names
from .compiled import uncompiled
from .cuda import CudaKernels
from .draws import at_worst
from .fakes import (
    OptimizerLike,
    default_to_foreach,
    fake_batch,
    fake_model,
    make_optimizer,
    mode_of,
)
from .graph import Op, ParameterSpec, Phase, Role, Storage, Trace, Value, live_bytes
from .hooked import update_in_backward
from .outside import Outside
from .recorder import Recorder, StorageRecord
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
    with warnings.catch_warnings(), nothing_changes(model, loss):
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
            asked,
            fake_mode,
            outside,
            kernels,
            recorder.following(fake),
            recorder,
        ):
            step = _record_step(recorder, fake, data, loss, fake_optimizer, within)
    return freeze(recorder, fake, fake_optimizer, step, device)


@contextmanager
def user_code() -> Iterator[None]:
    """Turn what the user's model, loss or optimizer raises into an error of one line."""
    try:
        yield
    except (ShoestringError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if isinstance(error, SystemExit):
            first = f"it called sys.exit({error.code!r})"
        raise InputError(
            f"the model failed on this batch: {first}",
            hint="loss(model, batch) must run as it would in training",
        ) from error


@contextmanager
def named_failures(recorder: Recorder | None = None) -> Iterator[None]:
    """Tell what fake tensors cannot do from what the user's own code did wrong."""
    try:
        with user_code(), _unlogged():
            yield
    except InputError as error:
        cause = error.__cause__
        where = "the model"
        if recorder is not None:
            where = recorder.failed_in or ("the loss" if recorder.failed_in is None else where)
        if cause is not None and reads_values(cause):
            func = getattr(cause, "func", type(cause).__name__)
            raise TraceError(
                f"{where} reads the value of a tensor ({func}{line_of(cause)}), "
                "which does not exist before the step runs",
                hint="give a model with weights: values are then read from a real forward pass; "
                "or verify and measure, which run real steps",
                values=True,
            ) from cause
        if isinstance(cause, (UnsupportedOperatorException, UnsupportedFakeTensorException)):
            raise TraceError(
                f"{where} uses an operation without a shape function{line_of(cause)}: {cause}",
                hint="register one with torch.library.register_fake, or measure a real step",
            ) from cause
        raise


@contextmanager
def _unlogged() -> Iterator[None]:
    """PyTorch logs what a shape function raises, with its traceback; here it is an error."""
    logger = logging.getLogger(FAKE_TENSORS)
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def line_of(error: BaseException) -> str:
    """Where in the user's code it happened: ' at model.py:12', or nothing."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(INSIDE):
            return f" at {Path(frame.filename).name}:{frame.lineno}"
    return ""


class RecordedStep:
    """The role of each tensor of a recorded step, for `freeze`."""

    def __init__(self) -> None:
        self.loss_value = -1
        self.inputs: list[StorageRecord] = []
        self.parameters: dict[str, StorageRecord] = {}
        self.buffers: list[StorageRecord] = []
        self.gradients: dict[str, StorageRecord] = {}
        self.state: list[StorageRecord] = []
        self.state_elements: dict[str, tuple[int, ...]] = {}
        self.backward_start = 0
        self.step_counts: set[int] = set()
        self.moved: frozenset[str] = frozenset()

    def note_moved(self, model: nn.Module, before: list[Held], run: Callable[[], Any]) -> None:
        """Which modules the forward pass changes every time; what only the first fills is a cache.

        `before` is of before the pass; `run` repeats it.
        """
        if moved_modules(model, before):
            again = [held_by(module) for module in model.modules()]
            run()
            self.moved = moved_modules(model, again)

    def note_gradients(self, recorder: Recorder, named: dict[str, nn.Parameter]) -> None:
        """Which storages are gradients, once there are any."""
        for name, parameter in named.items():
            if parameter.grad is not None:
                record = recorder.storage_of(parameter.grad)
                if record is not None:
                    self.gradients[name] = record

    def note_state(
        self, recorder: Recorder, optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]
    ) -> None:
        """Which storages are optimizer state, once a first update has made it."""
        by_id = {id(p): name for name, p in named.items()}
        counts_on_device = {
            id(p)
            for group in optimizer.param_groups
            if any(group.get(k) for k in ("fused", "capturable", "counts_on_device"))
            for p in group["params"]
        }
        for owner, state in optimizer.state.items():
            name = by_id.get(id(owner), "")
            tensors = [
                inner
                for t in tree_leaves(state)
                if isinstance(t, torch.Tensor)
                for inner in inner_tensors(t)
            ]
            for leaf in tensors:
                record = recorder.resident(leaf)
                if record is not None:
                    self.state.append(record)
                    if leaf.dim() == 0 and id(owner) not in counts_on_device:
                        self.step_counts.add(record.index)
            self.state_elements[name] = tuple(t.numel() for t in tensors if t.dim() > 0)


def _record_step(
    recorder: Recorder,
    model: nn.Module,
    batch: Any,
    loss: Loss,
    optimizer: torch.optim.Optimizer | None,
    within: Sequence[torch.optim.Optimizer] = (),
) -> RecordedStep:
    step = RecordedStep()
    named = dict(model.named_parameters())
    recorder.recording = False
    if within:  # hooks of the parameters update them: the first pass makes the state
        recorder.phase = Phase.OPTIMIZER
        loss(model, batch).backward()
        for own in within:
            step.note_state(recorder, own, named)
    for name, parameter in named.items():
        record = recorder.resident(parameter, name.rpartition(".")[0])
        if record is not None:
            step.parameters[name] = record
    for name, buffer in model.named_buffers():
        record = recorder.resident(buffer, name.rpartition(".")[0])
        if record is not None:
            step.buffers.append(record)
    for tensor in tensors_of(batch):
        record = recorder.resident(tensor)
        if record is not None:
            step.inputs.append(record)
    recorder.recording = True

    before = [held_by(module) for module in model.modules()]
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
    step.note_moved(model, before, lambda: loss(model, batch))
    gc.collect()
    return step


def check_trainable(model: nn.Module) -> None:
    """It must be a module, and something in it must require a gradient."""
    if not isinstance(model, nn.Module):
        given = model.__name__ if isinstance(model, type) else f"a {type(model).__name__}"
        raise InputError(
            f"the model must be a torch.nn.Module, got {given}",
            hint="build it first: model = MyModel(); only the command line takes names",
        )
    parameters = list(model.parameters())
    if not any(p.requires_grad for p in parameters):
        raise InputError(
            f"nothing to train: none of the model's {len(parameters)} parameters "
            "requires a gradient",
            hint="call model.requires_grad_(True), or unfreeze the part to train",
        )


def check_loss(value: Any) -> None:
    """A loss must be one number with a gradient."""
    if not isinstance(value, torch.Tensor):
        raise InputError(
            f"the loss must be a tensor, got {type(value).__name__}",
            hint="loss(model, batch) returns one scalar tensor",
        )
    if value.numel() != 1:
        raise InputError(
            f"the loss must be a scalar, got shape {tuple(value.shape)}",
            hint="reduce it, for example with .mean()",
        )
    if not value.requires_grad:
        raise InputError(
            "the loss does not depend on any trainable parameter",
            hint="check for torch.no_grad(), detach() or frozen layers",
        )


def other_model(what: str) -> InputError:
    """For a loss that trains a model it refers to, not the one it is given: often a copy."""
    return InputError(
        what,
        hint="loss(model, batch) must call its first argument, and a `forward` that was replaced "
        "on a module must be that module's",
    )


def freeze(
    recorder: Recorder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: RecordedStep,
    device: str,
) -> Trace:
    count = len(recorder.ops)
    roles: dict[int, tuple[Role, str]] = {}
    for record in step.inputs:
        roles[record.index] = (Role.INPUT, "")
    for record in step.buffers:
        roles[record.index] = (Role.BUFFER, record.module)
    for record in step.state:
        roles[record.index] = (Role.OPTIMIZER_STATE, record.module)
    for name, record in step.gradients.items():
        roles[record.index] = (Role.GRADIENT, name.rpartition(".")[0])
    for name, record in step.parameters.items():
        roles[record.index] = (Role.MODEL, name.rpartition(".")[0])
    storages = []
    for record in recorder.storages:
        birth, death = record.birth, record.death
        role, module = roles.get(record.index, (None, record.module))
        if device == "cuda" and record.index in step.step_counts:
            birth = death = count  # PyTorch keeps these in host memory
            role = Role.OPTIMIZER_STATE
        elif role is None and birth < 0 and death is not None:
            birth = death = count  # of the first optimizer step, which only made the state
            role = Role.TRANSIENT
        elif role is None:
            role = role_by_life(record, step.backward_start)
            if role is Role.BUFFER:
                birth = -1  # made once and kept by the model: there from the second step on
        elif role is not Role.GRADIENT:
            death = count
        storages.append(
            Storage(
                record.index,
                record.nbytes,
                birth,
                count if death is None else death,
                role,
                module,
            )
        )
    values = tuple(
        Value(index, v.storage, v.numel, v.dtype, v.producer, v.information_bits)
        for index, v in enumerate(recorder.values)
    )
    ops = _adopt_hidden_functions(_attach_saved(recorder))
    sparsifiable = sparsifiable_names(model)
    modules = dict(model.named_modules())
    parameters = tuple(
        ParameterSpec(
            name=name,
            shape=tuple(map(int, parameter.shape)),
            dtype=parameter.dtype,
            requires_grad=parameter.requires_grad,
            storage=step.parameters[name].index,
            has_gradient=name in step.gradients,
            state_elements=step.state_elements.get(name, ()),
            normalization=is_normalization(modules[name.rpartition(".")[0]]),
            sparsifiable=name in sparsifiable,
        )
        for name, parameter in model.named_parameters()
        if name in step.parameters
    )
    return Trace(
        ops=ops,
        values=values,
        storages=tuple(storages),
        parameters=parameters,
        modules=tuple((path, type(m).__name__) for path, m in model.named_modules()),
        inputs=tuple(record.value for record in step.inputs),
        loss=step.loss_value,
        device=device,
        optimizer="none" if optimizer is None else type(optimizer).__name__,
        moved=step.moved,
    )


def role_by_life(record: StorageRecord, backward_start: int) -> Role:
    """The role of an unnamed storage, by when it was made and how long it lived."""
    if record.death is None:
        return Role.BUFFER
    if record.phase is Phase.OPTIMIZER:
        return Role.TRANSIENT
    if record.phase is Phase.FORWARD:
        kept = record.death > backward_start
        return Role.FORWARD_ACTIVATION if kept else Role.TRANSIENT
    if record.phase is Phase.RECOMPUTE:
        return Role.FORWARD_ACTIVATION
    return Role.BACKWARD_ACTIVATION


def _attach_saved(recorder: Recorder) -> list[Op]:
    ops = list(recorder.ops)
    last: dict[int, int] = {}
    for op in ops:
        if op.function >= 0:
            last[op.function] = op.index
    for function, index in last.items():
        ops[index] = replace(ops[index], saved=recorder.function_saved.get(function, ()))
    return ops


def _adopt_hidden_functions(ops: list[Op]) -> tuple[Op, ...]:
    """Mark operations of custom functions whose call went unseen (`apply` bound at import).

    They ran with gradients off, yet a later operation reads their result as one that requires a
    gradient. Counting them as ordinary operations keeps at least what the function keeps.
    """
    producer: dict[int, int] = {}
    wanted: set[int] = set()
    for op in ops:
        if op.phase is not Phase.FORWARD:
            continue
        for _, spec in op.inputs:
            made = producer.get(spec.value, -1)
            if spec.requires_grad and made >= 0 and not ops[made].differentiable:
                wanted.add(made)
        for spec in op.outputs:
            producer.setdefault(spec.value, op.index)
    queue = [i for i in wanted if ops[i].function < 0 and not ops[i].is_view]
    adopted: set[int] = set()
    while queue:
        index = queue.pop()
        if ops[index].differentiable:
            continue
        ops[index] = replace(ops[index], differentiable=True)
        for _, spec in ops[index].inputs:
            made = producer.get(spec.value, -1)
            if not spec.requires_grad and 0 <= made < index and ops[made].function < 0:
                queue.append(made)
                adopted.add(spec.value)
    return tuple(
        replace(
            op,
            inputs=tuple(
                (name, replace(s, requires_grad=True) if s.value in adopted else s)
                for name, s in op.inputs
            ),
        )
        if op.differentiable and any(s.value in adopted for _, s in op.inputs)
        else op
        for op in ops
    )
