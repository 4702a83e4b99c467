"""The architectures on which predicted memory is compared with measured memory."""

from .base import Architecture
from .generative import GENERATIVE
from .huggingface import HUGGINGFACE
from .sequence import SEQUENCE
from .special import SPECIAL
from .vision import VISION

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for family in (VISION, GENERATIVE, SEQUENCE, HUGGINGFACE, SPECIAL)
    for architecture in family
}

# Building these needs the optional dependency `transformers`.
HUGGINGFACE_NAMES = frozenset(architecture.name for architecture in HUGGINGFACE)

__all__ = ["ARCHITECTURES", "HUGGINGFACE_NAMES", "Architecture"]
