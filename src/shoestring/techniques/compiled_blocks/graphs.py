"""The graphs that `torch.compile` makes of a block, run operation by operation.

A prediction has no numbers to compile for, and whoever follows every operation would see none of
compiled code. Here the same graphs run: decomposed as TorchInductor does it, and cut where the
min-cut partitioner cuts, so what is saved for backward is what compiled code saves. Code is fused,
too: an element-wise result that only element-wise functions and reductions read is never in memory,
and neither takes bytes nor a kernel here.

    graph        mm      mul    erf    add    mul      mm
    in memory    yes     -      -      -      yes      yes       the last product reads a tensor
"""

from __future__ import annotations

import operator
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from ...torch_private.dispatch import OpOverload
from ...torch_private.trees import tensor_leaves
from ...trace.passes import standing_for
from ...trace.places import mark_elsewhere

_POINTWISE = frozenset(
    "aten.full aten.full_like aten.expand aten.constant_pad_nd aten.index aten.embedding "
    "aten.gather aten.slice_scatter aten.select_scatter aten.iota prims.iota "
    "prims.convert_element_type aten._to_copy aten.clone".split()
)
"""Without PyTorch's tag, but computed element by element."""
_REDUCTIONS = frozenset(
    "aten.sum aten.mean aten.amax aten.amin aten.var_mean aten.var aten.prod aten.any aten.all "
    "aten.argmax aten.argmin aten.max aten.min prims.xor_sum aten.logsumexp".split()
)


class GraphRun:
    """Runs a graph once per call; what is fused takes no bytes, and values go when they are read.

    Whatever a fused value is computed from stays until the kernel runs that it is part of.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self._graph = graph
        self._nodes = list(graph.graph.nodes)
        self.draws = any(_draws(node) for node in self._nodes)
        place = {node: index for index, node in enumerate(self._nodes)}
        self._fused = {n for n in self._nodes if _pointwise(n) and not _is_read(n)}
        ends: dict[fx.Node, int] = {}
        for node in reversed(self._nodes):
            ends[node] = max(
                (ends[u] if u in self._fused else place[u] for u in node.users),
                default=place[node],
            )
        self._ending: dict[int, list[fx.Node]] = {}
        for node, end in ends.items():
            self._ending.setdefault(end, []).append(node)

    def __call__(self, given: list[Any]) -> Any:
        """The outputs for these inputs, which are taken out of the list."""
        inputs = (node for node in self._nodes if node.op == "placeholder")
        values: dict[fx.Node, Any] = dict(zip(inputs, given, strict=True))
        given.clear()
        for index, node in enumerate(self._nodes):
            if node.op == "output":
                return fx.map_arg(node.args[0], values.__getitem__)
            if node.op == "get_attr":
                values[node] = operator.attrgetter(str(node.target))(self._graph)
            elif node.op != "placeholder":
                values[node] = self._run(node, values)
            for ended in self._ending.get(index, ()):
                values.pop(ended, None)
        raise AssertionError("a graph without outputs")

    def _run(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        fused = node in self._fused
        with standing_for(0) if fused else nullcontext():
            made = node.target(*args, **kwargs)  # type: ignore[operator]
        if fused:
            for tensor in tensor_leaves(made):
                mark_elsewhere(tensor)
        return made


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        return str(target.overloadpacket)
    return ""


def _pointwise(node: fx.Node) -> bool:
    """It makes a tensor of its own, element by element."""
    if not isinstance(node.target, OpOverload) or node.target.is_view:
        return False
    return torch.Tag.pointwise in node.target.tags or _name(node) in _POINTWISE


def _passes_on(node: fx.Node) -> bool:
    """Whether its result lies in the memory of an argument."""
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, OpOverload) and bool(node.target.is_view)


def _is_read(node: fx.Node) -> bool:
    """Whether a kernel or the outside needs it in memory."""
    return any(
        _is_read(user) if _passes_on(user) else not (_pointwise(user) or _name(user) in _REDUCTIONS)
        for user in node.users
    )


def _draws(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
        arguments = target._schema.arguments
        given: dict[str, Any] = {a.name: a.default_value for a in arguments}
        given |= dict(zip((a.name for a in arguments), node.args, strict=False))
        return bool({**given, **node.kwargs}.get("dropout_p") != 0)  # of attention
    return node.op == "call_function" and any(w in str(target) for w in ("seed", "random"))
