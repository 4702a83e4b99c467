"""Study: what a file asks for. Settings are named like the flags of `shoestring train`."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from ... import files
from ...errors import InputError
from ...techniques.registry import flags as technique_flags
from ...techniques.registry import registered
from ..runs.settings import check_seed
from .kinds import at_least_one, check, known, named, or_list, positive

Values = dict[str, Any]
SPEC = "study.toml"
"""A study's own copy of its file, in its folder."""

FLAGS = {"lr": "learning_rate", "eval_every": "evaluate_every", "eval_batch": "evaluation_batch"}
"""Settings whose flag is not the name of the argument behind it."""
_ELSEWHERE = (
    "data_dir", "device", "out", "resume", "stop_after", "tensorboard", "changes", "techniques",
)  # fmt: skip
"""Arguments of a training that a study sets itself, or that say where it happens."""
_PROFILED = frozenset("model input loss batch optimizer accounting device".split())
QUANTITIES = frozenset(
    "score interval score_loss n failed seconds flops flops_ratio counted_bytes measured_bytes "
    "predicted_bytes model_bytes optimizer_bytes activation_bytes reduction model_reduction "
    "optimizer_reduction activation_reduction measured_reduction".split()
)
"""Quantities of a row, beside its settings."""
PLACES = frozenset({"data_on", "snapshot_every", "parallel"})
"""Where a run happens and what it writes on the way do not make it another run."""
_TRIALS = ("trials", "seeds")
SCORES = {"bleu": "BLEU", "best_accuracy": "accuracy (%)", "accuracy": "accuracy (%)"}
"""Fields of a last event that say how good a run is, and what they are called."""
KINDS = ("train", "profile")
MOST_RUNS = 100_000
"""Of a study: more is a slip of the pen, and would fill the memory before it is noticed."""
MOST_BYTES = 10**7
"""Of a study's file."""
FIGURES = ("line", "front", "pie")
_OWN = {"labels": dict, "stands_for": dict}
"""Tables a grid may have besides settings: words for a table, and what a fast run stands for."""
_STUDY = {
    **dict.fromkeys(("name", "title", "source", "notes", "kind", "score", "score_label"), str),
    **dict.fromkeys(("trials", "threads"), int),
    "run_seconds": float,
    **dict.fromkeys(("profile", "measure"), bool),
    **dict.fromkeys(("base", "baseline"), dict),
    **dict.fromkeys(("grid", "search", "target", "figure"), list[dict]),
    "seeds": list[int],
    **dict.fromkeys(("columns", "after"), list[str]),
}
_SEARCH = {
    **dict.fromkeys(("over", "using", "only"), dict),
    "also": list[dict],
    "per": list[str],
    "trials": int,
    "seeds": list[int],
}
_FIGURE = {
    **dict.fromkeys(("name", "x", "y", "kind", "title"), str),
    "series": str | list[str],
    "log_x": bool,
}


@dataclass(frozen=True)
class StudySearch:
    """Settings to be chosen on the validation split, for each of several settings apart."""

    over: Mapping[str, list[Any]]
    also: tuple[Mapping[str, Any], ...]
    """Single combinations that are tried beside those of `over`."""
    per: tuple[str, ...]
    """The best is chosen for each combination of these that the grids have."""
    using: Mapping[str, Any]
    """Settings of the search alone."""
    only: Mapping[str, list[Any]]
    """Combinations with other values are not searched."""
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class StudyTarget:
    """A published result: for these settings, those quantities.

    A quantity behind `max_` or `min_` is a bound. Those of a search are settings: what it chose.
    """

    where: Mapping[str, Any]
    quantities: Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """A plot of two quantities or settings, one line for each value of a third; or pies."""

    name: str
    x: str = "counted_bytes"
    y: str = "score"
    series: tuple[str, ...] = ()
    kind: str = "line"
    """line, front (with the Pareto front drawn) or pie."""
    log_x: bool = False
    title: str = ""


@dataclass(frozen=True)
class Study:
    """Everything a file says."""

    name: str
    title: str
    source: str
    """Where its targets come from."""
    notes: str
    kind: str
    seeds: tuple[int, ...]
    score: str
    """Field of a run's last event; the larger the better."""
    score_label: str
    base: Mapping[str, Any]
    grids: tuple[Mapping[str, Any], ...]
    searches: tuple[StudySearch, ...]
    baseline: Mapping[str, Any] | None
    """The row that reductions and losses are relative to."""
    targets: tuple[StudyTarget, ...]
    figures: tuple[Figure, ...]
    columns: tuple[str, ...] | None
    """Of the table; by default what the runs have."""
    profile: bool
    """Count the memory of every row, with its timeline."""
    measure: bool
    """Measure a few updates of every row whose runs are fast equivalents."""
    threads: int
    run_seconds: float | None
    """After which a run is ended, and has failed."""
    after: tuple[str, ...]
    """Studies beside this one whose searches chose for it."""
    text: str = field(repr=False)


