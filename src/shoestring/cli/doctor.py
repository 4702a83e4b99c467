"""`shoestring doctor`: what is installed, the device predictions use, what is missing for what."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

import typer

from ..units import plural
from ..version import __version__
from .options import AsJson, json_line

DOCTOR_EXAMPLES = """Examples:

`shoestring doctor`

`shoestring doctor --json`
"""

_EXTRAS = {
    "transformers": ("hf", "hf:NAME models, Hugging Face's Trainer"),
    "accelerate": ("hf", "Hugging Face's Trainer, accelerate loops"),
    "peft": ("hf", "--lora"),
    "timm": ("timm", "timm:NAME models"),
    "lightning": ("lightning", "Lightning's Trainer"),
    "bitsandbytes": ("bitsandbytes", "--optimizer adamw8bit"),
    "sklearn": ("lab", "--data digits, make demo"),
    "matplotlib": ("lab", "figures of studies, plan --front"),
    "sacrebleu": ("lab", "scores of translations"),
    "ray": ("ray", "study --ray"),
    "tensorboard": ("tensorboard", "train --tensorboard"),
}
"""Import name → the extra that brings it, and what needs it."""
_NAMES = {"sklearn": "scikit-learn"}


@dataclass(frozen=True)
class Finding:
    """One line of the answer."""

    part: str
    found: str
    ok: bool
    note: str = ""
    """Its purpose, or how to install it."""


def findings() -> list[Finding]:
    """Versions, device, kernels, then one line for each optional package."""
    import torch

    from ..devices import gpu
    from ..kernels import has_triton

    made = [
        Finding("shoestring", __version__, True),
        Finding("python", platform.python_version(), True),
        Finding("torch", torch.__version__, True),
    ]
    known = gpu()
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        size = torch.cuda.get_device_properties(0).total_memory / 1e9
        same = known.name == name
        made.append(Finding("device", f"{name}, {size:.0f} GB", True, f"CUDA {torch.version.cuda}"))
        note = "measured on this GPU" if same else f"rates and workspaces of the {known.name}"
        made.append(Finding("predictions", "for cuda", same, note))
        here = has_triton()
        made.append(
            Finding("kernels", "Triton" if here else "missing", here,
                    "" if here else "PyTorch runs instead: slower, more memory; pip install triton")
        )  # fmt: skip
    else:
        made.append(
            Finding(
                "device",
                f"cpu, {plural(torch.get_num_threads(), 'thread')}",
                True,
                "no CUDA device",
            )
        )
        made.append(
            Finding("predictions", "for cpu and cuda", True, f"cuda as on one {known.name}")
        )
        made.append(Finding("kernels", "PyTorch's", True, "ours run on CUDA only"))
    for name, (extra, purpose) in _EXTRAS.items():
        made.append(_package(name, extra, purpose))
    return made


def _package(name: str, extra: str, purpose: str) -> Finding:
    package = _NAMES.get(name, name)
    if importlib.util.find_spec(name) is None:
        return Finding(package, "missing", False, f"{purpose}: pip install 'shoestring[{extra}]'")
    try:
        return Finding(package, version(package), True, purpose)
    except PackageNotFoundError:  # importable, and not installed by pip
        return Finding(package, "found", True, purpose)


def doctor(as_json: AsJson = False) -> None:
    """Show what is installed, which device predictions use, and what is missing for what."""
    found = findings()
    if as_json:
        typer.echo(json_line([asdict(one) for one in found]))
        return
    parts = max(len(one.part) for one in found)
    texts = max(len(one.found) for one in found)
    for one in found:
        mark = typer.style("✓", fg="green") if one.ok else typer.style("–", fg="yellow")
        typer.echo(f"{mark} {one.part:<{parts}}  {one.found:<{texts}}  {one.note}".rstrip())
    missing = sum(not one.ok for one in found)
    needed = "; profile, plan, apply and verify need none of them"
    told = plural(missing, "optional part is", "optional parts are") + " missing" + needed
    typer.echo(told if missing else "every optional part is there")
