"""BLEU is what sacrebleu's own command line says."""

import json
import subprocess
import sys

import pytest

from shoestring.errors import InputError
from shoestring.lab.decoding.bleu import score

REFERENCES = [
    "a man in an orange hat starring at something .",
    "a boston terrier is running on lush green grass in front of a white fence .",
    "a girl in karate uniform breaking a stick with a front kick .",
    "",
    "we &apos;re here .",
]
TRANSLATIONS = [
    "a man in an orange hat staring at something .",
    "a boston terrier runs on lush green grass in front of a white fence .",
    "a girl in a karate uniform breaks a stick with a front kick .",
    "",
    "we &apos;re here .",
]


def test_the_same_as_the_command_line(tmp_path):
    for name, lines in (("ref", REFERENCES), ("hyp", TRANSLATIONS)):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    files = [str(tmp_path / "ref"), "-i", str(tmp_path / "hyp")]
    options = ["-tok", "none", "--force", "-w", "8"]
    command = [sys.executable, "-m", "sacrebleu", *files, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    printed = json.loads(done.stdout)
    found = score(TRANSLATIONS, REFERENCES)
    assert round(found.bleu, 8) == printed["score"]
    assert found.signature == printed["signature"] and "tok:none" in found.signature
    assert found.exact_percent == pytest.approx(40)


def test_as_many_translations_as_references():
    with pytest.raises(InputError, match="4 translations for 5"):
        score(TRANSLATIONS[:4], REFERENCES)
