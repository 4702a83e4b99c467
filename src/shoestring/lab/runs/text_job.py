"""Training on text: Adam by updates, evaluated by the loss of a word, scored by BLEU at the end."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..decoding.beam import translate
from ..decoding.bleu import score
from ... import files
from ...errors import InputError
from ..models import builtin
from ..models.label_smoothing import label_smoothed_loss
from ..target import build
from ...techniques.plan import Plan
from ..tasks import TextTask
from ..tasks.bpe import PADDING, Vocabulary
from ..tasks.corpus import joined
from ..tasks.prepared import read_vocabularies, write_vocabularies
from ..tasks.token_batches import TextFeed, target_tokens
from ...trace.failures import check_trainable
from ...trace.tracing import Loss
from .average import averaged_model
from ...step.distributed import add_over_ranks
from ...step.group import ShardingName, rank, ranks
from ...step.shares import Parallel, cut_evenly
from .text_settings import TextSettings

TRANSLATIONS, REFERENCES = "translations.txt", "references.txt"


class TextJob:
    """A `Job` of sentences in two languages."""

    score, higher_is_better = "loss", False

    def __init__(
        self,
        settings: TextSettings,
        task: TextTask,
        device: torch.device,
        parallel: ShardingName | None,
    ) -> None:
        self.settings, self._task, self._device = settings, task, device
        self.plan = weighted_by_tokens(settings.plan)
        self.parallel = None if parallel is None else Parallel(parallel, weight=target_tokens)
        self.feed = TextFeed(task, settings.batch, seed=settings.seed, device=device)
        self.updates = settings.updates
        self.weights_kept = settings.average if settings.average > 1 else 0
        shapes = [[shape.rows, shape.length] for shape in self.feed.shapes]
        filled = {"batch_shapes": shapes, "not_padding": round(self.feed.filled, 4)}
        self.notes: dict[str, Any] | None = {**task.notes, **filled}

    def model(self) -> tuple[nn.Module, Loss]:
        """As the settings name it, with the text's vocabularies."""
        return build_text_model(
            self.settings.model,
            self._task.source_vocabulary,
            self._task.target_vocabulary,
            self.settings.dropout,
        )

    def optimizer(self, model: nn.Module, device: torch.device) -> torch.optim.Adam:
        """Adam; in FP32 on CUDA it can be captured, in 16 bits it can be anyway."""
        on_cuda = device.type == "cuda"
        return torch.optim.Adam(
            model.parameters(),
            lr=self.settings.learning_rate_at(0),
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
            fused=on_cuda,
            capturable=on_cuda and self.settings.plan.input_dtype is torch.float32,
        )

    def learning_rate(self, update: int) -> float:
        """Another one for every update."""
        return self.settings.learning_rate_at(update)

    def sample(self) -> Any:
        """The largest shape there is; of many microbatches two, since all others are alike."""
        return self.feed.sample(self.plan.tokens_at_once)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Mean of -log p of the validation set's words, without smoothing."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for batch in self.feed.held_out(self.settings.evaluation_batch):
            mine = slice(*cut_evenly(len(batch["source"]), ranks())[rank()])
            source, fed, asked = (
                batch[name][mine] for name in ("source", "target_in", "target_out")
            )
            scores = model(source, fed).float().flatten(0, 1)
            loss = F.cross_entropy(scores, asked.flatten(), ignore_index=PADDING, reduction="sum")
            sums += torch.stack([loss.double(), (asked != PADDING).sum()])
        if ranks() > 1:
            add_over_ranks([sums])
        loss, count = sums.tolist()
        mean = loss / max(count, 1)
        return {"loss": mean, "perplexity": math.exp(min(mean, 700))}

    def begin(self, folder: Path) -> None:
        """Codes and vocabularies: the folder can translate by itself."""
        write_vocabularies(self._task, folder)

    def check(self, folder: Path) -> None:
        """Codes and vocabularies are those the run began with: its numbers mean their words."""
        task = self._task
        if read_vocabularies(folder) != (
            task.codes, task.source_vocabulary, task.target_vocabulary,
        ):  # fmt: skip
            raise InputError(
                f"{folder} began with other words than {self.settings.data} has now",
                hint="resume with the text, --languages and --merges it began with, or start in "
                "another folder",
            )

    def finish(self, model: nn.Module, folder: Path, weights: list[Path]) -> dict[str, Any]:
        """Translate with the averaged weights, write it down, and score it."""
        averaged = 0
        if weights and self.weights_kept:
            model, averaged = averaged_model(self.model, self.settings.plan, weights, self._device)
        sentences, references = self._task.scored
        found = translate(
            model,
            sentences,
            self.settings.search,
            words=self._task.target_vocabulary.size,
            tokens=self.settings.evaluation_batch,
            device=self._device,
        )
        lines = [joined(self._task.target_vocabulary.decode(numbers)) for numbers in found]
        for name, text in ((TRANSLATIONS, lines), (REFERENCES, references)):
            written = "".join(f"{line}\n" for line in text)
            files.write(folder / name, written.encode(errors="backslashreplace"))
        quality = score(lines, references)
        return {
            "bleu": quality.bleu,
            "bleu_signature": quality.signature,
            "exact_percent": quality.exact_percent,
            "averaged_epochs": averaged,
            "translated": len(lines),
        }

    def shown(self, event: dict[str, Any]) -> str:
        """The validation loss and the best."""
        return f"validation loss {event['loss']:.4f} (best {event['best_loss']:.4f})"


def weighted_by_tokens(plan: Plan) -> Plan:
    """The same plan; microbatches weigh as many words as they have, so the loss is the mean."""
    return Plan(technique.weighted(target_tokens) for technique in plan.techniques)


def build_text_model(
    name: str, source: Vocabulary, target: Vocabulary, dropout: float
) -> tuple[nn.Module, Loss]:
    """A translation model with these vocabularies: `model(source, target so far)` gives scores."""
    sizes = {"source_vocabulary": source.size, "target_vocabulary": target.size}
    if ":" in name:
        model = build(name, **sizes)
        check_trainable(model)
        return model, _loss_over(name, target.size)
    known = builtin(name)
    if known.batch_unit != "tokens":
        raise InputError(f"{name} does not take sentences", hint="such as dc-transformer")
    return known.build(**sizes, dropout=dropout), known.loss


def _loss_over(name: str, words: int) -> Loss:
    """Label-smoothed; a model of somebody's own may have other outputs than scores."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        scores, asked = model(batch["source"], batch["target_in"]), batch["target_out"]
        shape = tuple(getattr(scores, "shape", ()))
        if shape[:2] != tuple(asked.shape) or len(shape) != 3 or shape[2] < words:
            made = f"a tensor of shape {shape}" if shape else f"a {type(scores).__name__}"
            raise InputError(
                f"{name} makes {made} of {asked.shape[0]} × {asked.shape[1]} words",
                hint=f"its outputs must be scores, {asked.shape[0]} × {asked.shape[1]} × {words} "
                "(a factory may take source_vocabulary and target_vocabulary)",
            )
        return label_smoothed_loss(scores, asked)

    return loss
