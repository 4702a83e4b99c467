"""Pages of the site that stand elsewhere in the repository, and links to files beside `docs/`.

READMEs (of techniques, benchmarks, results, …) become pages. So do tutorials: they run here, and
the page shows their output. Any other file that a page links to is copied into the site, and of a
folder the list of its files, so that no link is dead.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import subprocess
import sys
import tempfile
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
        content, pictures = (ROOT / path).read_text(encoding="utf-8"), {}
        if path.endswith(".py"):
            content, pictures = _tutorial(ROOT / path)
        for name, picture in pictures.items():
            files.append(File.generated(config, f"tutorials/{name}", content=picture))
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


def _tutorial(path: Path) -> tuple[str, dict[str, str]]:
    """A script as a page: words as they are, code in blocks with its output; its pictures."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(Path(__file__).with_name("cells.py")), str(path)],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    parts, pictures = [], {}
    for cell in json.loads(done.stdout):
        if "words" in cell:
            parts.append(cell["words"])
            continue
        parts.append(f"```python\n{cell['code']}\n```")
        if cell["printed"]:
            parts.append(f"```{{.text .output}}\n{cell['printed'].rstrip()}\n```")
        for name, picture in cell["pictures"].items():
            pictures[f"{path.stem}-{name}"] = picture
            parts.append(f"![{name}]({path.stem}-{name})")
    return "\n\n".join(parts) + "\n", pictures


def on_page_content(html: str, **_: Any) -> str:
    """Keep a command-line flag in one line: browsers break after its hyphens."""
    return re.sub(
        r"(<code>)([^<]*--[^<]*)(</code>)",
        lambda m: (
            m[1] + re.sub(r"(?<![\w-])--[\w-]+", r'<span class="flag">\g<0></span>', m[2]) + m[3]
        ),
        html,
    )
