"""The errors a user can meet, and the exit status of each.

Exception
└── ShoestringError              exit 2: the call was wrong
    ├── InputError (ValueError)  a bad argument, model or batch
    │   └── SizeError            a size that cannot be read
    ├── TraceError               the model could not be traced
    ├── BudgetError              exit 1: nothing fits the budget
    ├── VerificationError        exit 1: what was measured is not what was promised
    └── TrainingStopped          exit 1: a run ended early; 130 or 143 by a signal

UserWarning
├── BudgetWarning                a step needed more than its budget
├── NoEffectWarning              a setting matched nothing in the model
├── UnknownOperationWarning      an operation without a rule, so its bytes may be off
└── UnprovenWarning              something was assumed that could not be tested
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar


class ShoestringError(Exception):
    """An error a user can act on: what happened, and optionally the way out.

    Args:
        message: What happened, with the numbers.
        hint: The way out.

    Examples:
        >>> try:
        ...     ss.Plan.load("missing.toml")
        ... except ss.ShoestringError as error:
        ...     print(error.message, error.hint)
    """

    exit_status: ClassVar[int] = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint is not None:
            self.add_note(f"hint: {hint}")  # a traceback shows it


class InputError(ShoestringError, ValueError):
    """An argument, model or batch that cannot be used.

    Examples:
        >>> try:
        ...     ss.Precision("fp12")
        ... except ss.InputError as error:
        ...     print(error.message)
    """


class SizeError(InputError):
    """A size that cannot be read as a number of bytes.

    Examples:
        >>> try:
        ...     ss.plan(model, batch, loss=loss, optimizer=optimizer, budget="6M")
        ... except ss.SizeError as error:
        ...     print(error.hint)
    """


class TraceError(ShoestringError):
    """The model, its batch or its loss could not be traced.

    Args:
        message: What happened, and where.
        hint: The way out.
        values: Whether values of tensors are read, which only real tensors have.

    Examples:
        >>> try:
        ...     ss.profile(model, batch, loss=loss)
        ... except ss.TraceError as error:
        ...     print(error.message)
    """

    def __init__(self, message: str, hint: str | None = None, *, values: bool = False) -> None:
        super().__init__(message, hint)
        self.values = values
        """Because values of tensors are read, which a forward pass on real ones would tell."""


class BudgetError(ShoestringError):
    """No plan fits the budget, or a step did not stay within it.

    Args:
        message: What happened, with the numbers.
        hint: The way out.
        smallest_bytes: The smallest budget for which a plan was found.

    Examples:
        >>> try:
        ...     ss.plan(model, batch, loss=loss, optimizer=optimizer, budget="1 KB")
        ... except ss.BudgetError as error:
        ...     print(error.smallest_bytes, error.hint)
    """

    exit_status = 1

    def __init__(
        self, message: str, hint: str | None = None, smallest_bytes: int | None = None
    ) -> None:
        super().__init__(message, hint)
        self.smallest_bytes = smallest_bytes
        """The smallest budget for which a plan was found."""


class VerificationError(ShoestringError):
    """A measured step differs from the predicted or the plain one.

    Examples:
        >>> certificate = ss.verify(plan, model, [batch], loss=loss, optimizer=optimizer)
        >>> try:
        ...     certificate.check()
        ... except ss.VerificationError as error:
        ...     print(error.message)
    """

    exit_status = 1


class TrainingStopped(ShoestringError):
    """A run that ended before its last step; its snapshots are good.

    Args:
        message: What ended it, and when.
        hint: The way out.
        exit_status: Of the command line.

    Examples:
        >>> try:
        ...     raise ss.TrainingStopped("stopped at update 100", hint="--resume")
        ... except ss.TrainingStopped as error:
        ...     print(error.hint)
    """

    exit_status = 1

    def __init__(self, message: str, hint: str | None = None, exit_status: int = 1) -> None:
        super().__init__(message, hint)
        self.exit_status = exit_status  # type: ignore[misc]


class BudgetWarning(UserWarning):
    """A step that needed more memory than its budget, with the numbers.

    Examples:
        >>> warnings.simplefilter("error", ss.BudgetWarning)
    """


class NoEffectWarning(UserWarning):
    """A setting that changed nothing, because nothing in the model matched it.

    Examples:
        >>> warnings.simplefilter("error", ss.NoEffectWarning)
    """


class UnprovenWarning(UserWarning):
    """Something was assumed that could not be tested.

    Examples:
        >>> warnings.simplefilter("error", ss.UnprovenWarning)
    """


class UnknownOperationWarning(UserWarning):
    """An operation the rules do not know, so that the bytes counted for it may be off.

    Examples:
        >>> warnings.simplefilter("ignore", ss.UnknownOperationWarning)
    """


@contextmanager
def needs_extra(extra: str, package: str, purpose: str) -> Iterator[None]:
    """Around the import of an optional package: names the extra that brings it if it is missing."""
    try:
        yield
    except ImportError:
        raise InputError(
            f"{purpose} needs {package}, which is not installed",
            hint=f"pip install 'shoestring[{extra}]'",
        ) from None


def render(error: ShoestringError) -> str:
    """The error as the command line prints it: kind and message, then the hint."""
    line = f"{type(error).__name__}: {error.message}"
    return line if error.hint is None else f"{line}\nhint: {error.hint}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the known name like it, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else "one of " + ", ".join(names)


def first_line(error: BaseException) -> str:
    """An exception's message, short enough for one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
