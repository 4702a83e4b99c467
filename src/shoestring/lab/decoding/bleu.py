"""BLEU by `sacrebleu` (Papineni et al., 2002; Post, 2018), on text that is tokenized already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import InputError, needs_extra


@dataclass(frozen=True)
class Score:
    """How near translations are to references."""

    bleu: float
    signature: str
    """Of sacrebleu: all that decides the number."""
    exact_percent: float
    """Sentences that are the reference, letter for letter."""


def score(translations: Sequence[str], references: Sequence[str]) -> Score:
    """One reference each; both tokenized as the training text is, so nothing is tokenized here."""
    with needs_extra("lab", "sacrebleu", "BLEU"):
        from sacrebleu.metrics import BLEU
    if len(translations) != len(references):
        raise InputError(f"{len(translations):,} translations for {len(references):,} references")
    metric = BLEU(tokenize="none", force=True)
    found = metric.corpus_score(list(translations), [list(references)])
    same = sum(one == other for one, other in zip(translations, references, strict=True))
    exact = 100 * same / max(len(references), 1)
    return Score(found.score, str(metric.get_signature()), exact)
