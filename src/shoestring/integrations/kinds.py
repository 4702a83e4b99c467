"""Which class of a family a configuration trains, and the batch that this class is given."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InputError

_WORDS, _PADDED, _TEXTS, _IMAGES = "words", "padded words", "texts", "images"
_TASKS = (
    ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", _WORDS),
    ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", _IMAGES),
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", _WORDS),
    ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", _PADDED),
)
"""Which of a family's models is trained where its configuration names none."""
_NAMED = (
    ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", _TEXTS),
    ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", _PADDED),
)
"""And where it names one of these."""
_CONTRASTIVE = "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES"
"""Families that are pretrained on pairs of an image and a text, compared with each other."""
_HINT = "give package.module:factory with --input"


@dataclass(frozen=True)
class TrainedClass:
    """The class that is trained, and what it sees."""

    model: Any
    sees: str
    named: bool
    """Whether the configuration names it."""

    @classmethod
    def of(cls, config: Any, name: str) -> TrainedClass:
        """Of a configuration; InputError where it trains on what a configuration does not tell."""
        import transformers
        from transformers.models.auto import modeling_auto

        def known(tasks: Iterable[tuple[str, str]]) -> list[tuple[dict[str, Any], str]]:
            return [(dict(getattr(modeling_auto, names)), sees) for names, sees in tasks]

        given = getattr(config, "architectures", None)
        for own in given if isinstance(given, list) else ():
            for classes, sees in known(_TASKS + _NAMED):
                if own in _flat(classes.values()) and hasattr(transformers, own):
                    return cls(getattr(transformers, own), sees, True)._checked(name)
            # A checkpoint of the pretraining is trained on as one of the others.
            other = isinstance(own, str) and "For" in own and "ForPreTraining" not in own
            if other and hasattr(transformers, own):
                raise InputError(
                    f"{name}: what {own} trains on is not in its configuration", hint=_HINT
                )
        if config.model_type in (pairs := dict(getattr(modeling_auto, _CONTRASTIVE))):
            raise InputError(
                f"{name}: {pairs[config.model_type]} trains on images and texts that it compares, "
                "which cannot be sized from its configuration",
                hint=f"{_HINT}; its image classifier is sized if 'architectures' names that class",
            )
        for classes, sees in known(sorted(_TASKS, key=lambda task: not _first(config, task[1]))):
            if config.model_type in classes:
                found = getattr(transformers, _flat([classes[config.model_type]])[0])
                return cls(found, sees, False)._checked(name)
        raise InputError(
            f"{name}: {type(config).__name__} has no language or image model to train", hint=_HINT
        )

    def _checked(self, name: str) -> TrainedClass:
        """InputError for a model of text that sees images, too: words alone would be too little."""
        parts = getattr(self.model.config_class, "sub_configs", {})
        if self.sees == _WORDS and "vision_config" in parts:
            raise InputError(
                f"{name}: {self.model.__name__} trains on images and text, and how many images go "
                "with a text is not in its configuration",
                hint=f"on text alone: a config.json of its text_config; else {_HINT}",
            )
        return self

    @property
    def images(self) -> bool:
        """Whether it sees images, which have no length."""
        return self.sees == _IMAGES

    def prepare(self, model: Any) -> None:
        """As a model is that gets these batches."""
        config = model.config
        config.use_cache = False
        if self.sees == _TEXTS and getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0  # to find the last word
        if self.sees == _WORDS and not getattr(config, "is_encoder_decoder", False):
            config.pad_token_id = None  # without a mask some look for it, in order to warn

    def batch(self, config: Any, count: int, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
        """Examples, as its Trainer gets them from its collator."""
        if self.images:
            config = getattr(config, "vision_config", config)
            size = getattr(config, "image_size", 224)
            height, width = size if isinstance(size, (list, tuple)) else (size, size)
            shape = count, getattr(config, "num_channels", 3), height, width
            labels = torch.zeros(count, dtype=torch.int64)
            return {"pixel_values": torch.zeros(shape, dtype=dtype), "labels": labels}
        # Real ones: a loss may ask how many labels count.
        words = torch.zeros(count, tokens, dtype=torch.int64, device="cpu")
        given = {"input_ids": words, "labels": words.clone()}
        if self.sees == _TEXTS:
            given["labels"] = _labels(config, count, dtype)
        if self.sees != _WORDS:  # of different lengths; some models read them for a missing mask
            given["attention_mask"] = torch.ones_like(words)
        return given


def _first(config: Any, sees: str) -> bool:
    """Encoders have a class that generates, too, which nobody trains."""
    return sees == _PADDED and not getattr(config, "is_decoder", False)


def _labels(config: Any, count: int, dtype: torch.dtype) -> torch.Tensor:
    """One for each text, of the type its loss takes."""
    classes = getattr(config, "num_labels", 2)
    if getattr(config, "problem_type", None) == "multi_label_classification":
        return torch.zeros(count, classes, dtype=dtype, device="cpu")
    return torch.zeros(count, dtype=dtype if classes == 1 else torch.int64, device="cpu")


def _flat(names: Iterable[Any]) -> list[str]:
    """Some families have several classes for one task."""
    return [n for name in names for n in ((name,) if isinstance(name, str) else name)]
