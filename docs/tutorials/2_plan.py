# %% [markdown]
# # Plan under a budget and read the plan
#
# `ss.plan` combines techniques so that the step fits a budget in bytes, at the least cost in time.

# %%
import torch
import torch.nn.functional as F
from torch import nn

import shoestring as ss

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(6)]
model = nn.Sequential(*blocks, nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batch = torch.randn(2048, 256), torch.randint(10, (2048,))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


given = {"loss": loss, "optimizer": optimizer}

# %% [markdown]
# `allow` says how far from plain training the plan may go. `"lossless"` permits what differs by
# rounding at most.

# %%
plan = ss.plan(model, batch, **given, budget="100 MB", allow="lossless")
print(plan)

# %% [markdown]
# How to read it. The first line is the plan in short, its peak and its operations. The second says
# what the budget was, what is predicted, and what plain training takes. The third is time. Then
# there is one row for each technique: its setting, how close it is to plain training, and why it
# is there. `cheap` means that cheap outputs of a block are recomputed; `keep` that all is kept.

# %%
print(f"{plan.plain.peak_bytes / 1e6:.0f} MB plain, {plan.predicted.peak_bytes / 1e6:.0f} planned")
for choice in plan.choices:
    print(f"{choice.part}: {choice.setting} ({choice.kind}), because {choice.why}")
plan.plot("plan.svg")

# %% [markdown]
# Less memory costs more time. The front of a plan has its neighbors.

# %%
for point in plan.front:
    print(f"{point.peak_bytes / 1e6:6.1f} MB  {point.seconds / plan.plain.seconds:.2f}x time")

# %% [markdown]
# Too small a budget is an error that names the smallest one, and what to allow to get lower.

# %%
try:
    ss.plan(model, batch, **given, budget="20 MB", allow="lossless")
except ss.BudgetError as error:
    print(error.message)
    print("hint:", error.hint)

# %% [markdown]
# Apply it. The model and the optimizer stay your own objects; the step runs forward, backward and
# update. A plan is a file, too: `plan.save("plan.toml")`, `ss.Plan.load("plan.toml")`.

# %%
step = ss.apply(plan, model, optimizer, loss=loss)
for _ in range(3):
    value = step(batch)
print(f"loss {float(value):.3f}, measured {step.measured.peak_bytes / 1e6:.1f} MB of 100 MB")
assert step.measured.peak_bytes <= plan.budget_bytes
