"""Work → seconds: a few numbers a device, by rule or by a short measurement.

seconds = operations / rate (products and convolutions have one each) + bytes moved / bandwidth +
kernels × seconds each. A sum and not the largest of them: it adds up over the parts of a step, as
the optimum needs, and the terms that do not decide are small. A GPU computes while the host starts
the next kernels, so a whole step takes the longer of the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import torch.nn.functional as F

from ..devices import DeviceRates, cpu_rates, gpu, reference_gpu
from ..memory.work import Work

_KINDS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Costs:
    """What a device takes for each unit of work."""

    device: str
    flops_per_second: Mapping[str, float]
    """Of products, by precision."""
    convolved_per_second: Mapping[str, float]
    """Operations of convolutions: by default PyTorch has them in TF32, but not products."""
    bytes_per_second: float
    seconds_per_kernel: float
    """What each takes on the device beside its work: it starts, and ends half filled."""
    seconds_per_launch: float
    """What the host takes to start one; on the CPU that is the device."""
    source: str
    """"nominal", or what was measured."""

    @property
    def narrow(self) -> str:
        """The 16-bit type to plan with: fp16 as in the report, unless bf16 is far faster."""
        rates = self.flops_per_second
        return "bf16" if rates["bf16"] > 2 * rates["fp16"] else "fp16"

    def seconds(self, work: Work, precision: str = "fp32") -> float:
        """How long the device takes for a part of a step when floats are of this precision."""
        return (
            (work.flops - work.convolved) / self.flops_per_second[precision]
            + work.convolved / self.convolved_per_second[precision]
            + work.bytes_moved / self.bytes_per_second
            + work.launches * self.seconds_per_kernel
        )

    def step_seconds(self, work: Work, precision: str = "fp32") -> float:
        """How long a whole step takes."""
        return max(self.seconds(work, precision), work.launches * self.seconds_per_launch)


def _nominal(device: str, rates: DeviceRates) -> Costs:
    return Costs(
        device,
        rates.flops_per_second,
        rates.convolved_per_second,
        rates.bytes_per_second,
        rates.seconds_per_kernel,
        rates.seconds_per_launch,
        rates.source,
    )


NOMINAL = {"cpu": _nominal("cpu", cpu_rates()), "cuda": _nominal("cuda", reference_gpu().rates)}
"""Of devices that are not there. They order plans; nothing is reported from them."""

_SAME = dict.fromkeys(_KINDS, 4e13)
IDEAL = Costs("any", _SAME, _SAME, float("inf"), 8e-6, 8e-6, "nominal, operations only")
"""For the fundamental accounting: no precision is faster, and what is counted is operations and
kernels. One rate for all keeps a plan for less memory from looking faster for its precision."""


def costs_of(device: str) -> Costs:
    """Measured if the device is there, else nominal."""
    there = device == "cpu" or torch.cuda.is_available()
    return _measured(device) if there else NOMINAL[device]


@lru_cache
def _measured(device: str) -> Costs:
    """A fraction of a second of products, convolutions, sums and small kernels."""
    on_gpu, nominal = device == "cuda", NOMINAL[device]
    efficiency = (gpu().rates if on_gpu else cpu_rates()).efficiency
    size, images, channels = (4096, 64, 256) if on_gpu else (512, 2, 64)
    products, convolutions = dict(nominal.flops_per_second), dict(nominal.convolved_per_second)
    for name, kind in _KINDS.items():
        factor = torch.ones(size, size, device=device, dtype=kind)
        pixels = torch.ones(images, channels, _SIDE, _SIDE, device=device, dtype=kind)
        weight = torch.ones(channels, channels, 3, 3, device=device, dtype=kind)
        with suppress(RuntimeError):  # no such kernels here
            seconds = _time(lambda a=factor: a @ a, device)  # type: ignore[misc]
            products[name] = efficiency * 2 * size**3 / seconds
            seconds = _time(lambda a=pixels, w=weight: F.conv2d(a, w, padding=1), device)  # type: ignore[misc]
            convolutions[name] = efficiency * 18 * channels * pixels.numel() / seconds
    large = torch.ones(2**28 if on_gpu else 2**22, device=device)
    small = torch.ones(16, device=device, requires_grad=True)
    launch = _time(lambda: small + 1, device)
    return replace(
        NOMINAL[device],
        flops_per_second=products,
        convolved_per_second=convolutions,
        bytes_per_second=2 * large.nbytes / _time(lambda: large.mul_(1), device),
        seconds_per_kernel=nominal.seconds_per_kernel if on_gpu else launch,
        seconds_per_launch=launch,
        source="measured here",
    )


_SIDE = 28
"""Of the images that are convolved."""


def _time(run: Callable[[], object], device: str, least_seconds: float = 0.02) -> float:
    """Seconds of one call, the best of a few rounds."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    run()
    wait()
    count, best = 1, float("inf")
    for _ in range(12):
        start = time.perf_counter()
        for _ in range(count):
            run()
        wait()
        took = time.perf_counter() - start
        best = min(best, took / count)
        if took >= least_seconds:
            break
        count = max(2 * count, int(count * least_seconds / max(took, 1e-7)))
    return best
