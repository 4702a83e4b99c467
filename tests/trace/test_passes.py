"""Loops that are cut short where memory alone is asked for: the same peak, in fewer operations."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from shoestring import Checkpointing, Microbatching, Plan, Precision, Sparsity
from shoestring.lab.models import builtin
from shoestring.memory.device import device_timeline
from shoestring.memory.work import work_of_passes
from shoestring.step import predict
from shoestring.step.trace_step import trace_plan
from shoestring.techniques.sparsity import index
from shoestring.trace.passes import passes, peak_only
from tiers import slow_but


def test_all_of_a_loop_but_where_peak_only_is_asked_for():
    assert [*passes(range(5))] == [0, 1, 2, 3, 4]
    with peak_only(), peak_only():
        assert [*passes(range(5))] == [0, 4]
        assert [*passes(range(2))] == [0, 1] and [*passes(range(0))] == []
    assert [*passes(range(5))] == [0, 1, 2, 3, 4]


def linear():
    """Weights of three chunks each, and four microbatches."""
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU())
    parts = [Sparsity(0.5), Precision("fp16"), Checkpointing("every-2"), Microbatching(2)]
    return model, torch.randn(8, 300), lambda m, x: m(x).mean(), parts


def transformer():
    known = builtin("dc-transformer-tiny")
    parts = [
        Sparsity(0.5), Precision("fp16"), Checkpointing("residual-1"),
        Microbatching(125, unit="tokens"),
    ]  # fmt: skip
    return known.build(), known.batch(250), known.loss, parts


@pytest.mark.parametrize("made", slow_but(1, [linear, transformer]))
def test_a_predicted_peak_is_that_of_all_passes(made, monkeypatch):
    model, batch, loss, parts = made()
    optimizer = torch.optim.Adam(model.parameters())

    def predicted():
        return predict.predict_step(
            Plan.of(parts), model, batch, loss=loss, optimizer=optimizer
        ).peak_bytes

    short = predicted()
    monkeypatch.setattr(predict, "peak_only", nullcontext)
    assert predicted() == short


def test_chunks_of_a_sparse_weight_are_traced_as_one_that_stands_for_many(monkeypatch):
    """All its work and all its memory; a weight of 10^11 elements has three million chunks."""
    model = nn.Linear(400, 400)  # five chunks
    given = dict(loss=lambda m, x: m(x).mean(), optimizer=torch.optim.Adam(model.parameters()))

    def traced():
        return trace_plan(Plan.of([Sparsity(0.5)]), model, torch.randn(8, 400), **given)

    short = traced()
    assert max(op.times for op in short.ops) == 3
    monkeypatch.setattr(index, "counted", lambda loop: [(one, 1) for one in loop])
    whole = traced()
    assert len(short.ops) < len(whole.ops)
    assert work_of_passes(short) == work_of_passes(whole)
    peaks = [int(device_timeline(trace).totals.max()) for trace in (short, whole)]
    assert peaks[0] == peaks[1]
