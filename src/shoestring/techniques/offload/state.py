"""`optimizer.state` whose tensors lie on the host.

Optimizers write their state by `state[key] = tensor`; here that moves the tensor. Copies, pickles
and files are of plain dictionaries.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ...errors import first_line
from ...trace.fakes import is_fake
from ...trace.places import is_elsewhere
from ...units import format_size
from ..host import check_pinned, offloaded, pinned_bytes
from ..optimizers import whole_elements

Entries = dict[str, Any]
Pair = tuple[torch.Tensor, torch.Tensor]
"""A copy on the device, and the tensor on the host."""
_ALIGN = 512


class OffloadedEntries(dict[str, Any]):
    """State of one parameter."""

    def __init__(self, store: Callable[[Any], Any], given: Entries) -> None:
        super().__init__()
        self._store = store
        self.held: dict[str, Pair] = {}
        """While an update runs on the device: key → copy there, tensor on the host."""
        self.open = False
        self.flat: torch.Tensor | None = None
        """All that was moved, one after the other, where it is packed."""
        self._moved: list[tuple[str, torch.Tensor]] | None = None
        self._moved_bytes: int | None = None
        self._before: Entries = {}
        """While an update runs: what was there when it began."""
        self.update(given)

    def __setitem__(self, key: str, value: Any) -> None:
        if self.open:
            super().__setitem__(key, value)
            return
        self._unpack()
        super().__setitem__(key, self._store(value))

    def __delitem__(self, key: str) -> None:
        self._unpack()
        super().__delitem__(key)

    def pop(self, key: str, *default: Any) -> Any:
        """As a dictionary's."""
        self._unpack()
        return super().pop(key, *default)

    def clear(self) -> None:
        """As a dictionary's."""
        self._unpack()
        super().clear()

    def _unpack(self) -> None:
        self.flat = self._moved = self._moved_bytes = None

    def moved(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors on the host; while an update runs, those from before it."""
        if self._moved is None:
            self._moved = [
                (key, value)
                for key, value in self.items()
                if isinstance(value, torch.Tensor) and is_elsewhere(value)
            ]
        return self._moved

    @property
    def moved_bytes(self) -> int:
        """Of all that, each where a copy of it may begin."""
        if self._moved_bytes is None:
            moved = self.moved()
            self._moved_bytes = sum(aligned(t.numel() * t.element_size()) for _, t in moved)
        return self._moved_bytes

    def pack(self) -> None:
        """Put what is in pinned memory into one piece of it; OSError if there is none left."""
        moved = self.moved()
        if self.flat is not None or not moved or not all(t.is_pinned() for _, t in moved):
            return
        flat = pinned_bytes(self.moved_bytes)
        start = 0
        for key, value in moved:
            nbytes = value.numel() * value.element_size()
            part = flat[start : start + nbytes].view(value.dtype)
            super().__setitem__(key, part.as_strided(value.shape, value.stride()).copy_(value))
            start += aligned(nbytes)
        self.flat, self._moved = flat, None

    def update(self, *given: Any, **named: Any) -> None:
        """As a dictionary's, which would write past `__setitem__`."""
        for key, value in dict(*given, **named).items():
            self[key] = value

    def setdefault(self, key: str, default: Any = None) -> Any:
        """As a dictionary's."""
        if key not in self:
            self[key] = default
        return self[key]

    def enter(self, held: dict[str, Pair]) -> None:
        """An update begins: it finds copies on the device, and may add what it likes."""
        self.moved()
        self.open, self.held, self._before = True, held, dict(self)
        for key, (here, _) in held.items():
            super().__setitem__(key, here)

    def leave(self) -> list[Pair]:
        """It has ended: the copies to write back, with their places; what is new is moved."""
        self.open, held, self.held = False, self.held, {}
        before, self._before = self._before, {}
        back = []
        for key, value in list(self.items()):
            if key in held and value is held[key][0]:
                back.append(held[key])
                super().__setitem__(key, held[key][1])
            elif key not in before or value is not before[key]:  # else all stays packed
                self[key] = value
        return back

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: Any) -> Entries:
        import copy

        return copy.deepcopy(dict(self), memo)


