"""What is allowed, which settings are tried, and plans by the report's accounting."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoestring.errors import BudgetError, InputError
from shoestring.lab.models import builtin
from shoestring.memory.prediction import Prediction
from shoestring.memory.work import Work
from shoestring.planning.allow import Allowed
from shoestring.planning.cost import NOMINAL
from shoestring.planning.planner import Planner
from shoestring.planning.result import FrontPoint
from shoestring.planning.search import Candidate, pareto, search, smallest
from shoestring.planning.settings import Setting
from shoestring.step.profiling import profile
from shoestring.techniques import (
    Checkpointing,
    GradientRelease,
    Offload,
    OptimizerState,
    Precision,
    Sparsity,
)
from shoestring.techniques.claims import LOSSLESS, LOSSY, NEAR_LOSSLESS, Circumstances, Level
from shoestring.techniques.microbatching import lossiness as microbatch_loss
from shoestring.techniques.offers import Offer, Scales
from shoestring.techniques.plan import Plan
from shoestring.techniques.sparsity import lossiness as density_loss

BUDGETS = ("404.8", "200", "100", "42.6", "20", "12.2", "10")


@pytest.mark.parametrize(
    "allow, expected",
    [
        (None, Allowed()),
        ((), Allowed(Level.ROUNDING)),
        ("lossless", Allowed(Level.ROUNDING)),
        ("exact", Allowed(Level.EQUAL)),
        ("precision", Allowed(names=frozenset({"precision"}))),
        (["sparsity"], Allowed(names=frozenset({"sparsity"}))),
        ("bn-microbatch, sparsity", Allowed(names=frozenset({"bn-microbatch", "sparsity"}))),
        ({"lossless", "sparsity"}, Allowed(Level.ROUNDING, frozenset({"sparsity"}))),
    ],
)
def test_allow(allow: object, expected: Allowed) -> None:
    assert Allowed.of(allow) == expected  # type: ignore[arg-type]


def test_near_is_more_than_a_way_out_only_where_it_is_asked_for() -> None:
    for allow in ("near", "near,sparsity"):
        assert Allowed.of(allow).near_to_be_faster
    for otherwise in (None, "sparsity", "near,lossless"):
        assert not Allowed.of(otherwise).near_to_be_faster


class _Known:
    """Estimates that are right: seconds by kind, and all of it fits."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds
        self.predicted: list[str] = []

    def least_seconds(self, setting: Setting) -> float:
        return self._seconds[setting.plan().short()]

    def least_bytes(self, setting: Setting) -> int:
        return 1

    def best(self, setting: Setting, room_bytes: int) -> Candidate:
        return Candidate(setting, None, 1, self.least_seconds(setting), Work(1))

    def idle(self, candidate: Candidate) -> bool:
        return False

    def bytes_by(self, setting: Setting, candidate: Candidate) -> int:
        return 1

    def predict(self, candidate: Candidate) -> Prediction:
        self.predicted.append(candidate.plan.short())
        return Prediction(1, "device", "cuda", candidate.seconds, 1, "nominal")


@pytest.mark.parametrize(
    "lossless, near, lossy, slow, chosen",
    [
        (2.0, 1.0, 0.1, 1.2, "8-bit state"),  # never a lossy one to be faster
        (2.0, 1.8, 0.1, 1.2, "state on the host"),  # hardly faster
        (1.1, 0.2, 0.1, 1.2, "state on the host"),  # about as fast as plain training
        (2.0, 1.0, 0.1, float("inf"), "state on the host"),  # near was not asked for
    ],
)
def test_a_lossless_plan_that_is_far_slower_gives_way(
    lossless: float, near: float, lossy: float, slow: float, chosen: str
) -> None:
    at = Circumstances("cuda", batch_norm=False)
    some = [
        Setting((Offer(Offload(), ""),)),
        Setting((Offer(OptimizerState(8), "", lossiness=0.02),)),
        Setting((Offer(OptimizerState(4), "", lossiness=0.2),)),
    ]
    times = dict(zip((s.plan().short() for s in some), (lossless, near, lossy), strict=True))
    known = _Known(times)
    found = search(known, some, 10, at, slow)  # type: ignore[arg-type]
    assert found is not None and found.candidate.plan.short() == chosen
    assert found.lossless_seconds == (lossless if chosen == "8-bit state" else None)
    assert known.predicted == [chosen]


