"""Verbs that answer before anything is run: what fits which card."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from ..errors import BudgetError, InputError, VerificationError
from ..progress import working
from ..units import format_size
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
    Quantize,
    Sharding,
    Tokens,
    check_at_once,
    check_places,
    json_line,
    show,
    with_technique_flags,
)

CARDS_EXAMPLES = """Examples:

`shoestring cards hf:./llama-8b --tokens 2048 --lora r=16`

`shoestring cards timm:vit_large_patch16_224 --batch 32 --html cards.html`

`shoestring cards hf:./qwen --card 24 --card 'RTX 4090' --json`

`shoestring cards hf:./llama-70b --gpus 8 --batch 8 --tokens 4096`
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
        list[str] | None, typer.Option(help="Size of a card in GB, or its name; repeatable.")
    ] = None,
    gpus: Gpus = 1,
    sharding: Sharding = "fsdp",
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
                f"{model} is not a configuration",
                hint="hf:FOLDER, hf:NAME or timm:NAME; of a factory, shoestring plan "
                f"{model} --input 8x3x224x224 --budget '24 GB' says whether it fits",
            )
        check_places(page=html)
        found = sized(
            model, tokens=2048 if tokens is None else tokens, batch=batch, optimizer=optimizer,
            lora=lora, quantize=quantize, dtype=dtype, sizes=card, gpus=gpus,
            sharding=sharding,  # type: ignore[arg-type]
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
            check_at_once(plan, 1 if batch is None else batch, "examples")
            found = explained(
                Configured(model, batch=1 if batch is None else batch, **given),
                optimizer=optimizer or "adamw", techniques=plan,
                device=device,  # type: ignore[arg-type]
            )  # fmt: skip
        else:
            target = resolve(model, input or (), batch=batch, loss=loss, how=how)
            check_at_once(plan, target.batch_size, target.batch_unit)
            found = explained(
                target.model, target.batch, loss=target.loss, techniques=plan,
                optimizer=optimizer or target.optimizer,
                device=device,  # type: ignore[arg-type]
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
            hint=failed[0].way_out,
        )


class DataSet:
    """The options of `plan --data --eval-data`; empty where neither was given."""

    def __init__(self, model: str, trained: Any, evaluated: Any, eval_batch: int) -> None:
        self._model, self._trained, self._evaluated = model, trained, evaluated
        self._eval_batch, self._eval_bytes = eval_batch, 0

    def plan(
        self, planner: Any, planned: Callable[[int], Any], budget_bytes: int, how: dict[str, Any],
        batch: int | None, optimizer: str, allow: list[str] | None,
    ) -> Any:  # fmt: skip
        """The plan for the longest batch, or the examples that are too long."""
        from ..integrations.configurations import Configured
        from ..integrations.lengths import check_evaluation, too_long
        from ..integrations.sizes import Sizes

        given = {key: value for key, value in how.items() if value is not None}
        try:
            found = planned(budget_bytes)
        except BudgetError as error:
            if self._trained is None:
                raise
            kinds = None if allow is None else ",".join(allow)
            sizes = Sizes(Configured(self._model, batch=batch or 1, **given), optimizer, kinds)
            raise too_long(error, self._trained, sizes, budget_bytes) from None
        if self._evaluated is not None:
            given["tokens"] = self._evaluated.longest
            asked = Configured(self._model, batch=self._eval_batch, **given)
            self._eval_bytes = check_evaluation(
                asked, optimizer, planner.margin.limit(budget_bytes)
            )
        return found

    def told(self) -> list[str]:
        """A line for each."""
        lines = [] if self._trained is None else [str(self._trained)]
        if self._evaluated is not None:
            lines.append(
                f"{self._evaluated}; {self._eval_batch} at once take "
                f"{format_size(self._eval_bytes)}"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        found: dict[str, Any] = {}
        for name, held in (("data", self._trained), ("eval_data", self._evaluated)):
            if held is not None:
                found[name] = {"examples": len(held.tokens), "longest_tokens": held.longest}
        if self._evaluated is not None:
            found["eval_data"] |= {"batch": self._eval_batch, "peak_bytes": self._eval_bytes}
        return found


def data_set(
    model: str, data: str | None, eval_data: str | None, eval_batch: int, how: dict[str, Any]
) -> DataSet:
    """Read the files; the tokens of the plan become those of the longest example."""
    if data is None and eval_data is None:
        return DataSet(model, None, None, eval_batch)
    if not model.startswith("hf:"):
        raise InputError(
            f"--data is for hf: models, {model} has no tokens",
            hint="in Python ss.plan(…, batches=loader) takes any data",
        )
    from ..integrations.lengths import Lengths

    trained, evaluated = (
        None if name is None else Lengths.read(name, model).cut(how["tokens"])
        for name in (data, eval_data)
    )
    if trained is not None:
        how["tokens"] = trained.longest
    return DataSet(model, trained, evaluated, eval_batch)
