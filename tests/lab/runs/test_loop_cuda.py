"""The loop on a GPU: one graph, no waiting, and what it measures."""

import pytest
import torch
from test_loop import ALL, PLAIN, final, run, settings

from shoestring import Plan, Precision
from shoestring.lab.records.run import read
from shoestring.lab.runs.loop import train
from shoestring.lab.runs.trainer import Trainer
from tiny_nets import small_task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HALF = Plan.of([Precision("fp16")])


def on_gpu(folder, plan, **others):
    made = settings(plan, channels_last=True, **others)
    return train(made, small_task(), folder, device=torch.device("cuda"), snapshot_every=5)


@pytest.mark.parametrize("plan", [PLAIN, HALF, ALL], ids=["fp32", "fp16", "all four"])
def test_a_run_is_captured_and_measured(tmp_path, plan):
    end = on_gpu(tmp_path / "run", plan, epochs=3)
    events = read(tmp_path / "run")
    assert end["step"] == 24 and end["measured_peak_bytes"] > 0
    evaluations = [e for e in events if e["event"] == "evaluation"]
    assert all(e["evaluation_peak_bytes"] > 0 for e in evaluations)
    assert evaluations[-1]["train_loss"] < evaluations[0]["train_loss"]
    assert events[0]["host"]["tf32"]["convolutions"] in (True, False)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("plan", [PLAIN, HALF], ids=["fp32", "fp16"])
def test_an_update_waits_for_nothing(plan):
    trainer = Trainer(settings(plan, channels_last=True), small_task(), torch.device("cuda"))
    for _ in range(4):
        trainer.advance()
    assert trainer.step.captured
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):  # within an epoch of 8
            trainer.advance()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_step_reads_batches_where_they_are_made():
    weights = []
    for in_place in (True, False):
        trainer = Trainer(settings(HALF, channels_last=True), small_task(), torch.device("cuda"))
        assert trainer.feed.in_place
        if not in_place:
            trainer.feed.in_place = False
            trainer.step._graph.in_place = False
        for _ in range(6):
            trainer.advance()
        (graph,) = trainer.step._graph._graphs.values()
        assert (trainer.feed._made is not None) == in_place
        if in_place:
            assert all(a is b for a, b in zip(graph._inputs, trainer.feed._made, strict=True))
        weights.append([p.detach().clone() for p in trainer.step.model.parameters()])
    assert all(map(torch.equal, *weights))


def test_the_gpu_learns_what_the_cpu_learns(tmp_path):
    on_gpu(tmp_path / "gpu", PLAIN)
    run(tmp_path / "cpu", PLAIN)
    losses = [
        [e["train_loss"] for e in read(tmp_path / name) if e["event"] == "evaluation"]
        for name in ("gpu", "cpu")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)  # dropout draws other numbers there


@pytest.mark.parametrize("plan", [PLAIN, ALL], ids=["fp32", "all four"])
def test_a_run_goes_on_from_its_snapshot(tmp_path, plan):
    made = settings(plan, channels_last=True, epochs=3)
    common = {"device": torch.device("cuda"), "resume": True}
    train(made, small_task(), tmp_path / "run", stop_after=13, **common)
    weights = final(tmp_path / "run")["step"]["model"]
    trainer = Trainer(made, small_task(), torch.device("cuda"), predict=False)
    trainer.load_state_dict(
        {**final(tmp_path / "run"), "seconds": 0.0, "records_bytes": 0},
    )
    for name, tensor in trainer.step.model.state_dict().items():
        assert tensor.cpu().equal(weights[name])
    end = train(made, small_task(), tmp_path / "run", **common)
    assert end["step"] == 24
    assert [e["event"] for e in read(tmp_path / "run")].count("resume") == 1
