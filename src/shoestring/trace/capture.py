"""Model + batch + loss → Trace: one training step run on fake tensors, nothing allocated."""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import InputError, ShoestringError, TraceError
from .blocks import is_normalization, sparsifiable_names
from .cuda import CudaKernels
from .graph import Op, ParameterSpec, Phase, Role, Storage, Trace, Value
from .recorder import Recorder, StorageRecord

Loss = Callable[[nn.Module, Any], torch.Tensor]
OptimizerLike = torch.optim.Optimizer | str | None

OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4),
    "sgd-plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=5e-4, betas=(0.9, 0.98), weight_decay=1e-4),
    "adamw": lambda p: torch.optim.AdamW(p, lr=5e-4),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}
"""The optimizers a command line can name; sgd and adam with the report's settings (Table 6)."""


def capture(
    model: nn.Module,
    batch: Any,
    *,
    loss: Loss,
    optimizer: OptimizerLike = None,
    device: str = "cpu",
) -> Trace:
    """Run one step of `loss(model, batch)` on fake tensors and return its frozen graph.

    `device="cuda"` records the operations CUDA would run instead of the CPU's (`trace.cuda`);
    neither needs the device. The model, batch and optimizer given are left as they are.
    """
    if device not in ("cpu", "cuda"):
        raise InputError(f"no accounting for device {device!r}", hint="use 'cpu' or 'cuda'")
    check_trainable(model)
    fake_mode = _mode_of(model) or FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), _same_random_streams():
        warnings.simplefilter("ignore")
        fake_model, mapping = _fake_model(model, fake_mode)
        fake_batch = _fake_batch(batch, fake_mode)
        fake_optimizer = make_optimizer(optimizer, fake_model, mapping)
        if device == "cuda" and fake_optimizer is not None:
            _default_to_foreach(fake_optimizer)
        recorder = Recorder()
        kernels: AbstractContextManager[Any] = CudaKernels() if device == "cuda" else nullcontext()
        with (
            _named_failures(recorder),
            fake_mode,
            kernels,
            recorder.following(fake_model),
            recorder,
        ):
            step = _record_step(recorder, fake_model, fake_batch, loss, fake_optimizer)
    return _freeze(recorder, fake_model, fake_optimizer, step, device)


@contextmanager
def user_code() -> Iterator[None]:
    """Turn what the user's model, loss or optimizer raises into an error of one line."""
    try:
        yield
    except (ShoestringError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"the model failed on this batch: {first}",
            hint="loss(model, batch) must run as it would in training",
        ) from error


@contextmanager
def _named_failures(recorder: Recorder) -> Iterator[None]:
    """Tell what fake tensors cannot do from what the user's own code did wrong."""
    try:
        with user_code():
            yield
    except InputError as error:
        cause = error.__cause__
        where = recorder.failed_in or ("the loss" if recorder.failed_in is None else "the model")
        if isinstance(cause, (DataDependentOutputException, DynamicOutputShapeException)):
            raise TraceError(
                f"{where} reads the value of a tensor ({cause.func}), "
                "which does not exist before the step runs",
                hint="trace a variant without data-dependent control flow, or measure a real step",
            ) from cause
        if isinstance(cause, (UnsupportedOperatorException, UnsupportedFakeTensorException)):
            raise TraceError(
                f"{where} uses an operation without a shape function: {cause}",
                hint="register one with torch.library.register_fake, or measure a real step",
            ) from cause
        raise


