"""The dynamic convolution against its unfold form: time and memory of forward and backward.

    PYTHONPATH=src python3 benchmarks/dynamic_conv.py [--json FILE] [--half | --float] [--tiny]

4,000 tokens of width 512 with four heads, in sentences of 25 and of 250, kernels of 3 to 31. The
unfold form is the one fairseq trains with (time first, so that forward needs no copy), with
PyTorch's own kernel for the gradient of `unfold`. `memory` is what forward and backward take beside
input, taps and the gradient of the output. On CUDA `device` is the time of a captured graph, and
`eager` has the launches in it. Without CUDA sizes are tiny, and times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoestring.lab.models.dynamic_conv_function import DynamicConv
from shoestring.memory.live.measure import track

TAPS = (3, 7, 15, 31)
SHAPES = ((160, 25), (16, 250))
TINY = ((4, 25),)
GROUPS = 7
"""Times are the median of so many groups of steps."""


def unfolded(x: Tensor, weights: Tensor, left: int) -> Tensor:
    """x (time, batch, channels) seen once a tap; weights are (time, batch, heads, taps)."""
    (times, batch, channels), (heads, taps) = x.shape, weights.shape[2:]
    padded = F.pad(x, (0, 0, 0, 0, left, taps - 1 - left))
    seen = padded.unfold(0, taps, 1).view(times * batch * heads, channels // heads, taps)
    return torch.bmm(seen, weights.reshape(-1, taps, 1)).view(times, batch, channels)


class Operands(nn.Module):
    """Input and taps of one convolution, and the gradient of its output."""

    def __init__(self, form: str, sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        super().__init__()
        batch, times, width, heads, taps = sizes
        self.run: Callable[..., Tensor] = unfolded if form == "unfold" else DynamicConv.apply
        self.left = taps // 2
        generator = torch.Generator().manual_seed(0)
        made = [
            torch.randn(batch, times, width, generator=generator),
            torch.randn(batch, times, heads, taps, generator=generator).softmax(-1),
            torch.randn(batch, times, width, generator=generator),
        ]
        if form == "unfold":
            made = [value.transpose(0, 1).contiguous() for value in made]
        x, weights, self.grad = (value.to(device=device, dtype=dtype) for value in made)
        self.x, self.weights = nn.Parameter(x), nn.Parameter(weights)

    def step(self) -> tuple[Tensor, ...]:
        """Forward and backward: output and both gradients."""
        y = self.run(self.x, self.weights, self.left)
        return y.detach(), *torch.autograd.grad(y, (self.x, self.weights), self.grad)

    def results(self) -> list[Tensor]:
        """The same in FP32, sentences first."""
        found = [value.float() for value in self.step()]
        return [v.transpose(0, 1) for v in found] if self.run is unfolded else found

    def memory_bytes(self) -> int:
        """The peak beside what is there before."""
        self.step()
        there = sum(value.nbytes for value in (self.x, self.weights, self.grad))
        if not self.x.is_cuda:
            measured = track(lambda entering: self.step(), self, self.grad, None)
            return measured.peak_bytes - there
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


def graphed(operands: Operands) -> Callable[[], object]:
    """The step as a CUDA graph: no launches from Python."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            operands.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operands.step()
    return graph.replay


def microseconds(run: Callable[[], object], steps: int, cuda: bool) -> float:
    """Of one call, the median over groups."""
    wait = torch.cuda.synchronize if cuda else lambda: None
    found = []
    for _ in range(GROUPS + 1):  # the first one warms up
        wait()
        start = time.perf_counter()
        for _ in range(steps):
            run()
        wait()
        found.append((time.perf_counter() - start) / steps)
    return 1e6 * statistics.median(found[1:])


def compared(sizes: tuple[int, ...], dtype: torch.dtype, device: str, steps: int) -> dict[str, Any]:
    """Both forms at one size; their gradients must agree."""
    row: dict[str, Any] = {"sizes": sizes, "dtype": str(dtype).removeprefix("torch.")}
    forms = {name: Operands(name, sizes, dtype, device) for name in ("unfold", "ours")}
    limit = 1e-4 if dtype is torch.float32 else 3e-2
    for theirs, ours in zip(*(o.results() for o in forms.values()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)
    for name, operands in forms.items():
        row[f"{name}_bytes"] = operands.memory_bytes()
        row[f"{name}_eager_us"] = microseconds(operands.step, steps, device == "cuda")
        if device == "cuda":
            row[f"{name}_device_us"] = microseconds(graphed(operands), steps, True)
    # Output and both gradients: what no form can do without.
    row["counted_bytes"] = 2 * forms["ours"].x.nbytes + forms["ours"].weights.nbytes
    return row


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Print one line."""
    batch, times, _, _, taps = row["sizes"]
    kind = "device" if "ours_device_us" in row else "eager"
    slow, fast = row[f"unfold_{kind}_us"], row[f"ours_{kind}_us"]
    print(
        f"{batch:4} x {times:<4} k {taps:<3} {row['dtype']:9}"
        f" {kind} {slow:9.1f} {fast:8.1f} us {slow / fast:6.1f}x"
        f"  eager {row['unfold_eager_us']:9.1f} {row['ours_eager_us']:8.1f} us"
        f"  memory {row['unfold_bytes'] / 1e6:8.2f} {row['ours_bytes'] / 1e6:7.2f} MB"
        f"  of counted {row['ours_bytes'] / row['counted_bytes']:.2f}",
        flush=True,
    )
    return row


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="write the rows to this file")
    parser.add_argument("--half", action="store_true", help="FP16 alone")
    parser.add_argument("--float", action="store_true", help="FP32 alone")
    parser.add_argument("--tiny", action="store_true", help="small sizes, as without CUDA")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = "cuda" if cuda else "cpu"
    where = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"{where}, torch {torch.__version__}; unfold form, then ours", flush=True)
    types = [torch.float16] * (not options.float) + [torch.float32] * (not options.half)
    tiny = options.tiny or not cuda
    width, shapes = (64, TINY) if tiny else (512, SHAPES)
    rows = [
        shown(compared((*shape, width, 4, taps), dtype, device, 2 if tiny else options.steps))
        for dtype in types
        for shape in shapes
        for taps in TAPS
    ]
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"device": where, "torch": torch.__version__, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
