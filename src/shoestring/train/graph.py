"""A whole training step as one CUDA graph: all microbatches, recomputation and the update.

Launching thousands of small kernels from Python costs far more than running them. A step whose
shapes, settings and randomness do not change is captured once and replayed; memory it needed
while it was captured stays in the graph's own pool and counts as the step's peak.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..techniques.base import Setup

PATIENCE = 3
"""Captures without a replay in between (settings that move at every step) before giving up."""


def can_capture(setup: Setup, precision: str) -> bool:
    """Whether the update stays on the device; a failed try would leave its counters moved."""
    if next(setup.model.parameters()).device.type != "cuda" or precision == "bf16":
        return False
    groups = setup.optimizer.param_groups
    return (
        precision == "fp16"
        or type(setup.optimizer) is torch.optim.SGD
        or all(group.get("capturable") for group in groups)
    )


class GraphRunner:
    """Runs a step eagerly, then captured, then eagerly again whenever it changes."""

    def __init__(self, setup: Setup, compute: Callable[[Any], torch.Tensor]) -> None:
        self._setup, self._compute = setup, compute
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Any = None
        self._loss: torch.Tensor | None = None
        self._key: Any = None
        self._wasted = 0
        self.enabled = True
        self.peak_bytes = 0
        """Allocated at most while the graph in use was captured."""

    def __call__(self, batch: Any) -> torch.Tensor:
        """One step on the GPU."""
        key = self._settings(batch)
        if self._graph is not None and key == self._key:
            self._wasted = 0
            return self._replay(batch)
        same, self._key = key == self._key, key
        self.drop()
        if not (self.enabled and same):
            return self._eagerly(batch)
        self._wasted += 1
        if self._wasted > PATIENCE:
            self.enabled = False
            return self._eagerly(batch)
        if not self._capture(batch):
            return self._eagerly(batch)
        return self._replay(batch)

    @property
    def captured(self) -> bool:
        """Whether there is a graph to replay."""
        return self._graph is not None

    def drop(self) -> None:
        """Forget the captured step: something it refers to is gone."""
        self._graph = self._batch = self._loss = None
        self.peak_bytes = 0

    def _eagerly(self, batch: Any) -> torch.Tensor:
        device = next(self._setup.model.parameters()).device
        generator = torch.cuda.default_generators[device.index or 0]
        before = generator.get_offset()
        loss = self._compute(on_device(device, batch))
        if generator.get_offset() != before:  # a replay would draw the same numbers for ever
            self.enabled = False
        return loss

    def _capture(self, batch: Any) -> bool:
        device = next(self._setup.model.parameters()).device
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._batch = tree_map(
            lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf,
            batch,
        )
        torch.cuda.reset_peak_memory_stats()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._loss = self._compute(self._batch)
        except RuntimeError as error:  # something in the step waits for the device
            self.enabled = False
            self.drop()
            warnings.warn(
                f"the step is not captured as a CUDA graph: {str(error).splitlines()[0]}",
                RuntimeWarning,
                stacklevel=2,
            )
            return False
        self._graph = graph
        self.peak_bytes = torch.cuda.max_memory_allocated()
        return True

    def _replay(self, batch: Any) -> torch.Tensor:
        assert self._graph is not None and self._loss is not None
        for held, given in zip(tree_leaves(self._batch), tree_leaves(batch), strict=True):
            if isinstance(held, torch.Tensor):
                held.copy_(given, non_blocking=True)
        self._graph.replay()
        return self._loss.clone()

    def _settings(self, batch: Any) -> Any:
        """Everything a captured step holds fixed: shapes, and the optimizer's numbers."""
        shapes = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
            for leaf in tree_leaves(batch)
        )
        numbers = tuple(
            tuple((k, repr(v)) for k, v in group.items() if k != "params")
            for group in self._setup.optimizer.param_groups
        )
        return shapes, numbers, self._setup.model.training


def on_device(device: torch.device, batch: Any) -> Any:
    """The batch with its tensors there."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, batch)
