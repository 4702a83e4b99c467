"""Results of operations on fake tensors that were seen before with operands of the same form.

The blocks of a model run the same operations on tensors of the same shapes, and a plan is traced
many times. PyTorch works a result out each time, or finds it by a key that takes as long to make.
Here the form of a result (shape, strides, type, whose storage it is) is known by a short key after
the first time; all that is out of the ordinary goes to PyTorch.

PyTorch's shape functions give some results the strides of an operand, but the CPU's kernel does
not: BatchNorm over transposed tokens returns a contiguous tensor, and an operation that reads its
transpose copies it. `_DENSE` corrects these (`tests/trace/test_result_forms.py` compares many).
Nor is the type always the kernel's, where operands have 16 bits and FP32: `_TYPED`, `_STATISTICS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..torch_private.fake_tensors import FakeTensor, constant_of, make_fake
from ..torch_private.storages import dense_strides, suggest_memory_format
from ..torch_private.trees import tensor_leaves
from .cuda import on_cuda

_MOST = 100_000
"""Forms that are kept; where there are more, all are forgotten."""
_PLAIN = frozenset(
    {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout,
     torch.memory_format}
)  # fmt: skip
_NAMESPACES = ("aten", "shoestring")
_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view}


_DENSE: dict[str, int | None] = {
    "native_batch_norm": 0,
    "_native_batch_norm_legit": 0,
    "native_batch_norm_backward": 1,
    "reflection_pad2d_backward": 1,
    "roll": 0,
    "log_sigmoid_forward": None,
    "log_sigmoid_backward": None,
    "mse_loss_backward": None,
    "smooth_l1_loss_backward": None,
    "huber_loss_backward": None,
    "glu_backward": None,
}
"""Operations whose CPU kernels return dense results: channels last if that operand is, else, or
where none is named, contiguous."""

_TYPED = {
    "native_group_norm_backward": 0,
    "mse_loss_backward": 1,
    "smooth_l1_loss_backward": 1,
}
"""Operations whose CPU kernels return a first result of the type of this operand."""
_STATISTICS = frozenset({"native_group_norm", "native_layer_norm", "native_batch_norm"})
"""Operations whose results but the first are FP32 on the CPU if any operand is."""
_JOINING = frozenset({"add", "add_", "sub", "sub_"})
"""Operations that put the values of sparse operands one after another."""
_ON_CPU = _DENSE.keys() | _TYPED.keys() | _STATISTICS


@dataclass(frozen=True, slots=True)
class _Form:
    """How one result is made."""

    operand: int
    """Whose storage it lies in; -1 for its own."""
    itself: bool
    """It is that operand."""
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: Any = None


_known: dict[Any, tuple[bool, type | None, tuple[Any, ...]] | None] = {}
"""Key → whether there are several results, of which type of list, and the form of each."""


def result(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation's result for fake tensors."""
    operands: list[FakeTensor] = []
    key = _key(func, args, kwargs, operands)
    if key is None:
        return _with_values(func, args, kwargs)
    corrected = func._opname in _ON_CPU and not on_cuda(operands[0])
    if corrected:
        key = (*key, "as the CPU has it")
    found = _known.get(key)
    if found is not None:
        return _made(found, operands)
    out = _with_values(func, args, kwargs)
    if corrected:
        out = _typed(func._opname, out, operands)
        if func._opname in _DENSE:
            out = _made_dense(out, _DENSE[func._opname], operands)
    if key not in _known:
        if len(_known) >= _MOST:
            _known.clear()
        written = func._schema.is_mutable and not corrected  # statistics keep their form
        unchanged = not written or key == _key(func, args, kwargs, [])
        _known[key] = _seen(out, operands) if unchanged else None
    return out


