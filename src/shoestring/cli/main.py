"""Verbs → library calls; no logic. Data on stdout, progress and errors on stderr."""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn

import typer

from ..errors import InputError, ShoestringError, render
from ..torch_private.loggers import FAKE_TENSORS
from ..version import __version__
from . import doctor, fit_verbs, step_verbs, study_verbs, train_verbs

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Train neural networks in a small, known amount of memory.",
    epilog="""Start with:

`shoestring profile wrn-28-2`

`shoestring plan wrn-28-2 --budget '120 MB' -o plan.toml`

`shoestring verify wrn-10-1 --checkpoint 'residual-2*'`

`shoestring doctor`
""",
)
SEE, FIT, TRAIN, STUDY, HERE = (
    "See where memory goes",
    "Fit a budget or a card",
    "Train",
    "Run studies",
    "This machine",
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"shoestring {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app.command(rich_help_panel=SEE, epilog=step_verbs.PROFILE_EXAMPLES)(step_verbs.profile)
app.command(rich_help_panel=FIT, epilog=step_verbs.PLAN_EXAMPLES)(step_verbs.plan)
app.command(rich_help_panel=FIT, epilog=fit_verbs.CARDS_EXAMPLES)(fit_verbs.cards)
app.command(rich_help_panel=FIT, epilog=step_verbs.VERIFY_EXAMPLES)(step_verbs.verify)
app.command(rich_help_panel=SEE, epilog=fit_verbs.EXPLAIN_EXAMPLES)(fit_verbs.explain)
app.command(rich_help_panel=SEE, epilog=fit_verbs.CHECK_EXAMPLES)(fit_verbs.check)
app.command(rich_help_panel=TRAIN, epilog=train_verbs.TRAIN_EXAMPLES)(train_verbs.train)
app.command(rich_help_panel=TRAIN, epilog=train_verbs.TRANSLATE_EXAMPLE)(train_verbs.translate)
app.command(rich_help_panel=TRAIN, epilog=train_verbs.PREPARE_EXAMPLE)(train_verbs.prepare)
app.command(rich_help_panel=STUDY, epilog=study_verbs.STUDY_EXAMPLES)(study_verbs.study)
app.command(rich_help_panel=STUDY, epilog=study_verbs.REPORT_EXAMPLES)(study_verbs.report)
app.command(rich_help_panel=HERE, epilog=doctor.DOCTOR_EXAMPLES)(doctor.doctor)


def main() -> NoReturn:
    """Run the command line; a user's mistake is one line and a hint, never a traceback."""
    warnings.showwarning = lambda message, category, *_: print(
        f"warning: {message}", file=sys.stderr
    )
    if isinstance(sys.stdout, TextIOWrapper):  # a path may have bytes that are not text
        sys.stdout.reconfigure(errors="backslashreplace")
    # It logs a traceback of its own for every error that is then raised and shown as one line.
    # A filter, because importing PyTorch sets its level.
    logging.getLogger(FAKE_TENSORS).addFilter(_silent)
    status = None
    try:
        status = app(standalone_mode=False)  # an early exit, such as --version, returns its status
    except ShoestringError as error:
        rank = os.environ.get("RANK", "0")  # under torchrun the first one speaks for all
        _fail(render(error) if rank == "0" else f"rank {rank}: {error.message}", error.exit_status)
    except KeyboardInterrupt:
        _fail("stopped", 130)
    except SystemExit as error:  # ours come below: this is a module that somebody imported
        if isinstance(error.__context__, BrokenPipeError):  # whoever read the output has left
            sys.exit(1)
        if _raised_in(error).startswith(("typer", "click")):  # completions were asked for or set up
            raise
        wrong = InputError(f"something that was imported ended the program: exit({error.code!r})")
        _fail(render(wrong), wrong.exit_status)
    except OSError as error:  # a name that is too long, a folder that may not be read, a full disk
        if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        shown = str(error.filename or "the disk")
        _fail(render(InputError(f"cannot use {shown[:200]}: {error.strerror}")), 2)
    except Exception as error:
        # Typer brings its own copy of click or uses the installed one, by version.
        kind = type(error).__name__
        if kind in ("Exit", "NoArgsIsHelpError"):
            sys.exit(getattr(error, "exit_code", 2))
        if kind == "Abort" and isinstance(error.__cause__, EOFError):  # Typer takes it for a ^D
            raise error.__cause__ from None
        if kind == "Abort":
            _fail("stopped", 130)
        if hasattr(error, "format_message"):
            at: Any = getattr(error, "ctx", None)
            of = f" {at.info_name}" if getattr(at, "parent", None) else ""  # the verb, if known
            wrong = InputError(_usage_message(error), hint=f"see shoestring{of} --help")
            _fail(render(wrong), 2)
        raise
    if status == 130:  # Typer makes this of Ctrl-C
        _fail("stopped", 130)
    sys.exit(status or 0)


def _raised_in(error: BaseException) -> str:
    """The module that raised it."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return "" if at is None else str(at.tb_frame.f_globals.get("__name__", ""))


def _silent(_: logging.LogRecord) -> bool:
    return False


def _usage_message(error: Any) -> str:
    """The mistake in the arguments, and the text that could not be read."""
    message = str(error.format_message()).rstrip(".")
    cause = error.__cause__
    given = cause.errors()[0]["input"] if hasattr(cause, "errors") else None
    return message if given is None else f"{message}: {given!r}"


def _fail(message: str, status: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(status)
