"""`profile` and `plan` mean the same plain step, whatever kernels and masks it takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shoestring as ss
from shoestring.planning.planner import Planner

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_grouped_heads_take_one_kernel(optimizer: str) -> None:
    """14 heads over 2 key heads in FP32: without a mask CUDA computes all scores."""
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=112, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=14, num_key_value_heads=2,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen2ForCausalLM(config)
    ids = torch.randint(64, (4, 256))
    given: dict[str, Any] = {"loss": lambda m, b: m(**b).loss, "optimizer": optimizer}
    batch = {"input_ids": ids, "labels": ids}
    whole = ss.profile(model, batch, accounting="device", device="cuda", **given).peak_bytes
    planned = Planner(model, batch, device="cuda", **given).estimates.plain.peak_bytes
    assert planned == pytest.approx(whole, rel=0.01)