class _Scratch(_Known):
    """Estimates that leave out bytes of kernels, by kind."""

    def __init__(self, left_out: dict[str, int]) -> None:
        super().__init__({kind: 1.0 + number / 100 for number, kind in enumerate(left_out)})
        self._left_out = left_out

    def best(self, setting: Setting, room_bytes: int) -> Candidate:
        return Candidate(setting, None, 90, self.least_seconds(setting), Work(1))

    def tighter(self, candidate: Candidate, missing_bytes: int) -> Candidate | None:
        return None

    def predict(self, candidate: Candidate) -> Prediction:
        kind = candidate.plan.short()
        self.predicted.append(kind)
        needed = candidate.peak_bytes + self._left_out[kind]
        return Prediction(needed, "device", "cuda", candidate.seconds, 1, "nominal")


def test_what_estimates_leave_out_is_learnt_from_the_first_prediction() -> None:
    some = [Setting((Offer(Offload(share=n / 32), ""),)) for n in range(1, 33)]
    kinds = [s.plan().short() for s in some]
    none = _Scratch(dict.fromkeys(kinds, 50))
    assert search(none, some, 100, Circumstances("cuda", batch_norm=False)) is None  # type: ignore[arg-type]
    assert len(none.predicted) < 24  # all 32 before
    last = _Scratch({**dict.fromkeys(kinds, 50), kinds[15]: 5})  # fits, unlike those before
    found = search(last, some, 100, Circumstances("cuda", batch_norm=False))  # type: ignore[arg-type]
    assert found is not None and found.candidate.plan.short() == kinds[15]


class _Tightened(_Scratch):
    """Each has a slower schedule, for which there is room."""

    def tighter(self, candidate: Candidate, missing_bytes: int) -> Candidate | None:
        if candidate.peak_bytes == 40:
            return None
        return Candidate(candidate.setting, None, 40, candidate.seconds + 1, Work(1))


def test_what_three_estimates_leave_out_alike_is_believed() -> None:
    """While each prediction of a large model takes seconds."""
    some = [Setting((Offer(Offload(share=n / 32), ""),)) for n in range(1, 33)]
    kinds = [s.plan().short() for s in some]
    known = _Tightened(dict.fromkeys(kinds, 50))
    found = search(known, some, 100, Circumstances("cuda", batch_norm=False))  # type: ignore[arg-type]
    assert found is not None and found.predicted.needed_bytes == 90
    assert found.candidate.plan.short() == kinds[0]  # the fastest
    assert len(known.predicted) == 4  # 13 before


class _Bounded(_Known):
    """Bytes by kind: what no plan is below, and what the smallest needs."""

    def __init__(self, sizes: dict[str, tuple[int, int]]) -> None:
        super().__init__(dict.fromkeys(sizes, 1.0))
        self._sizes = sizes

    def least_bytes(self, setting: Setting) -> int:
        return self._sizes[setting.plan().short()][0]

    def least(self, setting: Setting) -> Candidate:
        return Candidate(setting, None, self._sizes[setting.plan().short()][1], 1.0, Work(1))

    def predict(self, candidate: Candidate) -> Prediction:
        self.predicted.append(candidate.plan.short())
        return Prediction(candidate.peak_bytes, "device", "cuda", 1.0, 1, "nominal")


def test_the_smallest_is_not_the_one_of_the_lowest_bound() -> None:
    some = [
        Setting((Offer(technique, ""),))
        for technique in (Offload(), OptimizerState(8), OptimizerState(4), GradientRelease())
    ]
    names = [setting.plan().short() for setting in some]
    known = _Bounded(
        dict(zip(names, ((10, 90), (11, 80), (12, 70), (20, 30)), strict=True)),
    )
    found = smallest(known, some)  # type: ignore[arg-type]
    assert found is not None and found.candidate.plan.short() == names[-1]
    assert known.predicted == names[-1:]  # no other can need less than is estimated for it


class _Told(_Known):
    """What the plan with fewer techniques is predicted to take, where it is asked for."""

    simpler: Prediction | None

    def predict(self, candidate: Candidate) -> Prediction | None:
        made = super().predict(candidate)
        return self.simpler if len(candidate.plan.techniques) == 1 else made


BOTH = "state on the host + released gradients"


@pytest.mark.parametrize(
    "nbytes, seconds, width, chosen",
    [
        (10, 1.0, 1.0, "released gradients"),
        (11, 1.0, 1.0, BOTH),  # does not fit without the other
        (10, 1.1, 1.0, BOTH),  # takes longer
        (10, 1.0, 0.5, BOTH),  # its passes are not the same
        (None, 1.0, 1.0, BOTH),  # cannot be applied
    ],
)
def test_a_schedule_is_tried_with_fewer_techniques(
    nbytes: int | None, seconds: float, width: float, chosen: str
) -> None:
    """The setting with more techniques may come to it first."""
    release, offload = Offer(GradientRelease(), ""), Offer(Offload(), "")
    alone = Setting((release if width == 1 else Offer(release.technique, "", Scales(width=width)),))
    some = [Setting((release, offload)), alone]
    known = _Told({BOTH: 0.5, "released gradients": 0.6})
    known.simpler = nbytes and Prediction(nbytes, "device", "cuda", seconds, 1, "nominal")
    at = Circumstances("cuda", batch_norm=False)
    known.best = lambda setting, room: Candidate(setting, None, 1, 1.0, Work(1))  # type: ignore[method-assign]
    found = search(known, some, 10, at)  # type: ignore[arg-type]
    assert found is not None and found.candidate.plan.short() == chosen


