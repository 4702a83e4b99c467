"""`shoestring translate`: the folder of a run → its model with averaged weights → translations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..decoding.beam import BeamSearch, translate
from ...errors import InputError, ShoestringError, first_line
from ...techniques.plan import Plan
from ..records.run import read
from ..tasks.bpe import Vocabulary
from ..tasks.corpus import joined
from ..tasks.prepared import read_vocabularies
from ..tasks.text import TextEncoder
from . import snapshot
from .average import applied, averaged_model
from ...trace.tracing import Loss
from .text_job import build_text_model


@dataclass(frozen=True)
class Translator:
    """A trained model with all it takes to translate words."""

    model: nn.Module
    encode: TextEncoder
    vocabulary: Vocabulary
    search: BeamSearch
    device: torch.device
    averaged: int
    """Ends of epochs whose weights it has the mean of; 0: it has the newest snapshot's."""

    def __call__(self, lines: Sequence[str]) -> list[str]:
        """One translation for each line; an empty one for an empty one."""
        words = [number for number, line in enumerate(lines) if line.split()]
        numbers = [self.encode(lines[number]) for number in words]
        found = translate(
            self.model, numbers, self.search, words=self.vocabulary.size, device=self.device
        )
        made = [""] * len(lines)
        for number, translation in zip(words, found, strict=True):
            made[number] = joined(self.vocabulary.decode(translation))
        return made


def load_translator(
    run: str | Path,
    *,
    device: torch.device,
    beam: int | None = None,
    length_penalty: float | None = None,
    average: bool = True,
) -> Translator:
    """From a run on text, finished or not; sparse and 16-bit weights stay what they are."""
    folder = Path(run)
    start = next((event for event in read(folder, whole=False) if event["event"] == "start"), None)
    if start is None or "beam" not in (start.get("settings") or {}):
        raise InputError(f"{folder} is not a run on text", hint="shoestring train dc-transformer …")
    settings = start["settings"]
    try:
        return _loaded(folder, settings, device, beam, length_penalty, average)
    except ShoestringError:
        raise
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise InputError(
            f"{folder} does not hold a model that can translate: {first_line(error)}",
            hint="files of it were changed, or are of different runs",
        ) from error


def _loaded(
    folder: Path,
    settings: dict[str, Any],
    device: torch.device,
    beam: int | None,
    length_penalty: float | None,
    average: bool,
) -> Translator:
    codes, source, target = read_vocabularies(folder)
    plan = Plan.from_dict(settings["plan"])

    def build() -> tuple[nn.Module, Loss]:
        return build_text_model(settings["model"], source, target, settings["dropout"])

    kept = snapshot.found(folder, "weights") if average else []
    if kept:
        model, averaged = averaged_model(build, plan, kept, device)
    else:
        state, damaged = snapshot.load_latest(folder, held=False)
        for what in damaged:
            print(f"warning: {what}; taking the one before", file=sys.stderr)
        if state is None:
            raise InputError(f"{folder} has no snapshot yet")
        model, averaged = applied(build, plan.techniques, device), 0
        model.load_state_dict(state["step"]["model"])
    search = BeamSearch(
        settings["beam"] if beam is None else beam,
        settings["length_penalty"] if length_penalty is None else length_penalty,
    )
    return Translator(
        model.eval(), TextEncoder(codes, source), target, search, device, averaged
    )
