"""Tensors that autograd saves in a forward pass, in few bits.

Saved-tensor hooks see each tensor as it is saved. A function mode knows for which function: only
what products, normalizations and smooth activations save is rounded, for their gradients are linear
in it, or nearly. A softmax, a loss or an attention kernel keeps what it has: its gradient takes the
exponential of it.

Parameters, buffers and the batch are there anyway, and are kept as they are; so is what any
function keeps exactly. A tensor that several functions save is rounded once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...kernels import expected, has_triton, launched
from ...kernels import saved_codes as codec
from ...kernels.rounding import Noise
from ...torch_private.autograd import DisableTorchFunction, active_saved_tensors_hooks
from ...trace.batches import tensors_of
from ...trace.cuda import is_dense, on_cuda
from ...trace.fakes import is_fake
from ..base import Run
from ..saving import Saved, inputs_are_kept
from ..saving import storage_key as _key

ROUNDED = frozenset(
    """
    linear bilinear matmul __matmul__ __rmatmul__ mm bmm mv addmm baddbmm addbmm einsum
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    batch_norm layer_norm group_norm instance_norm rms_norm
    mul mul_ multiply __mul__ __rmul__ __imul__ square pow __pow__ addcmul
    gelu silu mish tanh sigmoid softplus dropout dropout1d dropout2d alpha_dropout
    """.split()
)
"""Functions whose gradient is linear in what they save, or bends it gently."""
SIGNS_ONLY = frozenset("relu relu_ leaky_relu leaky_relu_".split())
"""Functions whose gradient asks where a number is positive, and nothing else."""
_WEIGHTED = frozenset(name for name in ROUNDED if name == "linear" or name.startswith("conv"))
_OPAQUE = (nn.MultiheadAttention,)
"""Modules that run as one function, in which products are not told from the softmax."""
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


class SavedInBits:
    """The codes of one saved tensor, and how it lay."""

    __slots__ = ("__weakref__", "_bits", "_codes", "_dtype", "_ranges", "_shape", "_stride")

    def __init__(self, tensor: torch.Tensor, bits: int, noise: Noise, outer: Any = None) -> None:
        dense = is_dense(tensor)
        held = tensor.detach() if dense else tensor.detach().contiguous()
        self._shape, self._stride = held.shape, held.stride()
        self._dtype, self._bits = held.dtype, bits
        flat, elements = held.as_strided((held.numel(),), (1,)), held.numel()
        codes = flat.new_empty(codec.code_bytes(elements, bits), dtype=torch.uint8)
        ranges = None
        if bits != codec.SIGNS:
            groups = codec.groups_of(elements)
            ranges = flat.new_empty((groups, 2), dtype=torch.float32)
        written = [t for t in (codes, ranges) if t is not None]
        if not _has_kernels(flat):
            codec.encode(flat, codes, ranges, bits, noise.counter)
        elif is_fake(flat):
            launched("encode_saved", [flat, noise.counter], written)
        else:
            from ...kernels import saved_kernels

            saved_kernels.encode(flat, codes, ranges, bits, noise.counter)
        noise.move(1)
        self._codes = Saved(codes, outer)
        self._ranges = None if ranges is None else Saved(ranges, outer)

    @torch.no_grad()
    def value(self) -> torch.Tensor:
        """The tensor again."""
        codes = self._codes.value()
        ranges = None if self._ranges is None else self._ranges.value()
        made = torch.empty_strided(
            self._shape, self._stride, dtype=self._dtype, device=codes.device
        )
        flat = made.as_strided((made.numel(),), (1,))
        read = [t for t in (codes, ranges) if t is not None]
        if not _has_kernels(flat):
            codec.decode(codes, ranges, self._bits, flat)
        elif is_fake(flat):
            launched("decode_saved", read, [flat])
        else:
            from ...kernels import saved_kernels

            saved_kernels.decode(codes, ranges, self._bits, flat)
        return made


def _has_kernels(tensor: torch.Tensor) -> bool:
    return on_cuda(tensor) and expected() and (is_fake(tensor) or has_triton())


class SavingInBits(TorchFunctionMode):
    """A context of one forward pass."""

    sees_functions = True

    def __init__(self, model: nn.Module, batch: Any, bits: int, smallest: int, noise: Noise):
        super().__init__()
        self._bits, self._smallest, self._noise = bits, smallest, noise
        self._model = model
        held = (*model.parameters(), *model.buffers(), *tensors_of(batch))
        self._there = {_key(tensor) for tensor in held if tensor.layout is torch.strided}
        self._function, self._weight, self._input = "", None, None
        self._opaque = 0
        self._known: dict[Any, tuple[Any, Any]] = {}
        """Storage and version → kept whole; with bits and window → its codes. And when it goes."""
        self._outer: Any = None
        self.rounded = 0

    def __enter__(self) -> SavingInBits:
        super().__enter__()
        self._stack = ExitStack()
        self._outer = active_saved_tensors_hooks()
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._stack.enter_context(hooks)
        for module in self._model.modules():
            if isinstance(module, _OPAQUE):
                before = module.register_forward_pre_hook(self._closed)
                after = module.register_forward_hook(self._opened, always_call=True)
                self._stack.callback(before.remove)
                self._stack.callback(after.remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        self._known.clear()
        self._outer = None
        super().__exit__(*error)

    def _closed(self, *_: Any) -> None:
        self._opaque += 1

    def _opened(self, *_: Any) -> None:
        self._opaque -= 1

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        before = self._function, self._weight, self._input
        self._function = getattr(func, "__name__", "")
        if self._function in _WEIGHTED:
            self._input = args[0] if args else kwargs.get("input")
            self._weight = args[1] if len(args) > 1 else kwargs.get("weight")
        try:
            return func(*args, **kwargs)
        finally:
            self._function, self._weight, self._input = before

    def _pack(self, tensor: torch.Tensor) -> Any:
        with DisableTorchFunction(), torch.no_grad():
            bits = self._bits_for(tensor)
            whole = _key(tensor), tensor._version
            if bits is None:
                self._note(whole, tensor, lambda: None)
                return Saved(tensor, self._outer)
            if whole in self._known:  # it costs nothing to keep for others, too
                return Saved(tensor, self._outer)
            key = (_key(tensor), bits, *_reading(tensor))
            found = self._known[key][0]() if key in self._known else None
            if found is None:
                found = SavedInBits(tensor, bits, self._noise, self._outer)
                self.rounded += 1
                self._note(key, tensor, weakref.ref(found))
            return found

    def _note(self, key: Any, tensor: torch.Tensor, found: Callable[[], Any]) -> None:
        def gone(_: Any) -> None:
            self._known.pop(key, None)

        self._known[key] = found, weakref.ref(tensor.untyped_storage(), gone)

    def _bits_for(self, tensor: torch.Tensor) -> int | None:
        """Of this tensor, for the function that saves it; None for as it is."""
        if (
            tensor.dtype not in _TYPES
            or tensor.layout is not torch.strided
            or tensor.numel() < self._smallest
            or not (type(tensor) is torch.Tensor or is_fake(tensor))
            or (tensor.is_leaf and tensor.requires_grad)
            or _key(tensor) in self._there
            or isinstance(tensor._base, nn.Parameter)  # which ranks that split it gathered
            or _overlaps(tensor)
        ):
            return None
        if inputs_are_kept():  # others may read it by another window on its storage
            return self._bits if is_dense(tensor) and _is_whole(tensor) else None
        if self._opaque or self._is_weight(tensor):
            return None
        if self._function in SIGNS_ONLY:
            return codec.SIGNS
        return self._bits if self._function in ROUNDED else None

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        """Of a layer, cast or turned."""
        weight, read = self._weight, self._input
        if self._function not in _WEIGHTED or not isinstance(weight, torch.Tensor):
            return False
        alike = sorted(tensor.shape) == sorted(weight.shape)
        return alike and not (isinstance(read, torch.Tensor) and _key(read) == _key(tensor))


def _unpack(packed: SavedInBits | Saved) -> torch.Tensor:
    return packed.value()


def saving_in_bits(
    run: Run, model: nn.Module, bits: int, smallest: int, noise: Noise, told: Callable[[int], None]
) -> Run:
    """The run, with what it saves in few bits; `told` how many tensors that were."""

    def saving(batch: Any) -> torch.Tensor:
        with SavingInBits(model, batch, bits, smallest, noise) as saved:
            loss = run(batch)
        if torch.is_grad_enabled():
            told(saved.rounded)
        return loss

    return saving


def _reading(tensor: torch.Tensor) -> tuple[Any, ...]:
    where = tensor.shape, tensor.stride(), tensor.storage_offset()
    return tensor._version, tensor.dtype, tensor.is_conj(), tensor.is_neg(), *where


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _overlaps(tensor: torch.Tensor) -> bool:
    """Expanded: its elements are fewer than its shape says."""
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
