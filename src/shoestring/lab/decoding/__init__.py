"""Translations: a beam of hypotheses, one position at a time, and how good they are."""
