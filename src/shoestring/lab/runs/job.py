"""The parts of a run that depend on its data: batches, model, optimizer and evaluation.

The trainer and the loop know nothing of images or words; they ask a job.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ...techniques.plan import Plan
from ..tasks import ImageTask, TextTask
from ..tasks.images import DEVICE_LIMIT_BYTES
from ...trace.tracing import Loss
from .settings import AnySettings, ImageSettings
from ...step.group import ShardingName
from ...step.shares import Parallel
from .text_settings import TextSettings


class Feed(Protocol):
    """Minibatches on a device; any of them can be reproduced."""

    steps_per_epoch: int
    in_place: bool
    """Whether every batch is written over the last one."""

    @property
    def resident_bytes(self) -> int:
        """Of the data set, on the device, the whole time."""
        ...

    def batch(self, epoch: int, number: int) -> Any:
        """Batch `number` of an epoch, both counted from 0."""
        ...


class Job(Protocol):
    """One run's data and how it is trained on."""

    score: str
    """The number of an evaluation that says how good it is, such as accuracy."""
    higher_is_better: bool
    plan: Plan
    """The settings' plan, with what no file can hold: how microbatches weigh."""
    updates: int
    parallel: Parallel | None
    notes: dict[str, Any] | None
    """Facts about the data for the records."""
    weights_kept: int
    """Of the last epochs' ends, for an average."""

    @property
    def feed(self) -> Feed:
        """The minibatches."""
        ...

    def model(self) -> tuple[nn.Module, Loss]:
        """A new model on the CPU, and its loss; the caller seeds."""
        ...

    def optimizer(self, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
        """With the settings' numbers; its kernels are those of the device."""
        ...

    def learning_rate(self, update: int) -> float:
        """Of an update counted from 0."""
        ...

    def sample(self) -> Any:
        """A batch of the largest shape a rank runs, on the CPU in FP32, for predictions."""
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss and score on what is held out, of a model in eval mode; all ranks together."""
        ...

    def begin(self, folder: Path) -> None:
        """Further files of a run's folder, beside records and snapshots."""
        ...

    def check(self, folder: Path) -> None:
        """InputError where a run that began in the folder cannot go on with this data."""
        ...

    def finish(self, model: nn.Module, folder: Path, weights: list[Path]) -> dict[str, Any]:
        """After the last update: more fields for the last event. Rank 0 alone."""
        ...

    def shown(self, event: dict[str, Any]) -> str:
        """An evaluation, in words."""
        ...


def job_for(
    settings: AnySettings,
    task: ImageTask | TextTask,
    device: torch.device,
    *,
    parallel: ShardingName | None = None,
    device_limit_bytes: int = DEVICE_LIMIT_BYTES,
) -> Job:
    """By the kind of data."""
    if isinstance(task, TextTask):
        from .text_job import TextJob

        assert isinstance(settings, TextSettings)
        return TextJob(settings, task, device, parallel)
    from .image_job import ImageJob

    assert isinstance(settings, ImageSettings)
    return ImageJob(settings, task, device, parallel, device_limit_bytes)
