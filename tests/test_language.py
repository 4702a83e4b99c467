"""Pages and help are in plain American English (as PyTorch's own), with the glossary's words."""

import re
from pathlib import Path

import pytest
import typer

from shoestring.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += [p for part in ("docs", "src", "benchmarks") for p in (ROOT / part).rglob("*.md")]
CODE = [p for part in ("src", "tests") for p in (ROOT / part).rglob("*.py")]
BRITISH = re.compile(
    r"\w*(?:normalis|optimis|synchronis|tokenis|initialis|neighbour|colour|behaviour|labelled)\w*"
)
OURS = re.compile(
    r"made again|makes? .{0,20} again\b|\bruns? again\b|second pass|stand-in|\btwins?\b"
    r"|(?<![Tt]here )\b(?:is|are) no (?!more|less|longer|earlier)|\bonce more\b"
    r"|(?:^|[.:;] |^[-*] )What [^?\n]*$",
    re.M,
)
"""Recompute, placeholder or copy, "is not a"; a sentence does not start with What."""
IN_CODE = re.compile(
    r"\b(?:made|makes?|runs?) again\b|stand-in|[Tt]wins?\b|\bonce more\b"
    r'|(?<![Tt]here )\b(?:is|are) no (?!more|less|longer)|^\s*(?:"""|# )?What [^?\n]*$|help="What ',
    re.M,
)
"""Words of docstrings, comments and messages that a reader has to read twice."""


def texts() -> dict[str, str]:
    group = typer.main.get_command(app)
    helps = [str(verb.help) for verb in group.commands.values()]
    helps += [str(p.help) for verb in group.commands.values() for p in verb.params]
    pages = {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in PAGES}
    prose = {
        name: re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.S) for name, text in pages.items()
    }
    return {**prose, "shoestring --help": "\n".join(helps)}


@pytest.mark.parametrize("name", texts())
def test_spelling(name):
    assert not BRITISH.findall(texts()[name])


def test_spelling_of_code():
    found = {p.name: BRITISH.findall(p.read_text(encoding="utf-8")) for p in CODE}
    found.pop(Path(__file__).name)
    assert not {name: words for name, words in found.items() if words}


@pytest.mark.parametrize("name", texts())
def test_words_of_the_field(name):
    prose = "\n".join(
        line for line in texts()[name].splitlines() if not line.startswith(("#", "|"))
    )
    assert not [match[0] for match in OURS.finditer(prose)]


def test_words_of_the_code():
    found = [
        f"{path.relative_to(ROOT)}: {match[0].strip()}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for match in IN_CODE.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_the_glossary_is_sorted_and_has_the_words_of_plans():
    rows = re.findall(r"^\| ([^|]+) \| [^|]+\|$", (ROOT / "docs/glossary.md").read_text(), re.M)
    words = [row for row in rows if row not in ("word",) and not row.startswith("-")]
    assert words == sorted(words, key=str.lower)
    for word in ("budget", "cheap", "claim", "fake tensor", "keep", "lean", "microbatch", "peak",
                 "recompute", "reserved", "region", "trace"):  # fmt: skip
        assert word in words
