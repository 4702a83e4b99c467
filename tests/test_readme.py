"""What the README and docs show is what comes out: code, commands and the numbers in tables."""

import contextlib
import io
import json
import re
import shlex
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoestring.cli.main import main

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
REPORT = ROOT / "docs" / "report.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "README.md"]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, language: str) -> list[Block]:
    """All blocks of a language."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text.count("\n", 0, m.start()) + 1, language, m[1]) for m in found]


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """Each `$ command` of a console block with the lines shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(" ".join(line.split()))
    return found


def table_rows(page: Path) -> list[tuple[str, str]]:
    """(what is counted here, the command that counts it) of every table row with a command."""
    found: list[tuple[str, str]] = []
    column = -1
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "counted here" in cells:
            column = cells.index("counted here")
        elif not line.startswith("|"):
            column = -1
        elif column >= 0 and (match := re.fullmatch(r"`(shoestring profile [^`]*)`", cells[-1])):
            found.append((cells[column], match[1]))
    return found


def slow_outside_readme(page: Path, *values: Any) -> Any:
    """A case of a parametrized test; slow for docs, the translation model and Llamas."""
    long = ("dc-transformer", "hf:")
    quick = page in (README, REPORT) and not any(n in str(v) for n in long for v in values)
    marks = () if quick else (pytest.mark.slow,)
    return pytest.param(*values, marks=marks, id=" ".join(str(v) for v in values)[:100])


def run(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a `shoestring` command prints."""
    program, *arguments = shlex.split(command)
    assert program == "shoestring"
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main() replaces it
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main()
    captured = capsys.readouterr()
    assert not left.value.code, captured.err
    return captured.out


@pytest.mark.parametrize(
    "page",
    [slow_outside_readme(p, p.relative_to(ROOT)) for p in PAGES if blocks(p, "python")],
)
def test_python_blocks_run(page: Path) -> None:
    """The blocks of a page run one after the other and print what their `#>` lines say."""
    scope: dict[str, Any] = {"__name__": "readme"}
    for block in blocks(ROOT / page, "python"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block.text, str(block), "exec"), scope)
        shown = [line[3:] for line in block.text.splitlines() if line.startswith("#> ")]
        assert printed.getvalue().splitlines() == shown, str(block)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        slow_outside_readme(page, command, shown)
        for page in PAGES
        for block in blocks(page, "console")
        for command, shown in commands(block)
    ],
)
def test_console_blocks(
    command: str,
    shown: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every line shown is among those printed, in the same order."""
    monkeypatch.chdir(ROOT)  # hf:examples/…
    printed = iter(
        [" ".join(line.split()) for line in run(command, monkeypatch, capsys).splitlines()]
    )
    for line in shown:
        assert line in printed, f"{line!r} is not printed by {command}, or not there"


@pytest.mark.parametrize(
    ("counted", "command"),
    [
        slow_outside_readme(page, *row)
        for row, page in {r: p for p in reversed(PAGES) for r in table_rows(p)}.items()
    ],
)
def test_numbers_in_tables(
    counted: str,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The peak, to as many digits as the table has."""
    number = counted.removesuffix(" MB")
    digits = len(number.partition(".")[2])
    peak = json.loads(run(f"{command} --json", monkeypatch, capsys))["peak_bytes"]
    assert f"{peak / 1e6:,.{digits}f}" == number


def rows_under(text: str, heading: str) -> list[dict[str, list[str]]]:
    """The rows of the first table below a heading: head → cells, a head may come twice."""
    lines = text.partition(f"## {heading}\n")[2].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("| "))
    table = [[c.strip() for c in line.strip("| ").split("|")] for line in lines[first:]]
    heads, rows = table[0], table[2 : next(i for i, row in enumerate(table) if row == [""])]
    return [
        {h: [c for n, c in zip(heads, row, strict=True) if n == h] for h in heads} for row in rows
    ]


def test_the_accuracies_are_those_of_the_records() -> None:
    """Every row is one of the generated table, which is made from the records."""
    shown = rows_under(REPORT.read_text(encoding="utf-8"), "What they cost in accuracy")
    made = (ROOT / "results/cifar10/report/tables.md").read_text(encoding="utf-8")
    made = made.replace("\\*", "*")  # as Markdown shows it
    known = rows_under(made, "WRN-28-2 on CIFAR-10, 200 epochs")
    assert shown
    for row in shown:
        assert any(all(set(v) <= set(full[h]) for h, v in row.items()) for full in known), row


def test_every_page_is_read() -> None:
    """The patterns above find what they are meant to find."""
    assert len(blocks(README, "python")) >= 1
    assert sum(len(commands(block)) for block in blocks(README, "console")) >= 2
    assert len(table_rows(REPORT)) >= 11


@pytest.mark.slow
def test_the_picture_is_what_its_command_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plain step to the point; a planner that gets better may draw another planned one."""
    text = " ".join(README.read_text(encoding="utf-8").split())
    found = re.search(r"`(shoestring plan [^`]*) --svg (\S+)`", text)
    assert found is not None
    monkeypatch.chdir(ROOT)
    run(f"{found[1]} --svg {tmp_path / 'step.svg'}", monkeypatch, capsys)
    pictures = [(tmp_path / "step.svg").read_text(), (ROOT / found[2]).read_text()]
    plain = [re.findall(r'd="([^"]*)" style="fill:none;stroke:var\(--plain\)', p) for p in pictures]
    assert plain[0] == plain[1] and len(plain[0]) == 1
    for picture in pictures:
        said = re.findall(r">(plain: peak|planned: peak|budget) ([\d.]+) GB<", picture)
        sizes = {name: float(size) for name, size in said}
        assert f"peaks at {sizes['plain: peak']} GB" in text
        assert sizes["planned: peak"] <= sizes["budget"] == 12.0


def test_the_readme_is_short() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 180
    example = blocks(README, "python")[0].text.partition("plain, planned =")[0]
    code = [line for line in example.splitlines() if line.strip() and "import" not in line]
    assert len(code) <= 11, "the first example has ten lines or so"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Links between the pages, headings included."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"https?://", target):
            continue
        path, _, heading = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} → {target}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert heading in slugs, f"{page.name} → {target}"


@pytest.mark.parametrize(
    "page", [*PAGES, *(ROOT / "src").rglob("README.md")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_files_that_pages_name_exist(page):
    named = re.findall(
        r"`([\w./-]+/[\w.-]+\.(?:py|toml|csv|json|txt|md))`", page.read_text(encoding="utf-8")
    )
    places = (ROOT, ROOT / "src", ROOT / "src/shoestring", ROOT / "tests", page.parent)
    missing = [n for n in named if not any((p / n).exists() for p in places) and "NAME" not in n]
    assert not missing
