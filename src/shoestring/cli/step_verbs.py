"""Verbs about one training step: what it takes, a plan for it, and its proof."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from ..progress import working
from . import fit_verbs, next_command
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

PROFILE_EXAMPLES = """Examples:

`shoestring profile wrn-28-2`

`shoestring profile wrn-28-2 --density 0.3 --precision fp16 --microbatch 10 --checkpoint no-bn`

`shoestring profile mypackage.models:build --input 8x3x224x224 --accounting device --device cuda`
"""

PLAN_EXAMPLES = """Examples:

`shoestring plan wrn-28-2 --budget '120 MB' -o plan.toml`

`shoestring plan wrn-28-2 --budget '6.7 MB' --accounting fundamental --allow bn-microbatch,sparsity`

`shoestring plan mypackage.models:build --input 8x3x224x224 --budget '2 GB' --device cuda --front`

`shoestring plan wrn-10-1 --budget '60 MB' --prices --html plan.html`

`shoestring plan hf:./llama-8b --tokens 2048 --batch 1 --budget '24 GB' --lora r=16`
"""

VERIFY_EXAMPLES = """Examples:

`shoestring verify wrn-10-1 --checkpoint 'residual-2*'`

`shoestring verify mypackage.models:build --input 8x3x224x224 --plan plan.toml`

`shoestring verify mypackage.models:compiled --against mypackage.models:plain --input 8x64:int64`
"""


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