def _with_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result; a sparse one with all the values it may have, which PyTorch leaves out."""
    given = [t._nnz() for t in tensor_leaves(args) if t.layout is torch.sparse_coo]
    made = func(*args, **kwargs)
    if not isinstance(made, FakeTensor) or made.layout is not torch.sparse_coo:
        return made
    name = func._opname
    count = sum(given) if name in _JOINING else max(given, default=0)
    if name == "_embedding_bag_backward":
        count = args[1].numel()  # words in all bags
    if count > made._nnz():
        indices = made._indices().new_zeros(made.sparse_dim(), count)
        values = made._values().new_zeros(count, *made.shape[made.sparse_dim() :])
        full = torch.sparse_coo_tensor(indices, values, made.shape, check_invariants=False)
        torch.ops.aten.copy_sparse_to_sparse_(made, full)
    return made


def _typed(name: str, out: Any, operands: Sequence[FakeTensor]) -> Any:
    """The results in the types a CPU kernel gives them, where operands differ in theirs."""
    kinds = {operand.dtype for operand in operands}
    if len(kinds) < 2:
        return out

    def of(kind: torch.dtype, one: Any) -> Any:
        if not isinstance(one, FakeTensor) or one.dtype is kind:
            return one
        return make_fake(one.fake_mode, one.fake_device, tuple(one.shape), one.stride(), kind)

    first, *others = out if isinstance(out, (list, tuple)) else (out,)
    if name in _TYPED:
        first = of(operands[_TYPED[name]].dtype, first)
    if name in _STATISTICS and torch.float32 in kinds:
        others = [of(torch.float32, one) for one in others]
    return type(out)((first, *others)) if isinstance(out, (list, tuple)) else first


def _made_dense(out: Any, like: int | None, operands: Sequence[FakeTensor]) -> Any:
    """The results as a CPU kernel lays them out."""
    kind = torch.contiguous_format if like is None else suggest_memory_format(operands[like])

    def laid(one: Any) -> Any:
        if not isinstance(one, FakeTensor) or one.dim() < 2:  # statistics, or none
            return one
        if one.is_contiguous(memory_format=kind):
            return one
        strides = dense_strides(tuple(one.shape), kind)
        return make_fake(one.fake_mode, one.fake_device, tuple(one.shape), strides, one.dtype)

    return type(out)(map(laid, out)) if isinstance(out, (list, tuple)) else laid(out)


def _key(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[FakeTensor]
) -> Any:
    """Of the operation and the form of its operands; None where that does not tell the result."""
    if func.namespace not in _NAMESPACES or torch.is_inference_mode_enabled():
        return None
    parts: list[Any] = [func, torch.get_default_dtype()]
    seen: dict[int, int] = {}
    constants = _leaves_constants(func, args)
    if not _add(args, parts, operands, seen, constants):
        return None
    if not _add(kwargs.values(), parts, operands, seen, constants):
        return None
    if not operands or operands[0].fake_mode.shape_env is not None or not _tells(func):
        return None
    parts += kwargs
    return tuple(parts)


_telling: dict[Any, bool] = {}


def _tells(func: Any) -> bool:
    """Whether the result has a form that no value decides."""
    found = _telling.get(func)
    if found is None:
        found = _telling[func] = _TAGS.isdisjoint(func.tags)
    return found


_updating: dict[Any, tuple[int, ...]] = {}
"""Operations that return nothing → positions of what they write to."""


def _leaves_constants(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether known values are read only, by an operation that returns nothing: an update's count.

    They say nothing of its result, then.
    """
    written = _updating.get(func)
    if written is None:
        schema = func._schema
        found = (
            i for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write
        )
        written = _updating[func] = () if schema.returns else tuple(found)
    return bool(written) and all(
        position < len(args)
        and all(constant_of(tensor) is None for tensor in tensor_leaves(args[position]))
        for position in written
    )


def _add(
    given: Any,
    parts: list[Any],
    operands: list[FakeTensor],
    seen: dict[int, int],
    constants: bool,
) -> bool:
    for each in given:
        kind = each.__class__
        if kind in _PLAIN:
            parts.append(kind)
            parts.append(each)
        elif isinstance(each, FakeTensor):
            if each.constant is not None and not constants:
                return False
            if each.dtype.is_complex or each.layout != torch.strided:
                return False
            parts += (
                seen.setdefault(id(each), len(operands)), each.shape, each.stride(),
                each.dtype, each.storage_offset(), each.fake_device,
            )  # fmt: skip
            operands.append(each)
        elif kind is list or kind is tuple:
            parts.append(len(each))
            if not _add(each, parts, operands, seen, constants):
                return False
        else:
            return False
    return True


def _seen(out: Any, operands: Sequence[FakeTensor]) -> Any:
    """The forms of results; None for what must be worked out each time."""
    several = isinstance(out, (list, tuple))
    results = out if several else (out,)
    if several and type(out) not in (list, tuple):
        return None
    itself = {id(operand): i for i, operand in reversed(list(enumerate(operands)))}
    mine: dict[int, int] = {}
    for i in sorted(itself.values()):
        address = operands[i].untyped_storage()._cdata
        mine[address] = -2 if address in mine else i  # of two operands: which one is not known
    forms: list[Any] = []
    own: set[int] = set()
    for each in results:
        if each.__class__ in _PLAIN:
            forms.append(each)
            continue
        if not isinstance(each, FakeTensor) or each.constant is not None or each.dtype.is_complex:
            return None
        if each.layout != torch.strided or each.is_neg():
            return None
        if id(each) in itself:
            forms.append(_Form(itself[id(each)], True))
            continue
        storage = each.untyped_storage()
        at = mine.get(storage._cdata, -1)
        if at == -2:
            return None
        form = _Form(
            at, False, tuple(each.shape), each.stride(), int(each.storage_offset()), each.dtype,
            each.fake_device,
        )  # fmt: skip
        if at < 0:
            again = _one(form, operands)
            if storage._cdata in own or again.untyped_storage().nbytes() != storage.nbytes():
                return None
            own.add(storage._cdata)
        forms.append(form)
    return several, type(out) if several else None, tuple(forms)


def _made(found: tuple[bool, Any, tuple[Any, ...]], operands: Sequence[FakeTensor]) -> Any:
    several, kind, forms = found
    if not several:
        return _one(forms[0], operands)
    return kind(_one(form, operands) for form in forms)


def _one(form: Any, operands: Sequence[FakeTensor]) -> Any:
    if form.__class__ is not _Form:
        return form
    if form.itself:
        return operands[form.operand]
    storage = operands[form.operand].untyped_storage() if form.operand >= 0 else None
    mode = operands[0].fake_mode
    return make_fake(mode, form.device, form.shape, form.stride, form.dtype, storage, form.offset)
