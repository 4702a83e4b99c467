"""Work → seconds: a few numbers a device, by rule or by a short measurement.

seconds = operations / rate (products and convolutions have one each) + bytes moved / bandwidth +
kernels × seconds each. A sum and not the largest of them: it adds up over the parts of a step, as
the optimum needs, and the terms that do not decide are small. A GPU computes while the host starts
the next kernels, so a whole step takes the longer of the two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from ..devices import DeviceRates, cpu_rates, gpu, reference_gpu
from ..memory.work import Work

_KINDS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Costs:
    """Seconds a device needs for each unit of work."""

    device: str
    flops_per_second: Mapping[str, float]
    """Of products, by precision."""
    convolved_per_second: Mapping[str, float]
    """Operations of convolutions: by default PyTorch has them in TF32, but not products."""
    bytes_per_second: float
    seconds_per_kernel: float
    """Overhead of each kernel on the device: it starts, and ends half filled."""
    seconds_per_launch: float
    """Seconds the host needs to launch one; on the CPU that is the device."""
    link_bytes_per_second: float
    """Between the device and the host, each way."""
    source: str
    """"nominal", or what was measured."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a plan to say what it was chosen by."""
        return {
            "device": self.device,
            "source": self.source,
            "flops_per_second": dict(self.flops_per_second),
            "convolved_per_second": dict(self.convolved_per_second),
            "bytes_per_second": self.bytes_per_second,
            "seconds_per_kernel": self.seconds_per_kernel,
            "seconds_per_launch": self.seconds_per_launch,
            "link_bytes_per_second": self.link_bytes_per_second,
        }

    @property
    def narrow(self) -> str:
        """The 16-bit type to plan with: fp16 as in the report, unless bf16 is far faster."""
        rates = self.flops_per_second
        return "bf16" if rates["bf16"] > 2 * rates["fp16"] else "fp16"

    def seconds(self, work: Work, precision: str = "fp32") -> float:
        """How long the device takes for a part of a step when floats are of this precision."""
        products = work.flops - work.convolved
        narrow = work.narrow - work.narrow_convolved
        return (
            (products - narrow) / self.flops_per_second[precision]
            + narrow / self.flops_per_second["bf16"]
            + (work.convolved - work.narrow_convolved) / self.convolved_per_second[precision]
            + work.narrow_convolved / self.convolved_per_second["bf16"]
            + work.bytes_moved / self.bytes_per_second
            + work.launches * self.seconds_per_kernel
        )

    def step_seconds(self, work: Work, precision: str = "fp32", *, captured: bool = False) -> float:
        """How long a whole step takes; captured as a graph, the host starts no kernels."""
        device = self.seconds(work, precision)
        return device if captured else max(device, work.launches * self.seconds_per_launch)


def _nominal(device: str, rates: DeviceRates) -> Costs:
    return Costs(
        device,
        rates.flops_per_second,
        rates.convolved_per_second,
        rates.bytes_per_second,
        rates.seconds_per_kernel,
        rates.seconds_per_launch,
        rates.link_bytes_per_second,
        rates.source,
    )


NOMINAL = {"cpu": _nominal("cpu", cpu_rates()), "cuda": _nominal("cuda", reference_gpu().rates)}
"""Of devices that are not there. They order plans; nothing is reported from them."""

_SAME = dict.fromkeys(_KINDS, 4e13)
IDEAL = Costs(
    "any", _SAME, _SAME, float("inf"), 8e-6, 8e-6, float("inf"), "nominal, operations only"
)
"""For the fundamental accounting: no precision is faster, and what is counted is operations and
kernels. One rate for all keeps a plan for less memory from looking faster for its precision."""


def costs_of(device: str) -> Costs:
    """The device's nominal rates; where it is there, corrected if they are far off.

    So coarse that the same call gives the same plan on a busy machine as on an idle one.
    """
    if device == "cpu":
        return _cpu()
    return _gpu() if torch.cuda.is_available() else NOMINAL[device]


@lru_cache
def _cpu() -> Costs:
    """Nominal but for 16 bits, which some CPUs compute dozens of times slower than FP32."""
    nominal = NOMINAL["cpu"]
    wide = nominal.flops_per_second["fp32"]
    rates = dict(nominal.flops_per_second)
    for name, slowdown in _slowdowns().items():
        rates[name] = min(rates[name], wide / slowdown)
    return replace(nominal, flops_per_second=rates, convolved_per_second=rates)


