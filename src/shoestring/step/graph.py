"""A whole training step as one CUDA graph: all microbatches, recomputation and the update.

Launching thousands of small kernels from Python costs far more than running them. A step whose
shapes and settings come again is captured once and replayed; memory it needed while it was captured
stays in a pool that the graphs of all shapes share, and counts as the step's peak.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..techniques.base import Setup
from ..techniques.draws import RngRecorder, observed_by
from ..trace.batches import form_of, map_tensors
from ..trace.fakes import is_fake
from ..trace.streams import rewound_streams, stream_states
from .captured import CapturedStep, default_generator
from .host import HostState
from .numbers import number_at, numbers_around, numbers_of
from .rates import Rates

MOST_GRAPHS = 8
"""Shapes kept at a time; the one used longest ago goes first."""
MOST_SHAPES = 256
"""Shapes remembered from eager steps."""
PATIENCE = 3
"""Graphs in a row that were dropped before their second replay, until no more are captured."""


def why_not(setup: Setup) -> str | None:
    """Why the step cannot be a CUDA graph, as far as is known before it runs; None if it can."""
    first = next(setup.model.parameters())
    if first.device.type != "cuda" or is_fake(first):
        return "the model is not on CUDA"
    return not_capturable(setup)


def not_capturable(setup: Setup) -> str | None:
    """Say why a step on CUDA cannot be a CUDA graph.

    The update must stay on the device, and random numbers come from PyTorch's generator.
    """
    if any(isinstance(m, nn.RNNBase) and m.dropout > 0 for m in setup.model.modules()):
        return "cuDNN draws the dropout of recurrent layers from a state of its own"
    if setup.not_captured:
        return setup.not_captured
    if setup.clips and setup.sums is None and getattr(setup.clip, "norm", None) is not None:
        return "the passes run twice: for the norm of gradients, and to release them clipped"
    if setup.update_on_device or type(setup.optimizer) is torch.optim.SGD:
        return None
    if all(group.get("capturable") for group in setup.optimizer.param_groups):
        return None
    name = type(setup.optimizer).__name__
    return f"{name} counts its steps on the host: add FusedUpdate, or make it capturable"


class GraphRunner:
    """Runs a step eagerly when its shapes are new, captures it when they come again."""

    def __init__(
        self,
        setup: Setup,
        compute: Callable[[Any], torch.Tensor],
        *,
        in_place: bool = False,
    ) -> None:
        self._setup, self._compute, self.in_place = setup, compute, in_place
        self._rates = Rates(setup)
        self._modules = list(setup.model.modules())
        self._numbers = [(m.__dict__, name) for m in self._modules for name in numbers_of(m)]
        functions = [] if setup.loss is None else [setup.loss]
        self._around = numbers_around(functions, self._modules)
        self._graphs: OrderedDict[Any, CapturedStep] = OrderedDict()
        self._seen: OrderedDict[Any, list[int | None]] = OrderedDict()
        self._program: Any = None
        self._addresses: Any = None
        self._pool: Any = None
        self._wasted = 0
        self._captures = 0
        self.enabled = True
        self.refused: str | None = None
        """Why there is no graph, once a capture failed."""
        weakref.finalize(self, _wait_for, self._graphs).atexit = False

    def __call__(self, batch: Any) -> torch.Tensor:
        """One step on the GPU."""
        with self._rates.on_device(next(self._setup.model.parameters()).device):
            return self._run(batch)

    def _run(self, batch: Any) -> torch.Tensor:
        shapes = form_of(batch)
        self._look()
        if _hooked(self._setup.optimizer):  # a graph would not call them
            return self._eagerly(batch, shapes)
        graph = self._graphs.get(shapes)
        if graph is None and self.enabled and shapes in self._seen:
            graph = self._capture(batch, shapes)
        if graph is None:
            return self._eagerly(batch, shapes)
        self._graphs.move_to_end(shapes)
        if graph.replays:
            self._wasted = 0
        for call in self._setup.before_graph:
            call()
        return graph(batch)

    @property
    def captured(self) -> bool:
        """Whether there is a graph to replay."""
        return bool(self._graphs)

    @property
    def why_not(self) -> str | None:
        """Why steps run eagerly; None where they are replayed."""
        if self.captured:
            return None
        if _hooked(self._setup.optimizer):
            return "the optimizer has hooks, which a graph would not call"
        if self.refused is None and self.enabled:
            return "it is captured when a batch of the same shapes comes again"
        return (
            self.refused
            or "shapes, or numbers it reads, change so often that graphs were never used again"
        )

    @property
    def peak_bytes(self) -> int:
        """Allocated at most while any of the graphs in use was captured."""
        return max((graph.peak_bytes for graph in self._graphs.values()), default=0)

    def drop(self) -> None:
        """Forget the captured steps: something they refer to is gone."""
        if self._graphs:
            self._note_waste(max(graph.replays for graph in self._graphs.values()))
        self._graphs.clear()
        self._pool = None

    def _note_waste(self, replays: int) -> None:
        if replays < 2:
            self._wasted += 1
            self.enabled = self.enabled and self._wasted <= PATIENCE

    def _look(self) -> None:
        """Drop what no longer holds: captured steps know numbers by value, tensors by address."""
        program, addresses = self._settings(), self._where()
        if program != self._program:
            self._seen.clear()
        if program != self._program or addresses != self._addresses:
            self.drop()
        self._program, self._addresses = program, addresses

    def _eagerly(self, batch: Any, shapes: Any) -> torch.Tensor:
        device = next(self._setup.model.parameters()).device
        generator = default_generator(device)
        start = generator.get_offset()
        starts = RngRecorder(generator.get_offset)
        with observed_by(starts):
            loss = self._compute(on_device(device, batch))
        self._seen[shapes] = [None if at is None else at - start for at in starts.found]
        if len(self._seen) > MOST_SHAPES:
            self._seen.popitem(last=False)
        # The first step makes the optimizer's state. Numbers that steps change do not count:
        # the capture says why it cannot be.
        self._program, self._addresses = self._settings(), self._where()
        return loss

    def _capture(self, batch: Any, shapes: Any) -> CapturedStep | None:
        """The step as a graph; if it cannot be one, a warning, and all is as it was."""
        device = next(self._setup.model.parameters()).device
        graph: CapturedStep | None
        host = HostState(self._setup, self._modules, self._around)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        for call in self._setup.before_graph:
            call()
        try:
            with rewound_streams():
                drawn = stream_states()
                starts = self._seen[shapes]
                again, self._captures = self._captures > 0, self._captures + 1
                graph = CapturedStep(
                    self._within_capture, batch, device, starts, self._pool,
                    in_place=self.in_place, again=again,
                )  # fmt: skip
                if stream_states() != drawn:
                    raise RuntimeError("it draws random numbers on the host")
            if changed := host.changed():
                raise RuntimeError(changed)
        except RuntimeError as error:
            host.restore()
            self.drop()
            self.enabled = False
            self.refused = str(error).splitlines()[0]
            graph = None
        if graph is None:
            # Only now: the error's traceback held the tensors of the capture, and nodes of autograd
            # that accumulate on its stream.
            gc.collect()
            torch.cuda.empty_cache()
            warnings.warn(
                f"the step is not captured as a CUDA graph: {self.refused}",
                RuntimeWarning,
                stacklevel=5,
            )
            return None
        if len(self._graphs) == MOST_GRAPHS:
            self._note_waste(self._graphs.popitem(last=False)[1].replays)
        self._graphs[shapes] = graph
        return graph

    def _within_capture(self, batch: Any) -> torch.Tensor:
        with ExitStack() as stack:
            for around in self._setup.in_capture:
                stack.enter_context(around())
            return self._compute(batch)

    def _settings(self) -> Any:
        """Settings that decide which operations run, and the optimizer's numbers."""
        numbers = tuple(
            tuple((k, _constant(v)) for k, v in group.items() if k != "params")
            for group in self._setup.optimizer.param_groups
        )
        trained = tuple(
            p.requires_grad for m in self._modules for p in m._parameters.values() if p is not None
        )
        own = tuple(held.get(name) for held, name in self._numbers)
        own += tuple(map(number_at, self._around))
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self._modules)
        return numbers, trained, own, hooks

    def _where(self) -> tuple[int, ...]:
        """The addresses of everything that outlives a step."""
        held = [t for m in self._modules for t in (*m._parameters.values(), *m._buffers.values())]
        for state in dict.values(self._setup.optimizer.state):  # without waiting for what is in it
            held += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return tuple(tensor.data_ptr() for tensor in held if tensor is not None)


def _wait_for(graphs: Collection[Any]) -> None:
    """Replays copy to pinned memory, and PyTorch, which does not know it, would hand that out."""
    if graphs and not torch.cuda.is_current_stream_capturing():
        torch.cuda.current_stream().synchronize()


def _constant(value: Any) -> Any:
    """A setting on the device is read there, at every replay."""
    if isinstance(value, torch.Tensor) and value.is_cuda:
        return value.data_ptr()
    return repr(value)


def _hooked(optimizer: torch.optim.Optimizer) -> bool:
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def on_device(device: torch.device, batch: Any) -> Any:
    """The batch with its tensors there."""
    return map_tensors(lambda tensor: tensor.to(device), batch)
