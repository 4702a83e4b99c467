"""The options that several verbs of the command line share, each written once."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer

from ..errors import InputError
from ..files import json_text
from ..lab.models import LONGEST_SENTENCE_TOKENS, SENTENCE_TOKENS, builtin
from ..lab.target import Target, resolve
from ..techniques import Checkpointing, Microbatching, Precision, Sparsity, Technique
from ..techniques.microbatching.split import examples_of
from ..techniques.plan import Plan

ModelName = Annotated[
    str, typer.Argument(help="A built-in name (wrn-28-2, dc-transformer) or module:factory.")
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(help="Shape of an input, [name=]8x3x224x224[:dtype]; repeatable."),
]
Batch = Annotated[int | None, typer.Option(help="Minibatch: examples, or tokens.")]
OptimizerName = Annotated[
    str | None, typer.Option(help="sgd, adam, adamw, sgd-plain, rmsprop, adagrad or none.")
]
Density = Annotated[float | None, typer.Option(help="Fraction of weights kept, in (0, 1].")]
PrecisionKind = Annotated[str | None, typer.Option(help="fp32, fp16 or bf16.")]
Microbatch = Annotated[int | None, typer.Option(help="Examples (or tokens) that run at once.")]
Checkpoint = Annotated[
    str | None,
    typer.Option(help="none, no-bn, every-M, residual-M, `residual-M*` or `keep*3, recompute*9`."),
]
PlanFile = Annotated[
    str | None, typer.Option(help="File of a plan, TOML or JSON, in place of technique flags.")
]
LossName = Annotated[
    str | None,
    typer.Option(
        help="module:function(model, batch) for an imported model; the batch is the tuple of all "
        "--input, or a dict of named ones."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, bytes as integers.")]


def json_line(value: Any) -> str:
    """For `--json`: in ASCII, whatever the terminal takes, and null for NaN."""
    return json_text(value, ensure_ascii=True)


def techniques(
    density: float | None, precision: str | None, checkpoint: str | None
) -> list[Technique]:
    """What the flags ask for; microbatches come with the batch."""
    chosen: list[Technique] = []
    if density is not None:
        chosen.append(Sparsity(density))
    if precision is not None:
        chosen.append(Precision(precision))
    if checkpoint is not None:
        chosen.append(Checkpointing.parse(checkpoint))
    return chosen


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
    density: float | None,
    precision: str | None,
    microbatch: int | None,
    checkpoint: str | None,
) -> tuple[Plan, Target]:
    """A plan, from its file or from flags, and a real model with a small batch to try it on.

    A batch that is not given has 8 images or 100 tokens, or two microbatches if that is more.
    """
    flags = {"density": density, "precision": precision, "microbatch": microbatch}
    given = [name for name, v in {**flags, "checkpoint": checkpoint}.items() if v is not None]
    if plan is not None and given:
        raise InputError(
            f"--plan and --{given[0]} are both given", hint="write the setting into the plan's file"
        )
    chosen = (
        Plan.of(techniques(density, precision, checkpoint)) if plan is None else Plan.load(plan)
    )
    if microbatch is not None:
        Microbatching(microbatch)
    if batch is None and ":" not in model:
        batch = _small_batch(builtin(model).batch_unit, chosen, microbatch)
    torch.manual_seed(0)
    target = resolve(model, inputs or (), batch=batch, loss=loss, real=True)
    if microbatch is not None:
        chosen = replace(chosen, microbatching=_split(target, microbatch))
    return chosen, target


def _small_batch(unit: str, plan: Plan, microbatch: int | None) -> int:
    """Large enough for two microbatches; a plan counts examples, a flag the model's own unit."""
    examples = 0 if plan.microbatching is None else 2 * plan.microbatching.size
    if unit == "images":
        return max(8, examples, 2 * (microbatch or 0))
    if examples:  # sentences, of which there are several only in a batch this large
        return SENTENCE_TOKENS * max(examples, LONGEST_SENTENCE_TOKENS // SENTENCE_TOKENS + 1)
    return max(100, 2 * (microbatch or 0))


def _split(target: Target, microbatch: int) -> Microbatching:
    """Microbatches of so many examples or tokens, as examples of the target's batch."""
    examples = examples_of(target.batch) or 1
    each = target.batch_size // examples
    if microbatch % each or microbatch > target.batch_size:
        raise InputError(
            f"a batch of {examples} × {each} {target.batch_unit} has no microbatches of "
            f"{microbatch}",
            hint=f"a multiple of {each} up to {target.batch_size}, or another --batch",
        )
    return Microbatching(microbatch // each)
