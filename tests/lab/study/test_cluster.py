"""Studies on a Ray cluster: the same records, what runs, and how they are stopped."""

import os
import signal
import subprocess
import sys
import time

import pytest
from studies import ONE, records

from shoestring.errors import InputError
from shoestring.lab.records.run import read
from shoestring.lab.study import cluster
from shoestring.lab.study.command import run_study
from shoestring.lab.study.execute import FAILURE, LOG, Place
from shoestring.lab.study.expand import StudyJob
from shoestring.lab.study.local import STOP_SECONDS, TICK_SECONDS, Stopped

STUDY = """
import sys
from shoestring.cli.main import main
from shoestring.lab.study import cluster

cluster.STOP_SECONDS = float(sys.argv.pop(1))
main()
"""


def start_study(file, out, *options, stop_seconds=STOP_SECONDS):
    """A process of its own, that waits so long for a run to do as it is told."""
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", STUDY, str(stop_seconds), "study", file, "--out", out, "--device",
         "cpu", *options],
        env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_stopped_it_saves_and_resumed_it_has_the_same_numbers(tmp_path):
    """The forty runs of benchmarks/study_resume.py have them, too."""
    pytest.importorskip("ray")
    file, out = tmp_path / "one.toml", tmp_path / "ray"
    long = ONE.replace("epochs = 1", "epochs = 300\nsnapshot_every = 100000")
    file.write_text("profile = false\n" + long + "density = 0.5")
    run_study(file, tmp_path / "here", place=Place(device="cpu"))
    process = start_study(file, out, "--ray", "local")
    while not any("epoch 1/300" in path.read_text() for path in out.glob(f"runs/*/{LOG}")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.terminate()
    time.sleep(2 * TICK_SECONDS)
    os.killpg(process.pid, signal.SIGINT)  # an impatient Ctrl-C goes to all of the terminal's
    _, said = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert [line for line in said.splitlines() if " runs · " not in line] == [
        "TrainingStopped: stopped by SIGTERM after 0 of 1 runs", "hint: go on with --resume"
    ]  # fmt: skip
    (run,) = out.glob("runs/*")
    assert list(run.glob("snapshot-*.pt")), "nobody asked for one but the signal"
    process = start_study(file, out, "--ray", "local", "--resume")
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert "resume" in [event["event"] for event in read(run)]
    assert records(out) == records(tmp_path / "here") and len(records(out)) == 1


class Ray:
    """A cluster on which nothing ends; at the second look the first job has begun."""

    def __init__(self, log, asked):
        self.log, self.asked, self.canceled, self.looks = log, asked, [], 0

    def remote(self, job, folder, place):
        return job.name

    def wait(self, handles, num_returns=1, timeout=None):
        self.looks += 1
        if self.looks == 2:
            self.log.touch()
            self.asked.append(signal.SIGTERM)
        return [], handles

    def cancel(self, handle):
        self.canceled.append(handle)


def test_runs_that_wait_for_the_cluster_are_not_under_way(tmp_path):
    jobs = [StudyJob("train", {"model": "m", "seed": seed}) for seed in (0, 1, 2)]
    for job in jobs[:2]:  # of a study that was stopped
        (tmp_path / job.name).mkdir()
        (tmp_path / job.name / LOG).touch()
        os.utime(tmp_path / job.name / LOG, (1, 1))
    asked, running = [], []
    ray = Ray(tmp_path / jobs[0].name / LOG, asked)
    with pytest.raises(Stopped, match="SIGTERM"):
        cluster._drain(
            ray, ray, jobs, lambda job: tmp_path / job.name, Place(), lambda job: None,
            running.append, asked,
        )  # fmt: skip
    assert running == [[], [jobs[0]]]
    assert ray.canceled == [job.name for job in jobs] and ray.looks == 3, "and waited for"


class Hung(Ray):
    """A cluster on which the first job has begun and hangs, until it is killed; others end."""

    def __init__(self, folder, ended):
        self.folder, self.ended = folder, ended
        self.told, self.killed = [], []

    def remote(self, job, folder, place):
        return job.name

    def wait(self, handles, num_returns=1, timeout=None):
        time.sleep(0.02)
        (self.folder / handles[0] / LOG).touch()
        return [handle for handle in handles if handle in self.killed][:1], handles

    def get(self, handle):
        raise RuntimeError("the worker died")

    def cancel(self, handle, force=False):
        (self.killed if force else self.told).append(handle)


def test_a_run_whose_time_is_over_is_told_then_killed(tmp_path, monkeypatch):
    """Once, not three times; one that has not begun has all its time before it."""
    monkeypatch.setattr(cluster, "STOP_SECONDS", 0.2)
    jobs = [StudyJob("train", {"model": "m", "seed": seed}) for seed in (0, 1)]
    for job in jobs:
        (tmp_path / job.name).mkdir()
        (tmp_path / job.name / LOG).touch()
        os.utime(tmp_path / job.name / LOG, (1, 1))
    ended = []
    ray = Hung(tmp_path, ended)
    cluster._drain(
        ray, ray, jobs, lambda job: tmp_path / job.name, Place(run_seconds=0.3), ended.append,
        lambda running: None, [],
    )  # fmt: skip
    names = [job.name for job in jobs]
    assert [job.name for job in ended] == names and ray.told == names
    assert list(dict.fromkeys(ray.killed)) == names
    for job in jobs:
        assert "took longer than run_seconds = 0.3" in (tmp_path / job.name / FAILURE).read_text()


HUNG = """
import time
from torch import nn
class Hung(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(192, 10), 0
    def forward(self, x):
        self.calls += 1
        while self.calls > 3:
            time.sleep(0.1)
        return self.linear(nn.functional.avg_pool2d(x, 4).flatten(1))
"""


@pytest.mark.slow
def test_a_hung_run_on_ray_is_ended_by_its_time(tmp_path, monkeypatch):
    """It is told, and killed where that does not help; the study says why, with status 1."""
    pytest.importorskip("ray")
    (tmp_path / "hung_on_ray.py").write_text(HUNG)
    monkeypatch.syspath_prepend(str(tmp_path))
    file, out = tmp_path / "one.toml", tmp_path / "ray"
    text = ONE.replace("tiny_nets:tiny_linear", "hung_on_ray:Hung")
    assert text != ONE
    file.write_text("profile = false\nrun_seconds = 5\n" + text)
    process = start_study(file, out, "--ray", "local", stop_seconds=2)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1, said
    (failed,) = out.glob(f"runs/*/{FAILURE}")
    assert "took longer than run_seconds = 5" in failed.read_text()


def test_a_cluster_that_is_not_there(tmp_path):
    pytest.importorskip("ray")
    file = tmp_path / "one.toml"
    file.write_text(ONE)
    with pytest.raises(InputError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'"):
        run_study(file, tmp_path / "out", ray="127.0.0.1:1")
