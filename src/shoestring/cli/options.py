"""The options that several verbs of the command line share, each written once."""

from __future__ import annotations

import functools
import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError
from ..files import json_text
from . import declared

if TYPE_CHECKING:
    from ..lab.target import Target
    from ..techniques.plan import Plan

ModelName = Annotated[
    str,
    typer.Argument(
        help="A built-in name (wrn-28-2, dc-transformer), module:factory, hf:FOLDER or timm:NAME."
    ),
]
Tokens = Annotated[
    int | None, typer.Option(help="Tokens in an example, for hf:NAME; 2048 by default.")
]
Lora = Annotated[
    str | None,
    typer.Option(help="LoRA for hf: and timm: models, r=16[,alpha=32][,targets=all-linear]."),
]
Quantize = Annotated[
    str | None, typer.Option(help="nf4: frozen weights in 4 bits, as bitsandbytes has them.")
]
Dtype = Annotated[
    str | None, typer.Option(help="Type of a configuration's weights: bf16, fp16 or fp32.")
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(help="Shape of an input, [name=]8x3x224x224[:dtype]; repeatable."),
]
Batch = Annotated[int | None, typer.Option(help="Size of the minibatch, in examples or tokens.")]
OptimizerName = Annotated[
    str | None,
    typer.Option(help="sgd, adam, adamw, adamw8bit, sgd-plain, rmsprop, adagrad or none."),
]
PlanFile = Annotated[
    str | None,
    typer.Option(help="Take the plan from this file, TOML or JSON, in place of technique flags."),
]
LossName = Annotated[
    str | None,
    typer.Option(
        help="module:function(model, batch) for an imported model; the batch is the tuple of all "
        "--input, or a dict of named ones."
    ),
]
Gpus = Annotated[int, typer.Option(help="GPUs that share a step, each with a part of the batch.")]
Sharding = Annotated[
    str, typer.Option(help="For several GPUs: fsdp splits the model over them, ddp does not.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, bytes as integers.")]


def check_places(**files: str | None) -> None:
    """InputError where a file that was asked for cannot be written, before anything is done."""
    for what, name in files.items():
        if name is None:
            continue
        path, why = Path(name), None
        if not name or "\0" in name:
            why = "no file has such a name"
        elif path.is_dir():
            why = "it is a folder"
        elif not path.parent.is_dir():
            why = f"there is no folder {path.parent}"
        if why is not None:
            raise InputError(
                f"cannot write the {what} {name[:200]}: {why}",
                hint="make the folder first, or name another file",
            )


def json_line(value: Any) -> str:
    """For `--json`: in ASCII, whatever the terminal takes, and null for NaN."""
    return json_text(value, ensure_ascii=True)


def show(text: str) -> None:
    """Print a result; on a terminal its first line is bold, and a verdict has a color."""
    first, _, rest = text.partition("\n")
    typer.echo(typer.style(first, bold=True))
    colors = {"verified": "green", "NOT verified": "red"}
    for line in rest.splitlines():
        typer.echo(typer.style(line, fg=colors[line]) if line in colors else line)


Command = Callable[..., None]


def lossy_names() -> list[str]:
    """By which techniques are allowed to be lossy."""
    return [technique.allow for technique in declared.techniques()]


def with_technique_flags(command: Command) -> Command:
    """Give a verb the flags of all techniques in place of its argument `techniques`.

    It is called with those that were given, by name.
    """
    plain = inspect.signature(command, eval_str=True)
    flags = [flag for technique in declared.techniques() for flag in technique.options]
    options = [_option(flag) for flag in flags]
    parameters: list[inspect.Parameter] = []
    for parameter in plain.parameters.values():
        parameters += options if parameter.name == "techniques" else [parameter]

    @functools.wraps(command)
    def called(**given: Any) -> None:
        named = {flag.name: given.pop(flag.name) for flag in flags}
        chosen = {n: v for n, v in named.items() if v is not None and v is not False}
        command(**given, techniques=chosen)

    called.__signature__ = plain.replace(parameters=parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    return called


def _option(flag: declared.DeclaredFlag) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    option = typer.Option("--" + flag.name.replace("_", "-"), help=flag.help)
    wanted: Any = bool if flag.kind is bool else flag.kind | None
    default = False if flag.kind is bool else None
    return inspect.Parameter(flag.name, kind, default=default, annotation=Annotated[wanted, option])


def named_values(
    texts: Iterable[str], flag: str = "--set", example: str = "sparsity.fraction_multiplier=2"
) -> dict[str, Any]:
    """'setting=value' as name and value; a value is read as TOML, else as text.

    The name has a dot if the example has one: the setting of a technique.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or ("." in example.partition("=")[0]) > ("." in name):
            raise InputError(f"cannot read {flag} {text!r}", hint=f"such as {example}")
        try:
            found[name.strip()] = tomllib.loads(f"value = {value}")["value"]
        except (ValueError, RecursionError):  # no TOML, or a number of 5,000 digits
            found[name.strip()] = value.strip()
    return found


def planned(
    model: str,
    inputs: list[str] | None,
    *,
    plan: str | None,
    batch: int | None,
    loss: str | None,
    techniques: Mapping[str, Any],
) -> tuple[Plan, Target]:
    """A plan, from its file or from flags, and a real model with a small batch to try it on.

    A batch that is not given has 8 images or 100 tokens, or two microbatches if that is more.
    """
    import torch

    from ..lab.target import batch_unit, flagged_plan, resolve
    from ..techniques.plan import Plan

    if plan is not None and techniques:
        raise InputError(
            f"--plan and --{next(iter(techniques))} are both given",
            hint="write the setting into the plan's file",
        )
    chosen = flagged_plan(model, techniques) if plan is None else Plan.load(plan)
    if batch is None and ":" not in model:
        batch = _small_batch(batch_unit(model), chosen, flagged=plan is None)
    torch.manual_seed(0)
    target = resolve(model, inputs or (), batch=batch, loss=loss, real=True)
    if plan is None and chosen.at_once is not None:
        _check_parts(target, chosen.at_once)
    return chosen, target


def _small_batch(unit: str, plan: Plan, *, flagged: bool) -> int:
    """Large enough for two parts; a plan counts examples, a flag the model's own unit."""
    from ..lab.models import LONGEST_SENTENCE_TOKENS, SENTENCE_TOKENS

    parts = 2 * (plan.at_once or 0)
    if unit == "images":
        return max(8, parts)
    if parts and not flagged:  # sentences, of which there are several only in a batch this large
        return SENTENCE_TOKENS * max(parts, LONGEST_SENTENCE_TOKENS // SENTENCE_TOKENS + 1)
    return max(100, parts)


def check_at_once(plan: Plan, batch: int, unit: str) -> None:
    """InputError for microbatches above the batch, as training has it: nothing would be cut."""
    if plan.at_once is not None and plan.at_once > batch:
        raise InputError(
            f"a batch of {batch} {unit} has no microbatches of {plan.at_once}",
            hint=f"a --microbatch up to {batch}, or a larger --batch",
        )


def _check_parts(target: Target, at_once: int) -> None:
    """Whole examples must run at once."""
    from ..trace.split import examples_of

    examples = examples_of(target.batch) or 1
    each = target.batch_size // examples
    if at_once % each or at_once > target.batch_size:
        raise InputError(
            f"a batch of {examples} × {each} {target.batch_unit} has no microbatches of {at_once}",
            hint=f"a multiple of {each} up to {target.batch_size}, or another --batch",
        )
