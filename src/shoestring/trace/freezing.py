"""A recorder's notes of a step → the frozen `Trace`.

The recorder knows when each storage was made and dropped. Which are parameters, gradients, state
or the batch is noted by the step that ran (`RecordedStep`); the role of all others follows from
their life:

    made in forward, alive when backward begins     forward activation
    made in forward, gone before                    transient
    made when a block is recomputed                 forward activation
    made in backward                                backward activation
    made in the update                              transient
    never dropped                                   buffer: the model keeps it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..torch_private.autograd import DisableTorchFunction
from ..torch_private.dispatch import inner_tensors
from ..torch_private.trees import tree_leaves
from .attributes import Held, held_by, moved_modules
from .blocks import is_normalization, sparsifiable_names
from .graph import Op, ParameterSpec, Phase, Role, Storage, Trace, Value
from .recorder import Recorder, StorageRecord
from .settling import kept_tensors


class RecordedStep:
    """The role of each tensor of a recorded step, for `freeze`."""

    def __init__(self) -> None:
        self.loss_value = -1
        self.inputs: list[StorageRecord] = []
        self.parameters: dict[str, StorageRecord] = {}
        self.buffers: list[StorageRecord] = []
        self.gradients: dict[str, list[StorageRecord]] = {}
        self.state: list[StorageRecord] = []
        self.state_elements: dict[str, tuple[int, ...]] = {}
        self.backward_start = 0
        self.step_counts: set[int] = set()
        self.moved: frozenset[str] = frozenset()
        self.settled = False
        """All that modules keep was there before the step: what it keeps takes a place."""

    def note_buffers(self, recorder: Recorder, model: nn.Module) -> None:
        """Those of the model; nothing here holds on to one, which may be assigned over."""
        for name, buffer in model.named_buffers():
            record = recorder.resident(buffer, name.rpartition(".")[0])
            if record is not None:
                self.buffers.append(record)

    def settle(self, recorder: Recorder, model: nn.Module, moved: frozenset[str] | None) -> None:
        """Passes before the step left state in modules, unless `moved` is None."""
        if moved is None:
            return
        self.settled, self.moved = True, moved
        for tensor in kept_tensors(model).values():
            record = recorder.resident(tensor)
            if record is not None:
                self.buffers.append(record)

    def before(self, model: nn.Module) -> list[Held]:
        """For `note_moved`; it keeps what is assigned over."""
        return [] if self.settled else [held_by(module) for module in model.modules()]

    def note_moved(self, model: nn.Module, before: list[Held], run: Callable[[], Any]) -> None:
        """Which modules the forward pass changes every time; what only the first fills is a cache.

        `before` is of before the pass; `run` repeats it.
        """
        if not self.settled and moved_modules(model, before):
            again = [held_by(module) for module in model.modules()]
            run()
            self.moved = moved_modules(model, again)

    def note_gradients(self, recorder: Recorder, named: dict[str, nn.Parameter]) -> None:
        """Which storages are gradients, once there are any."""
        with DisableTorchFunction():  # asked of many
            for name, parameter in named.items():
                gradient = parameter.grad
                if gradient is not None:
                    records = recorder.storages_of(gradient)
                    if records:  # a sparse gradient moves when another is added
                        self.gradients.setdefault(name, []).extend(records)

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
                for t in tree_leaves(dict(state) if isinstance(state, dict) else state)
                if isinstance(t, torch.Tensor)
                for inner in inner_tensors(t)
            ]
            for leaf in tensors:
                if leaf.layout is torch.sparse_coo:
                    raise InputError(
                        f"{type(optimizer).__name__} keeps sparse gradients and adds to them: "
                        f"its state of {name} grows with every step",
                        hint="no momentum, SparseAdam or Adagrad; or build it with sparse=False",
                    )
                record = recorder.resident(leaf)
                if record is not None:
                    self.state.append(record)
                    if leaf.dim() == 0 and id(owner) not in counts_on_device:
                        self.step_counts.add(record.index)
            self.state_elements[name] = tuple(t.numel() for t in tensors if t.dim() > 0)


def freeze(
    recorder: Recorder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    step: RecordedStep,
    device: str,
) -> Trace:
    """All of a recorded step."""
    count = len(recorder.ops)
    roles: dict[int, tuple[Role, str]] = {}
    for record in step.inputs:
        roles[record.index] = (Role.INPUT, "")
    for record in step.buffers:
        roles[record.index] = (Role.BUFFER, record.module)
    for record in step.state:
        roles[record.index] = (Role.OPTIMIZER_STATE, record.module)
    for name, records in step.gradients.items():
        for record in records:
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
        elif role is None and birth >= count:
            birth = death = count  # of a pass after the step
            role = Role.TRANSIENT
        elif role is None:
            role = role_by_life(record, step.backward_start)
            if role is Role.BUFFER and not step.settled:
                birth = -1  # made once and kept by the model: there from the second step on
        elif role not in (Role.GRADIENT, Role.BUFFER):  # buffers may be assigned over
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
