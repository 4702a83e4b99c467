"""Trainer: a run's state (model, optimizer, data, counters) and what one update does to it."""

from __future__ import annotations

import math
import os
import random
import time
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..errors import InputError, ShoestringError
from ..profiling import profile
from ..tasks.images import DEVICE_LIMIT_BYTES, Feed, ImageTask
from .apply import Step, apply
from .distributed import add_over_ranks, average_statistics, own_tensors
from .group import from_all, largest, rank, ranks
from .predict import predict_step
from .settings import Settings, build_model
from .shares import Parallel, cut_evenly, shares_of

MEASURED_UPDATE = 2
"""The third: optimizer state exists, and on CUDA the step is captured."""

_TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Trainer:
    """Everything that changes while a run goes on; `state_dict` is what a snapshot holds."""

    def __init__(
        self,
        settings: Settings,
        task: ImageTask,
        device: torch.device,
        *,
        predict: bool = True,
        parallel: str | None = None,
        device_limit_bytes: int = DEVICE_LIMIT_BYTES,
    ) -> None:
        self.settings, self.device = settings, device
        self.parallel = None if ranks() == 1 else parallel or "ddp"
        shared = None if self.parallel is None else Parallel(self.parallel, batches="shares")
        shares = [(0, settings.batch)]
        if shared is not None:
            shares = shares_of(settings.batch, shared, settings.plan)
        most = max(stop - start for start, stop in shares)
        kind = "fp32" if settings.plan.precision is None else settings.plan.precision.kind
        self._dtype = _TYPES[kind]
        seed_streams(settings.seed)
        model, self.loss = build_model(settings.model)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.predicted = self._predict(model, task, most) if predict else {}
        layout = torch.channels_last if settings.channels_last else torch.preserve_format
        model.to(device, memory_format=layout)  # type: ignore[call-overload]
        optimizer = _sgd(settings, model, fused=device.type == "cuda")
        self.step: Step = apply(settings.plan, model, optimizer, loss=self.loss, parallel=shared)
        separate_streams(settings.seed)
        self.feed = Feed(
            task,
            settings.batch,
            seed=settings.seed,
            share=shares[rank()],
            device=device,
            dtype=self._dtype,
            channels_last=settings.channels_last,
            device_limit_bytes=device_limit_bytes,
        )
        self.updates = settings.epochs * self.feed.steps_per_epoch
        self.done = 0
        """Updates so far."""
        self.accuracy: float | None = None
        """Of the last evaluation, in percent."""
        self.best_accuracy, self.best_epoch = 0.0, 0
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        """Since the last evaluation; it stays on the device."""
        self.loss_count = 0
        self.measured_peak_bytes = 0
        """Of the training so far, without the data set."""
        self.seconds = 0.0
        """Spent by those who trained before this one."""
        self._started = time.monotonic()

    def _predict(
        self, model: torch.nn.Module, task: ImageTask, examples: int
    ) -> dict[str, int | None]:
        """Both peaks of so many examples, before anything is allocated; None where unknown."""
        settings = self.settings
        optimizer = _sgd(settings, model, fused=False)
        images = torch.zeros(examples, *task.images.shape[1:])
        batch = images, torch.zeros(examples, dtype=torch.int64)
        made: dict[str, int | None] = {"fundamental_peak_bytes": None, "step_peak_bytes": None}
        if self.parallel == "fsdp":
            return made
        with suppress(ShoestringError):  # microbatches that do not divide the batch, for one
            made["fundamental_peak_bytes"] = profile(
                model,
                batch,
                loss=self.loss,
                optimizer=optimizer,
                techniques=settings.plan.techniques,
            ).peak_bytes
        batch = images.to(self._dtype), batch[1]  # as it will be fed
        step = predict_step(settings.plan, model, batch, loss=self.loss, optimizer=optimizer)
        made["step_peak_bytes"] = step.peak_bytes
        return made

    @property
    def epoch(self) -> int:
        """Whole epochs done."""
        return self.done // self.feed.steps_per_epoch

    @property
    def at_end_of_epoch(self) -> bool:
        """Whether the last update was an epoch's last."""
        return self.done % self.feed.steps_per_epoch == 0

    @property
    def total_seconds(self) -> float:
        """Of all who worked on this run."""
        return self.seconds + time.monotonic() - self._started

    def advance(self) -> None:
        """One update; nothing here waits for the device."""
        epoch, number = divmod(self.done, self.feed.steps_per_epoch)
        rate = self.settings.learning_rate_at(epoch)
        for group in self.step.optimizer.param_groups:
            if group["lr"] != rate:
                group["lr"] = rate
        batch = self.feed.batch(epoch, number)
        if self.done == min(MEASURED_UPDATE, self.updates - 1) and self.step.measurable:
            self._note_peak(self.step.measure(batch).peak_bytes)
            loss = self.step.loss
        else:
            loss = self.step(batch)
        assert loss is not None
        self.loss_sum.add_(loss)
        self.loss_count += 1
        self.done += 1

    def _note_peak(self, peak_bytes: int) -> None:
        """Of the rank that takes most.

        The CPU's count is of the step alone; the allocator's has the data set in it.
        """
        self.measured_peak_bytes = max(
            self.measured_peak_bytes, largest(peak_bytes) - self.feed.resident_bytes
        )

    def train_loss(self) -> float:
        """Mean since the last evaluation; waits for the device."""
        return float(self.loss_sum) / max(self.loss_count, 1)

    def loss_scale(self) -> float | None:
        """Of FP16; waits for the device."""
        scale = self.step.loss_scale
        return None if scale is None else float(scale)

    def trouble(self) -> str | None:
        """Why it makes no sense to go on, or None; waits for the device."""
        if not math.isfinite(self.train_loss()):
            return f"the training loss is not finite after update {self.done:,}"
        scale = self.loss_scale()
        if scale is not None and scale < 1:
            return f"the loss scale fell to {scale:g} by update {self.done:,}: gradients overflow"
        held = own_tensors(self.step.model)
        finite = [t.detach().isfinite().all() for t in held if t.is_floating_point()]
        if not bool(torch.stack(finite).all()):
            return f"a weight is not finite after update {self.done:,}"
        return None

    def evaluate(self) -> dict[str, Any]:
        """Accuracy and loss on the held-out images, in one wait; the fields of an event."""
        if self.device.type == "cuda":
            peak_bytes = max(torch.cuda.max_memory_allocated(), self.step.captured_peak_bytes)
            self._note_peak(peak_bytes)
            torch.cuda.reset_peak_memory_stats()
        model = self.step.model
        average_statistics(model)
        model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        count = 0
        with torch.no_grad():
            for images, labels in self.feed.held_out(self.settings.evaluation_batch):
                count += len(labels)
                mine = slice(*cut_evenly(len(labels), ranks())[rank()])
                scores, own_labels = model(images[mine]).float(), labels[mine]
                right = (scores.argmax(1) == own_labels).sum()
                loss = F.cross_entropy(scores, own_labels, reduction="sum")
                sums += torch.stack([right, loss])
        model.train()
        if ranks() > 1:
            add_over_ranks([sums])
        right, loss = (sums / count).tolist()
        self.accuracy = round(100 * right, 4)
        if self.accuracy > self.best_accuracy:
            self.best_accuracy, self.best_epoch = self.accuracy, self.epoch
        made = {
            "epoch": self.epoch,
            "step": self.done,
            "learning_rate": self.step.optimizer.param_groups[0]["lr"],
            "train_loss": self.train_loss(),
            "loss": loss,
            "accuracy": self.accuracy,
            "best_accuracy": self.best_accuracy,
            "best_epoch": self.best_epoch,
            "loss_scale": self.loss_scale(),
            "measured_peak_bytes": self.measured_peak_bytes,
            "seconds": round(self.total_seconds, 3),
        }
        if self.device.type == "cuda":
            used = torch.cuda.max_memory_allocated() - self.feed.resident_bytes
            made["evaluation_peak_bytes"] = used
            torch.cuda.reset_peak_memory_stats()
        self.loss_sum.zero_()
        self.loss_count = 0
        return made

    def state_dict(self) -> dict[str, Any]:
        """Everything a run needs to go on, bit for bit."""
        return {
            "settings": self.settings.as_dict(),
            "predicted": self.predicted,
            "step": self.step.state_dict(),
            "random": from_all(random_state()),
            "done": self.done,
            "accuracy": [self.accuracy, self.best_accuracy, self.best_epoch],
            "loss_sum": self.loss_sum.cpu(),
            "loss_count": self.loss_count,
            "measured_peak_bytes": self.measured_peak_bytes,
            "seconds": self.total_seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.settings.check_same(state["settings"])
        self.predicted = state["predicted"]
        self.step.load_state_dict(state["step"])
        for group in self.step.optimizer.param_groups:
            group["fused"] = self.device.type == "cuda"  # the snapshot may come from elsewhere
        if len(state["random"]) == ranks() or rank() == 0:
            set_random_state(state["random"][rank()])
        else:
            separate_streams(self.settings.seed, state["done"])
        self.done = state["done"]
        self.accuracy, self.best_accuracy, self.best_epoch = state["accuracy"]
        self.loss_sum.copy_(state["loss_sum"])
        self.loss_count = state["loss_count"]
        self.measured_peak_bytes = state["measured_peak_bytes"]
        self.seconds = state["seconds"]
        self._started = time.monotonic()


def separate_streams(seed: int, *more: int) -> None:
    """Every rank but the first draws its own numbers, dropout's for instance."""
    if rank() > 0:
        state = np.random.SeedSequence([seed, rank(), *more]).generate_state(1, np.uint64)
        torch.manual_seed(int(state[0] >> np.uint64(1)))


def _sgd(settings: Settings, model: torch.nn.Module, *, fused: bool) -> torch.optim.SGD:
    return torch.optim.SGD(
        model.parameters(),
        lr=settings.learning_rate_at(0),
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
        nesterov=settings.momentum > 0,
        fused=fused,
    )


def prepare_device(name: str | None, *, tf32: bool, benchmark: bool) -> torch.device:
    """The device to train on (cuda where there is one), set up for numbers that can be stated.

    cuBLAS gets no workspace of its own unless CUBLAS_WORKSPACE_CONFIG says otherwise: on Hopper it
    would take 32 MiB. FP32 is FP32 unless `tf32`.
    """
    wanted = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise InputError(f"no device is called {wanted!r}", hint="cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"training on {device.type} is not supported", hint="cpu or cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise InputError(f"there is no {wanted} here", hint="--device cpu")
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cuda.matmul.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = benchmark
    return device


def seed_streams(seed: int) -> None:
    """Start every global generator a model may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """Of every global generator a model may draw from, as plain values and tensors."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Take them all back; the GPU's only where there is one."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
