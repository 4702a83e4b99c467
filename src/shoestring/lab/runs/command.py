"""`shoestring train`: what the flags ask for → settings, data, device → a run and its summary."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from ...devices import Device
from ...errors import InputError
from ...planning.allow import Allowed
from ...techniques.plan import Plan, from_flags
from ...progress import working
from ..records.run import FILE, Event, read
from ..tasks import ImageTask, TextTask, load_task
from ..tasks.images import DEVICE_LIMIT_BYTES
from ...trace.batches import tensors_of
from ...units import format_count, format_size, parse_size, plural
from .display import duration
from ...step.group import local_device, parallel_for, process_group
from .folder import component
from .job import Job, job_for
from .loop import train
from .settings import AnySettings, check_seed, settings_for
from .text_settings import text_settings_for
from .trainer import prepare_device

_LIMITS = {"auto": DEVICE_LIMIT_BYTES, "device": 2**62, "host": 0}


@dataclass(frozen=True)
class Call:
    """The arguments of the command; None is "not given"."""

    model: str
    data: str
    data_dir: str | None = None
    input: str | None = None
    """Shape that images are brought to, such as "1x28x28"."""
    split: str = "test"
    plan: str | None = None
    budget: str | None = None
    allow: str | None = None
    techniques: Mapping[str, Any] = field(default_factory=dict)
    """Values of technique flags, such as "density": 0.3."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings of techniques that have no flag, such as "sparsity.fraction_multiplier": 2."""
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
    evaluation_batch: int | None = None
    out: str | None = None
    resume: bool = False
    snapshot_every: int | None = None
    stop_after: str | None = None
    tensorboard: bool = False
    parallel: str | None = None
    updates: int | None = None
    warmup: int | None = None
    dropout: float | None = None
    average: int | None = None
    beam: int | None = None
    length_penalty: float | None = None
    languages: str | None = None
    merges: int | None = None
    predict: bool = True
    threads: int | None = None

    @property
    def for_text(self) -> dict[str, Any]:
        """Options for translation only."""
        names = ("updates", "warmup", "dropout", "average", "beam", "length_penalty")
        return {name: getattr(self, name) for name in names}

    @property
    def flags(self) -> dict[str, object]:
        """The techniques that are named one by one."""
        return {n: v for n, v in self.techniques.items() if v is not None and v is not False}


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    settings: AnySettings
    event: Event

    def __str__(self) -> str:
        end, settings, predicted = self.event, self.settings, self.event["predicted"]
        rows = [
            ("plan", str(settings.plan)),
            ("updates", f"{format_count(end['step'])} ({plural(end['epoch'], 'epoch')})"),
            ("predicted peak", f"{_size(predicted.get('fundamental_peak_bytes'))} fundamental"),
            ("", f"{_size(predicted.get('step_peak_bytes'))} of the step's tensors"),
            ("measured peak", _size(end["measured_peak_bytes"])),
            ("time", duration(end["seconds"])),
            ("folder", end["folder"]),
        ]
        if end.get("bleu") is not None:
            rows[2:2] = [
                ("validation loss", f"{end['loss']:.4f}"),
                ("BLEU", f"{end['bleu']:.2f} ({end['bleu_signature']})"),
                ("exactly right", f"{end['exact_percent']:.1f}% of {end['translated']:,}"),
            ]
        if end.get("accuracy") is not None:
            best = f"{end['best_accuracy']:.2f}% after epoch {end['best_epoch']}"
            rows[2:2] = [("accuracy", f"{end['accuracy']:.2f}%"), ("best accuracy", best)]
        if end["event"] == "stopped":
            rows.append(("", "stopped as asked; go on with --resume"))
        wide = max(len(name) for name, _ in rows)
        head = f"{settings.model} · {settings.data} ({settings.split}) · seed {settings.seed}"
        return "\n".join([head, *(f"{name:<{wide}}  {value}" for name, value in rows)])


def _size(n_bytes: int | None) -> str:
    return "unknown" if not n_bytes else format_size(n_bytes)


