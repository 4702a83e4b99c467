"""Put sparse tensors into the modules of a model, and take them out again.

A module that owns one gets a subclass of its class with the same name: `module.weight` reads as a
`SparseWeight`, the values are the parameter `weight_values`, the index the buffer `weight_index`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from . import index as plain
from .tensor import SparseTensor, random_positions, set_data
from .weight import SparseWeight

_HELD = "_sparse_tensors"


def sparse_tensors(model: nn.Module) -> dict[str, SparseTensor]:
    """The sparse tensors of a model by the name they had, a shared one once."""
    found: dict[int, SparseTensor] = {}
    for module in model.modules():
        for tensor in module.__dict__.get(_HELD, {}).values():
            found.setdefault(id(tensor), tensor)
    return {tensor.name: tensor for tensor in found.values()}


def sparse_names(model: nn.Module) -> dict[str, SparseTensor]:
    """Every name a sparse tensor had, so a shared one under each of its names."""
    names: dict[str, SparseTensor] = {}
    for path, module in model.named_modules():
        for name, tensor in module.__dict__.get(_HELD, {}).items():
            names[f"{path}.{name}" if path else name] = tensor
    return names


def make_sparse(
    name: str,
    parameter: nn.Parameter,
    nonzeros: int,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> tuple[SparseTensor, Callable[[], None]]:
    """Turn a parameter into its values at random positions, its gradient and state with it.

    Also returns how to undo it, which holds all that was there.
    """
    index = _random_index(parameter, nonzeros, generator)
    state = optimizer.state.get(parameter, {})
    dense, gradient, held = parameter.data, parameter.grad, dict(state)

    def at_nonzeros(tensor: torch.Tensor) -> torch.Tensor:
        if plain.is_fake(tensor):  # chunk by chunk it would take minutes, for nothing
            return tensor.new_empty(nonzeros)
        return plain.gather(tensor.detach(), index, nonzeros)

    def undo() -> None:
        set_data(parameter, dense)
        parameter.grad = gradient
        state.update(held)

    for key, moment in held.items():
        if isinstance(moment, torch.Tensor) and moment.shape == dense.shape:
            state[key] = at_nonzeros(moment)
    set_data(parameter, at_nonzeros(dense))
    if gradient is not None:
        parameter.grad = at_nonzeros(gradient)
    made = SparseTensor(name, dense.shape, parameter, index, weakref.ref(optimizer))
    return made, undo


def _random_index(
    parameter: torch.Tensor, nonzeros: int, generator: torch.Generator
) -> torch.Tensor:
    if plain.is_fake(parameter):
        size = plain.index_bytes(parameter.shape, nonzeros)
        return torch.empty(size, dtype=torch.uint8, device=parameter.device)
    free = torch.ones(parameter.numel(), dtype=torch.bool)
    mask = torch.zeros_like(free)
    mask[random_positions(free, nonzeros, generator)] = True
    return plain.encode(mask, parameter.shape).to(parameter.device)


def install(model: nn.Module, tensors: Sequence[SparseTensor]) -> Callable[[], None]:
    """Let every module that owns one of the parameters read it as a sparse weight."""
    by_parameter = {id(tensor.values): tensor for tensor in tensors}
    undone = []
    for module in list(model.modules()):
        owned = {
            n: by_parameter[id(p)] for n, p in module._parameters.items() if id(p) in by_parameter
        }
        if owned:
            undone.append(_install(module, owned))

    def undo() -> None:
        for one in undone:
            one()

    return undo


def _install(module: nn.Module, owned: dict[str, SparseTensor]) -> Callable[[], None]:
    cls, parameters, buffers = type(module), dict(module._parameters), dict(module._buffers)
    unsaved = set(module._non_persistent_buffers_set)
    renamed = {f"{n}_values" if n in owned else n: p for n, p in parameters.items()}
    module._parameters.clear()
    module._parameters.update(renamed)
    for name, tensor in owned.items():
        module.register_buffer(f"{name}_index", tensor.index)
    module.__dict__[_HELD] = dict(owned)
    module.__class__ = _sparse_class(cls, tuple(owned))

    def undo() -> None:
        module.__class__ = cls
        del module.__dict__[_HELD]
        for held, before in ((module._parameters, parameters), (module._buffers, buffers)):
            held.clear()
            held.update(before)  # type: ignore[arg-type]
        module._non_persistent_buffers_set = unsaved

    return undo


_classes: dict[tuple[Any, tuple[str, ...]], type[nn.Module]] = {}


def _sparse_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    if (cls, names) not in _classes:
        _classes[cls, names] = _make_class(cls, names)
    return _classes[cls, names]


def _make_class(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    def reader(name: str) -> property:
        return property(lambda module: SparseWeight(module.__dict__[_HELD][name]))

    members: dict[str, Any] = {name: reader(name) for name in names}
    members |= {
        "__reduce_ex__": _reduce,
        "_sparse_from": (cls, names),
        "__module__": cls.__module__,
    }
    if issubclass(cls, nn.RNNBase):
        members["_flat_weights"] = property(_dense_flat_weights, lambda module, weights: None)
        members["flatten_parameters"] = lambda module: None
    return type(cls.__name__, (_Sparse, cls), members)


def _reduce(module: Any, protocol: int) -> Any:
    """With what the class itself leaves out of a copy: a recurrent one has weak references."""
    own = any("__getstate__" in vars(c) for c in type(module).__mro__ if c is not object)
    state = module.__getstate__() if own else dict(module.__dict__)
    return _new_sparse, module._sparse_from, state


def _new_sparse(cls: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    made = _sparse_class(cls, names)
    return made.__new__(made)


def _dense_flat_weights(module: Any) -> list[torch.Tensor]:
    """The weights a recurrent module passes to its kernel: dense while the step runs."""
    weights = (getattr(module, name) for name in module._flat_weights_names)
    return [w.clone() if isinstance(w, SparseWeight) else w for w in weights]


class _Sparse(nn.Module):
    """Moving and loading a module that owns sparse tensors."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        out = super()._apply(fn, recurse)
        self._adopt()
        return out

    def _adopt(self) -> None:
        """Modules that share a weight go on sharing its index after a move."""
        for name, tensor in self.__dict__[_HELD].items():
            moved = self._buffers[f"{name}_index"]
            assert moved is not None
            if moved is not tensor.index and moved.device == tensor.index.device:
                self._buffers[f"{name}_index"] = tensor.index
            elif moved is not tensor.index:
                tensor.index = moved
                tensor.changed()
            values = self._parameters[f"{name}_values"]
            assert values is not None
            tensor.values = values

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Take the sizes of the state: a rewired tensor has other ones."""
        errors = args[-1]
        for name, tensor in self.__dict__[_HELD].items():
            values = state_dict.get(f"{prefix}{name}_values")
            index = state_dict.get(f"{prefix}{name}_index")
            if values is None or index is None:
                continue
            if values.dim() != 1 or not plain.is_sound(index, tensor.shape, values.numel()):
                errors.append(f"{tensor.name}: values and index of another tensor")
                return
            if values.numel() != tensor.nonzeros or index.shape != tensor.index.shape:
                before = tensor.nonzeros
                tensor.replace(
                    tensor.values.detach().new_zeros(values.numel()),
                    tensor.index.new_zeros(index.numel()),
                )
                tensor.reset_state(before)
        super()._load_from_state_dict(state_dict, prefix, *args)
        for name, tensor in self.__dict__[_HELD].items():
            loaded = self._buffers[f"{name}_index"]
            assert loaded is not None
            if loaded is not tensor.index and loaded.device == tensor.index.device:
                tensor.index.data = loaded.detach()  # assign=True brought a tensor of its own
            tensor.changed()
        self._adopt()
