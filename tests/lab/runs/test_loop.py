"""The loop: what a run leaves behind, and that stopping and going on changes no bit of it."""

import errno
import json
import os
import random
import resource
import signal
import threading

import numpy as np
import pytest
import torch

import shoestring.lab.runs.loop as loop_module
import shoestring.lab.runs.trainer as trainer_module
from shoestring import (Checkpointing, Microbatching, Plan, Precision, Sparsity)
from shoestring.errors import InputError, TrainingStopped
from shoestring.lab.records.run import (FILE, Records, read, strip_times)
from shoestring.lab.runs import snapshot
from shoestring.lab.runs.folder import run_folder
from shoestring.lab.runs.image_job import ImageJob
from shoestring.lab.runs.loop import train
from shoestring.lab.runs.settings import settings_for
from shoestring.lab.runs.trainer import Trainer
from tiny_nets import TINY, small_task

CPU = torch.device("cpu")
PLAIN = Plan()
ALL = Plan.of(
    [
        Sparsity(0.5, schedule=((30, 5),)),
        Precision("fp16"),
        Checkpointing("residual-1"),
        Microbatching(4),
    ]
)


def settings(plan=PLAIN, **others):
    given = {"epochs": 2, "batch": 8, "learning_rate": 0.05, **others}
    return settings_for(TINY, "digits", images=64, plan=plan, **given)


def run(folder, plan=PLAIN, *, task=None, resume=False, stop_after=None, every=3, **others):
    return train(
        settings(plan, **others),
        task or small_task(),
        folder,
        device=CPU,
        resume=resume,
        snapshot_every=every,
        stop_after=stop_after,
    )


def final(folder):
    """All that the last snapshot holds, apart from wall time."""
    state = snapshot.load(snapshot.found(folder)[-1])
    return {k: v for k, v in state.items() if k not in ("seconds", "records_bytes")}


