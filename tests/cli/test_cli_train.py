"""`shoestring train` from the outside: what it prints, what it leaves, how it fails."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

import tiny_nets
from shoestring import Plan
from shoestring.cli.main import main
from shoestring.errors import BudgetError
from shoestring.lab.records.run import Records, read
from shoestring.lab.runs import snapshot
from shoestring.lab.runs.command import Call, _plan_for_budget, _planned_before
from shoestring.lab.tasks import load_task
from shoestring.lab.tasks.cifar10 import VARIABLE

SHORT = ["train", tiny_nets.TINY, "--data", "digits", "--batch", "100", "--device", "cpu"]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the command; exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["shoestring", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    monkeypatch.setattr("warnings.showwarning", lambda *args, **kwargs: None)
    return call


def test_a_run_on_digits(run, tmp_path):
    status, out, err = run(*SHORT, "--epochs", "2", "--out", "first")
    assert status == 0, err
    events = read(tmp_path / "first")
    assert [e["event"] for e in events] == ["start", "evaluation", "evaluation", "end"]
    shown = {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in out.splitlines()}
    assert shown["accuracy"] == f"{events[-1]['accuracy']:.2f}%"
    assert shown["updates"] == "28 (2 epochs)" and shown["folder"] == "first"
    assert shown["measured peak"] in err and "epoch 2/2 · loss" in err
    assert f"tiny_nets:tiny_residual · digits (test) · seed 0\nplan{' ' * 12}plain" in out


def test_stop_resume_and_json(run, tmp_path):
    flags = ["--epochs", "2", "--out", "a", "--microbatch", "50", "--simulated", "--density", "0.5"]
    status, out, _ = run(*SHORT, *flags, "--stop-after", "9 steps")
    assert status == 0 and "stopped as asked" in out
    status, _, err = run(*SHORT, *flags)
    assert status == 2 and "a holds a run already" in err and "--resume" in err
    status, out, err = run(*SHORT, *flags, "--resume", "--json")
    assert status == 0, err
    end = json.loads(out)
    assert end["event"] == "end" and end["step"] == 28
    settings = read(tmp_path / "a")[0]["settings"]
    assert settings["plan"]["microbatching"] == {"size": 50, "simulated": True}
    assert settings["plan"]["sparsity"]["density"] == 0.5
    status, _, err = run(*SHORT, *flags[:-2], "--resume")
    assert status == 2 and "the run has plan" in err


def test_a_frozen_normalization_stays_frozen(run, tmp_path):
    """After evaluations too, and after a resume."""
    frozen = [SHORT[0], "tiny_nets:frozen_normalization", *SHORT[2:], "--epochs", "3"]
    assert run(*frozen, "--out", "whole")[0] == 0
    assert run(*frozen, "--out", "parts", "--stop-after", "20 steps")[0] == 0
    held, _ = snapshot.load_latest(tmp_path / "parts")
    assert int(held["step"]["model"]["1.num_batches_tracked"]) == 0
    assert run(*frozen, "--out", "parts", "--resume")[0] == 0
    whole, parts = read(tmp_path / "whole")[-1], read(tmp_path / "parts")[-1]
    assert (whole["accuracy"], whole["best_accuracy"]) == (
        parts["accuracy"],
        parts["best_accuracy"],
    )


def test_a_run_keeps_the_layout_it_began_with(run, tmp_path):
    """The default is another one on another device."""
    flags = [*SHORT, "--epochs", "1", "--out", "a"]
    assert run(*flags, "--channels-last", "--stop-after", "9 steps")[0] == 0
    status, _, err = run(*flags, "--channels-first", "--resume")
    assert status == 2 and "the run has channels last True, not False" in err
    status, _, err = run(*flags, "--resume")
    assert status == 0, err


def test_a_path_of_odd_bytes(run, tmp_path):
    out = b"odd-\xff".decode(errors="surrogateescape")
    status, _, err = run(*SHORT, "--epochs", "1", "--out", out)
    assert status == 0, err
    assert read(tmp_path / out)[0]["host"]["command"][-1] == out


def test_stop_after_counts_epochs_and_the_folder_has_a_name(run, tmp_path):
    status, out, _ = run(*SHORT, "--split", "validation", "--stop-after", "1")
    assert status == 0 and "12 (1 epoch)" in out
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("tiny_nets.tiny_residual-digits-seed0-")
    assert len(snapshot.found(folder)) == 1


def test_a_budget_is_planned_for(run, tmp_path):
    flags = ["--budget", "4 MB", "--out", "a", "--stop-after"]
    status, _, err = run(*SHORT, *flags, "3 steps")
    assert status == 0, err
    end = json.loads(run(*SHORT, *flags, "4 steps", "--resume", "--json")[1])
    assert 0 < end["measured_peak_bytes"] <= 4_000_000
    resumed = [*SHORT, "--out", "a", "--resume", "--budget"]
    for other, said in (
        (["4.01 MB"], "the run has a budget of 4,000,000 bytes that allows near, not a"),
        (["4 MB", "--allow", "lossless"], "not a budget of 4,000,000 bytes that allows lossless"),
        (["nonsense"], "cannot read 'nonsense' as a size"),
        (["4 MB", "--allow", "luck"], "unknown `allow` option 'luck'"),
    ):
        status, _, err = run(*resumed, *other)
        assert status == 2 and said in err


@pytest.mark.slow
def test_a_budget_on_cuda_may_be_smaller_than_workspaces_that_training_does_not_have(monkeypatch):
    call, digits = Call("wrn-10-1", "digits", budget="30 MB"), load_task("digits")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "0")
    assert _plan_for_budget(call, digits, "cuda").precision.kind == "fp16"
    with pytest.raises(BudgetError, match=r"smallest found is 22\.[89]") as raised:
        _plan_for_budget(replace(call, budget="22 MB"), digits, "cuda")
    least = str(raised.value.smallest_bytes)
    assert _plan_for_budget(replace(call, budget=least), digits, "cuda").precision.kind == "fp16"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with pytest.raises(BudgetError):
        _plan_for_budget(call, digits, "cuda")


def test_records_of_before_do_not_say_the_budget(tmp_path):
    call = Call(tiny_nets.TINY, "digits", budget="4 MB", out=str(tmp_path), resume=True)
    assert _planned_before(call) is None
    with Records(tmp_path) as records:
        records.write("start", settings={"plan": {"precision": {"kind": "fp16"}}})
    found = _planned_before(call)
    assert isinstance(found, Plan) and found.to_dict() == {"precision": {"kind": "fp16"}}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "wrn-10-1"], "Missing option '--data'"),
        ([*SHORT, "--resume"], "--resume needs the folder"),
        ([*SHORT, "--simulated"], "--simulated needs the size"),
        ([*SHORT, "--plan", "p.toml", "--density", "0.3"], "--plan and --density are both given"),
        ([*SHORT, "--budget", "1 MB", "--simulated"], "--budget and --simulated are both given"),
        ([*SHORT, "--allow", "sparsity"], "--allow says what a budget may cost"),
        (
            [*SHORT, "--budget", "1 MB", "--set", "microbatching.size=50"],
            "--set microbatching.size",
        ),
        ([*SHORT, "--stop-after", "0"], "cannot read --stop-after '0'"),
        ([*SHORT, "--snapshot-every", "0"], "--snapshot-every 0 is below 1"),
        ([*SHORT, "--data-on", "moon"], "unknown place 'moon'"),
        ([*SHORT[:-2], "--device", "mps"], "training on mps is not supported"),
        ([*SHORT[:-2], "--device", "toaster"], "no device is called 'toaster'"),
        ([*SHORT, "--batch", "2000"], "a batch of 2000 from 1,438 training images"),
        ([*SHORT, "--split", "train"], "unknown split 'train'"),
        ([*SHORT, "--split", "validation", "--seed", "-1"], "seed -1 is not a whole number"),
        ([*SHORT[:1], "tiny_nets:five_classes", *SHORT[2:]], "shape (100, 5) of 100 images in 10"),
        ([*SHORT[:1], "tiny_nets:five_classes", *SHORT[2:], "--no-predict"], "shape (100, 5)"),
        ([*SHORT[:1], "torch.nn:Flatten", *SHORT[2:]], "none of the model's 0 parameters"),
        (["train", "wrn-11-1", "--data", "digits"], "cannot have depth 11"),
        (["train", "dc-transformer", "--data", "digits"], "does not take images"),
        (["train", "wrn-10-1", "--data", "mnist"], "no data is called 'mnist'"),
        (["train", "wrn-10-1", "--data", "cifar10"], "cifar10 needs the folder"),
        (["train", "wrn-10-1", "--data", "cifar10", "--data-dir", "no"], "no CIFAR-10 in no"),
        ([*SHORT, "--out", "/proc/run"], "cannot write to /proc/run"),
    ],
)
def test_mistakes_are_one_line_and_status_2(run, monkeypatch, arguments, said):
    monkeypatch.delenv(VARIABLE, raising=False)
    status, out, err = run(*arguments)
    assert status == 2 and said in err and "Traceback" not in err
    assert out == "" and len(err.strip().splitlines()) <= 2


@pytest.mark.slow
def test_stdout_has_the_summary_alone(tmp_path):
    """As a process: data on stdout, progress on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "shoestring", "train", "wrn-10-0.25", "--data", "digits",
         "--batch", "20", "--stop-after", "3 steps", "--out", tmp_path / "run", "--json",
         "--device", "cpu"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 3
