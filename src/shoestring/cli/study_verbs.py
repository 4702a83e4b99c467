"""The verbs `study` and `report` of the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from .options import AsJson, json_line, named_values

STUDY_EXAMPLES = """Examples:

`shoestring study studies/digits.toml --workers 2`

`shoestring study studies/paper/pareto-table.toml --data-dir data --out results/pareto --resume`

`shoestring study studies/digits.toml --ray 10.0.0.1:6379 --gpus 0.25`

`shoestring study studies/cifar10.toml --data-dir data --resume --only density=0.2 --only seed=0`
"""
REPORT_EXAMPLES = """Examples:

`shoestring report results/pareto`

`shoestring report results/pareto --budget '6 MB' --json`
"""


def study(
    file: Annotated[str, typer.Argument(help="File of the study: grids of settings, in TOML.")],
    out: Annotated[
        str | None, typer.Option(help="Folder for the study; by default runs/NAME.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue; finished runs are kept.")
    ] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Repeat runs that failed.")
    ] = False,
    workers: Annotated[int, typer.Option(help="Runs at a time, on one device.")] = 1,
    ray: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster, or local, in place of workers.")
    ] = None,
    gpus: Annotated[float, typer.Option(help="GPUs for each run on a Ray cluster.")] = 0.0,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Run only these settings, such as 'density=0.2'; repeatable."),
    ] = None,
    run_seconds: Annotated[
        float | None,
        typer.Option(help="End a run after so many seconds; by default as the file says."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda.")] = None,
    data_dir: Annotated[
        str | None, typer.Option(help="Folder with the data; by default $SHOESTRING_DATA.")
    ] = None,
    keep_snapshots: Annotated[
        bool, typer.Option("--keep-snapshots", help="Keep the last weights of every run.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a grid of settings, each in its own process; finished runs are kept."""
    from ..lab.study.command import run_study
    from ..lab.study.execute import Place
    from ..lab.study.kinds import positive

    result = run_study(
        file,
        out,
        resume=resume or retry_failed,
        retry_failed=retry_failed,
        workers=workers,
        ray=ray,
        gpus=gpus,
        only=_values(only or ()),
        place=Place(
            device=device,
            data_dir=data_dir,
            run_seconds=positive("--run-seconds", run_seconds),
            keep_snapshots=keep_snapshots,
        ),
    )
    typer.echo(json_line(result.as_dict()) if as_json else str(result))
    if result.failed:
        raise typer.Exit(1)


def _values(texts: Iterable[str]) -> dict[str, list[Any]]:
    """Parse `--only`: a setting that is named twice may have either value."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        for name, value in named_values([text], "--only", "density=0.2").items():
            found.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return found


def report(
    folder: Annotated[
        str, typer.Argument(help="Folder of a study, or of runs of shoestring train.")
    ],
    out: Annotated[
        str | None, typer.Option(help="Folder to write to; by default FOLDER/report.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Name the best setting within this size, such as '6 MB'.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make tables, figures and one HTML page from the records of runs."""
    from pathlib import Path

    from ..lab.study.overview import is_overview
    from ..lab.study.report import report as write
    from ..lab.study.report import report_all

    result: Any
    if is_overview(Path(folder)) and out is None and budget is None:
        result = report_all(folder)
    else:
        result = write(folder, out, budget=budget)
    typer.echo(json_line(result.as_dict()) if as_json else str(result))
