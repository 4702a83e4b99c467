"""Facts about devices, as data: one TOML file for each, with its measured tables beside it.

A prediction for CUDA uses the file of the GPU that is there, or of `REFERENCE` where there is none
or it has no file. To add a GPU, copy the file of another, measure its numbers, and name it as
`torch.cuda.get_device_name` does.
"""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import torch

REFERENCE = "NVIDIA H200"
Device = Literal["cpu", "cuda"]
"""For which predictions are made."""


@dataclass(frozen=True)
class DeviceRates:
    """How fast a device is; nominal numbers that order plans, none is reported."""

    source: str
    flops_per_second: Mapping[str, float]
    """Of matrix products, by precision."""
    convolved_per_second: Mapping[str, float]
    bytes_per_second: float
    seconds_per_kernel: float
    """Overhead of each kernel on the device."""
    seconds_per_launch: float
    """Time the host needs to launch one."""
    link_bytes_per_second: float
    """Between the device and the host, each way while both are in use; of the CPU, to a disk."""
    efficiency: float
    """Rate of a network's matrix products, as a fraction of one large product's."""


@dataclass(frozen=True)
class RecurrentFit:
    """cuDNN's workspace of recurrent layers of one mode, fitted to the measured table."""

    widest_small: int
    """Up to this width cuDNN keeps the weights on chip and copies more."""
    small: tuple[float, ...]
    large: tuple[float, ...]
    """Bytes for each layer and direction, then factors of: outputs of one layer; those again if
    bidirectional; those again for dropout between layers; the input; states."""


@dataclass(frozen=True)
class Gpu:
    """Facts about a GPU and its libraries that a prediction for CUDA needs."""

    name: str
    multiprocessors: int
    threads_per_multiprocessor: int
    cublas_bytes: int
    """Workspace of a cuBLAS handle. Each thread has its own handle: forward and backward."""
    cublas_lt_bytes: int
    """Workspace of cuBLASLt, which adds a bias in the same kernel (`addmm`)."""
    dropout_state_bytes: int
    """cuDNN's random states for dropout between recurrent layers, made once."""
    attention_kernels: tuple[str, ...]
    """Fused ones for 16 bits, the preferred first: "cudnn", "flash"."""
    widest_head: int
    """Elements of a head at most that they take."""
    convolution_table: str
    """Measured workspaces of convolutions: a file of this folder."""
    recurrent_table: str
    recurrent_fits: Mapping[int, RecurrentFit]
    """By cuDNN's mode: 1 tanh, 2 LSTM, 3 GRU."""
    rates: DeviceRates


def gpu() -> Gpu:
    """The GPU that is there if it has a file, else the reference."""
    return _gpus().get(_name_of_gpu()) or reference_gpu()


def reference_gpu() -> Gpu:
    """The GPU that stands for all that have no file."""
    return _gpus()[REFERENCE]


@cache
def cpu_rates() -> DeviceRates:
    """Of the CPU that stands for all."""
    return _rates(_read("cpu.toml")["rates"])


def rows(table: str) -> Iterator[dict[str, str]]:
    """A CSV file of this folder, without its comments."""
    text = (files(__package__) / table).read_text(encoding="utf-8")
    return csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))


@cache
def _name_of_gpu() -> str:
    try:
        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    except RuntimeError:  # no memory left for its context, say
        return ""


@cache
def _gpus() -> dict[str, Gpu]:
    found = {}
    for file in sorted(files(__package__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml") and file.name != "cpu.toml":
            facts = _read(file.name)
            fits = {int(mode): _fit(fit) for mode, fit in facts.pop("recurrent_fits").items()}
            rates, kernels = _rates(facts.pop("rates")), tuple(facts.pop("attention_kernels"))
            made = Gpu(**facts, attention_kernels=kernels, recurrent_fits=fits, rates=rates)
            found[made.name] = made
    return found


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((files(__package__) / name).read_text(encoding="utf-8"))


def _rates(facts: dict[str, Any]) -> DeviceRates:
    return DeviceRates(**facts)


def _fit(facts: dict[str, Any]) -> RecurrentFit:
    return RecurrentFit(facts["widest_small"], tuple(facts["small"]), tuple(facts["large"]))


@dataclass(frozen=True)
class Card:
    """A card as people buy it, and what a process can take of it."""

    gigabytes: int
    """As it is sold."""
    name: str
    total_bytes: int
    """As CUDA reports it."""
    context_bytes: int
    """Taken by CUDA itself in a process, beside what PyTorch's allocator reserves."""

    @property
    def usable_bytes(self) -> int:
        """The most that can be reserved."""
        return self.total_bytes - self.context_bytes


@cache
def cards() -> tuple[Card, ...]:
    """Cards people have, from small to large."""
    return tuple(
        Card(
            int(row["gigabytes"]),
            row["name"],
            int(float(row["total_gib"]) * 2**30),
            int(float(row["context_gib"]) * 2**30),
        )
        for row in rows("cards.csv")
    )
