"""Model + batch + loss → Trace: one training step run on fake tensors, nothing allocated."""

from __future__ import annotations

import copy
import gc
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
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
    fake_mode = _mode_of(model) or FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), _quiet_rng(fake_mode):
        warnings.simplefilter("ignore")
        fake_model, mapping = _fake_model(model, fake_mode)
        fake_batch = tree_map(lambda leaf: _fake(leaf, fake_mode), batch)
        fake_optimizer = make_optimizer(optimizer, fake_model, mapping)
        if device == "cuda" and fake_optimizer is not None:
            _default_to_foreach(fake_optimizer)
        recorder = Recorder()
        kernels: AbstractContextManager[Any] = CudaKernels() if device == "cuda" else nullcontext()
        try:
            with fake_mode, kernels, recorder.following(fake_model), recorder:
                step = _record_step(recorder, fake_model, fake_batch, loss, fake_optimizer)
        except ShoestringError:
            raise
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            where = recorder._module_stack[-1] if recorder._module_stack else "the loss"
            raise TraceError(
                f"{where or 'the model'} reads the value of a tensor ({error.func}), "
                "which does not exist before the step runs",
                hint="trace a variant without data-dependent control flow, or measure a real step",
            ) from error
    return _freeze(recorder, fake_model, fake_optimizer, step, device)


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
    try:
        twin = copy.copy(optimizer)
        twin.__dict__.pop("step", None)  # a learning-rate scheduler binds it to the original
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
        self.state: dict[str, list[StorageRecord]] = {}
        self.state_elements: dict[str, tuple[int, ...]] = {}
        self.backward_start = 0


def _record_step(
    recorder: Recorder,
    model: nn.Module,
    batch: Any,
    loss: Loss,
    optimizer: torch.optim.Optimizer | None,
) -> _Step:
    step = _Step()
    named = dict(model.named_parameters())
    if not any(p.requires_grad for p in named.values()):
        raise InputError(
            f"nothing to train: none of the model's {len(named)} parameters requires a gradient",
            hint="call model.requires_grad_(True), or unfreeze the part to train",
        )
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
        for parameter, state in optimizer.state.items():
            name = by_id.get(id(parameter), "")
            tensors = [t for t in tree_leaves(state) if isinstance(t, torch.Tensor)]
            records = [r for t in tensors if (r := recorder.resident(t)) is not None]
            step.state[name] = [r for r, t in zip(records, tensors, strict=True) if t.dim() > 0]
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
    for records in step.state.values():
        for record in records:
            roles[record.index] = (Role.OPTIMIZER_STATE, record.module)
    for name, record in step.gradients.items():
        roles[record.index] = (Role.GRADIENT, name.rpartition(".")[0])
    for name, record in step.parameters.items():
        roles[record.index] = (Role.MODEL, name.rpartition(".")[0])
    storages = []
    for record in recorder.storages:
        birth, death = record.birth, record.death
        role, module = roles.get(record.index, (None, record.module))
        if role is None and birth < 0 and death is not None:
            birth = death = count  # of the first optimizer step, which only made the state
            role = Role.TRANSIENT
        elif role is None:
            role = _role_by_life(record, step.backward_start)
            if role is Role.BUFFER:
                birth = -1  # made once and kept by the model: there from the second step on
        if role in (Role.MODEL, Role.BUFFER, Role.INPUT, Role.OPTIMIZER_STATE):
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
    sparsifiable = sparsifiable_names(model, ops)
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


def _role_by_life(record: StorageRecord, backward_start: int) -> Role:
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
    while queue:
        index = queue.pop()
        if ops[index].differentiable:
            continue
        ops[index] = replace(ops[index], differentiable=True)
        for _, spec in ops[index].inputs:
            made = producer.get(spec.value, -1)
            if not spec.requires_grad and 0 <= made < index and ops[made].function < 0:
                queue.append(made)
    return tuple(ops)


# -- fakes -----------------------------------------------------------------------------------------


def _mode_of(model: nn.Module) -> FakeTensorMode | None:
    for tensor in [*model.parameters(), *model.buffers()]:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return None


def _fake(leaf: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
        return leaf
    with mode:
        twin = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype)
    return twin.requires_grad_(leaf.requires_grad)


def _fake_model(
    model: nn.Module, mode: FakeTensorMode
) -> tuple[nn.Module, dict[int, torch.Tensor]]:
    """A copy of the model whose parameters and buffers are fake; tied ones stay tied."""
    mapping: dict[int, torch.Tensor] = {}
    memo: dict[int, Any] = {}
    if _mode_of(model) is not None:
        return model, {id(p): p for p in model.parameters()}
    for parameter in model.parameters():
        twin = nn.Parameter(_fake(parameter.detach(), mode), requires_grad=parameter.requires_grad)
        mapping[id(parameter)] = memo[id(parameter)] = twin
    for buffer in model.buffers():
        memo.setdefault(id(buffer), _fake(buffer, mode))
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


class _quiet_rng(AbstractContextManager[None]):
    """Leave the user's random stream where it was."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._state = torch.get_rng_state()

    def __exit__(self, *_: object) -> None:
        torch.set_rng_state(self._state)
