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
from shoestring.lab.study.execute import LOG, Place
from shoestring.lab.study.expand import StudyJob
from shoestring.lab.study.local import TICK_SECONDS, Stopped


def start_study(file, out, *options):
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", "shoestring", "study", file, "--out", out, "--device", "cpu",
         *options],
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
        self.log, self.asked, self.cancelled, self.looks = log, asked, [], 0

    def remote(self, job, folder, place):
        return job.name

    def wait(self, handles, num_returns=1, timeout=None):
        self.looks += 1
        if self.looks == 2:
            self.log.touch()
            self.asked.append(signal.SIGTERM)
        return [], handles

    def cancel(self, handle):
        self.cancelled.append(handle)


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
    assert ray.cancelled == [job.name for job in jobs] and ray.looks == 3, "and waited for"


def test_a_cluster_that_is_not_there(tmp_path):
    pytest.importorskip("ray")
    file = tmp_path / "one.toml"
    file.write_text(ONE)
    with pytest.raises(InputError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'"):
        run_study(file, tmp_path / "out", ray="127.0.0.1:1")