def start(call: Call) -> Result:
    """Train as the command line says."""
    _check_one_plan(call)
    budget = _budget(call)
    check_seed(call.seed)
    if call.resume and call.out is None:
        raise InputError("--resume needs the folder of the run", hint="name it with --out")
    if call.data_on not in _LIMITS:
        raise InputError(f"unknown place {call.data_on!r}", hint="one of " + ", ".join(_LIMITS))
    parallel = parallel_for(call.parallel)
    device = prepare_device(
        local_device(call.device), tf32=call.tf32, benchmark=call.cudnn_benchmark
    )
    _at_least_one("--snapshot-every", call.snapshot_every)
    # All ranks meet before the data is read: only how long they take to start may differ.
    with process_group(device):
        task = _task(call)
        _set_threads(call, task)
        settings = _settings(call, task, device)
        name = component(f"{call.model}-{task.name}-seed{call.seed}")
        made = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        event = train(
            settings,
            task,
            Path(call.out or made),
            device=device,
            resume=call.resume,
            snapshot_every=call.snapshot_every,
            stop_after=_updates(call.stop_after, task, settings),
            tensorboard=call.tensorboard,
            parallel=parallel,
            device_limit_bytes=_LIMITS[call.data_on],
            predict=call.predict,
            budget=budget,
        )
    return Result(settings, event)


def job_of(call: Call) -> Job:
    """The training a call asks for, built on the CPU so that its memory can be counted."""
    _check_one_plan(call)
    task, there = _task(call), torch.device("cpu")
    return job_for(_settings(call, task, there), task, there)


def _task(call: Call) -> ImageTask | TextTask:
    return load_task(
        call.data, folder=call.data_dir, split=call.split, seed=call.seed,
        languages=call.languages, merges=call.merges, input=call.input,
    )  # fmt: skip


def _set_threads(call: Call, task: ImageTask | TextTask) -> None:
    """As asked, else as suits the data, else PyTorch's."""
    wanted = _at_least_one("--threads", call.threads)
    if wanted is None and "OMP_NUM_THREADS" not in os.environ:
        wanted = task.threads
    if wanted is not None:
        torch.set_num_threads(wanted)


def _settings(call: Call, task: ImageTask | TextTask, device: torch.device) -> AnySettings:
    """All that decides what is computed."""
    shared: dict[str, Any] = {
        "plan": _plan(call, task, device.type),
        "tune": call.plan is None,
        "epochs": call.epochs,
        "batch": call.batch,
        "learning_rate": call.learning_rate,
        "seed": call.seed,
        "split": call.split,
        "evaluate_every": call.evaluate_every,
        "tf32": call.tf32,
    }
    if call.evaluation_batch is not None:
        shared["evaluation_batch"] = call.evaluation_batch
    for line in task.remarks:
        print(line, file=sys.stderr)
    made = _SETTINGS[type(task)](call, task, device, shared)
    return replace(made, plan=made.plan.changed(call.changes))  # type: ignore[type-var]


def _text_settings(
    call: Call, task: TextTask, device: torch.device, shared: dict[str, Any]
) -> AnySettings:
    return text_settings_for(call.model, call.data, task, **shared, **call.for_text)


def _image_settings(
    call: Call, task: ImageTask, device: torch.device, shared: dict[str, Any]
) -> AnySettings:
    given = [name for name, value in call.for_text.items() if value is not None]
    if given:
        raise InputError(
            f"--{given[0].replace('_', '-')} is for translation, and {call.data} is images",
            hint="--epochs says how long to train on images" if given[0] == "updates" else None,
        )
    return settings_for(
        call.model, call.data, images=len(task.images), channels_last=_layout(call, device),
        input=call.input, **shared,
    )  # fmt: skip


_SETTINGS: dict[type, Callable[..., AnySettings]] = {
    TextTask: _text_settings,
    ImageTask: _image_settings,
}


def _layout(call: Call, device: torch.device) -> bool:
    """Whether channels lie last: as asked, as the run that is resumed has it, or as suits."""
    if call.channels_last is not None:
        return call.channels_last
    before = (_began(call) or {}).get("settings", {})
    return bool(before.get("channels_last", device.type == "cuda"))


