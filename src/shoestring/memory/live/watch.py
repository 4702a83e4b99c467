"""Which operation, of which module, asked the allocator for memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from ...torch_private.autograd import current_node, last_sequence_number
from ...torch_private.dispatch import TorchDispatchMode
from ...torch_private.trees import tree_leaves
from ...trace.graph import Phase


@dataclass(frozen=True, slots=True)
class Ran:
    """An operation that allocated: its allocations are those from `start` to before `end`."""

    start: int
    end: int
    name: str
    module: str
    phase: Phase
    returned: frozenset[int]
    """Addresses of the storages it gave back; what else it took is its workspace."""


class OperationWatch(TorchDispatchMode):
    """Notes operations by the number of allocations before and after them.

    `allocations` counts those of the process; inside backward, an operation belongs to the module
    that made the autograd node in the forward pass.
    """

    def __init__(self, allocations: Callable[[], int]) -> None:
        super().__init__()
        self._allocations = allocations
        self._first = allocations()
        self._phase = Phase.FORWARD
        self._ran: list[Ran] = []
        self._starts: list[int] = []
        self._modules: list[str] = []
        self._module_of_node: dict[int, str] = {}
        self.phases: list[tuple[int, Phase]] = []
        """Each phase and the number of allocations before it."""

    @property
    def count(self) -> int:
        """Allocations since the watch was made."""
        return self._allocations() - self._first

    def entering(self, phase: Phase) -> None:
        """The step enters a phase."""
        self._phase = phase
        self.phases.append((self.count, phase))

    def of(self, allocation: int) -> Ran | None:
        """The operation that made this allocation."""
        at = bisect_right(self._starts, allocation) - 1
        return self._ran[at] if at >= 0 and allocation < self._ran[at].end else None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        module, phase = self._place()
        start = self.count
        out = func(*args, **(kwargs or {}))
        end = self.count
        if end > start:
            name = f"{func.namespace}.{func._opname}"
            returned = frozenset(
                leaf.untyped_storage().data_ptr()
                for leaf in tree_leaves(out)
                if type(leaf) is torch.Tensor
            )
            self._ran.append(Ran(start, end, name, module, phase, returned))
            self._starts.append(start)
        return out

    def _place(self) -> tuple[str, Phase]:
        module = self._modules[-1] if self._modules else ""
        node = current_node()
        if node is None:
            if self._phase is Phase.FORWARD:  # autograd made the operation's node just before
                self._module_of_node.setdefault(last_sequence_number(), module)
            return module, self._phase
        if torch.is_grad_enabled() or self._modules:
            return module, Phase.RECOMPUTE
        return self._module_of_node.get(node._sequence_nr(), ""), Phase.BACKWARD

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Know the module an operation runs in."""
        paths = {id(module): path for path, module in model.named_modules()}

        def enter(module: nn.Module, _: Any) -> None:
            above = self._modules[-1] if self._modules else ""
            self._modules.append(paths.get(id(module), above))

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            self._modules.pop()

        handles = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._modules.clear()
