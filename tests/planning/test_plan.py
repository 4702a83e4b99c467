"""A plan is a value: it reads what it wrote, and says what it cannot read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoestring as ss
from shoestring.errors import InputError
from shoestring.techniques import Checkpointing, Microbatching, Precision, Sparsity
from shoestring.techniques.plan import Plan

NAME = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=8)
NAMES = st.lists(NAME, max_size=3).map(tuple)
POSITIVE = st.floats(1e-9, 1e9)


def schedules() -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    lasts = st.lists(st.integers(1, 10**6), unique=True, max_size=3).map(sorted)
    return lasts.map(lambda found: tuple((last, 1 + last % 100) for last in found))


SPARSITY = st.builds(
    Sparsity,
    density=st.floats(1e-6, 1.0),
    method=st.sampled_from(["dsr", "set", "static"]),
    tensors=st.none() | NAMES,
    seed=st.integers(0, 2**31),
    rewire_fraction=POSITIVE,
    fraction_multiplier=POSITIVE,
    frequency_multiplier=POSITIVE,
    threshold=POSITIVE,
    schedule=schedules(),
)
PRECISION = st.builds(
    Precision,
    kind=st.sampled_from(["fp32", "fp16", "bf16"]),
    rounding=st.sampled_from([None, "nearest", "stochastic"]),
    initial_scale=POSITIVE,
    growth_interval=st.integers(1, 10**6),
    seed=st.integers(0, 2**31),
)
CHECKPOINTING = st.builds(
    Checkpointing,
    strategy=st.sampled_from(["none", "no-bn", "every-3", "residual-12", "residual-2*"]),
    blocks=NAMES,
)
MICROBATCHING = st.builds(Microbatching, size=st.integers(1, 10**9)) | st.builds(
    Microbatching, size=st.integers(1, 9), accumulate=st.just("compensated")
)
PLANS = st.builds(
    Plan,
    sparsity=st.none() | SPARSITY,
    precision=st.none() | PRECISION,
    checkpointing=st.none() | CHECKPOINTING,
    microbatching=st.none() | MICROBATCHING,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@settings(max_examples=60, deadline=None)
@given(PLANS)
def test_a_plan_reads_what_it_wrote(folder: Path, plan: Plan) -> None:
    assert Plan.from_dict(plan.to_dict()) == plan
    assert Plan.from_dict(json.loads(plan.to_json())) == plan
    for name in ("plan.toml", "plan.json"):
        plan.save(folder / name)
        assert Plan.load(folder / name) == plan
    assert Plan.of(reversed(plan.techniques)) == plan


def test_defaults_are_left_out() -> None:
    plan = Plan(sparsity=Sparsity(0.3), checkpointing=Checkpointing("residual-2*", blocks=("a",)))
    assert plan.to_dict() == {
        "sparsity": {"density": 0.3},
        "checkpointing": {"strategy": "residual-2*", "blocks": ["a"]},
    }
    assert plan.to_toml() == (
        '[sparsity]\ndensity = 0.3\n\n[checkpointing]\nstrategy = "residual-2*"\nblocks = ["a"]\n'
    )


def test_techniques_come_in_the_order_they_are_applied() -> None:
    chosen = [Microbatching(10), Checkpointing("no-bn"), Precision("fp16"), Sparsity(0.3)]
    assert Plan.of(chosen).techniques == tuple(reversed(chosen))


def test_as_text() -> None:
    assert str(Plan()) == "plain"
    plan = Plan.of([Sparsity(0.3), Precision("fp16"), Microbatching(10)])
    assert str(plan) == "sparsity 0.3 + precision fp16 + microbatching 10"
    assert str(Plan.of([Checkpointing("residual-2*")])) == "checkpointing residual-2*"


def test_twice_the_same_technique() -> None:
    with pytest.raises(InputError, match="precision is given twice"):
        Plan.of([Precision("fp16"), Precision("bf16")])


def test_what_is_no_technique() -> None:
    given: Any = ["fp16"]
    with pytest.raises(InputError, match="'fp16' is not a technique"):
        Plan.of(given)


WRONG = {
    "[quantization]\nbits = 8": "no part 'quantization'",
    "precision = 'fp16'": "no part 'precision'",
    "[precision]\nkind = 'fp16'\nscale = 2": "precision has no setting 'scale'",
    "[precision]": "precision: .*'kind'",
    "[precision]\nkind = 'fp8'": "unknown precision 'fp8'",
    "[precision]\nkind = 'fp16'\ninitial_scale = 'large'": "precision: ",
    "[sparsity]\ndensity = 1.5": "density 1.5 lies outside",
    "[sparsity]\ndensity = '0.3'": "'0.3' is not a number",
    "[sparsity]\ndensity = 0.3\nschedule = [[1, 2, 3]]": "schedule",
    "[checkpointing]\nstrategy = 'sqrt'": "unknown checkpointing strategy 'sqrt'",
    "[microbatching]\nsize = 0": "microbatch 0",
    "[microbatching]\nsize = 2.5": "microbatch 2.5",
    "[precision\nkind = 'fp16'": "is damaged",
    "[precision]\nkind = 'fp16'\n[precision]\nkind = 'fp16'": "is damaged",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_file_that_is_no_plan(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=WRONG[text]):
        Plan.load(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"{", "is damaged"), (b"\xff\xfe{}", "is damaged"), (b"[1, 2]", "is not a table")],
)
def test_a_json_file_that_is_no_plan(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=said):
        Plan.load(path)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write the plan .*p\.toml: No such file"):
        Plan().save(tmp_path / "nowhere" / "p.toml")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read the plan .*none\.toml: No such file"):
        Plan.load(tmp_path / "none.toml")
    with pytest.raises(InputError, match="cannot read the plan"):
        Plan.load(tmp_path)


@pytest.mark.parametrize("name", ["plan.toml", "plan.json"])
def test_an_empty_file_is_refused_and_a_plain_plan_is_not_empty(tmp_path: Path, name: str) -> None:
    """A disk that is full leaves one, and training would be plain without a word."""
    for text in ("", " \n"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match="is damaged: it is empty"):
            Plan.load(tmp_path / name)
    Plan().save(tmp_path / name)
    assert Plan.load(tmp_path / name) == Plan()


def test_a_function_cannot_be_written() -> None:
    plan = Plan(microbatching=Microbatching(2, weight=len))
    with pytest.raises(InputError, match="units is a function"):
        plan.to_toml()


@pytest.mark.parametrize("odd", [{"allow": 3}, {"batches": 3}, {"batches": torch.ones(3)}], ids=str)
def test_odd_arguments_are_one_line(odd: dict[str, Any]) -> None:
    other: dict[str, Any] = {
        "loss": lambda m, b: m(b).mean(),
        "optimizer": "sgd",
        "budget": "1 MB",
        **odd,
    }
    with pytest.raises(ss.InputError):
        ss.plan(torch.nn.Linear(3, 2), torch.ones(2, 3), **other)


def test_a_loss_of_several_numbers_is_named() -> None:
    """The test of how it splits comes first."""
    with pytest.raises(ss.InputError, match=r"must be a scalar, got shape \(4, 2\)"):
        ss.plan(torch.nn.Linear(3, 2), torch.ones(4, 3), loss=lambda m, b: m(b), optimizer="sgd",
                budget="1 MB")  # fmt: skip
