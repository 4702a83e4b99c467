"""Pages of the site that stand elsewhere in the repository, and links to files beside `docs/`.

READMEs (of techniques, benchmarks, results, …) and tutorials become pages; any other file that a
page links to is copied into the site, of a folder the list of its files, so that no link is dead.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()([^)\s]+)(\))")

PLACES = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks.md",
    "results/report.md": "results/report.md",
    "studies/README.md": "studies-files.md",
    "src/shoestring/devices/README.md": "devices.md",
    **{
        path.relative_to(ROOT).as_posix(): f"techniques/{path.parent.name}.md"
        for path in (ROOT / "src" / "shoestring" / "techniques").glob("*/README.md")
    },
    **{
        path.relative_to(ROOT).as_posix(): f"results/{path.parent.name}.md"
        for path in (ROOT / "results").glob("*/README.md")
    },
    **{
        path.relative_to(ROOT).as_posix(): f"tutorials/{path.stem}.md"
        for path in (ROOT / "docs" / "tutorials").glob("*.py")
    },
}
"""File of the repository → page of the site."""
ORIGIN = {page: path for path, page in PLACES.items()}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, then whatever pages link to."""
    for path, page in PLACES.items():
        old = files.get_file_from_path(path.removeprefix("docs/"))
        if old is not None:
            files.remove(old)
        text = (ROOT / path).read_text(encoding="utf-8")
        content = _tutorial(text) if path.endswith(".py") else text
        made = File.generated(config, page, content=content)
        if path not in _IN_NAVIGATION:
            made.inclusion = made.inclusion.NOT_IN_NAV
        files.append(made)
    for file in list(files.documentation_pages()):
        for _, target, _ in LINK.findall(file.content_string):
            path = _repository_path(file.src_uri, target)
            if path is not None and path not in PLACES and not path.startswith("docs/"):
                copy = _copy(path)
                if files.get_file_from_path(copy) is None:
                    files.append(_copied(config, ROOT / path, copy))
    return files


_IN_NAVIGATION = {
    path
    for path, page in PLACES.items()
    if page in ("changelog.md", "contributing.md", "benchmarks.md")
    or page.startswith(("techniques/", "tutorials/"))
}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site has them."""
    here = page.file.src_uri

    def moved(found: re.Match[str]) -> str:
        path = _repository_path(here, found[2])
        if path is None:
            return found[0]
        heading = "#" + found[2].partition("#")[2] if "#" in found[2] else ""
        to = PLACES.get(path) or path.removeprefix("docs/")
        if path not in PLACES and not path.startswith("docs/"):
            to = _copy(path)
        return (
            f"{found[1]}{posixpath.relpath(to, posixpath.dirname(here) or '.')}{heading}{found[3]}"
        )

    return LINK.sub(moved, markdown)


def _copy(path: str) -> str:
    return f"files/{path}.txt" if (ROOT / path).is_dir() else f"files/{path}"


def _copied(config: Any, path: Path, to: str) -> File:
    if not path.is_dir():
        made = File.generated(config, to, content=path.read_bytes())
        made.inclusion = made.inclusion.NOT_IN_NAV
        return made
    inside = sorted(p.relative_to(ROOT).as_posix() for p in path.rglob("*") if p.is_file())
    shown = [p for p in inside if "/runs/" not in p and "__pycache__" not in p]
    return File.generated(config, to, content="\n".join(shown) + "\n")


def _repository_path(page: str, target: str) -> str | None:
    """What a link of a page means, from the root; None for other sites, headings and the dead."""
    path = target.partition("#")[0]
    if not path or re.match(r"[a-z]+:", target):
        return None
    origin = ORIGIN.get(page, f"docs/{page}")
    found = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    if (ROOT / found).is_dir() and f"{found}/README.md" in PLACES:
        return f"{found}/README.md"
    return found if (ROOT / found).exists() and found != "docs/command-line.md" else None


def _tutorial(text: str) -> str:
    """Cells of a script as a page: words as they are, code in blocks."""
    parts = []
    for cell in re.split(r"^# %%", text, flags=re.MULTILINE)[1:]:
        head, _, body = cell.partition("\n")
        if "[markdown]" in head:
            parts.append(re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE))
        elif body.strip():
            parts.append(f"```python\n{body.strip()}\n```")
    return "\n\n".join(parts) + "\n"