def _slowdowns(size: int = 256) -> dict[str, float]:
    """How many times longer a product takes in 16 bits than in FP32: the closest power of four.

    In one thread and by its own CPU time, so that a busy machine does not change the answer. bf16
    by AVX-512 without its own instructions takes 3 to 4 times as long, FP16 in PyTorch's own
    kernels 60 times and more.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = {name: _own_seconds(kind, size) for name, kind in _KINDS.items()}
    finally:
        torch.set_num_threads(threads)
    return {
        name: 4.0 ** round(math.log(min(max(took / seconds["fp32"], 1.0), 4.0**6), 4))
        for name, took in seconds.items()
        if name != "fp32"
    }


def _own_seconds(kind: torch.dtype, size: int, least_seconds: float = 0.01) -> float:
    """CPU time of one square product in this thread; infinite where there is no such kernel."""
    factor = torch.ones(size, size, dtype=kind)
    try:
        factor @ factor
    except RuntimeError:
        return float("inf")
    best = float("inf")
    for _ in range(3):
        count, start = 0, time.thread_time()
        while (took := time.thread_time() - start) < least_seconds:
            factor @ factor
            count += 1
        best = min(best, took / count)
    return best


@lru_cache
def _gpu() -> Costs:
    """A fraction of a second of products, convolutions and sums."""
    nominal, efficiency = NOMINAL["cuda"], gpu().rates.efficiency
    products, convolutions = dict(nominal.flops_per_second), dict(nominal.convolved_per_second)
    for name, kind in _KINDS.items():
        pixels = torch.ones(64, 256, _SIDE, _SIDE, device="cuda", dtype=kind)
        weight = torch.ones(256, 256, 3, 3, device="cuda", dtype=kind)
        with suppress(RuntimeError):  # no such kernels here
            rate = efficiency * _products(name, 4096)
            products[name] = _coarse(rate, products[name])
            seconds = _time(lambda a=pixels, w=weight: F.conv2d(a, w, padding=1))  # type: ignore[misc]
            rate = efficiency * 18 * 256 * pixels.numel() / seconds
            convolutions[name] = _coarse(rate, convolutions[name])
    large = torch.ones(2**28, device="cuda")
    moved = 2 * large.nbytes / _time(lambda: large.mul_(1))
    return replace(
        nominal,
        flops_per_second=products,
        convolved_per_second=convolutions,
        bytes_per_second=_coarse(moved, nominal.bytes_per_second),
        link_bytes_per_second=_link(nominal.link_bytes_per_second),
    )


def _link(nominal: float) -> float:
    """One copy from pinned memory; links of other widths differ by less than other rates do."""
    here = torch.empty(2**26, dtype=torch.uint8, device="cuda")
    try:
        there = torch.empty(2**26, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # no pinned memory left
        return nominal
    seconds = _time(lambda: here.copy_(there, non_blocking=True))
    return float(nominal * 2 ** round(math.log2(here.nbytes / seconds / nominal)))


_FAR = 4.0
"""Rates count as they should be unless they are off by more; a busy machine is not."""


def _coarse(rate: float, nominal: float) -> float:
    """The nominal rate times the power of `_FAR**2` that is closest."""
    return float(nominal * _FAR ** (2 * round(math.log(rate / nominal, _FAR**2))))


def _products(name: str, size: int) -> float:
    """Operations a second of one product of square matrices on the GPU."""
    factor = torch.ones(size, size, device="cuda", dtype=_KINDS[name])
    return 2 * size**3 / _time(lambda: factor @ factor)


_SIDE = 28
"""Of the images that are convolved."""


def _time(run: Callable[[], object], least_seconds: float = 0.02) -> float:
    """Seconds of one call on the GPU, the best of a few rounds."""
    run()
    torch.cuda.synchronize()
    count, best = 1, float("inf")
    for _ in range(12):
        start = time.perf_counter()
        for _ in range(count):
            run()
        torch.cuda.synchronize()
        took = time.perf_counter() - start
        best = min(best, took / count)
        if took >= least_seconds:
            break
        count = max(2 * count, int(count * least_seconds / max(took, 1e-7)))
    return best
