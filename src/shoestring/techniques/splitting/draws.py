"""Give the parts of a batch the random numbers that the whole batch drew.

Dropout, noise, masks and time steps are drawn for a batch at once. A part would draw others, and
nothing could be compared. `Drawn` records what the whole batch drew; under `Slices` each part gets
its own rows of that. The generators still advance as they would without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...torch_private.autograd import runs_backward
from ...torch_private.dispatch import OperationMode
from ...torch_private.trees import tensor_leaves

_aten = torch.ops.aten
_SHUFFLES = ("randperm",)
"""They mix the examples: rows of them mean nothing to a part."""
_BOUNDED = ("randint", "randint_like", "random_")
_MASKED = ("native_dropout",)
_MORE = ("random_",)
"""Random, and not tagged as such."""


@dataclass(frozen=True)
class Draw:
    """One call of a random operation."""

    name: str
    drawn: torch.Tensor | None
    """The drawn numbers; None where a kernel draws internally."""
    bounds: tuple[Any, ...] = ()
    """Of whole numbers."""


class _Random(OperationMode):
    """Sees every operation that draws."""

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[torch.Generator, torch.Tensor] = {}
        """Generators of the user's, as they were."""
        self.puts_back = True
        """Take these back there at the end."""

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for generator, state in self._own.items() if self.puts_back else ():
            generator.set_state(state)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        if torch.Tag.nondeterministic_seeded not in func.tags and name not in _MORE:
            return self.other(func, args, kwargs)
        own = kwargs.get("generator")
        own = own if own is not None else next((a for a in args if _is_generator(a)), None)
        if own is not None:
            self._own.setdefault(own, own.get_state())
        before = _states(own, args, kwargs)
        made = func(*args, **kwargs)
        if _states(own, args, kwargs) == before:  # attention without dropout, for instance
            return made
        return self.draw(name, before, args, kwargs, made)

    def other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that is not random."""
        return func(*args, **kwargs)

    def draw(
        self, name: str, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> Any:
        """The result of a random operation."""
        raise NotImplementedError


class Drawn(_Random):
    """Records what is drawn, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[Draw] = []

    @property
    def hidden(self) -> str | None:
        """A kernel whose draws cannot be cut, if one ran."""
        return next((draw.name for draw in self.draws if draw.drawn is None), None)

    def draw(
        self, name: str, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> Any:
        """Keep a copy: the model may write to it."""
        if not runs_backward():  # not of a recomputation
            drawn = _drawn(name, made)
            kept = None if drawn is None else drawn.detach().clone()
            self.draws.append(Draw(name, kept, _bounds(name, args, kwargs)))
        return made


class Slices(_Random):
    """Gives rows `start` to `stop` of what `examples` examples drew.

    Recomputation finds its draws by the state of the generator, as long as it puts that back.
    """

    def __init__(self, draws: list[Draw], rows: tuple[int, int], examples: int) -> None:
        super().__init__()
        self._draws, self._rows, self._examples = draws, rows, examples
        self._next = 0
        self._again: dict[Any, torch.Tensor] = {}
        self.unmatched: str | None = None
        """Draws for which the whole batch has no rows."""

    def select(self, rows: tuple[int, int]) -> None:
        """Go on with another part, from the first draw on."""
        self._rows, self._next = rows, 0
        self._again.clear()

    def draw(
        self, name: str, state: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> Any:
        """The part's rows, in the type that is asked for."""
        drawn = _drawn(name, made)
        key = None if drawn is None else (name, state, tuple(drawn.shape))
        if runs_backward():
            rows = self._again.get(key)
        else:
            rows = self._found(name, drawn, _bounds(name, args, kwargs))
            if rows is not None:
                self._again[key] = rows
        if rows is None or drawn is None:
            return made
        rows = rows.to(drawn.dtype)
        if name in _MASKED:
            return _masked(args, made, rows)
        drawn.copy_(rows)
        return made

    def _found(
        self, name: str, drawn: torch.Tensor | None, bounds: tuple[Any, ...]
    ) -> torch.Tensor | None:
        if self._next >= len(self._draws):
            self.unmatched = self.unmatched or name
            return None
        draw = self._draws[self._next]
        self._next += 1
        rows = None
        if drawn is not None and draw.drawn is not None and draw.name == name:
            if draw.bounds == bounds:
                rows = _cut(draw.drawn, drawn.shape, self._rows, self._examples)
            if name in _SHUFFLES and draw.drawn.shape != drawn.shape:
                rows = None
        if rows is None:
            self.unmatched = self.unmatched or name
        return rows


def _cut(
    whole: torch.Tensor, shape: torch.Size, rows: tuple[int, int], examples: int
) -> torch.Tensor | None:
    """The rows of a part along the one dimension that has the examples."""
    if whole.shape == shape:  # of no example, or the part is the whole
        return whole
    if whole.dim() != len(shape):
        return None
    other = [d for d in range(whole.dim()) if whole.shape[d] != shape[d]]
    if len(other) != 1 or whole.shape[other[0]] % examples:
        return None
    each = whole.shape[other[0]] // examples
    start, stop = rows
    if shape[other[0]] != each * (stop - start):
        return None
    return whole.narrow(other[0], start * each, shape[other[0]])


def _drawn(name: str, made: Any) -> torch.Tensor | None:
    """The tensor of random numbers in what an operation returns."""
    if name in _MASKED:
        mask: torch.Tensor = made[1]
        return mask
    simple = isinstance(made, torch.Tensor) and "attention" not in name and "rnn" not in name
    return made if simple and "rrelu" not in name else None


def _masked(args: tuple[Any, ...], made: Any, mask: torch.Tensor) -> Any:
    """Dropout by another mask."""
    given, p = args[0], args[1]
    return (given * mask * (0.0 if p == 1 else 1 / (1 - p))).to(made[0].dtype), mask


def _bounds(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    if name not in _BOUNDED:
        return ()
    numbers = [a for a in args if isinstance(a, (int, float)) and not isinstance(a, bool)]
    return (*numbers, kwargs.get("low"), kwargs.get("high"), kwargs.get("to"))


def _is_generator(value: Any) -> bool:
    return isinstance(value, torch.Generator)


def _states(own: torch.Generator | None, args: Any, kwargs: Any) -> tuple[bytes, ...]:
    """Where the generator stands that an operation draws from."""
    if own is not None:
        return (own.get_state().numpy().tobytes(),)
    made = [torch.get_rng_state().numpy().tobytes()]
    devices = {t.device for t in tensor_leaves((args, kwargs)) if t.is_cuda}
    if "device" in kwargs and kwargs["device"] is not None:
        named = torch.device(kwargs["device"])
        devices |= {named} if named.type == "cuda" else set()
    return (*made, *(torch.cuda.get_rng_state(d).numpy().tobytes() for d in devices))


@contextmanager
def open_kernels() -> Iterator[None]:
    """No kernel draws by itself: attention and LSTMs in steps, so that dropout shows."""
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if torch.cuda.is_available():
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield
