"""Follow every operation and every storage of a running step, on fake or on real tensors.

The same recorder serves the prediction (fake tensors) and the CPU measurement (real ones): it sees
what the dispatcher sees, below autograd, and learns of a storage's end from a weak reference.

Three lists grow while the step runs:

    ops         every operation: what it reads and writes, in which module and phase
    storages    every piece of memory: bytes, between which operations it was alive
    values      every content of a storage: writing in place makes a new value of the same storage

Example, the update `buffer.mul_(0.9).add_(gradient); weight.add_(buffer)`:

    op       reads            writes          storage of buffer    storage of weight
    mul_     buffer  (v12)    buffer (v15)    v12 → v15            v0
    add_     v15, gradient    buffer (v16)    v15 → v16            v0
    add_     weight (v0), v16 weight (v18)    v16                  v0 → v18

A view is not a new value: it reads its storage's. Autograd tells which forward operation a backward
one belongs to: every node has a number, and the recorder notes the operation that ran when the
node was made. `tracing.py` freezes the lists into a `Trace`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from ..errors import TraceError
from ..torch_private.autograd import (
    DisableTorchFunction,
    as_unobserved,
    current_node,
    last_sequence_number,
)
from ..torch_private.dispatch import OperationMode
from ..torch_private.fake_tensors import FakeTensor
from ..torch_private.storages import held_in, suggest_memory_format
from ..torch_private.trees import tensor_leaves
from .flops import flops_of
from .graph import Op, Phase, TensorSpec, channels_last_order
from .onednn import with_workspace
from .outside import UNKNOWN
from .oversized import held_elements, with_storage_of
from .passes import times
from .places import bytes_here
from .statistics import with_wide_statistics

_MASK_MAKERS = ("bernoulli", "bernoulli_")


@dataclass(slots=True)
class StorageRecord:
    """A storage while the step runs."""

    index: int
    nbytes: int
    birth: int
    death: int | None
    module: str
    phase: Phase | None
    born: int
    """Tick of the recorder's clock, which counts births and deaths: finer than operations."""
    died: int | None = None
    value: int = -1
    reference: weakref.ref[Any] | None = None


@dataclass(slots=True)
class ValueRecord:
    """A value while the step runs."""

    storage: int
    numel: int
    dtype: torch.dtype
    producer: int
    information_bits: int | None = None


