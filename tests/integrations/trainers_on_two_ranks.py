"""Started by torchrun: trainers with DDP, plainly and by plans; prints what differs."""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import shoestring as ss
from integrations.test_transformers_trainer import model, trained
from shoestring.integrations.transformers import BudgetTrainer

torch.set_num_threads(1)
place = Path(tempfile.mkdtemp())
given = {"gradient_accumulation_steps": 2, "optim": "sgd", "ddp_backend": "gloo"}
results = {}
for name, kind, own in (
    ("plain", transformers.Trainer, {}),
    ("checkpointed", BudgetTrainer, {"plan": [ss.Checkpointing("residual-1")]}),
    ("microbatched", BudgetTrainer, {"plan": [ss.Microbatching(3)]}),
    ("budget", BudgetTrainer, {"budget": "1 GB"}),
):
    trainer, logs = trained(kind, place / name, model(), **given, **own)
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    results[name] = logs, weights
whole = results["microbatched"][1].clone()
dist.all_reduce(whole)
if not torch.allclose(whole / 2, results["microbatched"][1], atol=1e-7):
    sys.exit("the ranks differ")
for name in ("checkpointed", "budget"):
    if results[name][0] != results["plain"][0] or not results[name][1].equal(results["plain"][1]):
        sys.exit(f"{name} differs from plain")
if not torch.allclose(results["microbatched"][1], results["plain"][1], atol=1e-5):
    sys.exit("microbatches differ from plain")
if dist.get_rank() == 0:
    print(f"world of {dist.get_world_size()}: all the same")
dist.destroy_process_group()
