"""Parameters whose numbers are brought when a function reads them.

A parameter gets a subclass of its class. Every function of PyTorch that is called with it comes
here first: the numbers are brought to the device, the function runs, and they go. What autograd
saves of them is a `SavedWeight`: when backward reads it, they are brought again. Functions that
write leave a copy that differs from the host's, which is copied there before another weight is
brought; so is one that was written through `parameter.data` or a view.

A function that gets at the memory past PyTorch's functions would read NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ...torch_private.autograd import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    active_saved_tensors_hooks,
)
from ...torch_private.dispatch import OpOverload
from ...torch_private.fake_tensors import FakeTensor
from ...torch_private.trees import tensor_leaves
from ..function_writes import may_write, written
from ..metadata import LAYOUT, METADATA
from ..saving import Saved
from .store import HostWeight, HostWeights, set_data

_T = torch.Tensor
_HELD = "_on_host"


class _OnHost:
    """How a parameter on the host answers functions of PyTorch."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ASKS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in LAYOUT:
            return func(args[0].__dict__[_HELD].there, *args[1:], **kwargs)
        if func is _SET_DATA:
            raise RuntimeError(
                "a weight on the host cannot get other data: change the model before ss.apply"
            )
        return _called(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """One on the device, like any other."""
        if id(self) not in memo:
            memo[id(self)] = _plain(self)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)


class OnHost(_OnHost, nn.Parameter):
    """A parameter on the host."""


class FakeOnHost(_OnHost, FakeTensor):
    """A fake one."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """An operator comes from below autograd, where a real one would not come by here."""
        if isinstance(func, OpOverload):
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def hosts(parameter: torch.Tensor) -> bool:
    """Whether it is of a class that can be put there."""
    return type(parameter) in (nn.Parameter, FakeTensor)


def put_on_host(parameter: torch.Tensor, weight: HostWeight) -> Callable[[], None]:
    """From now on its numbers are the weight's. Returns the undo."""
    own = type(parameter)
    set_data(parameter, weight.bare)
    parameter.__dict__[_HELD] = weight
    parameter.__class__ = FakeOnHost if own is FakeTensor else OnHost

    def undo() -> None:
        there = weight.store.settle(weight)
        parameter.__class__ = own
        del parameter.__dict__[_HELD]
        with torch.no_grad():
            back = torch.empty_strided(
                there.shape, there.stride(), dtype=there.dtype, device=weight.device
            )
            set_data(parameter, back.copy_(there))

    return undo


def weight_on_host(tensor: Any) -> HostWeight | None:
    """Where a parameter's numbers are; None for any other tensor."""
    return tensor.__dict__[_HELD] if isinstance(tensor, _OnHost) else None


def _plain(parameter: Any) -> nn.Parameter:
    """A parameter with a copy of its numbers, on the device."""
    return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


def _weights(args: Any, kwargs: Any) -> Iterator[HostWeight]:
    for leaf in tensor_leaves((args, kwargs)):
        weight = weight_on_host(leaf)
        if weight is not None:
            yield weight


def _called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weights = list(dict.fromkeys(_weights(args, kwargs)))
    store = weights[0].store
    if func is _T.detach and store.saving:
        return store.settle(weights[0]).detach()
    absent = [weight for weight in weights if not weight.present]
    if absent:
        store.flush(but=weights)
    hooks: AbstractContextManager[Any] = nullcontext()
    if torch.is_grad_enabled():
        outer = active_saved_tensors_hooks()
        if outer is None:
            hooks = SavingWeights(store)
        elif not isinstance(getattr(outer[0], "__self__", None), SavingWeights):
            hooks = _keeping_numbers(outer)
    writes: list[HostWeight] = []
    if may_write(func) or "out" in kwargs:
        changed = map(weight_on_host, written(func, args, kwargs))
        writes = [weight for weight in changed if weight is not None]
    with hooks, store.brought(absent, writes), DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        store.watch(result)
        return result


_SET_DATA = _T.data.__set__  # type: ignore[attr-defined]
_ASKS = METADATA | {
    *(
        getattr(getattr(_T, name), what)
        for name in ("grad", "requires_grad")
        for what in ("__get__", "__set__", "__delete__")
    ),
    *(
        getattr(_T, name).__get__
        for name in "grad_fn _base _backward_hooks _post_accumulate_grad_hooks".split()
    ),
    _T.requires_grad_, _T.register_hook, _T.register_post_accumulate_grad_hook,
}  # fmt: skip


class SavedWeight:
    """A weight as it was saved for backward: which part of it, and not its numbers."""

    __slots__ = ("_offset", "_shape", "_stride", "_version", "_weight")

    def __init__(self, weight: HostWeight, tensor: torch.Tensor) -> None:
        whole = weight_on_host(tensor) is not None and not weight.present
        like = weight.there if whole else tensor
        self._weight, self._version = weight, _version(weight)
        self._shape, self._stride = tensor.shape, like.stride()
        self._offset = like.storage_offset()

    def value(self) -> torch.Tensor:
        """The tensor, brought again."""
        if _version(self._weight) != self._version:
            raise RuntimeError(
                "a weight was changed in place after it was saved for backward: update it after "
                "the backward pass, or plan without weight_offload"
            )
        with torch.no_grad(), DisableTorchFunction():
            here = self._weight.store.bring(self._weight)
            return here.as_strided(self._shape, self._stride, self._offset)


def _version(weight: HostWeight) -> int:
    parameter = weight.parameter()
    return -1 if parameter is None else parameter._version


class SavingWeights(AbstractContextManager["SavingWeights"]):
    """Within: autograd saves weights as `SavedWeight`s, all else as what the hooks outside make."""

    def __init__(self, store: HostWeights) -> None:
        self._store = store
        self._outer: Any = None

    def __enter__(self) -> SavingWeights:
        self._outer = active_saved_tensors_hooks()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        del self._hooks  # no cycle may hold what was saved
        self._outer = None

    def _pack(self, tensor: torch.Tensor) -> SavedWeight | Saved:
        with DisableTorchFunction(), torch.no_grad():
            weight = weight_on_host(tensor)
            if weight is None and type(tensor) in (torch.Tensor, FakeTensor):
                strided = tensor.layout is torch.strided
                weight = self._store.weight_of(tensor) if strided else None
            return Saved(tensor, self._outer) if weight is None else SavedWeight(weight, tensor)


@contextmanager
def _keeping_numbers(outer: Any) -> Iterator[None]:
    """Within: the hooks outside get a weight as a tensor that holds its copy on the device.

    Recomputation keeps it until backward, when the weight itself has lost its numbers again.
    """

    def pack(tensor: torch.Tensor) -> Saved:
        with DisableTorchFunction(), torch.no_grad():
            held = tensor if weight_on_host(tensor) is None else tensor.detach()
            return Saved(held, outer)

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        yield


def _unpack(packed: SavedWeight | Saved) -> torch.Tensor:
    return packed.value()