def load(path: str | Path, name: str | None = None) -> Study:
    """Read a study's file; what it does not know is an error that names it.

    `name` is for a file that does not say its own; by default it is the file's.
    """
    try:
        text = files.read(path, MOST_BYTES, plain=False).decode()
        given = tomllib.loads(text)
    except OSError as error:
        raise InputError(
            f"cannot read the study {path}: {error.strerror}",
            hint="a TOML file such as studies/digits.toml",
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"the study {path} is not TOML: {error}") from None
    try:
        return from_values(given, text, name or Path(path).stem)
    except InputError as error:
        raise InputError(f"{path}: {error.message}", hint=error.hint) from None


def from_values(given: Values, text: str, name: str) -> Study:
    """A study from the tables of its file."""
    known(given, _STUDY, "a study")
    check(given, _STUDY)
    kind = given.get("kind", "train")
    if kind not in KINDS:
        raise InputError(f"unknown kind {kind!r}", hint="one of " + ", ".join(KINDS))
    base = _settings(given.get("base", {}), kind, "[base]")
    tables = given.get("grid", [{}])
    if not tables:
        raise InputError("grid has no tables", hint="leave it out for one run of [base]")
    grids = tuple(_settings(grid, kind, "[[grid]]", lists=True) for grid in tables)
    seeds = _seeds(given, (0,))
    score = given.get("score", "best_accuracy")
    for grid in grids:
        needed = ("model", "data") if kind == "train" else ("model",)
        for missing in (n for n in needed if n not in {**base, **grid}):
            raise InputError(f"no {missing} is given", hint=f"{missing} = … in [base] or [[grid]]")
    settled = {name for point in (base, *grids) for name in point if name not in _OWN}
    searches = tuple(_search(s, seeds, settled) for s in given.get("search", []))
    _check_one_source(given, base, grids, searches)
    shown = {
        *settled,
        *(name for point in (base, *grids) for own in _OWN for name in point.get(own, {})),
        *(name for search in searches for name in search.over),
    }
    baseline = _flat(given["baseline"]) if "baseline" in given else None
    named(baseline or (), shown, "baseline")
    named(given.get("columns", ()), QUANTITIES, "columns", "quantity")
    return Study(
        name=_file_name(given.get("name", name), "name"),
        title=given.get("title") or given.get("name", name),
        source=given.get("source", ""),
        notes=given.get("notes", ""),
        kind=kind,
        seeds=seeds if kind == "train" else (0,),
        score=score,
        score_label=given.get("score_label", SCORES.get(score, score.replace("_", " "))),
        base=base,
        grids=grids,
        searches=searches,
        baseline=baseline,
        targets=tuple(_target(t, shown) for t in given.get("target", [])),
        figures=_figures(given.get("figure", []), shown),
        columns=tuple(given["columns"]) if "columns" in given else None,
        profile=given.get("profile", True),
        measure=given.get("measure", True),
        threads=at_least_one("threads", given.get("threads", 1)),
        run_seconds=positive("run_seconds", given.get("run_seconds")),
        after=tuple(_file_name(name, "after") for name in given.get("after", ())),
        text=text,
    )


def _check_one_source(
    given: Values, base: Values, grids: tuple[Values, ...], searches: tuple[StudySearch, ...]
) -> None:
    """InputError where one place sets what another one is to decide."""
    counts = any(n in table for table in (given, *given.get("search", [])) for n in _TRIALS)
    if "seed" in base and counts:
        raise InputError(
            "[base] seed is beside trials or seeds", hint="seeds = [5] in place of seed = 5"
        )
    for name in {name for search in searches for name in search.over}:
        if all(name in grid for grid in grids):
            raise InputError(
                f"[[search]] over {name}: every [[grid]] sets it", hint="leave it to the search"
            )
    for grid in grids:
        for name in PLACES & grid.keys():
            if isinstance(grid[name], list):
                raise InputError(
                    f"[[grid]] {name} has several values, but they do not make several runs",
                    hint=f"{name} = … in [base]",
                )


def trained() -> frozenset[str]:
    """The settings of `shoestring train`, as its flags name them."""
    from ..runs.command import Call

    flags = {argument: flag for flag, argument in FLAGS.items()}
    names = (f.name for f in fields(Call) if f.name not in _ELSEWHERE)
    return frozenset({*technique_flags(), *(flags.get(name, name) for name in names)})


def profiled() -> frozenset[str]:
    """The settings of `shoestring profile`, as its flags name them."""
    return _PROFILED | technique_flags().keys()