def assert_same(one, other):
    """Equal to the bit, whatever the nesting."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype is other.dtype and one.shape == other.shape
        assert (
            one.contiguous()
            .view(-1)
            .view(torch.uint8)
            .equal(other.contiguous().view(-1).view(torch.uint8))
        )
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


def test_records_tell_the_run(tmp_path):
    end = run(tmp_path / "run")
    events = read(tmp_path / "run")
    assert [e["event"] for e in events] == ["start", "evaluation", "evaluation", "end"]
    start, first, last, written = events
    assert start["settings"]["model"] == TINY and start["updates"] == 16
    assert start["host"]["torch"] == torch.__version__ and start["host"]["device"] == "cpu"
    assert (first["step"], last["step"], last["epoch"]) == (8, 16, 2)
    assert first["train_loss"] > last["train_loss"] > 0
    assert last["best_accuracy"] == max(first["accuracy"], last["accuracy"])
    assert written["best_accuracy"] == end["best_accuracy"] == last["best_accuracy"]
    assert written["predicted"]["step_peak_bytes"] == written["measured_peak_bytes"] > 0
    assert 0 < start["predicted"]["fundamental_peak_bytes"] < written["measured_peak_bytes"]


def test_records_count_rewirings_and_skipped_updates(tmp_path):
    """Those of the whole run, also where it was made in parts."""
    run(tmp_path / "whole", ALL)
    run(tmp_path / "parts", ALL, stop_after=5)
    run(tmp_path / "parts", ALL, resume=True)
    for name in ("whole", "parts"):
        *_, evaluation, end = read(tmp_path / name)
        due = end["step"] // 5  # every fifth update
        assert end["rewirings"] == evaluation["rewirings"] == due > 0
        assert end["rewired_weights"] > 0 and end["skipped_updates"] == 0
    run(tmp_path / "plain")
    assert not {"rewirings", "skipped_updates"} & read(tmp_path / "plain")[-1].keys()


def test_train_loss_is_the_mean_of_the_losses(tmp_path, monkeypatch):
    losses = []
    plain = trainer_module.Trainer.advance

    def advance(self):
        before = float(self.loss_sum)
        plain(self)
        losses.append(float(self.loss_sum) - before)

    monkeypatch.setattr(trainer_module.Trainer, "advance", advance)
    run(tmp_path / "run")
    first, last = (e for e in read(tmp_path / "run") if e["event"] == "evaluation")
    assert first["train_loss"] == pytest.approx(sum(losses[:8]) / 8)
    assert last["train_loss"] == pytest.approx(sum(losses[8:]) / 8)


def test_accuracy_is_that_of_the_weights(tmp_path):
    """Computed again by hand from the snapshot of a run."""
    run(tmp_path / "run")
    trainer = Trainer(settings(), small_task(), CPU, predict=False)
    trainer.load_state_dict(snapshot.load(snapshot.found(tmp_path / "run")[-1]))
    task = small_task()
    images = (task.held_out_images / 255 - 0.5) / 0.25
    scores = trainer.step.model.eval()(images)
    accuracy = 100 * (scores.argmax(1) == task.held_out_labels).double().mean()
    assert read(tmp_path / "run")[-1]["accuracy"] == pytest.approx(float(accuracy))


@pytest.mark.parametrize("plan", [PLAIN, ALL], ids=["plain", "all four"])
def test_resumed_run_is_the_uninterrupted_one(tmp_path, plan):
    run(tmp_path / "whole", plan)
    for stop in (2, 7, 12):  # before the peak is measured, within an epoch, after a rewiring
        run(tmp_path / "parts", plan, resume=True, stop_after=stop)
        random.seed(stop), np.random.seed(stop), torch.manual_seed(stop)
    run(tmp_path / "parts", plan, resume=True)
    assert_same(final(tmp_path / "whole"), final(tmp_path / "parts"))
    whole, parts = (strip_times(read(tmp_path / name)) for name in ("whole", "parts"))
    assert [json.dumps(e) for e in whole] == [json.dumps(e) for e in parts]
    if plan is ALL:
        assert final(tmp_path / "whole")["step"]["techniques"]["sparsity"]["rewirings"] == 3


def test_other_seeds_give_other_runs(tmp_path):
    run(tmp_path / "a", seed=0, stop_after=2)
    run(tmp_path / "b", seed=1, stop_after=2)
    weights = [final(tmp_path / n)["step"]["model"]["conv.weight"] for n in "ab"]
    assert not weights[0].equal(weights[1])


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    first = run(tmp_path / "run")
    before = strip_times(read(tmp_path / "run"))
    again = run(tmp_path / "run", resume=True)
    assert strip_times(read(tmp_path / "run")) == before
    assert {**first, "time": 0, "seconds": 0} == {**again, "time": 0, "seconds": 0}


def begun(folder, *more):
    """A folder with records alone: a start, and an event of each of these names."""
    folder.mkdir()
    with Records(folder) as records:
        records.write("start", settings=settings().as_dict())
        for name in more:
            records.write(name, step=16, accuracy=50.0)
    return (folder / FILE).read_bytes()


def test_a_finished_run_without_snapshots_keeps_its_records(tmp_path, monkeypatch):
    before = begun(tmp_path / "run", "evaluation", "end")
    monkeypatch.setattr(loop_module, "Trainer", None)  # it would be needed
    end = run(tmp_path / "run", resume=True)
    assert (end["event"], end["accuracy"], end["folder"]) == ("end", 50.0, str(tmp_path / "run"))
    with pytest.raises(InputError, match="the run has epochs 2, not 3"):
        run(tmp_path / "run", resume=True, epochs=3)
    assert (tmp_path / "run" / FILE).read_bytes() == before


def test_records_without_a_snapshot_start_over_with_the_same_settings(tmp_path):
    begun(tmp_path / "run", "evaluation")
    path = tmp_path / "run" / FILE
    with path.open("ab") as file:
        file.write('{"event": "é'.encode()[:-1])  # killed while it wrote
    before = path.read_bytes()
    with pytest.raises(InputError, match="the run has seed 0, not 1"):
        run(tmp_path / "run", resume=True, seed=1)
    assert path.read_bytes() == before
    run(tmp_path / "run", resume=True, stop_after=1)
    (start,) = read(tmp_path / "run")
    assert start["updates"] == 16 and start["budget"] is None


def test_settings_cannot_change_under_way(tmp_path):
    run(tmp_path / "run", stop_after=4)
    with pytest.raises(InputError, match=r"the run has learning rate 0\.05, not 0\.1"):
        run(tmp_path / "run", resume=True, learning_rate=0.1)


def test_a_folder_with_a_run_is_refused(tmp_path):
    run(tmp_path / "run", stop_after=1)
    with pytest.raises(InputError, match="holds a run already"):
        run(tmp_path / "run")


def test_two_runs_never_write_into_one_folder(tmp_path):
    with (
        run_folder(tmp_path / "run", resume=False),
        pytest.raises(InputError, match="another run is writing"),
    ):
        run(tmp_path / "run", resume=True)
    run(tmp_path / "run", stop_after=1)  # it is free again


def test_files_that_are_deleted_let_no_second_run_in(tmp_path):
    with run_folder(tmp_path / "run", resume=False) as held:
        for path in held.iterdir():  # a lock would be one of them
            path.unlink()
        with pytest.raises(InputError, match="another run is writing"):
            run(tmp_path / "run", resume=True)


@pytest.mark.parametrize("where", ["file/run", "/proc/run"])
def test_a_folder_that_cannot_be_written(tmp_path, where):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"cannot write to .*run"):
        run(tmp_path / where)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_step_and_saves(tmp_path, monkeypatch, number, status):
    plain = trainer_module.Trainer.advance
    before = signal.getsignal(number)  # not the default where a shell runs this in the background

    def advance(self):
        if self.done == 4:
            os.kill(os.getpid(), number)
        plain(self)

    with monkeypatch.context() as patched:
        patched.setattr(trainer_module.Trainer, "advance", advance)
        with pytest.raises(TrainingStopped, match="after update 5 of 16") as stopped:
            run(tmp_path / "run")
    assert stopped.value.exit_status == status and "--resume" in stopped.value.hint
    assert final(tmp_path / "run")["done"] == 5
    assert signal.getsignal(number) is before
    run(tmp_path / "run", resume=True)
    run(tmp_path / "whole")
    assert_same(final(tmp_path / "run"), final(tmp_path / "whole"))


def test_another_thread_may_train(tmp_path):
    """Signals are for the main one."""
    ended = []
    work = threading.Thread(target=lambda: ended.append(run(tmp_path / "a")))
    work.start()
    work.join()
    assert ended[0]["event"] == "end"


def test_a_loss_that_is_not_finite_stops_at_the_last_good_snapshot(tmp_path, monkeypatch):
    plain = trainer_module.Trainer.advance

    def advance(self):
        if self.done == 7:
            with torch.no_grad():
                self.step.model.conv.weight.fill_(float("inf"))
        plain(self)

    monkeypatch.setattr(trainer_module.Trainer, "advance", advance)
    with pytest.raises(TrainingStopped, match="training loss is not finite") as stopped:
        run(tmp_path / "run")
    assert stopped.value.exit_status == 1 and "--lr" in stopped.value.hint
    assert snapshot.found(tmp_path / "run")[-1].name in stopped.value.message
    state = final(tmp_path / "run")
    assert state["done"] == 6
    assert all(t.isfinite().all() for t in state["step"]["model"].values())


def test_a_learning_rate_out_of_hand_stops(tmp_path):
    with pytest.raises(TrainingStopped, match=r"not finite .*learning rate 1e"):
        run(tmp_path / "run", learning_rate=1e30)


def test_weights_are_looked_at_before_they_are_saved():
    trainer = Trainer(settings(), small_task(), CPU, predict=False)
    trainer.advance()
    assert trainer.trouble() is None
    with torch.no_grad():
        trainer.step.model.bn.running_mean[3] = float("nan")
    assert "a weight is not finite after update 1" in trainer.trouble()


def test_a_collapsed_loss_scale_is_trouble():
    trainer = Trainer(settings(Plan.of([Precision("fp16")])), small_task(), CPU, predict=False)
    trainer.advance()
    assert trainer.trouble() is None
    trainer.step.loss_scale.fill_(0.5)
    assert "loss scale fell to 0.5" in trainer.trouble()


def test_a_full_disk_costs_no_snapshot(tmp_path):
    run(tmp_path / "run", stop_after=4)
    before = {p.name: p.read_bytes() for p in snapshot.found(tmp_path / "run")}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = len(next(iter(before.values())))
    for limit in (4096, size // 2, size - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(TrainingStopped, match="cannot write a snapshot") as stopped:
                run(tmp_path / "run", resume=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert snapshot.found(tmp_path / "run")[-1].name in stopped.value.message
        assert {p.name: p.read_bytes() for p in snapshot.found(tmp_path / "run")} == before
        assert not list((tmp_path / "run").glob("*.partial"))
    run(tmp_path / "run", resume=True)
    run(tmp_path / "whole")
    assert_same(final(tmp_path / "run"), final(tmp_path / "whole"))


@pytest.mark.parametrize("when", ["begin", "finish"])
def test_a_disk_that_is_full_for_other_files_is_one_line(tmp_path, monkeypatch, when):
    """What a job writes beside records and snapshots: vocabularies, translations."""

    def full(self, *arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some.txt")

    with monkeypatch.context() as patched:
        patched.setattr(ImageJob, when, full)
        with pytest.raises(TrainingStopped, match=r"cannot write to some.txt: No space") as stopped:
            run(tmp_path, epochs=1)
    assert stopped.value.exit_status == 1
    assert run(tmp_path, epochs=1, resume=True)["event"] == "end"


def test_a_damaged_snapshot_is_passed_over(tmp_path, capsys):
    run(tmp_path / "whole")
    run(tmp_path / "run", stop_after=7)
    newest = snapshot.found(tmp_path / "run")[-1]
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    run(tmp_path / "run", resume=True)
    assert f"{newest.name} is damaged" in capsys.readouterr().err
    assert_same(final(tmp_path / "run"), final(tmp_path / "whole"))
    assert strip_times(read(tmp_path / "run")) == strip_times(read(tmp_path / "whole"))


def test_when_all_snapshots_are_damaged_nothing_is_touched(tmp_path):
    run(tmp_path / "run", stop_after=7)
    for path in snapshot.found(tmp_path / "run"):
        path.write_bytes(path.read_bytes()[:-10])
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(InputError, match="checksum"):
        run(tmp_path / "run", resume=True)
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


def test_records_that_were_shortened_are_noticed(tmp_path):
    run(tmp_path / "run", stop_after=10)
    path = tmp_path / "run" / "records.jsonl"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(InputError, match="50 bytes"):
        run(tmp_path / "run", resume=True)


def test_evaluation_happens_when_asked_and_at_the_end(tmp_path):
    run(tmp_path / "run", epochs=5, evaluate_every=2)
    epochs = [e["epoch"] for e in read(tmp_path / "run") if e["event"] == "evaluation"]
    assert epochs == [2, 4, 5]


def test_evaluation_does_not_depend_on_its_batch(tmp_path):
    found = []
    for size in (1000, 7):
        run(tmp_path / str(size), evaluation_batch=size)
        found.append([e["accuracy"] for e in read(tmp_path / str(size)) if "accuracy" in e])
    assert found[0] == found[1]


def test_tensorboard_is_missing_or_written(tmp_path):
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        with pytest.raises(InputError, match="needs tensorboard, which is not installed"):
            train(settings(), small_task(), tmp_path / "run", device=CPU, tensorboard=True)
    else:
        train(settings(), small_task(), tmp_path / "run", device=CPU, tensorboard=True)
        assert list((tmp_path / "run" / "tensorboard").iterdir())


@pytest.mark.parametrize(("seconds", "made"), [(0.0, 16), (60.0, 1)])
def test_without_a_number_snapshots_are_made_by_the_clock(tmp_path, monkeypatch, seconds, made):
    saved = []
    plain = snapshot.save
    monkeypatch.setattr(loop_module, "SNAPSHOT_SECONDS", seconds)
    monkeypatch.setattr(snapshot, "save", lambda *given: saved.append(plain(*given)))
    run(tmp_path / "run", every=None)
    assert len(saved) == made and final(tmp_path / "run")["done"] == 16


def test_training_under_a_share_of_mps_is_refused(monkeypatch):
    """Losses came out as NaN under it; refused before a GPU is looked for."""
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "85")
    with pytest.raises(InputError, match="CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is 85"):
        trainer_module.prepare_device("cuda", tf32=False, benchmark=False)
