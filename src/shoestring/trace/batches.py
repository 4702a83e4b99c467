"""Batches of any nesting: tuples, lists, dicts of any class, mappings around one, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import UserDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ..errors import InputError
from ..torch_private.trees import tree_map


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """The same batch with `function` of every tensor; anything else is passed along."""
    return _mapped(torch.Tensor, function, batch)


def sizes_of_packed(batch: Any) -> list[torch.Tensor]:
    """How many sequences packed ones have at each step: PyTorch reads these numbers in C++."""
    found: list[torch.Tensor] = []

    def note(packed: PackedSequence) -> PackedSequence:
        found.append(packed.batch_sizes)
        return packed

    _mapped(PackedSequence, note, batch)
    return found


def _mapped(kind: type[Any], function: Callable[[Any], Any], batch: Any) -> Any:
    def one(leaf: Any) -> Any:
        if isinstance(leaf, kind):
            return function(leaf)
        # Tokenizers, collators and models return these, and pytree does not open them.
        copied: Any
        if isinstance(leaf, UserDict):
            copied = copy.copy(leaf)
            copied.data = {key: _mapped(kind, function, value) for key, value in leaf.data.items()}
            return copied
        if isinstance(leaf, dict):
            copied = copy.copy(leaf)
            for key, value in leaf.items():
                copied[key] = _mapped(kind, function, value)
            return copied
        if is_record(leaf):
            copied = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                mapped = _mapped(kind, function, getattr(leaf, field.name))
                object.__setattr__(copied, field.name, mapped)
            return copied
        return leaf

    return tree_map(one, batch, is_leaf=lambda node: isinstance(node, kind))


def check_layouts(tensors: Iterable[torch.Tensor]) -> None:
    """InputError for tensors whose bytes are not counted: sparse and nested ones."""
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            hint = "convert them with .to_dense()"
            if tensor.layout is torch.jagged:
                hint = "give their values() and offsets()"
            raise InputError(f"no accounting for {tensor.layout} tensors", hint=hint)


def is_record(value: Any) -> bool:
    """Whether it is an object of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def form_of(batch: Any) -> Any:
    """All of a batch but what its tensors hold: equal forms can take each other's tensors.

    Objects that are neither collections nor plain values never have equal forms.
    """
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, (dict, UserDict)):
        return type(batch), tuple((key, form_of(value)) for key, value in batch.items())
    if isinstance(batch, (list, tuple)):
        return type(batch), tuple(map(form_of, batch))
    if is_record(batch):
        fields = dataclasses.fields(batch)
        return type(batch), tuple(form_of(getattr(batch, field.name)) for field in fields)
    if batch is None or isinstance(batch, _PLAIN):
        return type(batch), batch
    return object()


_PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Every tensor of the batch."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, batch)
    return found
