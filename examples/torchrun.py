"""Train on several processes in a script of your own.

torchrun --nproc-per-node 2 examples/torchrun.py ddp     (or fsdp)
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shoestring as ss


def loss(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


on_gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if on_gpu else "gloo")
device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count()) if on_gpu else "cpu"
if on_gpu:
    torch.cuda.set_device(device)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)
)
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

kind = sys.argv[1] if len(sys.argv) > 1 else "ddp"
chosen = [ss.Microbatching(8)] + ([ss.Sparsity(0.3)] if kind == "ddp" else [])
step = ss.apply(chosen, model, optimizer, loss=loss, parallel=kind)

inputs = torch.randn(64, 64, device=device)
labels = inputs[:, :10].argmax(1)
for number in range(40):
    value = step((inputs, labels))  # the whole minibatch; every rank runs its share
    if number % 10 == 9 and dist.get_rank() == 0:
        print(f"step {number + 1}: loss {float(value):.3f}")

state = step.state_dict()  # on all ranks: it puts together what is split
if dist.get_rank() == 0:
    print(f"{sum(t.numel() for t in state['model'].values()):,} numbers to save")
dist.destroy_process_group()
