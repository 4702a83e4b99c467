"""One training step of fixed shapes as a CUDA graph, with the random numbers of the eager step.

Numbers drawn in a graph come from generator states that belong to it: one for the step, and one for
every recomputation, since that starts again where the first pass did and cannot move a generator
back while it is captured. Before a replay each is set to its place in the process's own stream,
counted from where that stands; afterwards the stream stands where the eager step would leave it.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from ..techniques.draws import RngReplay, observed_by
from ..torch_private.cuda_memory import clear_cublas_workspaces, end_allocate_to_pool, release_pool
from ..trace.batches import map_tensors, tensors_of


class CapturedStep:
    """A step on a batch of certain shapes, captured once."""

    def __init__(
        self,
        compute: Callable[[Any], torch.Tensor],
        batch: Any,
        device: torch.device,
        starts: Sequence[int | None],
        pool: Any,
        *,
        in_place: bool = False,
        again: bool = False,
    ) -> None:
        """`starts`: where recomputations draw from, relative to where the step does.

        `in_place`: the batch is the caller's own to write the next one into; others are copied.

        Where it was captured before, only what was made since is searched for garbage: to search
        all that Python holds takes longer than the rest.
        """
        copy = not in_place
        self._batch = map_tensors(lambda tensor: tensor.to(device, copy=copy), batch)
        self._inputs = tensors_of(self._batch)
        self._randomness = _Randomness(device, starts)
        self._graph = torch.cuda.CUDAGraph()
        self._randomness.register(self._graph)
        self.replays = 0
        gc.collect(1 if again else 2)
        torch.cuda.synchronize()
        _free_workspaces()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        stream = torch.cuda.current_stream(device)
        try:
            with warnings.catch_warnings():
                # Of one that broke off before its first kernel; the error says why.
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                # Other threads may ask for pinned memory meanwhile: a DataLoader's does.
                around = torch.cuda.graph(
                    self._graph, pool, capture_stream(device), capture_error_mode="thread_local"
                )
                with self._randomness.in_force(), around:
                    self._loss = compute(self._batch)
        except BaseException:
            torch.cuda.set_stream(stream)
            _abandon(pool, device)
            raise
        finally:
            _free_workspaces()
        self.peak_bytes = torch.cuda.max_memory_allocated(device)
        """Allocated at most while it was captured."""

    def __call__(self, batch: Any) -> torch.Tensor:
        """Run the step."""
        for held, given in zip(self._inputs, tensors_of(batch), strict=True):
            if held is not given:
                held.copy_(given)  # from pinned memory, too, it is over: the next may be put there
        with self._randomness.placed():
            self._graph.replay()
        self.replays += 1
        return self._loss.clone()


@cache
def capture_stream(device: torch.device) -> Any:
    """The stream that steps are captured on, always the same: graphs share memory of one stream.

    PyTorch's own is on the GPU of the first capture, and would record nothing of another's kernels.
    """
    return torch.cuda.Stream(device)


def _free_workspaces() -> None:
    """cuBLAS keeps one for every thread and stream, tens of MiB each (`devices/`).

    Before a capture those of eager steps go, so that a step does not hold two sets; after it those
    that lie in the graph's pool, where replays use them but nothing else may.
    """
    clear_cublas_workspaces()


def _abandon(pool: Any, device: torch.device) -> None:
    """Let the allocator know that a capture is over, which a broken one does not by itself.

    Otherwise the pool would be kept for ever, and with it all blocks that several streams use.
    """
    index = default_generator(device).device.index
    try:
        end_allocate_to_pool(index, pool)
    except RuntimeError:  # it ended in good order
        return
    release_pool(index, pool)


class _Randomness:
    """The generator states of one graph."""

    def __init__(self, device: torch.device, starts: Sequence[int | None]) -> None:
        self._default = default_generator(device)
        self._own = torch.Generator(device)
        self._again = [None if s is None else (torch.Generator(device), s) for s in starts]
        self._seed: int | None = None

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Must come before the capture."""
        for state in (self._own, *(pair[0] for pair in self._again if pair is not None)):
            graph.register_generator_state(state)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """For the capture: the step draws from its own states.

        So the state of the process is in no graph, and a capture that fails leaves it usable.
        """
        outside = self._default.graphsafe_get_state()
        places = RngReplay(self._again, self._drawing_from)
        self._drawing = [self._own]
        self._default.graphsafe_set_state(self._own)
        try:
            with observed_by(places):
                yield
        finally:
            self._default.graphsafe_set_state(outside)
        if not places.all_used:
            raise RuntimeError("the step recomputes less often than it did before")

    @contextmanager
    def _drawing_from(self, place: tuple[torch.Generator, int]) -> Iterator[None]:
        self._drawing.append(place[0])
        self._default.graphsafe_set_state(place[0])
        try:
            yield
        finally:
            self._drawing.pop()
            self._default.graphsafe_set_state(self._drawing[-1])

    @contextmanager
    def placed(self) -> Iterator[None]:
        """For a replay: every state at its place in the stream, which moves on afterwards."""
        seed, start = self._default.initial_seed(), self._default.get_offset()
        used = [pair for pair in self._again if pair is not None]
        if seed != self._seed:
            for state in (self._own, *(state for state, _ in used)):
                state.manual_seed(seed)
            self._seed = seed
        self._own.set_offset(start)
        for state, relative in used:
            state.set_offset(start + relative)
        yield
        self._default.set_offset(self._own.get_offset())


def default_generator(device: torch.device) -> torch.Generator:
    """The process's own random stream on a CUDA device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator
