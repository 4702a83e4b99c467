"""The kernels of saved activations against the same in PyTorch, interpreted and on a GPU."""

from __future__ import annotations

import pytest
import torch

from interpreter import run_interpreted
from shoestring.kernels import saved_codes as codec
from shoestring.kernels.rounding import Noise

torch.set_num_threads(1)


def compare(device: str) -> None:
    """The same random bits, so the same codes; where a product rounds otherwise, one is off."""
    from shoestring.kernels import saved_kernels as kernels

    where = torch.device(device)
    for count in (1, 255, 2100):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = (torch.randn(count, generator=torch.Generator().manual_seed(count)) * 3).to(
                where, dtype
            )
            x[count // 2] = 0
            for bits in (8, 4, 2, codec.SIGNS):
                noise = Noise(where, 5)
                groups = codec.groups_of(count)
                made = []
                for way in (codec, kernels):
                    codes = torch.zeros(
                        codec.code_bytes(count, bits), dtype=torch.uint8, device=where
                    )
                    ranges = None if bits == codec.SIGNS else torch.zeros(groups, 2, device=where)
                    way.encode(x, codes, ranges, bits, noise.counter)
                    out = torch.full_like(x, 9)
                    way.decode(codes, ranges, bits, out)
                    made.append((codes, ranges, out))
                (_, ranges, out), (codes, its_ranges, its_out) = made
                if ranges is None or its_ranges is None:
                    assert torch.equal(out, its_out) and torch.equal(out > 0, x > 0)
                    continue
                torch.testing.assert_close(ranges, its_ranges)
                step = ranges[:, 1].repeat_interleave(codec.GROUP)[:count]
                off = (out.float() - its_out.float()).abs()
                assert (off <= step * 1.01 + 0.05).all()
                assert (off > step / 2 + 0.05).float().mean() < 0.002
                crossed = torch.full_like(x, 9)
                codec.decode(codes, its_ranges, bits, crossed)
                torch.testing.assert_close(crossed, its_out, atol=0.02, rtol=0.01)
    x = torch.randn(600).to(where)
    x[300] = torch.nan
    codes = torch.zeros(codec.code_bytes(600, 4), dtype=torch.uint8, device=where)
    ranges = torch.zeros(3, 2, device=where)
    kernels.encode(x, codes, ranges, 4, Noise(where, 5).counter)
    out = torch.zeros(600, device=where)
    kernels.decode(codes, ranges, 4, out)
    assert out[256:512].isnan().all() and out[:256].isfinite().all()


def test_they_agree_interpreted() -> None:
    run_interpreted(__file__, "compare('cpu')")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_they_agree_on_a_gpu() -> None:
    compare("cuda")
