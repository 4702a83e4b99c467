"""The node that runs now, how nodes are numbered, and the hooks on what they save."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.utils.checkpoint

DYNAMO = "torch._dynamo"
"""A second to import; the first optimizer does it."""

preserved_version = torch.autograd._unsafe_preserve_version_counter
"""A context in which writing to a tensor goes unseen by what was saved for backward."""
DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
tensor_methods: ModuleType = torch._tensor
"""Where the methods of tensors written in Python are defined."""


def current_node() -> Any:
    """The node whose backward pass runs now, on this thread; None outside of one."""
    return torch._C._current_autograd_node()


_SELECTS = "MaxBackward0 MinBackward0 TopkBackward0 SortBackward0 KthvalueBackward0".split()
_INTO_ZEROS = {
    "scatter_add": {"GatherBackward0", "CummaxBackward0", "CumminBackward0"},
    "index_put": {"IndexBackward0"},
    "index_add": {"IndexSelectBackward0"},
    "put": {"TakeBackward0"},
    "masked_scatter": {"MaskedSelectBackward0"},
    "scatter": {*_SELECTS, "MedianBackward1", "NanmedianBackward1", "ModeBackward0"},
}
"""Gradients that PyTorch places into fresh zeros; out of place where a dispatch mode looks on."""


def as_unobserved(func: Any) -> Any:
    """The operation that the running node calls where no mode sees it: in place of fresh zeros."""
    nodes = _INTO_ZEROS.get(func._opname)
    if nodes is None or torch.is_grad_enabled():
        return func
    node = current_node()
    if node is None or node.name() not in nodes:
        return func
    return getattr(getattr(torch.ops.aten, func._opname + "_"), func._overloadname)


def last_sequence_number() -> int:
    """Of the node that was made last on this thread."""
    return torch.autograd._get_sequence_nr() - 1


def active_saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost `saved_tensors_hooks` that is active: its pack and unpack."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def runs_backward() -> bool:
    """Whether a backward pass runs now, on this thread."""
    return torch._C._current_graph_task_id() != -1


def forget_failed_backward() -> None:
    """Free the graph of a backward pass that failed in this thread.

    Nodes that autograd had not run yet stay in the thread's queue, behind later ones: nodes
    are ordered by a number, which grows with every operation of a thread. A tiny graph whose
    numbers are those of a new thread comes last, so that what waits is looked at and dropped.
    """
    made: list[torch.Tensor] = []

    def build() -> None:
        with torch.enable_grad():
            made.append(torch.zeros((), requires_grad=True) * 1)

    thread = threading.Thread(target=build)
    try:
        thread.start()
    except RuntimeError:  # no memory for one: the graph stays
        return
    thread.join()
    for tensor in made:
        tensor.backward()


def add_determinism_check(name: str, noted: Callable[[torch.Tensor], Any]) -> None:
    """Another `determinism_check` of `torch.utils.checkpoint`.

    It notes something of each tensor that backward reads, and must find the same in the second
    pass.
    """
    torch.utils.checkpoint._allowed_determinism_checks_to_fns[name] = noted
