"""The parts of a model that matter to a technique: repeated blocks, sparsifiable weights, norms."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from torch import nn

from .graph import Phase, Role, Trace

_NORM_TYPES = (nn.modules.batchnorm._BatchNorm,)
_STATISTICS = nn.modules.batchnorm._NormBase
_SCALING = (_STATISTICS, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def is_normalization(module: nn.Module) -> bool:
    """BatchNorm, which the report keeps in FP32 (Section 3.2)."""
    return isinstance(module, _NORM_TYPES)


def writers(trace: Trace) -> frozenset[str]:
    """Paths of modules whose state changes in the forward pass: how often they run counts."""
    found: set[str] = set(trace.moved)
    for op in trace.forward_ops:
        for name, spec in op.inputs if op.mutates else ():
            storage = trace.storages[trace.values[spec.value].storage]
            if name in op.mutates and storage.role in (Role.BUFFER, Role.MODEL):
                found.add(storage.module)
    return frozenset(found)


def sparsifiable_names(model: nn.Module) -> frozenset[str]:
    """The weights the report makes sparse (Sections 3.1 and 4.3).

    A network of convolutions: every convolution but the first; the linear layers stay dense when
    there is one (the classifier), and all but the last are sparse when there are more. Any other
    network: every matrix of a linear layer, embedding or attention. Normalization and biases
    never, nor scales of whatever shape, nor a module with `keep_dense = True`. A tied weight counts
    once, under its first name.
    """
    convolutions: list[str] = []
    matrices: list[str] = []
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            if not _is_matrix(module, parameter) or getattr(module, "keep_dense", False):
                continue
            if isinstance(module, nn.modules.conv._ConvNd):
                convolutions.append(full)
            else:
                matrices.append(full)
    if convolutions:
        return frozenset(convolutions[1:]) | frozenset(matrices[:-1])
    return frozenset(matrices)


def _is_matrix(module: nn.Module, parameter: nn.Parameter) -> bool:
    if isinstance(module, _SCALING):
        return False
    if isinstance(module, (nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)):
        return parameter.dim() >= 2
    return sum(size > 1 for size in parameter.shape) >= 2  # one number a channel is not a matrix


def find_blocks(trace: Trace) -> tuple[str, ...]:
    """Paths of the repeated blocks of a traced model, in the order they run."""
    found = set(_repeated(dict(trace.modules)))
    first: dict[str, int] = {}
    for op in trace.ops:
        if op.phase is Phase.FORWARD:
            block = block_of(op.module, found)
            if block is not None:
                first.setdefault(block, op.index)
    return tuple(sorted(first, key=first.__getitem__))


def block_paths(model: nn.Module) -> tuple[str, ...]:
    """Paths of the repeated blocks of a model, in the order they are defined."""
    return block_levels(model)[0]


def block_levels(model: nn.Module) -> list[tuple[str, ...]]:
    """The repeated blocks, then those inside of them, and so on: stages, their layers, …

    Each level covers what the one before it does; a block with none inside stays.
    """
    classes = {path: type(m).__name__ for path, m in model.named_modules()}
    levels = [tuple(_repeated(classes))]
    while (finer := tuple(_repeated(classes, frozenset().union(*levels)))) != levels[-1]:
        levels.append(finer)
    return levels


def _repeated(classes: dict[str, str], opened: frozenset[str] = frozenset()) -> list[str]:
    """Numbered children of a container that are made of several modules, of a class found twice.

    `layers.3`, `h.0`, `groups.1.2`: the outermost such level that is not itself only a list of
    lists, or `opened`. These are the residual blocks and layers after which a checkpoint may stand.
    """
    children: dict[str, list[str]] = {}
    for path in classes:
        if path:
            children.setdefault(path.rpartition(".")[0], []).append(path)
    numbered = {
        path: kind
        for path, kind in classes.items()
        if re.fullmatch(r"\d+", path.rpartition(".")[2])
        and children.get(path)
        and kind not in _CONTAINERS
    }
    often = Counter(numbered.values())
    found: list[str] = []

    def visit(path: str) -> None:
        for kid in children.get(path, []):
            before = len(found)
            if often[numbered.get(kid, "")] <= 1 or kid in opened:
                visit(kid)
            if often[numbered.get(kid, "")] > 1 and len(found) == before:
                found.append(kid)

    visit("")
    return found


_CONTAINERS = frozenset({"Sequential", "ModuleList"})


def block_of(module: str, blocks: Iterable[str]) -> str | None:
    """The block a module path lies in, if any."""
    known = blocks if isinstance(blocks, (set, frozenset, dict)) else set(blocks)
    while module:
        if module in known:
            return module
        module = module.rpartition(".")[0]
    return None