@dataclass
class Recorder(OperationMode):
    """A dispatch mode that writes down operations and the lives of storages."""

    ops: list[Op] = field(default_factory=list)
    storages: list[StorageRecord] = field(default_factory=list)
    values: list[ValueRecord] = field(default_factory=list)
    phase: Phase = Phase.FORWARD
    recording: bool = True
    clock: int = 0
    """Births and deaths of storages so far."""
    failed_in: str | None = None
    """The module whose operation raised, once one has."""

    def __post_init__(self) -> None:
        super().__init__()
        self._by_address: dict[int, int] = {}
        self._module_stack: list[str] = []
        self._module_paths: dict[int, str] = {}
        self._first_op_of_node: dict[int, int] = {}
        self._function_stack: list[int] = []
        self._function_count = 0
        self._function_saved: dict[int, tuple[int, ...]] = {}

    # -- storages ------------------------------------------------------------------------------

    def storage_of(self, tensor: torch.Tensor) -> StorageRecord | None:
        """The record of the tensor's storage, made on first sight; of a sparse tensor its values'.

        None for a tensor that only wraps others, which have storages of their own.
        """
        if _wraps(type(tensor)):
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            sparse = tensor.layout is torch.sparse_coo
            return self.storages_of(tensor)[0] if sparse else None
        address = storage._cdata
        index = self._by_address.get(address)
        if index is not None:
            record = self.storages[index]
            record.nbytes = bytes_here(storage)
            return record
        record = StorageRecord(
            index=len(self.storages),
            nbytes=bytes_here(storage),
            birth=len(self.ops) if self.recording else -1,
            death=None,
            module=self._module_stack[-1] if self._module_stack else "",
            phase=self.phase if self.recording else None,
            born=self.clock,
        )
        self.clock += 1
        self.storages.append(record)
        self._by_address[address] = record.index

        def gone(_: Any, record: StorageRecord = record, address: int = address) -> None:
            record.death, record.died = len(self.ops), self.clock
            self.clock += 1
            if self._by_address.get(address) == record.index:
                del self._by_address[address]

        record.reference = weakref.ref(storage, gone)
        return record

    def storages_of(self, tensor: torch.Tensor) -> list[StorageRecord]:
        """The same; of a sparse tensor two, of its values and of its indices."""
        records = map(self.storage_of, held_in(tensor))
        return [record for record in records if record is not None]

    def resident(self, tensor: torch.Tensor, module: str = "") -> StorageRecord | None:
        """Note a tensor that exists before the step."""
        record = self.storage_of(tensor)
        if record is not None:
            record.birth, record.phase = -1, None
            record.module = record.module or module
            if record.value < 0:
                self._new_value(record, tensor, producer=-1)
        return record

    def _new_value(self, record: StorageRecord, tensor: torch.Tensor, producer: int) -> int:
        itemsize = max(tensor.element_size(), 1)
        bits = 1 if tensor.dtype is torch.bool else None
        self.values.append(
            ValueRecord(record.index, record.nbytes // itemsize, tensor.dtype, producer, bits)
        )
        record.value = len(self.values) - 1
        return record.value

    def spec(self, tensor: torch.Tensor, producer: int = -1) -> TensorSpec | None:
        """The tensor as a view of the value its storage holds now; of a sparse one the values."""
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        record = self.storage_of(tensor)
        if record is None:
            return None
        if record.value < 0:
            self._new_value(record, tensor, producer)
        try:
            shape = tuple(map(int, tensor.shape))
        except AttributeError:  # a nested tensor, whose memory is in others
            raise TraceError(
                "a nested tensor has rows of different lengths, and cannot be followed",
                hint="pad it; or measure on CUDA, by the allocator",
            ) from None
        return TensorSpec(record.value, shape, tensor.dtype, tensor.requires_grad)

    # -- operations ----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with DisableTorchFunction():  # what is asked of tensors here concerns no function mode
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for often, and slow to answer further down
        if not self.recording or func.namespace == "prim":
            return self._unrecorded(func, args, kwargs)
        if self._is_step_count(func, args):
            return UNKNOWN if args[0].constant is None else func(*args)
        func = as_unobserved(func)
        known = _facts(func)
        inputs: list[tuple[str, TensorSpec]] = []
        mutates: list[str] = []
        written_tensors: list[torch.Tensor] = []
        for position, name, written in known.arguments:
            given = args[position] if position < len(args) else kwargs.get(name)
            for label, tensor in _tensors(name, given):
                spec = self.spec(tensor)
                if spec is not None:
                    inputs.append((label, spec))
                    if written:
                        mutates.append(label)
                if written:
                    written_tensors.append(tensor)
        moving = [held_in(t) for t in written_tensors if t.layout is torch.sparse_coo]
        try:
            out = func(*args, **kwargs)
        except Exception:
            self.failed_in = self._module_stack[-1] if self._module_stack else None
            raise
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            out = with_workspace(args, out)
        out = with_wide_statistics(func, args, out)
        elements = held_elements(func, args, kwargs, out)
        if elements:
            out = with_storage_of(elements, out)
        index = len(self.ops)
        for tensor in written_tensors:
            record = self.storage_of(tensor)
            if record is not None:
                self._new_value(record, tensor, index)
        outputs = [spec for t in tensor_leaves(out) if (spec := self.spec(t, index)) is not None]
        if elements:
            self.values[outputs[0].value].numel = out.numel()  # all that an ideal executor holds
        is_view = known.returns_view
        if is_view and outputs and not any(s.value == outputs[0].value for _, s in inputs):
            is_view = False  # reshape and contiguous may copy after all
        self._note_masks(func, inputs, outputs, mutates)
        self.ops.append(self._op(index, func, args, kwargs, out, inputs, outputs, is_view, mutates))
        del moving  # there until its values were written anew
        return out

    def _unrecorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._is_step_count(func, args):
            return UNKNOWN if args[0].constant is None else func(*args)
        out = func(*args, **kwargs)
        if func.namespace != "prim":
            for leaf in tensor_leaves(out):
                self.storage_of(leaf)
        return out

    def _is_step_count(self, func: Any, args: tuple[Any, ...]) -> bool:
        """A fake optimizer reads its step count, or another number; no size depends on it."""
        return (
            self.phase is Phase.OPTIMIZER
            and func is torch.ops.aten._local_scalar_dense.default
            and isinstance(args[0], FakeTensor)
        )

    def _op(
        self,
        index: int,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        inputs: list[tuple[str, TensorSpec]],
        outputs: list[TensorSpec],
        is_view: bool,
        mutates: list[str],
    ) -> Op:
        grad_enabled = torch.is_grad_enabled()
        phase, forward_op = self.phase, -1
        module = self._module_stack[-1] if self._module_stack else ""
        node = current_node()
        if phase is Phase.BACKWARD:
            if grad_enabled and (node is not None or self._module_stack):
                phase = Phase.RECOMPUTE
            elif node is not None:
                forward_op = self._first_op_of_node.get(node._sequence_nr(), -1)
                if forward_op >= 0:
                    module = self.ops[forward_op].module
        differentiable = (
            grad_enabled
            and phase in (Phase.FORWARD, Phase.RECOMPUTE)
            and any(s.requires_grad for _, s in inputs)
        )
        if differentiable:
            sequence = last_sequence_number()
            self._first_op_of_node.setdefault(sequence, index)
        for leaf in outputs:
            record = self.storages[self.values[leaf.value].storage]
            if record.birth == index:
                record.module = module
                record.phase = phase
        return Op(
            index=index,
            name=_facts(func).name,
            phase=phase,
            module=module,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            flops=0 if is_view else times() * flops_of(func, args, kwargs, out),
            is_view=is_view,
            mutates=tuple(mutates),
            differentiable=differentiable,
            function=self._function_stack[0] if self._function_stack else -1,
            forward_op=forward_op,
            settings=tuple(_settings(func, args, kwargs)),
            strided=tuple(_strided(func, args, kwargs)),
            conjugated=tuple(_conjugated(func, args, kwargs)),
            times=times(),
        )

    def _note_masks(
        self,
        func: Any,
        inputs: list[tuple[str, TensorSpec]],
        outputs: list[TensorSpec],
        mutates: list[str],
    ) -> None:
        """Mark values of a wider type that hold one bit an element: dropout's scaled masks."""
        if not outputs:
            return
        made = self.values[outputs[0].value]
        scaled = func._opname in ("div_", "mul_", "div", "mul") and len(inputs) == 1
        if func._opname in _MASK_MAKERS or (
            scaled and self.values[inputs[0][1].value].information_bits == 1
        ):
            made.information_bits = 1

    # -- modules and custom functions ------------------------------------------------------------

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Know the module an operation runs in, and the custom autograd function."""
        self._module_paths = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self._module_paths.setdefault(id(module), path)

        def enter(module: nn.Module, _: Any) -> None:
            path = self._module_paths.get(id(module))
            above = self._module_stack[-1] if self._module_stack else ""
            self._module_stack.append(above if path is None else path)

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            if self._module_stack:
                self._module_stack.pop()

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        plain_apply = torch.autograd.Function.__dict__["apply"]
        recorder = self

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return recorder._run_function(plain_apply.__get__(None, cls), cls, args, kwargs)

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            torch.autograd.Function.apply = plain_apply  # type: ignore[method-assign]
            for handle in handles:
                handle.remove()
            self._module_stack.clear()

    def _run_function(self, run: Any, cls: Any, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self._function_stack or not self.recording:
            return run(*args, **kwargs)
        self._function_stack.append(self._function_count)
        self._function_count += 1
        saved: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            spec = self.spec(tensor)
            if spec is not None:
                saved.append(spec.value)
            return tensor

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                out = run(*args, **kwargs)
        finally:
            self._function_saved[self._function_stack.pop()] = tuple(dict.fromkeys(saved))
        return out

    @property
    def function_saved(self) -> dict[int, tuple[int, ...]]:
        """The values each call of a custom autograd function keeps."""
        return self._function_saved


@cache
def _wraps(kind: type) -> bool:
    """Whether tensors of a class are made of others."""
    return hasattr(kind, "__tensor_flatten__")


@dataclass(frozen=True, slots=True)
class _Facts:
    """Of an operation, whatever it is called with."""

    name: str
    arguments: tuple[tuple[int, str, bool], ...]
    """Position and name of each, and whether it is written to."""
    returns_view: bool
    convolves: bool


@cache
def _facts(func: Any) -> _Facts:
    schema = func._schema
    return _Facts(
        f"{func.namespace}.{func._opname}",
        tuple((i, a.name, _writes(func, a)) for i, a in enumerate(schema.arguments)),
        any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns),
        "convolution" in func._opname,
    )


def _settings(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    for position, name, _ in _facts(func).arguments:
        given = args[position] if position < len(args) else kwargs.get(name)
        if isinstance(given, (bool, int, float)):
            yield name, given
        elif isinstance(given, (list, tuple)) and given:
            if all(isinstance(item, (bool, int)) for item in given):
                yield name, tuple(given)


def _strided(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    known = _facts(func)
    for position, name, _ in known.arguments:
        given = args[position] if position < len(args) else kwargs.get(name)
        if not isinstance(given, torch.Tensor) or given.layout is not torch.strided:
            continue
        if not given.is_contiguous():
            yield name, _memory_order(given)
        elif known.convolves:
            if suggest_memory_format(given) is not torch.contiguous_format:  # an extent is one
                yield name, channels_last_order(given.dim())


def _conjugated(func: Any, args: Any, kwargs: Any) -> Iterator[str]:
    for position, name, _ in _facts(func).arguments:
        given = args[position] if position < len(args) else kwargs.get(name)
        for label, tensor in _tensors(name, given):
            if tensor.dtype.is_complex and tensor.is_conj():
                yield label


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest; empty if they do not fill the memory."""
    strides, shape = tensor.stride(), tensor.shape
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], shape[d] == 1))
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1 and strides[dim] != expected:
            return ()
        expected *= shape[dim]
    return tuple(order)


_SAME_VALUES = frozenset({"transpose_", "t_", "squeeze_", "unsqueeze_", "detach_"})
"""Operations that change in place how a tensor is read, and no value of it."""


def _writes(func: Any, argument: Any) -> bool:
    return (
        argument.alias_info is not None
        and argument.alias_info.is_write
        and func._opname not in _SAME_VALUES
    )


def _tensors(name: str, given: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(given, torch.Tensor):
        yield name, given
    elif isinstance(given, (list, tuple)):
        for position, item in enumerate(given):
            if isinstance(item, torch.Tensor):
                yield f"{name}.{position}", item
