"""Verbs that answer before anything is run: what fits which card."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..errors import InputError, VerificationError
from ..progress import working
from .options import (
    AsJson,
    Batch,
    Dtype,
    Inputs,
    Lora,
    LossName,
    ModelName,
    OptimizerName,
    Quantize,
    Tokens,
    json_line,
    show,
    with_technique_flags,
)

CARDS_EXAMPLES = """Examples:

`shoestring cards hf:./llama-8b --tokens 2048 --lora r=16`

`shoestring cards timm:vit_large_patch16_224 --batch 32 --html cards.html`

`shoestring cards hf:./qwen --card 24 --card 48 --json`
"""

CHECK_EXAMPLES = """Examples:

`shoestring check memory.toml --update` writes memory.baseline.json

`shoestring check memory.toml` fails where a peak has risen since
"""

EXPLAIN_EXAMPLES = """Examples:

`shoestring explain hf:./llama-8b --tokens 2048 --lora r=16`

`shoestring explain mypackage.models:build --input 8x3x224x224 --checkpoint residual-1`
"""

Configuration = Annotated[
    str, typer.Argument(help="hf:FOLDER (with config.json), hf:NAME on the hub, or timm:NAME.")
]
Examples = Annotated[int, typer.Option(help="Examples in a step.")]
Optimizer = Annotated[str, typer.Option(help="adamw, adamw8bit, sgd, …")]


def cards(
    model: Configuration,
    tokens: Tokens = None,
    batch: Examples = 1,
    optimizer: Optimizer = "adamw",
    lora: Lora = None,
    quantize: Quantize = None,
    dtype: Dtype = None,
    card: Annotated[
        list[int] | None, typer.Option(help="Size of a card in GB; repeatable.")
    ] = None,
    html: Annotated[str | None, typer.Option(help="Also write the table as an HTML page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show which cards a model trains on, by which plan, how fast, and with which batch."""
    with working(f"sizing {model}"):
        from ..files import write
        from ..integrations.cards import cards as sized
        from ..integrations.configurations import PREFIXES

        if not model.startswith(PREFIXES):
            raise InputError(
                f"{model} is not a configuration", hint="hf:FOLDER, hf:NAME or timm:NAME"
            )
        found = sized(
            model, tokens=2048 if tokens is None else tokens, batch=batch, optimizer=optimizer,
            lora=lora, quantize=quantize, dtype=dtype, sizes=card,
        )  # fmt: skip
        if html is not None:
            write(html, found.html().encode())
    typer.echo(json_line(found.as_dict())) if as_json else show(str(found))


@with_technique_flags
def explain(
    model: ModelName,
    input: Inputs = None,
    batch: Batch = None,
    optimizer: OptimizerName = None,
    techniques: dict[str, Any] = {},  # noqa: B006
    device: Annotated[str, typer.Option(help="cpu or cuda; it need not be there.")] = "cuda",
    loss: LossName = None,
    tokens: Tokens = None,
    lora: Lora = None,
    quantize: Quantize = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Show which flags move the peak, by how much, and which do nothing."""
    with working(f"tracing {model}"):
        from ..integrations.configurations import PREFIXES, Configured
        from ..integrations.explain import explain as explained
        from ..lab.target import flagged_plan, resolve

        how = {"tokens": tokens, "lora": lora, "quantize": quantize, "dtype": dtype}
        plan = flagged_plan(model, techniques)
        if model.startswith(PREFIXES) and not input and not loss:
            given: dict[str, Any] = {k: v for k, v in how.items() if v is not None}
            found = explained(
                Configured(model, batch=1 if batch is None else batch, **given),
                optimizer=optimizer or "adamw", device=device, techniques=plan,
            )  # fmt: skip
        else:
            target = resolve(model, input or (), batch=batch, loss=loss, how=how)
            found = explained(
                target.model, target.batch, loss=target.loss, device=device, techniques=plan,
                optimizer=optimizer or target.optimizer,
            )  # fmt: skip
    typer.echo(json_line(found.as_dict())) if as_json else show(str(found))


def check(
    file: Annotated[str, typer.Argument(help="TOML, one table a check: model, input, budget, …")],
    update: Annotated[
        bool, typer.Option("--update", help="Accept today's peaks as the baseline.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Fail if the predicted peak of a model has risen: a memory test for CI, on a CPU."""
    with working(f"checking {file}"):
        from pathlib import Path

        from ..lab.checks import check_file

        found = check_file(Path(file), update=update)
    if as_json:
        typer.echo(json_line([{**vars(one), "failure": one.failure} for one in found]))
    else:
        typer.echo("\n".join(map(str, found)))
    failed = [one for one in found if one.failure is not None]
    if failed and not update:
        raise VerificationError(
            f"{failed[0].name}: {failed[0].failure}",
            hint="if it is meant: shoestring check --update",
        )