def _settings(given: Mapping[str, Any], kind: str, where: str, *, lists: bool = False) -> Values:
    """Settings as names without tables; with `lists` each may have several values."""
    from ..runs.command import Call

    own = {name: given[name] for name in _OWN if name in given}
    check(own, _OWN, where)
    flat = _flat({name: value for name, value in given.items() if name not in _OWN})
    real = _flat(own.get("stands_for", {}))
    kinds = {name: one for name, one in get_type_hints(Call).items() if name not in _ELSEWHERE}
    kinds |= {name: flag.kind for name, flag in technique_flags().items()}
    kinds |= {flag: kinds[argument] for flag, argument in FLAGS.items()}
    if kind == "profile":  # shapes of whole inputs, where a training has that of one image
        kinds["input"] = str | list[str]
    several = {name: or_list(one) for name, one in kinds.items()} if lists else kinds
    for settings, allowed in ((flat, several), (real, kinds)):
        flags = [n for n in settings if not n.startswith(tuple(f"{t}." for t in registered()))]
        known(flags, trained() if kind == "train" else profiled(), where)
        check(settings, allowed, where)
    if empty := next((name for name, value in flat.items() if value == []), None):
        raise InputError(f"{where} {empty} has no values")
    seeds = flat.get("seed", [])
    for seed in seeds if isinstance(seeds, list) else [seeds]:
        check_seed(seed)
    return {**flat, **own, **({"stands_for": real} if "stands_for" in own else {})}


def _flat(table: Mapping[str, Any], before: str = "") -> Values:
    """`sparsity.method = …` is a table within a table to TOML; here it is one name."""
    found: Values = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{before}{name}."))
        else:
            found[before + name] = value
    return found


def _search(given: Values, seeds: tuple[int, ...], settled: set[str]) -> StudySearch:
    known(given, _SEARCH, "[[search]]")
    check(given, _SEARCH, "[[search]]")
    over = _settings(given.get("over", {}), "train", "search.over", lists=True)
    if not over or not all(isinstance(values, list) for values in over.values()):
        raise InputError("a search is over lists of values", hint="over = {lr = [0.05, 0.1]}")
    also = tuple(_settings(one, "train", "search.also") for one in given.get("also", ()))
    for one in also:
        named(one, over, "[[search]] also")
    only = _flat(given.get("only", {}))
    named(given.get("per", ()), settled, "[[search]] per")
    named(only, settled, "[[search]] only")
    return StudySearch(
        over=over,
        also=also,
        per=tuple(given.get("per", ())),
        using=_settings(given.get("using", {}), "train", "search.using"),
        only=only,
        seeds=_seeds(given, seeds),
    )


def _target(given: Values, shown: set[str]) -> StudyTarget:
    check(given, {"where": dict}, "[[target]]")
    where = _flat(given.get("where", {}))
    named(where, shown, "[[target]] where")
    found = _flat({name: value for name, value in given.items() if name != "where"})
    check(found, {name: float for name in found if name not in shown}, "[[target]]")
    plain = (name.removeprefix("max_").removeprefix("min_") for name in found)
    named(plain, QUANTITIES | shown, "[[target]]", "quantity or setting")
    return StudyTarget(where, found)


def _figures(given: list[Values], shown: set[str]) -> tuple[Figure, ...]:
    made = tuple(_figure(figure, shown) for figure in given)
    names = [figure.name for figure in made]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"two figures are called {twice!r}")
    return made


def _file_name(name: str, where: str) -> str:
    if not name.strip() or "/" in name or name in (".", "..") or not name.isprintable():
        raise InputError(f"{where} {name!r} is not a file name")
    return name


def _figure(given: Values, shown: set[str]) -> Figure:
    known(given, _FIGURE, "[[figure]]")
    check(given, _FIGURE, "[[figure]]")
    if "name" not in given:
        raise InputError("a figure needs a name", hint='name = "accuracy-vs-density"')
    if given.get("kind", "line") not in FIGURES:
        raise InputError(f"unknown figure {given['kind']!r}", hint="one of " + ", ".join(FIGURES))
    _file_name(given["name"], "[[figure]] name")
    series = given.get("series", ())
    series = (series,) if isinstance(series, str) else tuple(series)
    named(series, shown, "[[figure]] series")
    axes = [given[axis] for axis in ("x", "y") if axis in given]
    named(axes, QUANTITIES | shown, "[[figure]]", "quantity or setting")
    return Figure(**{**given, "series": series})


def _seeds(given: Values, default: tuple[int, ...]) -> tuple[int, ...]:
    if "seeds" in given:
        seeds = tuple(given["seeds"])
        if not seeds or len(set(seeds)) < len(seeds):
            raise InputError(
                f"seeds {list(seeds)} " + ("has one twice" if seeds else "has no values"),
                hint="every trial needs a seed of its own: seeds = [0, 1, 2]",
            )
        for seed in seeds:
            check_seed(seed)
        return seeds
    trials = at_least_one("trials", given.get("trials", 1))
    if trials > MOST_RUNS:
        raise InputError(f"trials = {trials:,} is more than {MOST_RUNS:,}")
    return tuple(range(trials)) if "trials" in given else default
