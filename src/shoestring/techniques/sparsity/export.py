"""Between a sparse model and ordinary dense states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from . import index as plain
from .modules import sparse_names, sparse_tensors
from .tensor import SparseTensor


def to_dense(model: nn.Module) -> dict[str, Any]:
    """The state dict of the same model had it stayed dense: its names, its shapes."""
    sparse = sparse_names(model)
    made: dict[int, torch.Tensor] = {}
    state: dict[str, Any] = {}
    for key, held in model.state_dict().items():
        name = key.removesuffix("_values")
        if key.removesuffix("_index") in sparse and key.endswith("_index"):
            continue
        if key.endswith("_values") and name in sparse:
            tensor = sparse[name]
            if id(tensor) not in made:
                made[id(tensor)] = tensor.dense(tensor.values)
            state[name] = made[id(tensor)]
        else:
            state[key] = held
    return state


@torch.no_grad()
def load_dense(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a dense state into a sparse model.

    A tensor whose nonzeros fit is taken over exactly, its pattern with it (and its optimizer state
    starts again); of a denser one the values at the present pattern are taken.
    """
    sparse = sparse_names(model)
    for name, tensor in sparse.items():
        given = state.get(name)
        if given is not None and given.shape != tensor.shape:
            raise InputError(
                f"{name} has the shape {tuple(given.shape)}, not {tuple(tensor.shape)}"
            )
    missing = [n for n, t in sparse_tensors(model).items() if n not in state]
    if missing:
        raise InputError(f"the state has no {missing[0]}", hint="it is to be dense, as of to_dense")
    own = model.state_dict()
    for name in sparse:
        own.pop(f"{name}_values"), own.pop(f"{name}_index")
    rest = {key: held for key, held in state.items() if key not in sparse}
    wrong = sorted(own.keys() ^ rest.keys())
    if wrong:
        raise InputError(f"{wrong[0]} is not both in the model and in the state")
    model.load_state_dict(rest, strict=False)
    for name, tensor in sparse_tensors(model).items():
        _take(tensor, state[name])


def _take(tensor: SparseTensor, given: torch.Tensor) -> None:
    dense = given.detach().to(tensor.values)
    flat, mask = dense.reshape(-1), tensor.mask()
    wanted = flat != 0
    if int(wanted.sum()) <= tensor.nonzeros and bool((wanted & ~mask).any()):
        spare = (mask & ~wanted).nonzero().flatten()
        wanted[spare[: tensor.nonzeros - int(wanted.sum())]] = True
        short = tensor.nonzeros - int(wanted.sum())
        wanted[(~wanted).nonzero().flatten()[:short]] = True
        tensor.replace(flat[wanted], plain.encode(wanted, tensor.shape))
        tensor.reset_state(tensor.nonzeros)
    else:
        tensor.values.copy_(tensor.gather(dense))
