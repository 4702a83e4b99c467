"""The built-in models by name, each with a batch, a loss and the report's optimizer.

`wrn-D-W` is a wide residual network of any legal depth and width (`wrn-D-W-pool`: its shortcuts
average; the report does not say what its own do), `dc-transformer` the report's
translation model, and `dc-transformer-width-W`, `dc-transformer-decoder-L` its smaller baselines;
sizes go together (`dc-transformer-width-128-encoder-4-decoder-4`), and `dc-transformer-tiny` has
width 64 and two layers on each side.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import InputError
from .dynamic_conv import (
    SOURCE_VOCABULARY,
    TARGET_VOCABULARY,
    TransformerConfig,
    dc_transformer,
    label_smoothed_loss,
)
from .wide_resnet import Shortcut, blocks_per_group, group_channels, wide_resnet

__all__ = ["BuiltinModel", "builtin", "builtin_names"]

SENTENCE_TOKENS = 25
LONGEST_SENTENCE_TOKENS = 250
# Begin, padding, end and unknown come first in both vocabularies.
SPECIAL_TOKENS = 4

TINY = {"width": 64, "encoder_layers": 2, "decoder_layers": 2}
"""Enough for number words."""

# The architectures of the report's tables of learning rates, and the smallest of the family.
REPORTED = (
    *(f"wrn-{depth}-2" for depth in (28, 22, 16, 10)),
    *(f"wrn-28-{width}" for width in ("1.5", "1", "0.75", "0.5")),
    "wrn-10-1",
    "dc-transformer",
    *(f"dc-transformer-decoder-{layers}" for layers in (3, 1)),
    *(f"dc-transformer-width-{width}" for width in (384, 256, 192, 128)),
)


@dataclass(frozen=True)
class BuiltinModel:
    """A model that can be named, with all it takes to make one training step."""

    name: str
    build: Callable[..., nn.Module]
    """Keywords are the model's own: a translation model takes vocabularies and dropout."""
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    default_batch: int
    batch_unit: str
    default_optimizer: str


def builtin(name: str) -> BuiltinModel:
    """The built-in model of that name; `InputError` if there is none."""
    if match := re.fullmatch(r"wrn-(\d{1,4})-(\d{1,20}(?:\.\d{1,20})?)(-pool)?", name):
        depth, width = int(match[1]), float(match[2])
        blocks_per_group(depth)
        group_channels(width)
        shortcut: Shortcut = "pool" if match[3] else "strided"
        build = partial(wide_resnet, depth, width, shortcut=shortcut)
        return BuiltinModel(name, build, image_batch, image_loss, 100, "images", "sgd")
    if match := re.fullmatch(r"dc-transformer(-tiny)?((?:-(?:width|encoder|decoder)-\d+)*)", name):
        sizes = {**(TINY if match[1] else {}), **_sizes(name, match[2])}
        TransformerConfig(**sizes)
        build_transformer = partial(dc_transformer, **sizes)
        return BuiltinModel(
            name, build_transformer, sentence_batch, sentence_loss, 4000, "tokens", "adam"
        )
    close = difflib.get_close_matches(name, builtin_names(), n=3)
    known = f"known: {', '.join(REPORTED[:4])}, …"
    hint = f"did you mean {' or '.join(close)}?" if close else known
    raise InputError(
        f"no built-in model is called {name!r}",
        hint=f"{hint} (wrn-D-W and dc-transformer-width-W take other numbers); "
        "your own is package.module:factory with --input 8x3x224x224, a configuration hf:FOLDER",
    )


MOST_LAYERS = 10_000


def _sizes(name: str, text: str) -> dict[str, int]:
    """-width-256-decoder-3 → the arguments they stand for."""
    fields = {"width": "width", "encoder": "encoder_layers", "decoder": "decoder_layers"}
    found = re.findall(r"-([a-z]+)-(\d+)", text)
    if len({word for word, _ in found}) < len(found):
        raise InputError(f"{name} says a size twice", hint="such as dc-transformer-width-256")
    sizes = {fields[word]: int(number[:30]) for word, number in found}
    if max((size for field, size in sizes.items() if field != "width"), default=0) > MOST_LAYERS:
        raise InputError(f"{name} has more than {MOST_LAYERS:,} layers")
    return sizes


def builtin_names() -> list[str]:
    """The names of the report's models and baselines; other legal numbers work as well."""
    return list(REPORTED)


def image_batch(images: int) -> tuple[Tensor, Tensor]:
    """Random CIFAR-10 images (n, 3, 32, 32) and labels (n,)."""
    _check_count(images, "images")
    return torch.randn(images, 3, 32, 32), torch.randint(10, (images,))


def image_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of the class scores."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def sentence_batch(tokens: int) -> dict[str, Tensor]:
    """Random sentence pairs of that many tokens on each side, without padding.

    The report counts 4,000 tokens a minibatch, and 250 a microbatch, since no sentence may be
    longer than one. It does not say how long its sentences were: we take 25 tokens, about the
    mean of IWSLT'14, where the count is over 250 and a multiple of 25, and else one sentence.
    """
    _check_count(tokens, "tokens")
    split = tokens > LONGEST_SENTENCE_TOKENS and tokens % SENTENCE_TOKENS == 0
    shape = (tokens // SENTENCE_TOKENS, SENTENCE_TOKENS) if split else (1, tokens)
    return {
        "source": torch.randint(SPECIAL_TOKENS, SOURCE_VOCABULARY, shape),
        "target_in": torch.randint(SPECIAL_TOKENS, TARGET_VOCABULARY, shape),
        "target_out": torch.randint(SPECIAL_TOKENS, TARGET_VOCABULARY, shape),
    }


def sentence_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Label-smoothed cross-entropy of the next token."""
    return label_smoothed_loss(model(batch["source"], batch["target_in"]), batch["target_out"])


def _check_count(count: int, unit: str) -> None:
    if count < 1:
        raise InputError(f"a batch cannot have {count} {unit}", hint=f"ask for 1 or more {unit}")
