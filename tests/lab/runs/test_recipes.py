"""The report's hyperparameters, and how settings are filled in from them."""

import pytest

from shoestring import (Microbatching, Plan, Precision, Sparsity)
from shoestring.errors import InputError
from shoestring.lab.runs.defaults import (CIFAR10, TRANSLATION, TRANSLATION_BY_DENSITY, Multipliers, learning_rate_at, rewiring_schedule)
from shoestring.techniques.sparsity.rewiring import is_due
from shoestring.lab.runs.settings import ImageSettings, build_model, settings_for


def made(plan=None, model="wrn-28-2", **others) -> ImageSettings:
    return settings_for(model, "cifar10", images=50_000, plan=plan or Plan(), **others)


def test_learning_rate_drops_after_epochs_60_120_and_160():
    settings = made(learning_rate=0.1)
    by_epoch = [settings.learning_rate_at(epoch) for epoch in range(200)]
    expected = [0.1] * 60 + [0.02] * 60 + [0.004] * 40 + [0.0008] * 40
    assert by_epoch == pytest.approx(expected)


def test_the_drops_scale_with_the_epochs():
    rates = [learning_rate_at(e, 10, 1.0, CIFAR10.drops, 0.1) for e in range(10)]
    assert rates == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_the_report_s_defaults():
    settings = made()
    assert (settings.epochs, settings.batch) == (200, 100)
    assert (settings.momentum, settings.weight_decay) == (0.9, 5e-4)
    assert settings.learning_rate == pytest.approx(0.05)  # 0.1 × 0.5 for the dense network


@pytest.mark.parametrize(
    ("density", "rate", "fraction", "frequency"),
    [
        (0.5, 0.05, 4, 0.5),
        (0.4, 0.1, 1, 2),
        (0.3, 0.1, 2, 0.5),
        (0.2, 0.1, 2, 1),
        (0.1, 0.05, 1, 0.5),
        (0.05, 0.05, 1, 0.25),
        (0.35, 0.1, 2, 0.5),  # between two: the smaller one's
        (0.02, 0.05, 1, 0.25),
    ],
)
def test_what_the_report_tuned_for_each_density(density, rate, fraction, frequency):
    settings = made(Plan.of([Sparsity(density), Precision("fp16")]), tune=True, seed=3)
    sparsity = settings.plan.sparsity
    assert settings.learning_rate == pytest.approx(rate)
    assert (sparsity.fraction_multiplier, sparsity.frequency_multiplier) == (fraction, frequency)
    assert sparsity.seed == settings.plan.precision.seed == 3
    assert sparsity.schedule == ((12_500, 100), (40_000, 200), (70_000, 400), (95_000, 800))


def test_smaller_models_and_shortcuts():
    assert made(model="wrn-28-0.5").learning_rate == pytest.approx(0.1)
    assert made(model="wrn-16-2-pool").learning_rate == pytest.approx(0.05)
    model, _ = build_model("wrn-10-1-pool", 10)
    assert model.group2[0].shortcut_kind == "pool"


def test_a_plan_from_a_file_is_taken_as_it_is():
    plan = Plan.of([Sparsity(0.3, schedule=((10, 5),)), Microbatching(4)])
    assert made(plan, seed=5).plan == plan


def test_rewiring_scales_its_periods_as_the_report_does_for_translation():
    halved = ((6250, 100), (20_000, 200), (35_000, 400), (47_500, 800))
    assert rewiring_schedule(50_000, 50_000) == halved
    assert rewiring_schedule(4, 4) == ((1, 200), (2, 400), (3, 800))
    assert rewiring_schedule(0, 50_000) == ()


def test_a_run_cut_short_rewires_as_many_times():
    """20,000 updates of translation's 50,000: every 40, 80, 160 and 320."""
    short = rewiring_schedule(20_000, 50_000)
    assert short == ((2500, 40), (8000, 80), (14_000, 160), (19_000, 320))
    whole = rewiring_schedule(50_000, 50_000)
    counts = [
        sum(is_due(step, schedule, 1.0) for step in range(1, updates + 1))
        for schedule, updates in ((short, 20_000), (whole, 50_000))
    ]
    assert abs(counts[0] - counts[1]) <= 3, counts
    assert rewiring_schedule(200_000, 100_000)[0] == (25_000, 100)  # a longer one as often


def test_a_run_cut_short_says_so(capsys):
    made = settings_for(
        "wrn-28-2", "cifar10", images=50_000, plan=Plan.of([Sparsity(0.3)]), tune=True, epochs=60
    )
    assert "3.33 times as often" in capsys.readouterr().err
    assert made.plan.sparsity.schedule[0] == (3750, 30)
    settings_for("wrn-28-2", "cifar10", images=50_000, plan=Plan.of([Sparsity(0.3)]), tune=True)
    assert capsys.readouterr().err == ""


def test_a_multiplier_of_zero_never_rewires():
    schedule = rewiring_schedule(50_000, 50_000)
    assert not any(is_due(step, schedule, 0.0) for step in range(1, 50_001))
    assert Sparsity(0.3, frequency_multiplier=0.0).frequency_multiplier == 0
    with pytest.raises(InputError, match="fraction_multiplier 0 is not a number above 0"):
        Sparsity(0.3, fraction_multiplier=0)


def test_translation():
    assert TRANSLATION.learning_rate_at(4000) == pytest.approx(5e-4)
    assert TRANSLATION.learning_rate_at(1) == pytest.approx(1e-7 + (5e-4 - 1e-7) / 4000)
    assert TRANSLATION.learning_rate_at(16_000) == pytest.approx(2.5e-4)
    assert TRANSLATION_BY_DENSITY[0.1] == Multipliers(8, 1, 0.5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"epochs": 0}, "epochs 0 is below 1"),
        ({"batch": 0}, "batch 0 is below 1"),
        ({"seed": -1}, "seed -1"),
        ({"learning_rate": 0.0}, "learning rate 0 is not above 0"),
        ({"evaluate_every": 0}, "evaluate every 0 is below 1"),
    ],
)
def test_settings_that_cannot_be(wrong, said):
    with pytest.raises(InputError, match=said):
        made(**wrong)


def test_models_for_other_data():
    with pytest.raises(InputError, match="dc-transformer does not take images"):
        build_model("dc-transformer", 10)
    with pytest.raises(InputError, match="no data is called 'imagenet'"):
        settings_for("wrn-28-2", "imagenet", images=1, plan=Plan())
