"""The page of the command line, generated from the verbs themselves."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.structure.files import File, Files

PAGE = "command-line.md"


def on_files(files: Files, config: Any) -> Files:
    """Add the page."""
    files.append(File.generated(config, PAGE, content=command_line()))
    return files


def command_line() -> str:
    """Every verb by its task: what it does, arguments, options, examples."""
    import typer

    from shoestring.cli.main import app

    group: Any = typer.main.get_command(app)
    parts = [
        "# Command line",
        "`shoestring VERB --help` shows the same in a terminal, `shoestring --install-completion` "
        "sets up completion. Data goes to stdout, progress and hints to stderr. Exit status: 0 "
        "done, 1 the answer is no, 2 the call was wrong.",
    ]
    by_task: dict[str, list[Any]] = {}
    for verb in group.commands.values():
        by_task.setdefault(verb.rich_help_panel, []).append(verb)
    for task, verbs in by_task.items():
        parts.append(f"## {task}")
        for verb in verbs:
            parts += _verb(verb)
    return "\n\n".join(parts) + "\n"


def _verb(verb: Any) -> list[str]:
    arguments = [p for p in verb.params if p.param_type_name == "argument"]
    options = [p for p in verb.params if p.param_type_name == "option" and not p.hidden]
    usage = " ".join(["shoestring", verb.name, *(p.name.upper() for p in arguments), "[OPTIONS]"])
    parts = [f"### shoestring {verb.name}", verb.help or "", f"```\n{usage}\n```"]
    rows = [(p.name.upper(), p.help or "") for p in arguments]
    for option in options:
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        shown = "" if option.default in (None, False, ()) or callable(option.default) else (
            f"`{option.default}`")  # fmt: skip
        told = " Required." if option.required else f" Default: {shown}." if shown else ""
        rows.append((names, (option.help or "") + told))
    table = ["| option | means |", "|---|---|"]
    table += [f"| {name} | {_cell(text)} |" for name, text in rows]
    parts.append("\n".join(table))
    examples = re.findall(r"`([^`]+)`", str(verb.epilog or ""))
    if examples:
        parts.append("```\n" + "\n".join(examples) + "\n```")
    return parts


def _cell(text: str) -> str:
    """One line of Markdown that means the text; code in backticks stays as it is."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    parts[::2] = [re.sub(r"([*_<\[\]])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)
