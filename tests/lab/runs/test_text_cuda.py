"""Translation on a GPU: captured for every shape, with the losses of eager steps."""

import pytest
import torch

from shoestring import (Checkpointing, Microbatching, Plan, Precision, Sparsity)
from shoestring.lab.records.run import read
from shoestring.lab.runs.loop import train
from shoestring.lab.runs.text_settings import text_settings_for
from shoestring.lab.runs.trainer import Trainer
from translation import random_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LEAN = Plan.of([Precision("fp16"), Checkpointing("residual-1"), Microbatching(250, unit="tokens")])
PLANS = {
    "fp32": Plan(),
    "fp32 by name": Plan.of([Precision("fp32")]),
    "fp16": Plan.of([Precision("fp16")]),
    "lean": LEAN,
    "sparse": Plan.of([Sparsity(0.5, schedule=((60, 25),)), Precision("fp16")]),
}


def settings(task, plan, **others):
    given = {"updates": 60, "batch": 1000, "warmup": 10, "average": 0, **others}
    return text_settings_for("dc-transformer-tiny", "random", task, plan=plan, **given)


@pytest.mark.parametrize("name", PLANS)
def test_steps_are_captured_and_train_like_eager_ones(name):
    task, device = random_text(400), torch.device("cuda", 0)
    losses = {}
    for graph in (True, False):
        trainer = Trainer(settings(task, PLANS[name]), task, device, predict=False)
        trainer.step.use_graph(graph)
        seen = []
        for _ in range(60):
            before = float(trainer.loss_sum)
            trainer.advance()
            seen.append(float(trainer.loss_sum) - before)
        assert trainer.step.captured is graph
        losses[graph] = seen
    assert losses[True] == pytest.approx(losses[False], rel=2e-2)
    assert losses[True][-1] < losses[True][0]


def test_a_whole_run(tmp_path):
    task = random_text(200)
    end = train(settings(task, LEAN), task, tmp_path / "run", device=torch.device("cuda", 0))
    assert end["translated"] == 8 and end["measured_peak_bytes"] > 0
    assert read(tmp_path / "run")[-1]["event"] == "end"