def _check_one_plan(call: Call) -> None:
    """Techniques come from a file, from a budget or from flags."""
    named = [*call.flags][:1]
    ways = [*(["plan"] if call.plan else []), *(["budget"] if call.budget else []), *named]
    if len(ways) > 1:
        raise InputError(
            f"--{ways[0]} and --{ways[1]} are both given",
            hint="a plan comes from a file, from a budget, or from technique flags",
        )
    if call.budget and call.changes:
        raise InputError(
            f"--set {next(iter(call.changes))} would change the plan of --budget",
            hint="`shoestring plan … --out FILE` writes it; then --plan FILE with --set",
        )
    if call.allow is not None and call.budget is None:
        raise InputError("--allow says what a budget may cost", hint="add --budget '13 MB'")
    from_flags(call.flags)  # says what is wrong with them before data is read


def _plan(call: Call, task: ImageTask | TextTask, device: str) -> Plan:
    if call.plan is not None:
        return Plan.load(call.plan)
    if call.budget is not None:
        return _planned_before(call) or _plan_for_budget(call, task, device)
    return from_flags(call.flags, task.unit)


def _budget(call: Call) -> dict[str, Any] | None:
    """`--budget` and `--allow` as the records keep them."""
    if call.budget is None:
        return None
    return {"bytes": parse_size(call.budget), "allow": str(Allowed.of(call.allow))}


def _planned_before(call: Call) -> Plan | None:
    """Of the run that is resumed: a planner that got better must not change it."""
    start = _began(call)
    if start is None:
        return None
    wanted = _budget(call)
    held = start.get("budget", wanted)  # records of earlier versions do not say
    if held is not None and held["allow"] == "precision":  # as earlier versions called it
        held = {**held, "allow": "near"}
    if held != wanted:
        raise InputError(
            f"the run has {_told(held)}, not {_told(wanted)}",
            hint="resume with the settings it began with, or start in another folder",
        )
    return Plan.from_dict(start["settings"]["plan"])


def _began(call: Call) -> dict[str, Any] | None:
    """The first event of the run that is resumed."""
    if not call.resume or call.out is None or not (Path(call.out) / FILE).exists():
        return None
    events = read(call.out, whole=False)
    return next((event for event in events if event["event"] == "start"), None)


def _told(budget: dict[str, Any] | None) -> str:
    if budget is None:
        return "no budget"
    return f"a budget of {budget['bytes']:,} bytes that allows {budget['allow']}"


def _plan_for_budget(call: Call, task: ImageTask | TextTask, device: str) -> Plan:
    from ...planning.planner import plan

    assert call.budget is not None
    there = torch.device(device)  # its layout and its optimizer; the data stays here
    settings = _settings(replace(call, budget=None, allow=None), task, there)
    job = job_for(settings, task, torch.device("cpu"))
    model, loss = job.model()
    batch = job.sample()
    room = parse_size(call.budget)
    if device == "cuda" and not task.written_in_place:  # a captured step copies its minibatch
        room -= sum(t.nbytes for t in tensors_of(batch))
    with working(f"planning {call.model} for {call.budget}"):
        found = plan(
            model, batch, loss=loss, optimizer=job.optimizer(model, there),
            budget=max(room, 1), allow=call.allow, device=cast(Device, device), budget_of="allocated",
        ).plan  # fmt: skip
    if task.unit == "examples":
        return found
    length = batch["source"].shape[1]  # other sentences are longer or shorter
    return Plan(technique.counting(task.unit, length) for technique in found.techniques)


def _at_least_one(name: str, number: int | None) -> int | None:
    if number is not None and number < 1:
        raise InputError(f"{name} {number} is below 1", hint="a whole number from 1")
    return number


def _updates(text: str | None, task: ImageTask | TextTask, settings: AnySettings) -> int | None:
    """'3' epochs or '300 steps', as updates."""
    if text is None:
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,17})\s*(epochs?|steps?)?", text.strip())
    if match is None:
        raise InputError(f"cannot read --stop-after {text!r}", hint="3 (epochs) or '300 steps'")
    if (match[2] or "").startswith("step"):
        return int(match[1])
    return int(match[1]) * settings.steps_per_epoch(task)
