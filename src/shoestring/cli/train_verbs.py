"""The verbs `train`, `translate` and `prepare` of the command line."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ..progress import working
from .options import (
    AsJson,
    Batch,
    ModelName,
    PlanFile,
    json_line,
    named_values,
    with_technique_flags,
)

TRAIN_EXAMPLES = """Examples:

`shoestring train wrn-10-1 --data digits`

`shoestring train wrn-28-2 --data cifar10 --data-dir data --precision fp16 --density 0.3`

`shoestring train wrn-28-2 --data cifar10 --plan plan.toml --out runs/first --resume`
"""
TRANSLATE_EXAMPLE = (
    """Example: `echo dreihundertvierundzwanzig | shoestring translate runs/number_words`"""
)
PREPARE_EXAMPLE = """Example: `shoestring prepare multi30k --data-dir data --out multi30k-10k`"""


@with_technique_flags
def train(
    model: ModelName,
    data: Annotated[
        str,
        typer.Option(
            help="digits, cifar10, number_words, multi30k, iwslt14, europarl160k, a folder "
            "with images.npz, or a folder of aligned text."
        ),
    ],
    data_dir: Annotated[
        str | None, typer.Option(help="Folder with the data; by default $SHOESTRING_DATA.")
    ] = None,
    input: Annotated[
        str | None,
        typer.Option(help="Bring images to this shape, 1x28x28: channels, height, width."),
    ] = None,
    split: Annotated[
        str,
        typer.Option(help="The set to evaluate: test, or validation from the training set."),
    ] = "test",
    plan: PlanFile = None,
    budget: Annotated[
        str | None, typer.Option(help="Plan for a peak of this size in tensors, such as '13 MB'.")
    ] = None,
    allow: Annotated[
        str | None, typer.Option(help="How far a plan for --budget may go, as for shoestring plan.")
    ] = None,
    techniques: dict[str, Any] = {},  # noqa: B006
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Another setting, 'sparsity.fraction_multiplier=2'; repeatable."
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the data; by default as many as its recipe has.")
    ] = None,
    updates: Annotated[
        int | None, typer.Option(help="Text: number of updates, in place of epochs.")
    ] = None,
    batch: Batch = None,
    lr: Annotated[
        float | None, typer.Option(help="Largest learning rate; by default the tuned one.")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Text: updates in which the learning rate rises.")
    ] = None,
    dropout: Annotated[
        float | None, typer.Option(help="Text: dropout rate; by default as its recipe has.")
    ] = None,
    average: Annotated[
        int | None, typer.Option(help="Text: number of last epochs whose weights are averaged.")
    ] = None,
    beam: Annotated[int | None, typer.Option(help="Text: size of the beam.")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Text: scores are divided by the length to this power.")
    ] = None,
    languages: Annotated[str | None, typer.Option(help="Text: languages, such as de-en.")] = None,
    merges: Annotated[
        int | None, typer.Option(help="Text: number of BPE merges; 10,000 by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and techniques.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda.")] = None,
    channels_last: Annotated[
        bool | None,
        typer.Option("--channels-last/--channels-first", help="By default last on cuda."),
    ] = None,
    tf32: Annotated[bool, typer.Option("--tf32", help="Let FP32 be TF32 on cuda.")] = False,
    cudnn_benchmark: Annotated[
        bool, typer.Option("--cudnn-benchmark", help="Try kernels: faster, in more memory.")
    ] = False,
    data_on: Annotated[
        str, typer.Option(help="host or device; auto: on the device up to 2 GB.")
    ] = "auto",
    eval_every: Annotated[int, typer.Option(help="Epochs between evaluations.")] = 1,
    eval_batch: Annotated[
        int | None, typer.Option(help="Images (1000) or tokens (4000) evaluated at once.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="Folder for the run; by default runs/MODEL-DATA-SEED-TIME.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the last snapshot in --out, if there is one."),
    ] = False,
    snapshot_every: Annotated[
        int | None, typer.Option(help="Updates between snapshots; by default one a minute.")
    ] = None,
    stop_after: Annotated[
        str | None,
        typer.Option(help="Stop after so many epochs, or '300 steps'; --resume continues."),
    ] = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also write TensorBoard files.")
    ] = False,
    parallel: Annotated[
        str | None, typer.Option(help="Under torchrun: ddp (the default) or fsdp.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads; by default all, for number_words one.")
    ] = None,
    predict: Annotated[
        bool,
        typer.Option("--predict/--no-predict", help="Predict the peaks first: up to a minute."),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Train to the end: recorded, measured, and resumable to the bit."""
    from ..lab.runs.command import Call, start
    from ..step.group import is_first

    result = start(
        Call(
            model=model,
            data=data,
            data_dir=data_dir,
            input=input,
            split=split,
            plan=plan,
            budget=budget,
            allow=allow,
            techniques=techniques,
            changes=named_values(set_ or ()),
            epochs=epochs,
            batch=batch,
            learning_rate=lr,
            seed=seed,
            device=device,
            channels_last=channels_last,
            tf32=tf32,
            cudnn_benchmark=cudnn_benchmark,
            data_on=data_on,
            evaluate_every=eval_every,
            evaluation_batch=eval_batch,
            out=out,
            resume=resume,
            snapshot_every=snapshot_every,
            stop_after=stop_after,
            tensorboard=tensorboard,
            parallel=parallel,
            updates=updates,
            warmup=warmup,
            dropout=dropout,
            average=average,
            beam=beam,
            length_penalty=length_penalty,
            languages=languages,
            merges=merges,
            predict=predict,
            threads=threads,
        )
    )
    if is_first():
        typer.echo(json_line(result.event) if as_json else str(result))


