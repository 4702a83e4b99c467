"""Units a loss may be averaged over, and batches in which two of these differ."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import nn

from ...trace.batches import map_tensors
from ...trace.split import cut
from .units import is_not, tensors_by_path

Targets = list[tuple[torch.Tensor, int]]
"""Labels that a likelihood read, and the one it ignores."""
IGNORED = (-100, -1, 0, 1)
"""Numbers that padding usually has; also those that embeddings of the model say."""
MISSING = ("nan", "-1", "0")
"""Numbers in the place of a measurement that is not there: a label, a depth."""
ENDS = 4
"""Of so many rows the last number may be padding."""


def repeated(batch: Any, count: int) -> Any:
    """The batch with the first example in the place of some that come later."""
    order = torch.arange(count)
    order[count // 2 :: 2] = 0
    first = tensors_by_path(cut(batch, 0, 1))
    made = {}
    for path, tensor in tensors_by_path(batch).items():
        one = first.get(path, tensor)
        pairs = zip(tensor.shape, one.shape, strict=True)
        for dim in [d for d, (n, m) in enumerate(pairs) if n == count * m and n != m]:
            rows = tensor.unflatten(dim, (count, -1)).index_select(dim, order.to(tensor.device))
            made[id(tensor)] = rows.flatten(dim, dim + 1)
    return map_tensors(lambda t: made.get(id(t), t), batch)


def labels(batch: Any, targets: Targets) -> list[str]:
    """Labels that the loss was seen to read, and what it ignored."""
    made: list[str] = []
    for target, ignored in targets:
        valid = target[target != ignored]
        for path, tensor in tensors_by_path(batch).items():
            if tensor.is_floating_point() or tensor.is_complex():
                continue
            for shift in ("", "[:, 1:]"):
                if shift and tensor.dim() < 2:
                    continue
                given = (tensor[:, 1:] if shift else tensor).flatten()
                found = given[given != ignored].to(target.dtype)
                if found.shape == valid.shape and torch.equal(found, valid):
                    made.append(f"{path}{shift} != {ignored}")
    return list(dict.fromkeys(made))


def masks(batch: Any, model: nn.Module) -> list[str]:
    """Ways to count the tensors of the batch: as masks, and without padding."""
    padding = {getattr(m, "padding_idx", None) for m in model.modules()}
    made: list[str] = []
    for path, tensor in tensors_by_path(batch).items():
        if tensor.is_complex():
            continue
        shifts = ["", "[:, 1:]"] if tensor.dim() > 1 else [""]
        if bool((tensor >= 0).all()):  # a mask, weights of examples, lengths
            made += [f"{path}{shift}" for shift in shifts]
        if tensor.is_floating_point():
            made += [f"{path} != {value}" for value in MISSING]
        if not tensor.is_floating_point() and tensor.dtype is not torch.bool:
            last = tensor[:, -1:] if tensor.dim() > 1 else tensor[:0]
            ends = last.flatten()[:ENDS]
            numbers = [*IGNORED, *sorted(p for p in padding if p is not None)]
            for value in dict.fromkeys([*numbers, *(int(v) for v in ends)]):
                made += [f"{path}{shift} != {value}" for shift in shifts]
    return list(dict.fromkeys(made))


def _counted(batch: Any, candidate: str) -> tuple[torch.Tensor, float]:
    """The tensor it counts, and the number it leaves out."""
    path = candidate.partition(" ")[0].partition("[")[0]
    value = float(candidate.rpartition("!= ")[2]) if "!=" in candidate else 0
    return tensors_by_path(batch)[path], value


def ends_the_process(batch: Any, candidate: str) -> bool:
    """Whether the changed batch could be one that no error message survives.

    A number that the tensor does not have may be none that an embedding has. The CPU says so;
    on CUDA it is an assertion of a kernel, after which nothing runs any more.
    """
    tensor, value = _counted(batch, candidate)
    return tensor.is_cuda and bool(is_not(tensor, value).all()) and not tensor.is_floating_point()


def changed(batch: Any, candidate: str) -> Any:
    """The batch with half of a row not counted by this candidate any more."""
    tensor, value = _counted(batch, candidate)
    other = tensor.clone(memory_format=torch.contiguous_format)
    flat = other.view(len(other), -1)
    row = 1 + int(is_not(flat[1:], value).sum(1).argmax())  # not of the part of one example
    counted = is_not(flat[row], value).nonzero().flatten()
    flat[row, counted[len(counted) // 2 :]] = value
    return map_tensors(partial(_exchanged, tensor, other), batch)


def named(units: str) -> str:
    """A tensor of a tuple, by its place."""
    return re.sub(r"^(\d+)", r"batch[\1]", units)


def none_ignored(batch: Any, candidate: str) -> Any:
    """The batch with a label that counts in the place of each that is ignored."""
    tensor, value = _counted(batch, candidate)
    counts = is_not(tensor, value)
    other = torch.where(counts, tensor, tensor[counts][:1])
    return map_tensors(partial(_exchanged, tensor, other), batch)


def _exchanged(old: torch.Tensor, new: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    return new if held is old else held
