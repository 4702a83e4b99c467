"""Whether what CUDA streams do is ordered: a recorder that stands in for them on the CPU.

All tensors pass for a GPU's, except memory that was asked for as pinned. Every operation runs at
once, so its result is right in any case; what is recorded is whether a GPU would have had to wait
for it. Each stream, and the host, has a clock: a number of operations of its own, and how many of
every other are known to be over. Two accesses to the same bytes, one of them a write, are a fault
unless the later one's clock knows of the earlier one.

    recorder = Recorder()
    recorder.run(monkeypatch, lambda: step(batch))
    assert recorder.faults == []

A step can be captured and replayed as a CUDA graph, and waits of one line of code be left out.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoestring.techniques import host

Clock = dict[str, int]
Access = tuple[int, int, bool]
"""First byte, end, whether it is written."""


class Line:
    """What happens one after the other: a stream, the host, a stream within one graph."""

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, {name: 0}

    def join(self, clock: Clock) -> None:
        for name, tick in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), tick)

    def tick(self) -> int:
        self.clock[self.name] += 1
        return self.clock[self.name]


class Event:
    """So much of a stream."""

    def __init__(self, recorder: Recorder, line: Line, graph: object) -> None:
        self._recorder, self.clock, self.graph = recorder, dict(line.clock), graph

    def synchronize(self) -> None:
        self._recorder.host_waits(self.clock)


class Stream:
    """In place of `torch.cuda.Stream`."""

    def __init__(self, recorder: Recorder, device: Any = None) -> None:
        self.recorder = recorder
        self.line = Line(f"stream {recorder.count()}")
        self.graph: object = None
        """The capture it is in."""

    def record_event(self) -> Event:
        return Event(self.recorder, self.line, self.graph)

    def wait_event(self, event: Event) -> None:
        if self.recorder.waits():
            self.recorder.stream_waits(self, event)

    def wait_stream(self, other: Stream) -> None:
        if self.recorder.waits():
            self.recorder.stream_waits(self, other.record_event())

    def synchronize(self) -> None:
        self.recorder.host_waits(self.line.clock)


class Storage:
    """Of one storage: whose memory it is (None on the host), and the last accesses."""

    def __init__(self, where: str, owner: Stream | None, graph: object) -> None:
        self.where, self.owner, self.graph = where, owner, graph
        self.seen: dict[tuple[int, int, bool, str], tuple[int, str]] = {}


class Graph:
    """A captured step: what it reads and writes of memory that is not its own."""

    def __init__(self) -> None:
        self.accesses: dict[int, tuple[str, set[Access]]] = {}
        self.forked: list[tuple[Stream, Line]] = []


class Recorder(TorchDispatchMode):
    """Records all operations; `faults` says what is not ordered, or not allowed in a capture."""

    def __init__(self, without: str | None = None) -> None:
        """`without`: the line of code, "file.py:12", that does not wait."""
        super().__init__()
        self.faults: list[str] = []
        self.waited: dict[str, None] = {}
        """Lines of code that wait."""
        self._without, self._numbers, self._graph = without, 0, None
        self._storages: dict[int, tuple[Storage, Any]] = {}
        self._pinned: set[int] = set()
        self._host = Line("host")
        self.compute = self.current = Stream(self)

    # -- in place of torch.cuda ------------------------------------------------------------------

    def run(self, patch: pytest.MonkeyPatch, function: Callable[[], Any]) -> Any:
        """What it returns, where tensors are a GPU's; what it made goes before it ends."""
        with patch.context() as within, self:
            within.setattr(torch.Tensor, "is_cuda", property(lambda t: not self._on_host(t)))
            within.setattr(torch.Tensor, "is_pinned", lambda t: self._on_host(t))
            within.setattr(torch.UntypedStorage, "cpu", lambda storage: storage.clone())
            within.setattr(torch.Tensor, "pin_memory", lambda t: self._pin(t).copy_(t))
            within.setattr(host, "_pinned", self._pin)
            within.setattr(torch.cuda, "Stream", lambda device=None: Stream(self, device))
            within.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
            within.setattr(torch.cuda, "stream", self._within)
            capturing = lambda: self._graph is not None  # noqa: E731
            within.setattr(torch.cuda, "is_current_stream_capturing", capturing)
            within.setattr(torch.cuda, "device", lambda device: nullcontext())
            returned = function()
            gc.collect()
            return returned

    @contextmanager
    def _within(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._graph is not None:
            self._fault("pinned memory is asked for while a step is captured")
        made = torch.empty_like(tensor, device="cpu")
        self._storages.pop(_key(made))  # as what it was noted when it was made
        self._pinned.add(_key(made))
        return made

    def _on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and _key(tensor) in self._pinned

    # -- waiting -----------------------------------------------------------------------------------

    def count(self) -> int:
        self._numbers += 1
        return self._numbers

    def waits(self) -> bool:
        """Whether the line of the library that calls waits, which is noted."""
        frame = sys._getframe(1)
        while frame is not None and "/src/shoestring/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is None:  # the test itself
            return True
        line = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        self.waited[line] = None
        return line != self._without

    def stream_waits(self, stream: Stream, event: Event) -> None:
        if self._graph is not None and stream.graph is None and event.graph is self._graph:
            self._graph.forked.append((stream, stream.line))
            stream.line, stream.graph = Line(f"{stream.line.name} of a graph"), self._graph
            stream.line.clock[stream.line.name] = self.count()  # of this capture, of no other
        elif event.graph is not stream.graph:
            self._fault("a captured stream waits for an event of another capture, or of none")
            return
        stream.line.join(event.clock)

    def host_waits(self, clock: Clock) -> None:
        if self.waits():
            self._host_follows(clock)

    def _host_follows(self, clock: Clock) -> None:
        if self._graph is not None:
            self._fault("the host waits while a step is captured")
        self._host.join(clock)

    # -- graphs ------------------------------------------------------------------------------------

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Within, what runs becomes part of a graph; it counts as the graph's first replay."""
        graph, own = Graph(), self.compute.line
        self.compute.line = Line(f"{own.name} of graph {self.count()}")
        self.compute.line.join(own.clock)
        self._graph = self.compute.graph = graph
        try:
            yield graph
        finally:
            self._graph = self.compute.graph = None
            ended, self.compute.line = self.compute.line, own
            own.join(ended.clock)
            for stream, line in graph.forked:
                if own.clock.get(stream.line.name, 0) < stream.line.clock[stream.line.name]:
                    self._fault(f"{line.name} does not join the captured stream again")
                stream.line, stream.graph = line, None

    def replay(self, graph: Graph) -> None:
        """Once more, on the stream that computes."""
        for key, (where, accesses) in graph.accesses.items():
            if key not in self._storages:
                self._fault(f"a graph uses {where} that is gone")
                continue
            for access in accesses:
                self._access(self.compute.line, key, access, "a replay")

    # -- operations --------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view and func is not torch.ops.aten.detach.default:
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name, schema = func.__name__.partition(".")[0], func._schema
        used: list[tuple[torch.Tensor, bool]] = []
        for number, about in enumerate(schema.arguments):
            given = args[number] if number < len(args) else kwargs.get(about.name)
            writes = about.alias_info is not None and about.alias_info.is_write
            used += [(t, writes) for t in tree_leaves(given) if _has_bytes(t)]
        for tensor in used:
            self._known(tensor[0], self.compute, made_now=False)
        there, places = {_key(t) for t, _ in used}, {self._on_host(t) for t, _ in used}
        line = self._host if places == {True} else self.current.line
        for made in tree_leaves(result):
            if _has_bytes(made) and _key(made) not in there:
                owner = None if line is self._host else self.current
                self._known(made, owner, made_now=True)
                used.append((made, True))  # also `empty`: the memory was somebody else's before
        if not used:
            return
        if line is not self._host:
            line.join(self._host.clock)
            if self._graph is not None and self.current.graph is not self._graph:
                self._fault(f"{name} runs on {line.name}, which is not captured")
        for tensor, writes in used:
            access = *_bytes(tensor), writes
            self._access(line, _key(tensor), access, name)
            storage = self._storages[_key(tensor)][0]
            if self._graph is not None and storage.graph is not self._graph:
                outside = self._graph.accesses.setdefault(_key(tensor), (storage.where, set()))
                outside[1].add(access)
        if self._graph is not None and name in ("_local_scalar_dense", "equal", "nonzero"):
            self._fault(f"{name} waits for the device while a step is captured")
        if len(places) == 2 and not kwargs.get("non_blocking", _third(args)):
            self._host_follows(self.current.line.clock)

    def _known(self, tensor: torch.Tensor, owner: Stream | None, made_now: bool) -> None:
        key = _key(tensor)
        if key not in self._storages:
            pinned = self._on_host(tensor)
            where = f"{'pinned ' * pinned}memory of {tuple(tensor.shape)}"
            storage = Storage(
                where,
                None if pinned else owner,
                self._graph if made_now else None,
            )
            held = weakref.ref(tensor.untyped_storage(), lambda _: self._freed(key))
            self._storages[key] = storage, held

    def _access(self, line: Line, key: int, access: Access, what: str) -> None:
        start, end, writes = access
        storage = self._storages[key][0]
        for (first, last, wrote, other), (tick, before) in storage.seen.items():
            if other == line.name or last <= start or end <= first or not (writes or wrote):
                continue
            if tick > line.clock.get(other, 0):
                does, did = ("writes" if w else "reads" for w in (writes, wrote))
                self._fault(
                    f"{what} on {line.name} {does} {storage.where} that {before} on {other} "
                    f"{did}, and does not wait"
                )
        storage.seen[start, end, writes, line.name] = line.tick(), what

    def _freed(self, key: int) -> None:
        """Its stream may use the memory again, at once; pinned memory is kept until then."""
        self._pinned.discard(key)
        storage = self._storages.pop(key)[0]
        pinned = storage.owner is None
        clock = self._host.clock if pinned else storage.owner.line.clock
        for (_, _, _, other), (tick, before) in storage.seen.items():
            unseen = "graph" in other or before == "a replay"  # by whoever frees pinned memory
            if tick > clock.get(other, 0) and (unseen or not pinned):
                self._fault(f"{storage.where} is free that {before} on {other} may still use")

    def _fault(self, said: str) -> None:
        if said not in self.faults:
            self.faults.append(said)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _has_bytes(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel() > 0


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    each, start = tensor.element_size(), tensor.storage_offset()
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return start * each, (start + last + 1) * each


def _third(args: Any) -> Any:
    """Of `copy_`: whether it may be under way when it returns."""
    return args[2] if len(args) > 2 else False
