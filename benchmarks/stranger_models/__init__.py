"""Models that the project is not developed with, small, with random weights."""

from __future__ import annotations

from .base import Stranger
from .handwritten import HANDWRITTEN
from .language import LANGUAGE
from .perception import PERCEPTION

STRANGERS: dict[str, Stranger] = {s.name: s for s in (*LANGUAGE, *PERCEPTION, *HANDWRITTEN)}
