"""Two ranks train as one process does: DDP and FSDP2, under every plan that composes with them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shoestring as ss
from once import made_once
from shoestring.errors import InputError
from shoestring.lab.records.run import read, strip_times
from shoestring.lab.runs import snapshot
from shoestring.lab.runs.trainer import Trainer
from shoestring.step.apply import apply
from shoestring.step.sharding import check_sharding
from shoestring.step.shares import Parallel, cut_evenly
from shoestring.techniques.distance import relative_error
from step.two_ranks import (
    CLIPPED,
    CROSSED,
    OPTIMIZERS,
    RESUMED,
    SAME,
    STEPS,
    batches,
    channels_last,
    clipped,
    make,
    results,
    together,
    trained,
    units,
    with_padding,
)
from techniques.small_models import SMALL

ROUNDING = {"fp16": 2e-2, "8-bit state": 5e-2, "bf16, 8-bit state": 0.2}
"""Largest relative error; FP16 adds the parts of a gradient in another order. Rows of a rank have
blocks and random numbers of their own, and codes are up to 0.8% off."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks left results and runs."""

    def run(folder: Path) -> None:
        states = {}
        for _, plan, optimizer in CROSSED:
            step = make("tied", plan, optimizer)
            states[plan] = trained(step, batches("tied")[: STEPS // 2])["state"]
        together(folder, states)

    return made_once(tmp_path_factory, "ranks", run)


@pytest.fixture(scope="module")
def found(place: Path) -> list[dict[str, Any]]:
    """The results of both ranks, by job."""
    return results(place)


def alone(model: str, plan: str, optimizer: str = "sgd") -> dict[str, Any]:
    return trained(make(model, plan, optimizer), batches(model))


def weights_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What does not depend on how many ranks count batches and track statistics."""
    skipped = ("num_batches_tracked", "running_mean", "running_var")
    return {k: v for k, v in state["model"].items() if not k.endswith(skipped)}


def moments_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"{index} {key}": value
        for index, held in state["optimizer"]["state"].items()
        for key, value in held.items()
        if isinstance(value, torch.Tensor)
    }


def assert_same(expected: dict[str, Any], given: dict[str, Any], tolerance: float = 1e-4) -> None:
    assert given["losses"] == pytest.approx(expected["losses"], rel=tolerance / 4)
    compared = {"weights": [weights_of(made["state"]) for made in (expected, given)]}
    if "optimizer" in given["state"]:
        compared["moments"] = [expected["moments"], given["moments"]]
    for what, (a, b) in compared.items():
        assert a.keys() == b.keys()
        assert all(a[k].shape == b[k].shape for k in a)
        assert relative_error([(a[k].float(), b[k].float()) for k in a]) < tolerance, what


@pytest.mark.slow
@pytest.mark.parametrize("plan", CLIPPED)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_clip_to_the_norm_of_all_gradients(
    found: list[Any], parallel: str, plan: str
) -> None:
    first, second = (result[f"clipped {parallel} {plan}"] for result in found)
    assert first["losses"] == second["losses"]
    assert min(first["losses"]) > 0.05
    assert_same(clipped(None, plan), first, ROUNDING.get(plan, 1e-4) * 4)


@pytest.mark.slow
@pytest.mark.parametrize("case", SAME, ids=" ".join)
def test_two_ranks_train_as_one_process(found: list[Any], case: tuple[str, ...]) -> None:
    parallel, model, plan, optimizer = case
    first, second = (result[" ".join(case)] for result in found)
    assert_same(alone(model, plan, optimizer), first, ROUNDING.get(plan, 1e-4))
    assert first["losses"] == second["losses"]
    assert first["indexes"].keys() == second["indexes"].keys()
    assert all(torch.equal(a, second["indexes"][n]) for n, a in first["indexes"].items())
    if parallel == "ddp":
        for part in (weights_of, moments_of):
            a, b = part(first["state"]), part(second["state"])
            assert all(torch.equal(a[k], b[k]) for k in a)
    if plan in ("dsr", "set"):
        rewiring = first["state"]["techniques"]["sparsity"]
        assert rewiring["rewirings"] == 3 and rewiring["rewired"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_small_gradients_added_together(found: list[Any], kind: str) -> None:
    made = found[0][f"small gradients {kind}"]
    plain, together = made["one by one"], made["together"]
    assert plain["losses"] == together["losses"]
    for name, tensor in plain["state"]["model"].items():
        assert torch.equal(tensor, together["state"]["model"][name]), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_weights_that_lie_channels_last(found: list[Any], kind: str) -> None:
    assert_same(channels_last(None), found[0][f"channels last {kind}"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradients_are_synchronized_once_a_step(found: list[Any], kind: str) -> None:
    """As often for one rank's three microbatches as for a whole share at once."""
    for result in found:
        plain, parts = (result[f"collectives {kind} {p}"] for p in ("plain", "microbatched"))
        if kind == "ddp":
            assert plain == parts
            assert plain["counts"] == {"allreduce_": 2}  # the gradients, packed; the loss
            assert plain["summed"] == plain["elements"] + 1
        else:
            units = 4  # three layers, and what is around them
            assert plain["counts"]["_reduce_scatter_base_"] == units
            assert parts["counts"]["_reduce_scatter_base_"] == units
            assert parts["summed"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_an_overflow_on_one_rank_skips_on_all(found: list[Any], kind: str) -> None:
    first, second = (result[f"overflow {kind}"] for result in found)
    for result in (first, second):
        assert result["skipped"] == 1 and result["scale"] == 2.0**14
    held, kept, last = (weights_of(first[k]) for k in ("before", "after", "last"))
    assert all(torch.equal(held[k], kept[k]) for k in held)
    assert not all(torch.equal(kept[k], last[k]) for k in kept)


@pytest.mark.slow
@pytest.mark.parametrize("case", CROSSED, ids=" ".join)
def test_a_state_goes_from_two_ranks_to_one(found: list[Any], case: tuple[str, ...]) -> None:
    _, plan, optimizer = case
    begun = found[0][f"begin {' '.join(case)}"]
    step = make("tied", plan, optimizer, seed=1)
    step.load_state_dict(begun["state"])
    rest = trained(step, batches("tied")[STEPS // 2 :])
    given = {**rest, "losses": begun["losses"] + rest["losses"]}
    assert_same(alone("tied", plan, optimizer), given, ROUNDING.get(plan, 1e-4))


@pytest.mark.slow
@pytest.mark.parametrize("case", CROSSED, ids=" ".join)
def test_a_state_goes_from_one_rank_to_two(found: list[Any], case: tuple[str, ...]) -> None:
    expected = alone("tied", *case[1:])
    given = found[0][f"go on {' '.join(case)}"]
    expected["losses"] = expected["losses"][STEPS // 2 :]
    assert_same(expected, given, ROUNDING.get(case[1], 1e-4))


@pytest.mark.slow
@pytest.mark.parametrize("plan", RESUMED)
def test_a_state_of_sharded_ranks_goes_on_to_the_bit(found: list[Any], plan: str) -> None:
    whole, parts = (found[0][f"resumed {plan}"][which] for which in ("whole", "parts"))
    assert whole["losses"][STEPS // 2 :] == parts["losses"]
    for a, b in ((whole["state"]["model"], parts["state"]["model"]),
                 (whole["moments"], parts["moments"])):  # fmt: skip
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.slow
def test_gradients_that_only_one_rank_has_are_released_too(found: list[Any]) -> None:
    for result in found:
        plain, released = (result["routed"][plan] for plan in ("plain", "released"))
        assert plain["losses"] == released["losses"]
        for part in (weights_of, moments_of):
            a, b = part(plain["state"]), part(released["state"])
            assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.slow
def test_all_ranks_start_from_the_first_ones_weights(found: list[Any]) -> None:
    assert_same(alone("mlp", "plain"), found[1]["other_weights_at_first"])


@pytest.mark.slow
@pytest.mark.parametrize("job", ["parts_of_their_own", "parts_of_their_own_sharded"])
def test_unequal_parts_weigh_what_they_have(found: list[Any], job: str) -> None:
    assert_same(alone("mlp", "microbatched"), found[0][job])


@pytest.mark.slow
def test_a_loss_averaged_over_units(found: list[Any]) -> None:
    step = make("mlp", "plain")
    assert [int(units(b)) for b in with_padding(1)] == [4]
    assert_same(trained(step, with_padding()), found[0]["averaged_over_tokens"])


@pytest.mark.slow
def test_running_statistics_become_the_mean_of_the_ranks(found: list[Any]) -> None:
    first, second = (result["statistics"] for result in found)
    assert not torch.equal(first["own"], second["own"])
    torch.testing.assert_close(first["mean"], (first["own"] + second["own"]) / 2)
    assert torch.equal(first["mean"], second["mean"])


@pytest.mark.slow
def test_a_transformed_model_in_pytorchs_own_ddp(found: list[Any]) -> None:
    small = SMALL["tied"]
    torch.manual_seed(0)
    model = small.build()
    chosen = [ss.Sparsity(0.3, method="static"), ss.Checkpointing("residual-2")]
    step = apply(chosen, model, OPTIMIZERS["sgd"](model), loss=small.loss)
    assert_same(trained(step, batches("tied")), found[0]["wrapped_by_hand"])


@pytest.mark.slow
def test_what_cannot_be_shared_is_refused_on_all_ranks(found: list[Any]) -> None:
    for result in found:
        refused = result["refusals"]
        assert "sparse weights" in refused["dsr"]
        assert "without compensation" in refused["compensated"]
        assert "minibatch of 1 has no share" in refused["small"]
        assert "DistributedDataParallel" in refused["wrapped"]
        assert all(text.startswith("InputError") for text in refused.values())
        assert "rewired their sparse weights differently" in result["other_pattern"]["error"]


@pytest.mark.slow
def test_a_stopped_run_of_two_ranks_goes_on_to_the_bit(found: list[Any], place: Path) -> None:
    whole, parts = (snapshot.load_latest(place / name)[0] for name in ("whole", "parts"))
    assert whole is not None and parts is not None
    assert whole["done"] == parts["done"] == 4
    drawn, again = ([one["cpu"] for one in state["random"]] for state in (whole, parts))
    assert len(drawn) == len(again) == 2 and not torch.equal(drawn[0], drawn[1])
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))
    a, b = ({**weights_of(s["step"]), **moments_of(s["step"])} for s in (whole, parts))
    assert all(torch.equal(a[k], b[k]) for k in a)
    for key, value in whole["step"]["model"].items():
        assert torch.equal(value, parts["step"]["model"][key]), key
    events = [strip_times(read(place / name)) for name in ("whole", "parts")]
    assert events[0] == events[1] and events[0][0]["event"] == "start"


@pytest.mark.slow
def test_all_ranks_stop_after_the_same_update(found: list[Any]) -> None:
    said = "TrainingStopped: stopped by SIGTERM after update 2 of 59"
    assert all(result["told_to_stop"]["error"].startswith(said) for result in found)


@pytest.mark.slow
def test_what_one_rank_finds_stops_all(found: list[Any], place: Path) -> None:
    for result in found:
        assert "holds a run already" in result["folder_in_use"]["error"]
        assert "a weight is not finite" in result["broken_on_one_rank"]["error"]
    assert snapshot.found(place / "broken") == []


@pytest.mark.slow
def test_ranks_draw_different_numbers_and_feed_their_own_examples(found: list[Any]) -> None:
    first, second = (result["streams"] for result in found)
    assert not torch.equal(first["drawn"], second["drawn"])
    assert (first["share"], second["share"]) == ((0, 12), (12, 24))


@pytest.mark.parametrize(
    "examples, parts, unit, expected",
    [
        (6, 2, 1, [(0, 3), (3, 6)]),
        (7, 2, 1, [(0, 3), (3, 7)]),
        (6, 2, 2, [(0, 2), (2, 6)]),
        (100, 4, 10, [(0, 20), (20, 50), (50, 70), (70, 100)]),
        (95, 2, 10, [(0, 50), (50, 95)]),
        (15, 2, 10, [(0, 10), (10, 15)]),
        (10, 2, 10, [(0, 5), (5, 10)]),
        (1, 2, 1, [(0, 0), (0, 1)]),
    ],
)
def test_shares_are_whole_microbatches(
    examples: int, parts: int, unit: int, expected: list[tuple[int, int]]
) -> None:
    assert cut_evenly(examples, parts, unit) == expected


def test_unequal_shares_are_measured_by_all_ranks_together() -> None:
    """Who goes on from rank 0's snapshot must not take another share for a shape to measure."""
    trainer: Any = SimpleNamespace(job=SimpleNamespace(parallel=Parallel(batches="shares")))
    first, second = (Trainer._shapes(trainer, torch.zeros(n, 3)) for n in (12, 13))
    assert first == second


class Blocks(nn.Module):
    """Two blocks, and a head that may share a weight with one."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(2, 1, 2) for _ in range(2))
        self.head = nn.Linear(2, 2)
        if tied:
            self.head.weight = self.blocks[1].linear1.weight
        else:
            self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    "tied, message",
    [(True, "a module outside of the blocks shares a parameter with blocks.1"), (False, "scale")],
)
def test_what_fsdp_cannot_split_is_said_before_anything_changes(tied: bool, message: str) -> None:
    model = Blocks(tied)
    setup: Any = SimpleNamespace(model=model, optimizer=OPTIMIZERS["sgd"](model))
    with pytest.raises(InputError, match=message):
        check_sharding(setup, ss.Plan())


def test_what_is_no_parallel() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(parallel: Any) -> None:
        apply([], model, optimizer, loss=lambda m, b: m(b).sum(), parallel=parallel)

    with pytest.raises(InputError, match="needs a process group"):
        step("ddp")
    with pytest.raises(InputError, match="unknown parallel 'dp'"):
        step("dp")
    with pytest.raises(InputError, match="unknown batches"):
        step(Parallel(batches="half"))