def translate(
    run: Annotated[str, typer.Argument(help="Folder of a run on text.")],
    beam: Annotated[int | None, typer.Option(help="By default that of the run.")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="By default that of the run.")
    ] = None,
    average: Annotated[
        bool,
        typer.Option("--average/--newest", help="Mean of the last epochs, or the newest snapshot."),
    ] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda.")] = None,
) -> None:
    """Translate lines of stdin, tokenized as the training text was, to lines of stdout."""
    with working(f"loading {run}"):
        from ..lab.runs.trainer import prepare_device
        from ..lab.runs.translating import load_translator
        from ..lab.tasks.corpus import lines_of

        translator = load_translator(
            run,
            device=prepare_device(device, tf32=False, benchmark=False),
            beam=beam,
            length_penalty=length_penalty,
            average=average,
        )
    lines, damaged = lines_of(sys.stdin.buffer.read())
    if damaged:
        shown = f"{len(damaged):,} lines are not UTF-8, the first is line {min(damaged) + 1:,}"
        print(f"warning: {shown}", file=sys.stderr)
    for line in translator(lines):
        typer.echo(line.encode())  # as the texts are, whatever the terminal's encoding


def prepare(
    data: Annotated[str, typer.Argument(help="Name or folder of a text in two languages.")],
    out: Annotated[str, typer.Option(help="Folder to write: all that training needs to read.")],
    data_dir: Annotated[
        str | None, typer.Option(help="Folder with the data; by default $SHOESTRING_DATA.")
    ] = None,
    languages: Annotated[str | None, typer.Option(help="Languages, such as de-en.")] = None,
    merges: Annotated[
        int | None, typer.Option(help="Number of BPE merges; 10,000 by default.")
    ] = None,
) -> None:
    """Encode a text once, so that training elsewhere needs only the result."""
    with working(f"preparing {data}"):
        from pathlib import Path

        from ..lab.tasks import load_text
        from ..lab.tasks.prepared import check_place, save

        check_place(Path(out))
        task = load_text(data, folder=data_dir, languages=languages, merges=merges)
        save(task, Path(out))
    typer.echo(json_line({"name": task.name, "folder": out, **task.notes}))