def make_optimizer(
    optimizer: OptimizerLike, model: nn.Module, mapping: dict[int, torch.Tensor]
) -> torch.optim.Optimizer | None:
    """The same optimizer over the fake parameters, with no state yet."""
    if optimizer is None:
        return None
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZERS:
            raise InputError(
                f"unknown optimizer {optimizer!r}", hint="one of " + ", ".join(sorted(OPTIMIZERS))
            )
        return OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    # Not copy.copy: an optimizer's pickled state leaves out what a subclass adds to it.
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a learning-rate scheduler binds it to the original
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    try:
        twin.param_groups = [
            {**group, "params": [mapping[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
    except KeyError:
        raise InputError(
            "the optimizer holds parameters that are not the model's",
            hint="build the optimizer from model.parameters()",
        ) from None
    twin.state = defaultdict(dict)
    return twin


class _Step:
    """What a recorded step leaves behind for freezing: which tensor was what."""

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


def _record_step(
    recorder: Recorder,
    model: nn.Module,
    batch: Any,
    loss: Loss,
    optimizer: torch.optim.Optimizer | None,
) -> _Step:
    step = _Step()
    named = dict(model.named_parameters())
    recorder.recording = False
    for name, parameter in named.items():
        record = recorder.resident(parameter, name.rpartition(".")[0])
        if record is not None:
            step.parameters[name] = record
    for name, buffer in model.named_buffers():
        record = recorder.resident(buffer, name.rpartition(".")[0])
        if record is not None:
            step.buffers.append(record)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            record = recorder.resident(leaf)
            if record is not None:
                step.inputs.append(record)
    recorder.recording = True

    recorder.phase = Phase.FORWARD
    value = loss(model, batch)
    check_loss(value)
    spec = recorder.spec(value)
    step.loss_value = -1 if spec is None else spec.value
    recorder.phase = Phase.BACKWARD
    step.backward_start = len(recorder.ops)
    value.backward()

    for name, parameter in named.items():
        if parameter.grad is not None:
            record = recorder.storage_of(parameter.grad)
            if record is not None:
                step.gradients[name] = record
    if optimizer is not None:
        recorder.phase = Phase.OPTIMIZER
        recorder.recording = False  # the first step makes the state, the second is the steady one
        optimizer.step()
        by_id = {id(p): name for name, p in named.items()}
        counts_on_device = {
            id(p)
            for group in optimizer.param_groups
            if group.get("fused") or group.get("capturable")
            for p in group["params"]
        }
        for owner, state in optimizer.state.items():
            name = by_id.get(id(owner), "")
            tensors = [t for t in tree_leaves(state) if isinstance(t, torch.Tensor)]
            for leaf in tensors:
                record = recorder.resident(leaf)
                if record is not None:
                    step.state.append(record)
                    if leaf.dim() == 0 and id(owner) not in counts_on_device:
                        step.step_counts.add(record.index)
            step.state_elements[name] = tuple(t.numel() for t in tensors if t.dim() > 0)
        recorder.recording = True
        optimizer.step()
        recorder.recording = False
        optimizer.zero_grad(set_to_none=True)
    for parameter in named.values():
        parameter.grad = None
    recorder.recording = False
    del value
    gc.collect()
    return step


def check_trainable(model: nn.Module) -> None:
    """Something must require a gradient."""
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


def _freeze(
    recorder: Recorder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: _Step,
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
        batch_elements=0,
        device=device,
        optimizer="none" if optimizer is None else type(optimizer).__name__,
    )


def role_by_life(record: StorageRecord, backward_start: int) -> Role:
    """What a storage with no name is for, by when it was made and how long it lived."""
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


# -- fakes -----------------------------------------------------------------------------------------


def _mode_of(model: nn.Module) -> FakeTensorMode | None:
    for tensor in [*model.parameters(), *model.buffers()]:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return None


def _fakes(tensors: Iterable[torch.Tensor], mode: FakeTensorMode) -> dict[int, torch.Tensor]:
    """A fake for each tensor, by its id; those that share a storage go on sharing it."""
    groups: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    for tensor in {id(t): t for t in tensors}.values():
        if tensor.layout is not torch.strided:
            raise InputError(
                f"no accounting for {tensor.layout} tensors", hint="convert them with .to_dense()"
            )
        key = (tensor.untyped_storage()._cdata, tensor.dtype)
        groups.setdefault(key, []).append(tensor)
    made: dict[int, torch.Tensor] = {}
    with mode, torch.no_grad():
        for (_, dtype), group in groups.items():
            start, end = span(group)
            base = torch.empty(end - start, dtype=dtype)
            for tensor in group:
                offset = tensor.storage_offset() - start
                made[id(tensor)] = base.as_strided(tensor.shape, tensor.stride(), offset).detach()
    return made


def span(tensors: Iterable[torch.Tensor]) -> tuple[int, int]:
    """First element and end of what views of one storage show of it."""
    starts, ends = [], []
    for tensor in tensors:
        starts.append(int(tensor.storage_offset()))
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        ends.append(starts[-1] + (reach + 1 if tensor.numel() else 0))
    return min(starts), max(ends)


def _fake_batch(batch: Any, mode: FakeTensorMode) -> Any:
    fakes = _fakes((t for t in tree_leaves(batch) if isinstance(t, torch.Tensor)), mode)

    def twin(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return fakes[id(leaf)].requires_grad_(leaf.requires_grad)

    return tree_map(twin, batch)


def _fake_model(
    model: nn.Module, mode: FakeTensorMode
) -> tuple[nn.Module, dict[int, torch.Tensor]]:
    """A copy of the model whose parameters and buffers are fake; tied ones stay tied."""
    memo: dict[int, Any] = dict(_fakes([*model.parameters(), *model.buffers()], mode))
    mapping: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        twin = nn.Parameter(memo[id(parameter)], requires_grad=parameter.requires_grad)
        mapping[id(parameter)] = memo[id(parameter)] = twin
    try:
        return copy.deepcopy(model, memo), mapping
    except Exception as error:
        raise TraceError(
            f"the model could not be copied for tracing: {error}",
            hint="make it deep-copyable, or build it inside the factory given on the command line",
        ) from error


def _default_to_foreach(optimizer: torch.optim.Optimizer) -> None:
    """On CUDA an optimizer with no choice made runs over all tensors at once."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True


@contextmanager
def _same_random_streams() -> Iterator[None]:
    """Leave the user's random streams where they were."""
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(streams[0])
        random.setstate(streams[1])
        np.random.set_state(streams[2])
