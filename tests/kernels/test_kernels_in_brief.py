"""One small case of every Triton kernel in its interpreter; the tests of each have them all."""

from __future__ import annotations

import torch

from interpreter import run_interpreted


def compare_few() -> None:
    from lab.models import test_dynamic_conv_kernels as dynamic_conv
    from lab.tasks import test_images as images
    from techniques import test_batch_norm as batch_norm
    from techniques.precision import test_update_kernels as update
    from techniques.sparsity import test_kernels as sparsity

    images.compare_kernels(few=True)
    sparsity.compare("cpu", sparsity.SHAPES[:2])
    dynamic_conv.compare("cpu", dynamic_conv.SMALL[:1], [torch.float16])
    update.compare("cpu", ["adam"])
    batch_norm.compare("cpu", most=2)


def test_every_kernel_in_brief() -> None:
    run_interpreted(__file__, "compare_few()")
