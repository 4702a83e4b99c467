"""Verbs → library calls; no logic. Data on stdout, progress and errors on stderr."""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ..errors import InputError, ShoestringError, render
from ..progress import working
from ..torch_private.loggers import FAKE_TENSORS
from ..version import __version__
from . import doctor as doctor
from . import fit_verbs as fit_verbs
from . import next_command as next_command
from . import study_verbs as study_verbs
from . import train_verbs as train_verbs
from .options import (
    AsJson,
    Batch,
    Dtype,
    Gpus,
    Inputs,
    Lora,
    LossName,
    ModelName,
    OptimizerName,
    PlanFile,
    Quantize,
    Sharding,
    Tokens,
    check_at_once,
    check_places,
    json_line,
    lossy_names,
    planned,
    show,
    with_technique_flags,
)
from .profile_table import show_profile

if TYPE_CHECKING:
    from ..planning.result import BudgetPlan

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


@app.command(
    rich_help_panel=SEE,
    epilog="""Examples:

`shoestring profile wrn-28-2`

`shoestring profile wrn-28-2 --density 0.3 --precision fp16 --microbatch 10 --checkpoint no-bn`

`shoestring profile mypackage.models:build --input 8x3x224x224 --accounting device --device cuda`
""",
)
@with_technique_flags
def profile(
    model: ModelName,
    input: Inputs = None,
    batch: Batch = None,
    optimizer: OptimizerName = None,
    techniques: dict[str, Any] = {},  # noqa: B006
    accounting: Annotated[
        str,
        typer.Option(help="fundamental (the report's) or device (what the allocator shows)."),
    ] = "fundamental",
    device: Annotated[
        str, typer.Option(help="cpu or cuda, for --accounting device; it need not be there.")
    ] = "cpu",
    loss: LossName = None,
    tokens: Tokens = None,
    lora: Lora = None,
    quantize: Quantize = None,
    dtype: Dtype = None,
    svg: Annotated[
        str | None, typer.Option(help="Draw memory over the step, by role, as SVG.")
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(help="Also write a page: the step over time, plain beside planned."),
    ] = None,
    trace: Annotated[
        str | None, typer.Option(help="Also write the timeline for Perfetto (ui.perfetto.dev).")
    ] = None,
    snapshot: Annotated[
        str | None,
        typer.Option(help="Also write a memory snapshot for pytorch.org/memory_viz."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where every byte of a training step goes, before anything is allocated."""
    with working(f"tracing {model}"):
        from ..lab.target import at_once, flagged_plan, resolve
        from ..memory.picture import check_name
        from ..step.profiling import check
        from ..step.profiling import profile as predict
        from ..techniques.registry import flags

        check(accounting, device)
        check_name(svg)
        check_places(page=html, picture=svg, trace=trace, snapshot=snapshot)
        chosen = flagged_plan(model, techniques)
        counted = accounting == "fundamental"  # on the part of the batch that runs at once
        plan = chosen if counted else None
        how = {"tokens": tokens, "lora": lora, "quantize": quantize, "dtype": dtype}
        target = resolve(model, input or (), batch=batch, plan=plan, loss=loss, how=how)
        check_at_once(chosen, target.batch_size, target.batch_unit)
        name = target.optimizer if optimizer is None else optimizer
        result = predict(
            target.model,
            target.batch,
            loss=target.loss,
            optimizer=None if name == "none" else name,
            accounting=accounting,  # type: ignore[arg-type]
            device=device,  # type: ignore[arg-type]
            techniques=at_once(chosen) if counted else chosen,
        )
    settings = {
        "model": model,
        "batch": target.batch_size,
        "batch_unit": target.batch_unit,
        "optimizer": name,
        **{flag.name: techniques.get(flag.name, flag.neutral) for flag in flags().values()},
    }
    if html is not None:
        from ..lab.study.profile_page import write_profile

        plain = None
        if chosen.techniques:
            with working(f"tracing {model} without techniques"):
                whole = resolve(model, input or (), batch=batch, loss=loss, how=how)
                plain = predict(
                    whole.model,
                    whole.batch,
                    loss=whole.loss,
                    optimizer=None if name == "none" else name,
                    accounting=accounting,  # type: ignore[arg-type]
                    device=device,  # type: ignore[arg-type]
                )
        write_profile(html, settings, result, plain)
    if svg is not None:
        result.plot(svg)
    if trace is not None:
        from ..files import write
        from ..memory.timeline import perfetto

        write(trace, json_line(perfetto(result.timeline)).encode())
    if snapshot is not None:
        from ..files import write
        from ..memory.snapshot import pickled

        write(snapshot, pickled(result.timeline))
    if as_json:
        typer.echo(json_line({**settings, **result.as_dict()}))
    else:
        show_profile(settings, chosen.short(), result)
    shared = {"input": input, "batch": batch, "optimizer": optimizer, "loss": loss, **how}
    where = device if accounting == "device" else None
    next_command.say(
        next_command.after_profile(model, result.peak_bytes, accounting, device=where, **shared)
    )


@app.command(
    rich_help_panel=FIT,
    epilog="""Examples:

`shoestring plan wrn-28-2 --budget '120 MB' -o plan.toml`

`shoestring plan wrn-28-2 --budget '6.7 MB' --accounting fundamental --allow bn-microbatch,sparsity`

`shoestring plan mypackage.models:build --input 8x3x224x224 --budget '2 GB' --device cuda --front`

`shoestring plan wrn-10-1 --budget '60 MB' --prices --html plan.html`

`shoestring plan hf:./llama-8b --tokens 2048 --batch 1 --budget '24 GB' --lora r=16`
""",
)
def plan(
    model: ModelName,
    budget: Annotated[str, typer.Option(help="The peak to stay under, such as '8 GB'.")],
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="How close to plain training: exact, lossless or near (the default); and lossy "
            "techniques by name: " + ", ".join(lossy_names()) + ". Repeatable, or with commas."
        ),
    ] = None,
    accounting: Annotated[
        str, typer.Option(help="device (what the allocator shows) or fundamental (the report's).")
    ] = "device",
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu or cuda; it need not be there. cpu unless given, cuda for hf: and timm:."
        ),
    ] = None,
    budget_of: Annotated[
        str,
        typer.Option(
            help="On CUDA: reserved (what the allocator takes from the card) or allocated (what "
            "tensors use of that)."
        ),
    ] = "reserved",
    input: Inputs = None,
    batch: Batch = None,
    optimizer: OptimizerName = None,
    loss: LossName = None,
    tokens: Tokens = None,
    lora: Lora = None,
    quantize: Quantize = None,
    dtype: Dtype = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "--lengths",
            help="The data of an hf: model: JSON lines (input_ids, length or text), or a number of "
            "tokens a line. The plan holds for its longest batch.",
        ),
    ] = None,
    eval_data: Annotated[
        str | None, typer.Option(help="The data set that is evaluated between steps.")
    ] = None,
    eval_batch: Annotated[int, typer.Option(help="Examples that are evaluated at once.")] = 8,
    gpus: Gpus = 1,
    sharding: Sharding = "fsdp",
    front: Annotated[
        bool, typer.Option("--front", help="Show memory against time of all allowed plans.")
    ] = False,
    plot: Annotated[
        str | None, typer.Option(help="Picture of the front; front.png with --front alone.")
    ] = None,
    svg: Annotated[
        str | None, typer.Option(help="Draw memory over the step, plain and planned, as SVG.")
    ] = None,
    prices: Annotated[
        bool,
        typer.Option("--prices", help="Also show plans for somewhat less and more memory."),
    ] = False,
    html: Annotated[str | None, typer.Option(help="Also write a page, with those prices.")] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="Write the plan to this file, TOML or JSON.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest training step that fits a budget in bytes, lossless if there is one."""
    with working(f"planning {model}"):
        from ..integrations.configurations import PREFIXES
        from ..lab.target import resolve
        from ..memory.picture import check_name
        from ..planning.planner import Planner
        from ..planning.plot import front_table, plot_front
        from ..planning.ranks import SharedStep, plan_for_ranks
        from ..units import parse_size

        budget_bytes = parse_size(budget)
        check_name(svg)
        check_places(plan=out, page=html, picture=svg, plot=plot)
        how = {"tokens": tokens, "lora": lora, "quantize": quantize, "dtype": dtype}
        over = fit_verbs.data_set(model, data, eval_data, eval_batch, how)
        target = resolve(model, input or (), batch=batch, loss=loss, how=how)
        where = "cuda" if model.startswith(PREFIXES) else "cpu"
        name = target.optimizer if optimizer is None else optimizer
        ranks = SharedStep(gpus, sharding)
        planner = Planner(
            target.model,
            target.batch if gpus == 1 else ranks.share(target.batch),
            loss=target.loss,
            optimizer=None if name == "none" else name,
            allow=None if allow is None else ",".join(allow),
            accounting=accounting,
            device=device or where,
            budget_of=budget_of,
        )
        points = planner.front() if front or plot else ()
        if points:
            plot_front(points, planner.estimates.plain, model, plot or "front.png")
    if points and not as_json:
        typer.echo(front_table(points, planner.estimates.plain))
    with working(f"planning {model}"):

        def planned(nbytes: int) -> BudgetPlan:
            if gpus == 1:
                return planner.plan(nbytes)
            return plan_for_ranks(planner, ranks, nbytes, target.loss)

        result = over.plan(planner, planned, budget_bytes, how, batch, name, allow)
        if prices or html is not None:
            result = planner.priced(result)
        if html is not None:
            from ..files import write
            from ..integrations.pages import plan_page

            write(html, plan_page(model, result).encode())
    if out is not None:
        result.save(out)
    if svg is not None:
        result.plot(svg)
    if as_json:
        shown = result.as_dict()
        whole = {"front": [p.as_dict() for p in points]} if points else {}
        typer.echo(json_line({"model": model, **shown, **whole, **over.as_dict()}))
    else:
        show("\n".join([*over.told(), str(result)]))
    next_command.say(
        next_command.after_plan(model, out, input=input, optimizer=optimizer, loss=loss)
    )


app.command(rich_help_panel=FIT, epilog=fit_verbs.CARDS_EXAMPLES)(fit_verbs.cards)


@app.command(
    rich_help_panel=FIT,
    epilog="""Examples:

`shoestring verify wrn-10-1 --checkpoint 'residual-2*'`

`shoestring verify mypackage.models:build --input 8x3x224x224 --plan plan.toml`

`shoestring verify mypackage.models:compiled --against mypackage.models:plain --input 8x64:int64`
""",
)
@with_technique_flags
def verify(
    model: ModelName,
    plan: PlanFile = None,
    input: Inputs = None,
    batch: Batch = None,
    optimizer: OptimizerName = None,
    techniques: dict[str, Any] = {},  # noqa: B006
    loss: LossName = None,
    steps: Annotated[int, typer.Option(help="How many training steps to compare.")] = 3,
    against: Annotated[
        str | None,
        typer.Option(help="module:factory of a model to compare with, in place of plain training."),
    ] = None,
    near: Annotated[
        float | None,
        typer.Option(help="Largest relative difference of a claim of near; by default measured."),
    ] = None,
    accept: Annotated[
        list[str] | None, typer.Option(help="Accept this row although it is UNPROVEN; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train two copies, one plainly and one by a plan, and compare them and their peaks."""
    with working(f"verifying {model}"):
        from ..lab.target import resolve
        from ..trace.fakes import make_optimizer
        from ..verification.verify import verify as certify

        chosen, target = planned(
            model,
            input,
            plan=plan,
            batch=batch,
            loss=loss,
            techniques=techniques,
        )
        name = target.optimizer if optimizer is None else optimizer
        made = make_optimizer(None if name == "none" else name, target.model, {})
        if made is None:
            raise InputError("verify trains, which takes an optimizer", hint="such as sgd")
        if plan is None and against is None and not techniques:
            raise InputError(
                "there is nothing to verify: no plan, technique or other model is given",
                hint="--plan plan.toml, a flag such as --checkpoint 'residual-2*', or --against",
            )
        other = None
        if against is not None:
            other = resolve(against, input or (), batch=batch, loss=loss, real=True).model
        result = certify(
            chosen,
            target.model,
            [target.batch],
            loss=target.loss,
            optimizer=made,
            steps=steps,
            against=other,
            near=near,
            accept=accept or (),
        )
    settings = {
        "model": model,
        "batch": target.batch_size,
        "batch_unit": target.batch_unit,
        "optimizer": name,
    }
    if as_json:
        typer.echo(json_line({**settings, **result.as_dict()}))
    else:
        show(f"{model} · {target.batch_size} {target.batch_unit} · {name}\n{result}")
    result.check()
    next_command.say(next_command.after_verify(plan))


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
