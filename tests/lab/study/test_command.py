"""Studies that are killed, resumed and interrupted."""

import errno
import json
import os
import signal
import sys
import time

import pytest
from studies import FAILED, JOBS, ONE, context, records, study_process

from shoestring.cli.main import main
from shoestring.errors import InputError, TrainingStopped
from shoestring.lab.records.run import read
from shoestring.lab.runs.command import Call, start
from shoestring.lab.study.command import Summary, run_study
from shoestring.lab.study.execute import FAILURE, Place, arguments, execute
from shoestring.lab.study.expand import StudyJob, expand
from shoestring.lab.study.spec import load

CPU = Place(device="cpu")


@pytest.mark.slow
def test_killed_and_resumed_every_run_is_there_once(tiny):
    """Forty runs and five kills: benchmarks/study_resume.py."""
    found = records(tiny)
    failed = {path.parent.name for path in tiny.glob(f"runs/*/{FAILURE}")}
    assert len(list(tiny.glob("runs/*"))) == JOBS and len(failed) == FAILED
    assert {path.parent.name for path in tiny.glob("runs/*/snapshot-*.pt")} <= failed
    for name, events in found.items():
        kinds = [event["event"] for event in events]
        if name not in failed:
            assert kinds.count("start") == kinds.count("end") == 1 and kinds[-1] == "end", name
        if "-test-" in name and name not in failed:
            assert kinds == ["start", "evaluation", "evaluation", "end"], name


def test_what_is_done_is_not_done_again_and_a_changed_study_goes_on(tmp_path):
    file, out = tmp_path / "one.toml", tmp_path / "out"
    file.write_text("profile = false\n" + ONE)
    assert run_study(file, out, place=CPU).runs == 1
    (before,) = out.glob("runs/*/records.jsonl")
    stamp = before.stat().st_mtime_ns
    with pytest.raises(InputError, match="holds a study already"):
        run_study(file, out, place=CPU)
    file.write_text("profile = false\n" + ONE + "[[grid]]\ndensity = [1.0, 2.0]")
    summary = run_study(file, out, resume=True, place=CPU)
    assert (summary.runs, summary.failed) == (2, 1)
    assert before.stat().st_mtime_ns == stamp
    (failure,) = out.glob(f"runs/*/{FAILURE}")
    assert "density 2 lies outside" in json.loads(failure.read_text())["error"]
    stamp = failure.stat().st_mtime_ns
    assert run_study(file, out, resume=True, place=CPU).failed == 1
    assert failure.stat().st_mtime_ns == stamp, "a failed run is not tried again unasked"
    assert run_study(file, out, resume=True, retry_failed=True, place=CPU).failed == 1
    assert failure.stat().st_mtime_ns != stamp


def test_only_failures_that_are_retried_are_forgotten(tmp_path):
    file, out = tmp_path / "two.toml", tmp_path / "out"
    file.write_text("profile = false\n" + ONE + "[[grid]]\nlr = [0.1, 0.2]")
    assert run_study(file, out, place=Place(device="nowhere")).failed == 2
    again = {"resume": True, "retry_failed": True, "place": CPU}
    with pytest.raises(InputError, match="--only depth"):
        run_study(file, out, only={"depth": 3}, **again)
    assert len(list(out.glob("runs/*/failure.json"))) == 2
    made = run_study(file, out, only={"lr": 0.1}, **again)
    assert (made.runs, made.failed, made.left) == (2, 1, 0)


def test_a_wrong_baseline_ends_before_anything_is_written(tmp_path):
    file, out = tmp_path / "one.toml", tmp_path / "out"
    file.write_text("baseline = {density = 0.9}\n" + ONE + "[[grid]]\ndensity = [1.0, 0.5]")
    with pytest.raises(InputError, match=r"no row is the baseline {'density': 0.9}"):
        run_study(file, out, place=CPU)
    assert not out.exists()


def test_a_search_by_a_score_that_no_run_has_ends_with_the_first(tmp_path):
    file, out = tmp_path / "search.toml", tmp_path / "out"
    search = "[[search]]\nover = {lr = [0.1, 0.2, 0.3]}"
    file.write_text("profile = false\nscore = 'best_acuracy'\n" + ONE + search)
    with pytest.raises(InputError, match="no run has the study's score, 'best_acuracy'"):
        run_study(file, out, place=CPU)
    assert len(list(out.glob("runs/*"))) <= 2, "the next one may have begun"
    file.write_text("profile = false\n" + ONE + search)
    assert run_study(file, out, resume=True, place=CPU).runs == 4


@pytest.mark.slow
def test_a_text_is_counted_as_it_is_trained(tmp_path):
    """Its vocabularies and shapes are not those the model is counted with by itself."""
    file, out = tmp_path / "text.toml", tmp_path / "out"
    file.write_text(
        "score = 'bleu'\n[base]\nmodel = 'dc-transformer-tiny'\ndata = 'number_words'\n"
        "updates = 2\nmicrobatch = 200\ncheckpoint = 'residual-1'\nprecision = 'bf16'\n"
    )
    assert run_study(file, out, place=CPU).failed == 0
    ends = {path.parent.name: read(path)[-1] for path in out.glob("runs/*/records.jsonl")}
    (counted,) = (end["peak_bytes"] for name, end in ends.items() if "-profile-" in name)
    (trained,) = (end["predicted"] for name, end in ends.items() if "-test-" in name)
    assert counted == trained["fundamental_peak_bytes"]


