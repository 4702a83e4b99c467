"""Training on labeled images: SGD by epochs, evaluated by accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..tasks.images import ImageFeed, ImageTask
from ...techniques.plan import Plan
from ...trace.tracing import Loss
from ...step.distributed import add_over_ranks
from ...step.group import ShardingName, rank, ranks
from .settings import ImageSettings, build_model
from ...step.shares import Parallel, cut_evenly, shares_of



class ImageJob:
    """A `Job` of images."""

    score, higher_is_better = "accuracy", True
    notes: dict[str, Any] | None = None
    weights_kept = 0

    def __init__(
        self,
        settings: ImageSettings,
        task: ImageTask,
        device: torch.device,
        parallel: ShardingName | None,
        device_limit_bytes: int,
    ) -> None:
        self.settings, self.plan, self._task = settings, weighted_by_images(settings.plan), task
        self.parallel = (
            None if parallel is None else Parallel(parallel, batches="shares", weight="examples")
        )
        shares = [(0, settings.batch)]
        if self.parallel is not None:
            shares = shares_of(settings.batch, self.parallel, settings.plan)
        self._most = max(stop - start for start, stop in shares)
        self._layout = torch.channels_last if settings.channels_last else torch.preserve_format
        self.feed = ImageFeed(
            task,
            settings.batch,
            seed=settings.seed,
            share=shares[rank()],
            device=device,
            dtype=settings.plan.input_dtype,
            channels_last=settings.channels_last,
            in_place=device.type == "cuda",
            device_limit_bytes=device_limit_bytes,
        )
        self.updates = settings.epochs * self.feed.steps_per_epoch

    def model(self) -> tuple[nn.Module, Loss]:
        """As the settings name it, in their layout."""
        model, loss = build_model(self.settings.model, self._task.classes, self._task.shape[0])
        return model.to(memory_format=self._layout), loss  # type: ignore[call-overload]

    def optimizer(self, model: nn.Module, device: torch.device) -> torch.optim.SGD:
        """SGD with Nesterov's momentum."""
        settings = self.settings
        return torch.optim.SGD(
            model.parameters(),
            lr=settings.learning_rate_at(0),
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
            nesterov=settings.momentum > 0,
            fused=device.type == "cuda",
        )

    def learning_rate(self, update: int) -> float:
        """The same within an epoch."""
        return self.settings.learning_rate_at(update // self.feed.steps_per_epoch)

    def sample(self) -> Any:
        """As many examples as the largest share has."""
        images = torch.zeros(self._most, *self._task.images.shape[1:])
        return images.to(memory_format=self._layout), torch.zeros(self._most, dtype=torch.int64)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Accuracy in percent and mean loss, in one wait."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.feed.device)
        count = 0
        for images, labels in self.feed.held_out(self.settings.evaluation_batch):
            count += len(labels)
            mine = slice(*cut_evenly(len(labels), ranks())[rank()])
            scores, own_labels = model(images[mine]).float(), labels[mine]
            right = (scores.argmax(1) == own_labels).sum()
            loss = F.cross_entropy(scores, own_labels, reduction="sum")
            sums += torch.stack([right, loss])
        if ranks() > 1:
            add_over_ranks([sums])
        right, loss = (sums / count).tolist()
        return {"loss": loss, "accuracy": round(100 * right, 4)}

    def begin(self, folder: Path) -> None:
        """Nothing more."""

    def check(self, folder: Path) -> None:
        """A name has always the same images."""

    def finish(self, model: nn.Module, folder: Path, weights: list[Path]) -> dict[str, Any]:
        """Accuracy says it all."""
        return {}

    def shown(self, event: dict[str, Any]) -> str:
        """The last accuracy and the best."""
        return f"accuracy {event['accuracy']:.2f}% (best {event['best_accuracy']:.2f}%)"


def weighted_by_images(plan: Plan) -> Plan:
    """The same plan; every image has its label, so microbatches weigh their images, untested."""
    return Plan(technique.weighted("examples") for technique in plan.techniques)