class OffloadedState(defaultdict[torch.Tensor, Entries]):
    """State of all parameters: tensors of `smallest` elements and more are moved as they come.

    That of the parameters in `kept` stays where it is.
    """

    def __init__(
        self, folder: str, smallest: int, kept: frozenset[torch.Tensor] = frozenset()
    ) -> None:
        super().__init__(dict)
        self._folder, self._smallest, self.kept = folder, smallest, kept
        self._left: tuple[int, str] = 0, ""
        self._loose = False
        """There was no room to pack."""
        self.pending: Callable[[], None] | None = None
        """Waits for copies to the host that a step began."""

    def settle(self) -> None:
        """From here on the tensors on the host are complete."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending()

    def __getitem__(self, parameter: torch.Tensor) -> Entries:
        self.settle()
        return super().__getitem__(parameter)

    def get(self, parameter: torch.Tensor, default: Any = None) -> Any:
        """As a dictionary's."""
        self.settle()
        return super().get(parameter, default)

    def items(self) -> Any:
        """As a dictionary's."""
        self.settle()
        return super().items()

    def values(self) -> Any:
        """As a dictionary's."""
        self.settle()
        return super().values()

    def __missing__(self, parameter: torch.Tensor) -> Entries:
        self[parameter] = {}
        return super().__getitem__(parameter)

    def __setitem__(self, parameter: torch.Tensor, entries: Entries) -> None:
        if not isinstance(entries, OffloadedEntries):
            of_whole = parameter.numel() / max(whole_elements(parameter), 1)
            store = _unmoved if parameter in self.kept else partial(self._store, of_whole)
            entries = OffloadedEntries(store, entries)
        super().__setitem__(parameter, entries)

    def update(self, *given: Any, **named: Any) -> None:
        """As a dictionary's."""
        for parameter, entries in dict(*given, **named).items():
            self[parameter] = entries

    def entries(self, parameter: torch.Tensor) -> OffloadedEntries:
        """Of one parameter, where its tensors lie now; waits for nothing."""
        found = super().get(parameter)
        if found is None:
            found = self.__missing__(parameter)
        assert isinstance(found, OffloadedEntries)
        return found

    def has(self, parameter: torch.Tensor) -> bool:
        """Whether there is any state of it."""
        return bool(super().get(parameter))

    def pack(self, parameter: torch.Tensor, written: Callable[[], None]) -> None:
        """Let state in pinned memory lie in one piece, so that it moves as one.

        `written` waits until it is there, which is not asked where there is nothing to pack.
        """
        entries = self.entries(parameter)
        if entries.flat is not None or not entries.moved() or self._loose:
            return
        written()
        try:
            entries.pack()
        except OSError:  # it moves tensor by tensor, and so does what comes later
            self._loose = True

    def moves(self, value: Any, of_whole: float = 1.0) -> bool:
        """Whether it belongs on the host; `of_whole` of its parameter is held here."""
        return (
            isinstance(value, torch.Tensor)
            and value.dim() > 0
            and value.numel() >= of_whole * self._smallest
        )

    def _store(self, of_whole: float, value: Any) -> Any:
        if not self.moves(value, of_whole) or is_elsewhere(value):
            return value
        return self.place(value, pinned=value.is_cuda)

    def place(self, value: torch.Tensor, *, pinned: bool) -> torch.Tensor:
        """A copy on the host; the tensor itself where there is no room."""
        if self._left[1]:
            return value
        try:
            if pinned and not is_fake(value):
                check_pinned(value.nbytes)
            return offloaded(value, self._folder, pinned=pinned)
        except OSError as error:  # the update must not end halfway: say it at its end
            self._left = self._left[0] + value.nbytes, first_line(error)
            return value

    def warn(self) -> None:
        """Say once that there was no room; what had none stays where it was, and trains."""
        nbytes, why = self._left
        if nbytes:
            self._left = 0, why
            warnings.warn(
                f"offload: {format_size(nbytes)} of optimizer state and all that follows stay "
                f"where they are: {why}",
                RuntimeWarning,
                stacklevel=3,
            )

    def __reduce__(self) -> Any:
        return _plain_state, (list(self.items()),)

    def __deepcopy__(self, memo: Any) -> Any:
        import copy

        return copy.deepcopy(_plain_state(list(self.items())), memo)


def aligned(nbytes: int) -> int:
    """As tensors begin in a buffer."""
    return -(-nbytes // _ALIGN) * _ALIGN


def _unmoved(value: Any) -> Any:
    return value


def _plain_state(items: list[tuple[torch.Tensor, Entries]]) -> defaultdict[torch.Tensor, Entries]:
    made: defaultdict[torch.Tensor, Entries] = defaultdict(dict)
    made.update((parameter, dict(entries)) for parameter, entries in items)
    return made


class _Passing:
    """A tensor that `load_state_dict` passes on as it is, and does not take to the device."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def keep_on_host(
    optimizer: Optimizer,
    folder: str,
    smallest: int,
    kept: frozenset[torch.Tensor] = frozenset(),
) -> Callable[[], None]:
    """Move the state there is, and all that is made or loaded later. Returns the undo."""
    original = optimizer.state
    moved = OffloadedState(folder, smallest, kept)
    moved.update(original)
    optimizer.state = moved

    def loading(optimizer: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        if isinstance(optimizer.state, OffloadedState):
            optimizer.state.settle()  # a replayed graph may still write what goes now
        moves = OffloadedState(folder, smallest, kept).moves
        names = [name for group in loaded["param_groups"] for name in group["params"]]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        here = {name for name, p in zip(names, held, strict=False) if p in kept}
        state = {
            name: {
                key: _Passing(value) if moves(value) else value for key, value in entries.items()
            }
            if isinstance(entries, dict) and name not in here
            else entries
            for name, entries in loaded["state"].items()
        }
        return {**loaded, "state": state}

    def loaded(optimizer: Optimizer) -> None:
        """PyTorch has put a dictionary of its own there, floats in the parameter's type."""
        found = OffloadedState(folder, smallest, kept)
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items():
                if isinstance(value, _Passing):
                    kind = value.tensor.dtype
                    if parameter.is_floating_point() and kind.is_floating_point:
                        kind = parameter.dtype
                    copied = found.place(value.tensor.to(kind), pinned=parameter.is_cuda)
                    found[parameter][key] = copied.clone() if copied is value.tensor else copied
                else:  # as they were loaded they would be shared with whoever gave them
                    shared = isinstance(value, torch.Tensor) and not is_elsewhere(value)
                    found[parameter][key] = value.clone() if shared else value
        optimizer.state = found
        found.warn()

    def saved(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Plain dictionaries, which `torch.load` trusts."""
        return {**state, "state": {name: dict(held) for name, held in state["state"].items()}}

    handles = (
        optimizer.register_state_dict_post_hook(saved),
        optimizer.register_load_state_dict_pre_hook(loading),
        optimizer.register_load_state_dict_post_hook(loaded),
    )

    def undo() -> None:
        for handle in handles:
            handle.remove()
        optimizer.state = original

    moved.warn()
    return undo
