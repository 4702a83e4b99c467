"""Models of the size people train on one card; the project is not developed with them."""

from .base import Subject
from .language import LANGUAGE
from .perception import PERCEPTION

SUBJECTS: dict[str, Subject] = {s.name: s for s in (*LANGUAGE, *PERCEPTION)}

__all__ = ["SUBJECTS", "Subject"]
