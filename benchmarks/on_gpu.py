"""Everything that is measured on a GPU, at once: many processes plan while one is timed.

    python benchmarks/on_gpu.py --out FOLDER                      # all of it, on one GPU of 140 GB
    python benchmarks/on_gpu.py --out FOLDER --only tests --only fits --seconds 400
    python benchmarks/on_gpu.py --out runs/gpu --only quality --seconds 580    # trainings, hours
    python benchmarks/on_gpu.py --list

The tests run first and hold the GPU; predicted fits, which are about bytes alone, run beside them.
Then the others take turns (`turns`). Logs and rows lie in FOLDER as they are made. After
`--seconds` whatever still runs is ended, and the ends of all logs are printed. Trainings that take
hours ("quality") run only if they are named, read $SHOESTRING_DATA (by default carry/data), and go
on where they were when the same command is given again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from turns import FILE

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Job:
    """Commands of one process, one after the other; `{out}` is the folder."""

    name: str
    commands: tuple[str, ...]
    timed: bool = True
    """Takes turns on the GPU; else it is about bytes alone."""
    after_seconds: float = 0.0
    """Begins so much later than the first."""
    hours: bool = False
    """Trains for hours: started only by `--only`, and goes on where it was ended."""


def _card(*arguments: str) -> str:
    return " ".join(("card.py", *arguments, "--out {out}/card.jsonl"))


def _study(name: str) -> Job:
    command = f"-m shoestring study studies/{name}.toml --out {{out}}/{name} --resume --workers 6"
    return Job(f"quality-{name}", (command,), timed=False, hours=True)


def _fits(*arguments: str) -> str:
    return " ".join(("fits.py", *arguments, "--predictions {out}/fits_predicted.json"))


NEAR = "--allow near --at-once --no-peers"
STRANGERS = (
    ("gemma2", "phi", "opt", "bloom"),
    ("qwen2-autocast", "mixtral", "t5"),
    ("llama-1b-lora", "bert-mlm", "whisper"),
    ("vit-l-autocast", "swin-t", "convnext-t", "dinov2"),
    ("regnet", "segformer", "graph"),
    ("llama-1b", "qwen2-0.5b"),
    ("resnet-50", "vit-l", "gpt2-medium"),
    ("mamba", "detr"),
)
JOBS = (
    Job("tests", ("-m pytest -m gpu -q -p no:benchmark -p no:cacheprovider -n 5 tests",)),
    Job("fits-1b", (_fits("--only", "'llama 1B'"),), timed=False),
    Job("fits-8b", (_fits("--only", "'llama 8B'", "--longest"),), timed=False),
    Job("fits-others", (_fits("--only", "qwen"), _fits("--only", "ViT")), timed=False),
    Job("llama-8b", (
        _card("llama-8b-bf16", "--budgets 66GB", NEAR),
        _card("llama-8b-bf16", "--budgets 20GB", NEAR),
        _card("llama-8b-bf16", "--budgets 35GB", NEAR),
        "levers.py --only '8b update'",
        _card("llama-8b-8x", "--budgets 24GB", NEAR),
    )),
    Job("llama-1b", (_card("llama-1b-bf16", "--budgets 17.8GB 14.1GB"),)),
    Job("llama-1b-near", (_card("llama-1b-bf16", "--budgets 6.0GB 4.96GB", NEAR),)),
    Job("llama-1b-compiled", (
        _card("llama-1b-bf16", "--budgets 17.8GB 14.1GB", "--allow lossless,compiled_blocks",
              "--at-once --no-peers"),
        "levers.py --only '1b compiled' --only '1b + compiled'",
    )),
    Job("modernbert", (_card("modernbert", "--budgets 0.30 gc"),)),
    Job("u-net", (_card("u-net", "--budgets 0.15 0.35"),)),
    Job("speed-llama", ("plan_speed.py llama-1b --no-compile --json {out}/speed_llama.json",)),
    Job("speed-resnet", (
        "plan_speed.py resnet50 --compile-budgets 0.5 --json {out}/speed_resnet.json",
    )),
    Job("speed-gpt2", (
        "plan_speed.py gpt2-medium --compile-budgets 0.5 --json {out}/speed_gpt2.json",
    ), after_seconds=45),
    *(Job(f"strangers-{number}", tuple(
        _card(name, "--budgets 0.80 0.55 0.35 0.20 gc --smallest") for name in names
    ), after_seconds=60) for number, names in enumerate(STRANGERS)),
    *(Job(f"quality-language-model-{seed}", (
        f"language_model.py --seeds {seed} --out {{out}}/language_model.jsonl",
    ), timed=False, hours=True) for seed in range(3)),
    *map(_study, ("multi30k-levers", "europarl-levers", "cifar10-levers")),
)  # fmt: skip


def start(job: Job, folder: Path, device_turns: Path) -> subprocess.Popen[bytes]:
    """Run its commands in a process group of its own, all that they print in one log."""
    python = f"{sys.executable} -u"
    given = (
        command if command.startswith("-m") else f"{HERE}/{command}" for command in job.commands
    )
    lines = [f"{python} {command.replace('{out}', str(folder))}" for command in given]
    if job.name == "tests":  # as one that holds the GPU, so that nothing is timed beside them
        lines = [f"flock {device_turns} {line}" for line in lines]
    environment = {
        "SHOESTRING_DATA": str(HERE.parent / "carry" / "data"), **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (
            str(HERE.parent / "src"), str(HERE.parent / "carry" / "site"),
            os.environ.get("PYTHONPATH", ""),
        ))),
    }  # fmt: skip
    if job.timed and job.name != "tests":
        environment[FILE] = str(device_turns)
    script = f"sleep {job.after_seconds}; " + "; ".join(lines)
    with (folder / f"{job.name}.log").open("wb") as log:
        return subprocess.Popen(
            ["bash", "-c", script], stdout=log, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True, cwd=HERE.parent,
        )  # fmt: skip


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a folder for logs and rows")
    parser.add_argument("--only", action="append", default=[], help="part of a job's name")
    parser.add_argument("--seconds", type=float, default=3600.0, help="in all")
    parser.add_argument("--lines", type=int, default=20, help="of each log, printed at the end")
    parser.add_argument("--list", action="store_true", help="print the jobs, and run none")
    given = parser.parse_args()
    jobs = [j for j in JOBS if any(part in j.name for part in given.only or [""] * (not j.hours))]
    if given.list:
        for job in jobs:
            print(job.name, *job.commands, sep="\n    ")
        return
    if given.out is None or not jobs:
        parser.error("--out FOLDER is missing" if jobs else "no job has that name; see --list")
    folder = given.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    known = HERE / "results" / "fits_predicted.json"
    (folder / "fits_predicted.json").write_text(known.read_text())
    began = time.monotonic()
    running = {job.name: start(job, folder, folder / "turns") for job in jobs}
    ended: dict[str, str] = {}
    while len(ended) < len(running):
        late = time.monotonic() - began > given.seconds
        for name, process in running.items():
            if name in ended:
                continue
            if late and process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                ended[name] = "stopped"
            elif process.poll() is not None:
                ended[name] = f"ended with {process.returncode}"
        time.sleep(0.2)
    for name, end in ended.items():
        print(f"== {name}: {end}")
        lines = (folder / f"{name}.log").read_text(errors="replace").splitlines()
        print("\n".join(line[:220] for line in lines[-given.lines :]), flush=True)


if __name__ == "__main__":
    main()
