"""Facts about devices are data: read from files, chosen by the GPU that is there, in no code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from shoestring import devices
from shoestring.planning.cost import NOMINAL

SOURCE = Path(devices.__file__).parents[1]


def test_the_reference_is_the_card_that_was_measured():
    """132 processors of 2,048 threads; 48 KiB of random states each."""
    card = devices.reference_gpu()
    assert card.name == "NVIDIA H200" and card.multiprocessors * 2048 == 270_336
    assert card.threads_per_multiprocessor == 2048
    assert card.dropout_state_bytes == 132 * 48 * 1024
    rates = NOMINAL["cuda"].flops_per_second
    assert 10 < rates["bf16"] / rates["fp32"] < 20 and rates["bf16"] == rates["fp16"]


def test_every_table_has_rows():
    for card in devices._gpus().values():
        assert len(list(devices.rows(card.convolution_table))) > 100
        assert len(list(devices.rows(card.recurrent_table))) > 10
        assert set(card.recurrent_fits) == {1, 2, 3}


@pytest.mark.parametrize("name", ["NVIDIA H200", "A card without a file"])
def test_a_card_without_a_file_is_predicted_by_the_reference(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    devices._name_of_gpu.cache_clear()
    try:
        assert devices.gpu() is devices.reference_gpu()
    finally:
        devices._name_of_gpu.cache_clear()


def test_a_card_with_a_file_is_predicted_by_it(monkeypatch):
    from dataclasses import replace

    other = replace(devices.reference_gpu(), name="Other", multiprocessors=10)
    monkeypatch.setattr(devices, "_gpus", lambda: {"Other": other})
    monkeypatch.setattr(devices, "_name_of_gpu", lambda: "Other")
    from shoestring.kernels.batch_norm_tiles import programs

    assert devices.gpu() is other and programs() == 160


def test_no_code_names_a_card():
    """Text about measurements may; that stands in docs, benchmarks and the devices' own files."""
    named = re.compile(r"H200|H100|A100|Hopper|Ampere")
    found = [
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if named.search(file.read_text(encoding="utf-8"))
    ]
    assert found == ["devices/__init__.py"]
