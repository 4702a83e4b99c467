"""`shoestring train`: what the flags ask for → settings, data, device → a run and its summary."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import InputError
from ..planning.plan import Plan
from ..records.run import Event
from ..tasks import ImageTask, load_task
from ..tasks.images import DEVICE_LIMIT_BYTES
from ..units import format_count, format_size
from .display import duration
from .group import local_device, parallel_for, process_group
from .loop import train
from .settings import Settings, settings_for
from .trainer import prepare_device

_LIMITS = {"auto": DEVICE_LIMIT_BYTES, "device": 2**62, "host": 0}


@dataclass(frozen=True)
class Call:
    """The arguments of the command; None is "not given"."""

    model: str
    data: str
    data_dir: str | None = None
    split: str = "test"
    plan: str | None = None
    budget: str | None = None
    density: float | None = None
    precision: str | None = None
    microbatch: int | None = None
    simulated: bool = False
    checkpoint: str | None = None
    epochs: int | None = None
    batch: int | None = None
    learning_rate: float | None = None
    seed: int = 0
    device: str | None = None
    channels_last: bool | None = None
    tf32: bool = False
    cudnn_benchmark: bool = False
    data_on: str = "auto"
    evaluate_every: int = 1
    evaluation_batch: int = 1000
    out: str | None = None
    resume: bool = False
    snapshot_every: int | None = None
    stop_after: str | None = None
    tensorboard: bool = False
    parallel: str | None = None

    @property
    def flags(self) -> dict[str, object]:
        """The techniques that are named one by one."""
        named = {
            "density": self.density,
            "precision": self.precision,
            "microbatch": self.microbatch,
            "checkpoint": self.checkpoint,
        }
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    settings: Settings
    event: Event

    def __str__(self) -> str:
        end, settings = self.event, self.settings
        predicted = end["predicted"]
        rows = [
            ("plan", str(settings.plan)),
            ("updates", f"{format_count(end['step'])} ({end['epoch']} epochs)"),
            *(
                [("accuracy", f"{end['accuracy']:.2f}% at the end")]
                if end.get("accuracy") is not None
                else []
            ),
            ("best accuracy", f"{end['best_accuracy']:.2f}% after epoch {end['best_epoch']}"),
            ("predicted peak", f"{_size(predicted.get('fundamental_peak_bytes'))} fundamental"),
            ("", f"{_size(predicted.get('step_peak_bytes'))} of the step's tensors"),
            ("measured peak", _size(end["measured_peak_bytes"])),
            ("time", duration(end["seconds"])),
            ("folder", end["folder"]),
        ]
        wide = max(len(name) for name, _ in rows)
        head = f"{settings.model} · {settings.data} ({settings.split}) · seed {settings.seed}"
        return "\n".join([head, *(f"{name:<{wide}}  {value}" for name, value in rows)])


def _size(n_bytes: int | None) -> str:
    return "unknown" if not n_bytes else format_size(n_bytes)


def start(call: Call) -> Result:
    """Train as the command line says."""
    if call.plan is not None and (call.flags or call.simulated):
        name = next(iter(call.flags), "simulated")
        raise InputError(
            f"--plan and --{name} are both given", hint="write the setting into the plan's file"
        )
    if call.resume and call.out is None:
        raise InputError("--resume needs the folder of the run", hint="name it with --out")
    if call.data_on not in _LIMITS:
        raise InputError(f"unknown place {call.data_on!r}", hint="one of " + ", ".join(_LIMITS))
    parallel = parallel_for(call.parallel)
    device = prepare_device(
        local_device(call.device), tf32=call.tf32, benchmark=call.cudnn_benchmark
    )
    task = load_task(call.data, folder=call.data_dir, split=call.split, seed=call.seed)
    on_cuda = device.type == "cuda"
    settings = settings_for(
        call.model,
        call.data,
        images=len(task.images),
        plan=_plan(call),
        density=call.density,
        precision=call.precision,
        microbatch=call.microbatch,
        simulated=call.simulated,
        checkpoint=call.checkpoint,
        epochs=call.epochs,
        batch=call.batch,
        learning_rate=call.learning_rate,
        seed=call.seed,
        split=call.split,
        evaluate_every=call.evaluate_every,
        evaluation_batch=call.evaluation_batch,
        channels_last=on_cuda if call.channels_last is None else call.channels_last,
        tf32=call.tf32,
    )
    made = f"runs/{call.model.replace(':', '.')}-{call.data}-{time.strftime('%Y%m%d-%H%M%S')}"
    with process_group(device):
        event = train(
            settings,
            task,
            Path(call.out or made),
            device=device,
            resume=call.resume,
            snapshot_every=_at_least_one("--snapshot-every", call.snapshot_every),
            stop_after=_updates(call.stop_after, task, settings),
            tensorboard=call.tensorboard,
            parallel=parallel,
            device_limit_bytes=_LIMITS[call.data_on],
        )
    return Result(settings, event)


def _plan(call: Call) -> Plan | None:
    if call.budget is not None:
        raise InputError("planning for a budget is not there yet", hint="use --plan or flags")
    return None if call.plan is None else Plan.load(call.plan)


def _at_least_one(name: str, number: int | None) -> int | None:
    if number is not None and number < 1:
        raise InputError(f"{name} {number} is below 1")
    return number


def _updates(text: str | None, task: ImageTask, settings: Settings) -> int | None:
    """'3' epochs or '300 steps', as updates."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9][0-9]*)\s*(epochs?|steps?)?", text.strip())
    if match is None:
        raise InputError(f"cannot read --stop-after {text!r}", hint="3 (epochs) or '300 steps'")
    each = 1 if (match[2] or "").startswith("step") else len(task.images) // settings.batch
    return int(match[1]) * each