@pytest.mark.parametrize("estimated, tried", [(10, True), (11, False), (0, True)])
def test_fewer_techniques_are_predicted_only_where_they_may_fit(
    estimated: int, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of a large model takes seconds to trace; 0 is for what no estimate tells."""
    release, offload = Offer(GradientRelease(), ""), Offer(Offload(), "")
    known = _Told({BOTH: 0.5, "released gradients": 0.6})
    known.simpler = Prediction(11, "device", "cuda", 1.0, 1, "nominal")
    monkeypatch.setattr(known, "best", lambda setting, room: Candidate(setting, None, 1, 1, Work()))
    monkeypatch.setattr(known, "bytes_by", lambda setting, candidate: estimated)
    some = [Setting((release, offload)), Setting((release,))]
    at = Circumstances("cuda", batch_norm=False)
    assert search(known, some, 10, at)  # type: ignore[arg-type]
    assert known.predicted == [BOTH, *(["released gradients"] if tried else [])]


LEVELS = st.sampled_from([Level.EQUAL, Level.ROUNDING, Level.NEAR])
NAMES = st.frozensets(st.sampled_from(["precision", "sparsity", "bn-microbatch"]), min_size=1)


@given(st.builds(Allowed, LEVELS, NAMES))
def test_what_is_allowed_is_asked_for_by_its_text(allowed: Allowed) -> None:
    assert Allowed.of(str(allowed)) == allowed


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(InputError, match="'pruning'") as raised:
        Allowed.of("pruning")
    assert "bn-microbatch" in str(raised.value.hint)


@given(st.floats(0.01, 1.0), st.floats(0.01, 1.0), st.integers(1, 200), st.integers(1, 200))
def test_less_is_lossier(a: float, b: float, m: int, n: int) -> None:
    assert density_loss(min(a, b)) >= density_loss(max(a, b)) >= 0
    assert microbatch_loss(min(m, n)) >= microbatch_loss(max(m, n)) > 0


@cache
def offering(batch_norm: bool, linear: bool, ragged: bool) -> Planner:
    layers = [nn.Linear(8, 8), *([nn.BatchNorm1d(8)] if batch_norm else []), nn.ReLU()]
    model = nn.Sequential(*layers) if linear else nn.Sequential(nn.BatchNorm1d(8), nn.ReLU())
    return Planner(
        model, torch.randn(12, 8), loss=lambda m, b: m(b).mean(), optimizer="sgd",
        accounting="device" if ragged else "fundamental", costs=NOMINAL["cpu"],
    )  # fmt: skip


def found(
    allow: str | None, *, batch_norm: bool = False, linear: bool = True, ragged: bool = False
) -> list[tuple[Setting, tuple[str | None, int | None, float | None]]]:
    planner = offering(batch_norm, linear, ragged)
    some = planner._settings(Allowed.of(allow))
    ranks = [s.rank(planner.context.circumstances) for s in some]
    assert ranks == sorted(ranks)
    shown = {"precision", "microbatching", "sparsity"}
    some = [s for s in some if {t.name for t in s.techniques} <= shown]
    plans = [s.plan() for s in some]
    return [
        (s, (p.precision and p.precision.kind, p.at_once, p.sparsity and p.sparsity.density))
        for s, p in zip(some, plans, strict=True)
    ]


def made(allow: str | None, **changes: bool) -> list[tuple[str | None, int | None, float | None]]:
    return [setting for _, setting in found(allow, **changes)]


def test_settings_by_what_is_allowed() -> None:
    sizes = [None, 6, 4, 3, 2, 1]
    assert made("lossless") == [(None, size, None) for size in sizes]
    assert made("exact") == [(None, None, None)]
    assert made(None) == [(p, size, None) for p in (None, "fp16") for size in sizes]
    assert made("lossless", batch_norm=True) == [(None, None, None)]
    assert (None, 1, None) in made("bn-microbatch", batch_norm=True)
    none = made("sparsity", linear=False, batch_norm=True)
    assert none and all(density is None for _, _, density in none)
    assert len(made("lossless", ragged=True)) == 6


def test_kinds() -> None:
    some = found("bn-microbatch,sparsity", batch_norm=True)
    at = offering(True, True, False).context.circumstances
    kinds = {tuple(value is None for value in key): s.level(at).kind for s, key in some}
    assert kinds[True, True, True] == LOSSLESS
    assert kinds[False, True, True] == NEAR_LOSSLESS
    assert {kind for key, kind in kinds.items() if not (key[1] and key[2])} == {LOSSY}


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), max_size=30))
def test_pareto_is_brute_force(pairs: list[tuple[int, int]]) -> None:
    points = [FrontPoint(Plan(), m, float(t), False, LOSSLESS) for m, t in pairs]
    expected = {
        (m, t)
        for m, t in pairs
        if not any((a <= m and b < t) or (a < m and b <= t) for a, b in pairs)
    }
    assert {(p.peak_bytes, int(p.seconds)) for p in pareto(points)} == expected


# -- the report's accounting -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide_resnet() -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    known = builtin("wrn-28-2")
    return known.build(), known.batch(100)


@pytest.fixture(scope="module")
def planner(wide_resnet) -> Planner:  # type: ignore[no-untyped-def]
    model, batch = wide_resnet
    return Planner(
        model, batch, loss=builtin("wrn-28-2").loss, optimizer="sgd", accounting="fundamental",
        allow="bn-microbatch",
    )  # fmt: skip


@pytest.mark.slow
def test_time_grows_as_the_budget_falls(planner: Planner) -> None:
    """Nothing sparse, and each slower than the one before."""
    found = [planner.plan(int(float(size) * 1e6)) for size in BUDGETS]
    for size, plan in zip(BUDGETS, found, strict=True):
        assert plan.predicted.peak_bytes <= float(size) * 1e6
        assert plan.sparsity is None
    seconds = [plan.predicted.seconds for plan in found]
    assert seconds == sorted(seconds)
    assert [plan.kind for plan in found] == [LOSSLESS] * 3 + [NEAR_LOSSLESS] + [LOSSY] * 3


@pytest.mark.parametrize(
    "size, density, microbatch",
    [
        pytest.param("42.6", 1.0, 100, marks=pytest.mark.slow),
        pytest.param("12.2", 1.0, 10, marks=pytest.mark.slow),
        pytest.param("6.7", 0.3, 10, marks=pytest.mark.slow),
        pytest.param("5.6", 0.2, 10, marks=pytest.mark.slow),
        pytest.param("3.6", 0.2, 4, marks=pytest.mark.slow),
        ("2.5", 0.1, 4),
    ],
)
def test_no_row_of_the_report_is_better(
    planner: Planner, wide_resnet, size: str, density: float, microbatch: int
) -> None:
    """Its Table 3: no more memory, no more operations, no lower density."""
    model, _ = wide_resnet
    known = builtin("wrn-28-2")
    row = profile(
        model, known.batch(microbatch), loss=known.loss, optimizer="sgd",
        techniques=[Sparsity(density), Precision("fp16"), Checkpointing("residual-2*")],
    )  # fmt: skip
    row_flops = (row.forward_flops + row.backward_flops + row.recompute_flops) * (100 // microbatch)
    planner.allowed = Allowed.of("bn-microbatch,sparsity")
    plan = planner.plan(int(float(size) * 1e6))
    planner.allowed = Allowed.of("bn-microbatch")
    assert plan.predicted.peak_bytes <= min(float(size) * 1e6, row.peak_bytes)
    assert plan.predicted.flops <= row_flops
    assert (1.0 if plan.sparsity is None else plan.sparsity.density) >= density


def test_what_is_predicted_is_what_profile_counts(planner: Planner, wide_resnet) -> None:  # type: ignore[no-untyped-def]
    model, batch = wide_resnet
    plan = planner.plan(20_000_000)
    counted = profile(
        model, batch, loss=builtin("wrn-28-2").loss, optimizer="sgd", techniques=plan.techniques
    )
    assert plan.predicted.peak_bytes == counted.peak_bytes


def test_below_the_smallest(planner: Planner) -> None:
    with pytest.raises(BudgetError, match="the smallest found is 7") as raised:
        planner.plan(2_000_000)
    assert str(raised.value.hint).startswith("allow 'bn-microbatch,sparsity' (about ")
    assert raised.value.exit_status == 1
    smallest = raised.value.smallest_bytes
    assert smallest is not None
    assert planner.plan(smallest).predicted.peak_bytes <= smallest
    with pytest.raises(BudgetError):
        planner.plan(smallest - 2)
