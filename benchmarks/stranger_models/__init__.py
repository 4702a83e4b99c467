"""Models that the project is not developed with, small, with random weights."""

from __future__ import annotations

from .base import Stranger
from .families import FAMILIES
from .habits import HABITS
from .handwritten import HANDWRITTEN
from .images import IMAGES
from .kinds import KINDS
from .language import LANGUAGE
from .layouts import LAYOUTS
from .losses import LOSSES
from .mechanics import MECHANICS
from .perception import PERCEPTION
from .routes import ROUTES
from .scans import SCANS
from .stateful import STATEFUL
from .steps import STEPS
from .untraced import UNTRACED
from .unusual import UNUSUAL

__all__ = ["KINDS", "STRANGERS", "Stranger"]

STRANGERS: dict[str, Stranger] = {
    s.name: s
    for s in (
        *LANGUAGE,
        *PERCEPTION,
        *HANDWRITTEN,
        *UNTRACED,
        *LOSSES,
        *STEPS,
        *UNUSUAL,
        *STATEFUL,
        *FAMILIES,
        *IMAGES,
        *SCANS,
        *MECHANICS,
        *ROUTES,
        *HABITS,
        *LAYOUTS,
    )
}