def test_a_failed_run_keeps_its_snapshot_and_goes_on_from_it(tmp_path):
    file, out = tmp_path / "one.toml", tmp_path / "out"
    file.write_text("profile = false\n" + ONE)
    (job,) = expand(load(file), lambda job: None).jobs
    folder = out / "runs" / job.name
    start(Call(**arguments(job.settings), device="cpu", out=str(folder), stop_after="4 steps"))
    assert run_study(file, out, place=Place(device="nowhere")).failed == 1
    assert list(folder.glob("snapshot-*.pt"))
    assert run_study(file, out, resume=True, retry_failed=True, place=CPU).failed == 0
    resumed = [event["step"] for event in read(folder) if event["event"] == "resume"]
    assert resumed == [4] and read(folder)[-1]["event"] == "end"
    assert not list(folder.glob("snapshot-*.pt"))


def test_a_setting_named_again_may_have_either_value(monkeypatch):
    given = {}
    monkeypatch.setattr(
        "shoestring.lab.study.command.run_study",
        lambda *a, **k: given.update(k) or Summary("f", 1, 0),
    )
    only = ["density=0.2", "density=[0.3, 0.4]", "seed=0"]
    flags = [text for one in only for text in ("--only", one)]
    monkeypatch.setattr(sys, "argv", ["shoestring", "study", "one.toml", *flags])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    assert given["only"] == {"density": [0.2, 0.3, 0.4], "seed": [0]}


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    file, out = tmp_path / "one.toml", tmp_path / "out"
    file.write_text(ONE)
    out.mkdir()
    (out / "runs").touch()
    with pytest.raises(InputError, match="cannot write to"):
        run_study(file, out)
    (out / "runs").unlink()

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "failure.json")

    monkeypatch.setattr("shoestring.lab.study.local.run", full)
    with pytest.raises(TrainingStopped, match=r"cannot write to failure.json: No space"):
        run_study(file, out)


@pytest.mark.parametrize(("failed", "status"), [(0, 0), (1, 1)])
def test_the_exit_status_says_whether_a_run_failed(monkeypatch, capsys, failed, status):
    monkeypatch.setattr(
        "shoestring.lab.study.command.run_study", lambda *_, **__: Summary("a", 3, failed)
    )
    monkeypatch.setattr("warnings.showwarning", lambda *args, **kwargs: None)
    monkeypatch.setattr(sys, "argv", ["shoestring", "study", "a.toml", "--json"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == status
    assert json.loads(capsys.readouterr().out)["failed"] == failed


def test_a_part_of_a_study_now_and_the_rest_another_time(tmp_path):
    file, out = tmp_path / "two.toml", tmp_path / "out"
    file.write_text("profile = false\nseeds = [0, 1]\n" + ONE + "[[grid]]\nlr = [0.1, 0.2]")
    with pytest.raises(InputError, match="--only depth: no run has such a setting"):
        run_study(file, out, only={"depth": 3}, place=CPU)
    with pytest.raises(InputError, match=r"--only lr=0\.3: no run has it"):
        run_study(file, out, only={"lr": [0.2, 0.3]}, place=CPU)
    assert not out.exists()
    some = run_study(file, out, only={"lr": 0.2, "density": 1}, place=CPU)
    assert (some.runs, some.left) == (2, 2)
    assert str(some).endswith("; 2 are still to be run")
    first = [read(f)[0]["settings"] for f in out.glob("runs/*")]
    assert {s["seed"] for s in first} == {0, 1} and {s["learning_rate"] for s in first} == {0.2}
    rest = run_study(file, out, resume=True, place=CPU)
    assert (rest.runs, rest.left) == (4, 0)


def test_interrupted_it_saves_and_says_how_to_go_on(tmp_path):
    file, out, log = tmp_path / "long.toml", tmp_path / "out", tmp_path / "log"
    file.write_text(ONE.replace("epochs = 1", "epochs = 100000\nsnapshot_every = 7"))
    process = context().Process(target=study_process, args=(file, out, log))
    process.start()
    while not list(out.glob("runs/*/snapshot-*.pt")):
        assert process.is_alive(), log.read_text()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    process.join()
    assert process.exitcode == 1 and "stopped by SIGTERM after 0 of 2 runs" in log.read_text()
    (run,) = out.glob("runs/*")
    assert "stopped by SIGTERM" in (run / "log.txt").read_text()
    assert not (run / FAILURE).exists() and list(run.glob("snapshot-*.pt"))


@pytest.mark.gpu
def test_on_a_gpu_each_process_starts_cuda_anew(tmp_path):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    file = tmp_path / "one.toml"
    file.write_text("profile = false\n" + ONE + "[[grid]]\nprecision = ['fp32', 'fp16']")
    summary = run_study(file, tmp_path / "out", workers=2, place=Place(device="cuda"))
    assert (summary.runs, summary.failed) == (2, 0)


def test_profiles_of_a_text_need_no_text(tmp_path, monkeypatch):
    """They are counted with the report's vocabularies, and say so."""
    monkeypatch.delenv("SHOESTRING_DATA", raising=False)
    job = StudyJob(
        "profile",
        {"model": "dc-transformer-tiny", "data": "iwslt14", "microbatch": 250, "updates": 9},
    )
    execute(job, tmp_path / "run", Place(device="cpu"))
    end = read(tmp_path / "run")[-1]
    assert end["event"] == "end" and end["peak_bytes"] > 0
    assert end["vocabularies"].startswith("the report's")
    assert end["batch_unit"] == "tokens" and end["batch"] == 4000
