"""The profile of a setting as plain values: bytes by category, and the whole step's timeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ...memory.model import MemoryProfile
from ...memory.timeline import ROLES, Timeline
from ...step.profiling import profile
from ...techniques.registry import flags
from ..runs.defaults import IMAGE_DEFAULTS
from ..runs.job import Job
from ..target import at_once, flagged_plan, resolve
from ..tasks import IMAGES, SHAPE
from ..tasks.images import image_shape

MOST_INSTANTS = 3000
"""A longer timeline is thinned for the page: of neighbors the one with most bytes stays."""
MOST_LIVE = 40


def profiled_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Count one training step of these settings; simulated microbatches run all at once."""
    given = dict(settings)
    dotted = {name: given.pop(name) for name in settings if "." in name}
    data = given.pop("data", None)
    name, batch = given.pop("model"), given.pop("batch", None)
    plan = flagged_plan(name, {n: given.pop(n) for n in flags() if n in given}).changed(dotted)
    inputs, loss = given.pop("input", ()), given.pop("loss", None)
    if ":" in name and data in IMAGES:  # trained on images of that data
        batch = batch or IMAGE_DEFAULTS[data].batch
        shape = "x".join(map(str, image_shape(inputs) if inputs else SHAPE))
        inputs, loss = [f"{batch}x{shape}", f"{batch}:int64"], "shoestring.lab.models:image_loss"
    target = resolve(
        name,
        [inputs] if isinstance(inputs, str) else inputs,
        batch=batch,
        plan=plan,
        loss=loss,
    )
    optimizer = given.pop("optimizer", target.optimizer)
    result = profile(
        target.model,
        target.batch,
        loss=target.loss,
        optimizer=None if optimizer == "none" else optimizer,
        techniques=at_once(plan),
        **given,
    )
    return {"batch": target.batch_size, "batch_unit": target.batch_unit, **as_values(result)}


def profiled_job(job: Job) -> dict[str, Any]:
    """Count one step of what a training would do, on its largest minibatch."""
    model, loss = job.model()
    result = profile(
        model,
        job.sample(),
        loss=loss,
        optimizer=job.optimizer(model, torch.device("cpu")),
        techniques=job.plan.techniques,
    )
    return as_values(result)


def as_values(result: MemoryProfile) -> dict[str, Any]:
    """The JSON of the command line, with the timeline instead of the modules."""
    made = result.as_dict()
    del made["modules"]
    return {**made, "timeline": timeline_values(result.timeline)}


def timeline_values(timeline: Timeline) -> dict[str, Any]:
    """Bytes of every category at every instant, and what is live at the peak, largest first.

    Words are numbered, and an instant is (operation, phase, module), to keep it small.
    """
    kept = _thinned(timeline)
    words: dict[str, int] = {}
    labels = [
        [words.setdefault(word, len(words)) for word in timeline.labels[i]] for i in kept.tolist()
    ]
    table = timeline.bytes_by_role[kept]
    peak = timeline.peak_instant
    live: dict[tuple[str, str], int] = {}
    for change in timeline.changes:
        if change.instant <= peak:
            key = (change.module, change.role.value)
            live[key] = live.get(key, 0) + change.nbytes
    largest = sorted(((-b, *key) for key, b in live.items() if b > 0), key=lambda item: item)
    rest = -sum(size for size, *_ in largest[MOST_LIVE:])
    return {
        "words": list(words),
        "labels": labels,
        "bytes": {
            role.value: table[:, i].tolist() for i, role in enumerate(ROLES) if table[:, i].any()
        },
        "instants": len(timeline.labels),
        "kept": kept.tolist() if len(kept) < len(timeline.labels) else None,
        "peak": int(np.searchsorted(kept, peak)),
        "live": [[module, role, -size] for size, module, role in largest[:MOST_LIVE]],
        "live_rest_bytes": rest,
    }


def _thinned(timeline: Timeline) -> np.ndarray:
    count = len(timeline.labels)
    if count <= MOST_INSTANTS:
        return np.arange(count)
    totals = timeline.totals
    starts = np.arange(1, MOST_INSTANTS) * count // MOST_INSTANTS  # evenly, as the slider goes
    parts = np.split(np.arange(count), starts)
    kept = {int(part[totals[part].argmax()]) for part in parts} | {timeline.peak_instant}
    return np.array(sorted(kept))
