"""Sums of gradients that lie on the host until the last part of a batch.

Beside the CPU a sum lies in a mapped file, and gradients are added to it there. Beside a GPU it is
in pinned memory, and the device adds: two buffers, and a stream each way.

    in         piece 2's old sum   piece 3's old sum   …
    compute    piece 1 + part      piece 2 + part      …
    out                            piece 1's new sum   …

So the sum is made by the addition of plain accumulation, old sum + part, and no bit differs. The
host adds nothing, hence a step need not wait for it, and can be a CUDA graph. Buffers are of one
size, and larger tensors pass in several pieces. The piece that follows is the one that followed
last time, and comes in ahead. What computes waits for a buffer, never for the host, so the bytes on
the device do not depend on the speed of the link.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ...errors import first_line
from ...trace.cuda import lies_as
from ...trace.fakes import is_fake
from ...units import format_size
from ..host import check_pinned, place_for

BUFFER_BYTES = 2**26
"""Of each of the two buffers, unless all gradients are smaller."""
_ALIGN = 512


class HostSums:
    """Sums of what the parts of a batch had so far, parameter by parameter."""

    def __init__(self, folder: str, smallest: int, way: SumLink | None) -> None:
        """`way`: to the host and back beside a GPU; None beside the CPU."""
        self._folder, self._smallest, self._way = folder, smallest, way
        self._there: dict[torch.Tensor, torch.Tensor] = {}
        """Room on the host: it stays from step to step."""
        self._held: dict[torch.Tensor, list[SumPiece]] = {}
        """Those with a sum now."""
        self._pieces: dict[torch.Tensor, list[SumPiece]] = {}
        self._full = False

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._held

    def __bool__(self) -> bool:
        return bool(self._held)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(list(self._held))

    def begin(self) -> None:
        """A batch begins."""
        if self._way is not None:
            self._way.begin()

    def end(self) -> None:
        """It has ended: what is computed next waits for what is on its way."""
        if self._way is not None:
            self._way.wait()

    def forget(self) -> None:
        """No update will be made from them."""
        for parameter in self:
            self._release(parameter)

    def add(self, parameter: torch.Tensor) -> None:
        """Take the gradient of a part away and add it to the sum, if it is one that moves."""
        gradient = parameter.grad
        assert gradient is not None
        before = parameter in self._held
        there = self._there.get(parameter) if before else self._room_for(parameter, gradient)
        if there is None:
            return
        pieces = self._held.setdefault(parameter, self._pieces[parameter])
        if self._way is not None:
            flat = _flat(gradient if _alike(there, gradient) else _as(there, gradient))
            for piece in pieces:
                self._way.send(piece, flat[piece.start : piece.end])
        elif before:
            there.add_(gradient)
        else:
            there.copy_(gradient)
        parameter.grad = None

    def finish(self, parameter: torch.Tensor) -> None:
        """The gradient is the whole sum now, and the host has none."""
        if parameter not in self._held:
            return
        there, gradient = self._there[parameter], parameter.grad
        made = torch.empty_like(there, device=parameter.device) if gradient is None else gradient
        if not _alike(there, made):
            made = _as(there, made)
        if self._way is not None:
            flat = _flat(made)
            for piece in self._held[parameter]:
                self._way.fetch(piece, flat[piece.start : piece.end], adds=gradient is not None)
        elif gradient is None:
            made.copy_(there)
        else:
            made.add_(there)
        parameter.grad = made
        self._release(parameter)

    def _release(self, parameter: torch.Tensor) -> None:
        for piece in self._held.pop(parameter):
            piece.held = False

    def _room_for(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor | None:
        """None for one that stays: a small or sparse one, or where the host has no room."""
        if gradient.layout is not torch.strided or gradient.numel() < self._smallest:
            return None
        there = self._there.get(parameter)
        if there is None or not _alike(there, gradient):
            there = self._placed(gradient)
            if there is None or not _alike(there, gradient):
                return None
            self._there[parameter] = there
            self._pieces[parameter] = [] if self._way is None else self._way.pieces(there)
        return there

    def _placed(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if self._full:
            return None
        try:
            if gradient.is_cuda and not is_fake(gradient):
                check_pinned(gradient.nbytes)
            return place_for(gradient, self._folder, pinned=gradient.is_cuda)
        except OSError as error:
            self._full = True
            warnings.warn(
                f"gradient_release: a sum of {format_size(gradient.nbytes)} and all that follow "
                f"stay on the device: {first_line(error)}",
                RuntimeWarning,
                stacklevel=2,
            )
            return None


class SumPiece:
    """Some elements of a sum on the host."""

    def __init__(self, flat: torch.Tensor, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.there = flat[start:end]
        self.held = False
        """Whether it is there now."""
        self.following: SumPiece | None = None
        """The one that came next, last time."""
        self.written: Any = None
        """When it is on the host."""


class SumLink:
    """Two buffers on the device, taken in turn, and the streams that fill and empty them."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        held = list(parameters)
        self._like = held[0]
        self._nbytes = buffer_bytes(p.nbytes for p in held)
        self._real = self._like.is_cuda and not is_fake(self._like)
        self._both: torch.Tensor | None = None
        self._buffers: tuple[torch.Tensor, ...] = ()
        self._make_streams()
        self._all: list[SumPiece] = []
        self._turn = 0
        self._emptied: list[Any] = [None, None]
        self._ahead: tuple[SumPiece, Any] | None = None
        """The piece that comes into the next buffer, and when it is there."""
        self._last: SumPiece | None = None
        self._capturing = False

    def _make_streams(self) -> None:
        if self._real:
            self._in, self._out = (torch.cuda.Stream(self._like.device) for _ in range(2))

    def pieces(self, there: torch.Tensor) -> list[SumPiece]:
        """Each fits a buffer."""
        flat, each = _flat(there), self._nbytes // there.element_size()
        made = [SumPiece(flat, at, min(at + each, len(flat))) for at in range(0, len(flat), each)]
        self._all += made
        return made

    def send(self, piece: SumPiece, part: torch.Tensor) -> None:
        """Add a part to a piece of a sum, and begin to copy that out."""
        room = self._room(piece)
        if piece.held:
            room.add_(part)
        else:
            room.copy_(part)
        piece.held = True
        with self._on("out"):
            piece.there.copy_(room, non_blocking=True)
            if self._real:
                self._emptied[self._turn] = piece.written = self._out.record_event()

    def fetch(self, piece: SumPiece, here: torch.Tensor, *, adds: bool) -> None:
        """Bring a piece to what is there, or add it to that."""
        room = self._room(piece)
        if adds:
            here.add_(room)
        else:
            here.copy_(room)
        piece.held = False
        if self._real:
            self._emptied[self._turn] = torch.cuda.current_stream().record_event()

    def _room(self, piece: SumPiece) -> torch.Tensor:
        """The next buffer, with what is held of the piece; the piece that follows comes ahead."""
        self._turn = 1 - self._turn
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] is not piece:
            ahead = piece, self._bring(piece, self._turn)
        if self._last is not None:
            self._last.following = piece
        self._last, following = piece, piece.following
        if following is not None and following is not piece and following.held:
            self._ahead = following, self._bring(following, 1 - self._turn)
        if self._real:
            torch.cuda.current_stream().wait_event(ahead[1])
        return self._view(piece, self._turn)

    def _bring(self, piece: SumPiece, index: int) -> Any:
        """Begin to copy it in, once the buffer is free; when that is done."""
        with self._on("in"):
            if self._real:
                for event in (self._emptied[index], piece.written):
                    if event is not None:
                        self._in.wait_event(event)
            if piece.held:
                self._view(piece, index).copy_(piece.there, non_blocking=True)
            return self._in.record_event() if self._real else None

    def _view(self, piece: SumPiece, index: int) -> torch.Tensor:
        return self._buffers[index][: piece.there.nbytes].view(piece.there.dtype)

    def begin(self) -> None:
        """A step begins: what is copied from here on waits for all before.

        The buffers are there from the first step on, in however many parts it runs.
        """
        if self._both is None:
            self._both = torch.empty(2 * self._nbytes, dtype=torch.uint8, device=self._like.device)
        self._buffers = self._both.split(self._nbytes)  # in every step, so that traces know of them
        if not self._capturing:
            self.wait()
        self._follow()
        self._ahead = None
        self._emptied = [None, None]
        for piece in self._all:
            piece.written = None

    def _follow(self) -> None:
        if self._real:
            for stream in (self._in, self._out):
                stream.wait_stream(torch.cuda.current_stream())

    def wait(self) -> None:
        """All that is computed next finds nothing on its way."""
        if self._real:
            for stream in (self._in, self._out):
                torch.cuda.current_stream().wait_stream(stream)

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Around a step that is captured: its streams leave from that of the capture, and join."""
        self._capturing = True
        try:
            self.begin()
            yield
            self.wait()
        except BaseException:
            with suppress(RuntimeError):  # else the capture would end with another error
                self.wait()
            self._make_streams()  # the others were left within the capture
            raise
        finally:
            self._capturing = False
            self._ahead, self._emptied = None, [None, None]
            for piece in self._all:
                piece.written = None

    @contextmanager
    def _on(self, name: str) -> Iterator[None]:
        if not self._real:
            yield
            return
        if name == "out":
            self._out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._in if name == "in" else self._out):
            yield


def buffer_bytes(each: Iterable[int]) -> int:
    """Of one of the two buffers, for gradients of so many bytes."""
    return min(BUFFER_BYTES, -(-max(each) // _ALIGN) * _ALIGN)


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and lies_as(one, other)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All its elements as they lie in memory; it has no gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _as(there: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as the first part's lay, which the sum lies as."""
    return torch.empty_like(there, device=gradient.device).copy_(gradient)
