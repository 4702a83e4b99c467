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


def block():
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))


model = nn.Sequential(*(block() for _ in range(6)), nn.Linear(256, 10))
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
# The first line is the plan in short, with its peak and its operations. The second has the budget,
# the predicted peak and the peak of plain training, the third the time. Each row below is one
# technique: its setting, how close it stays to plain training, and why the planner took it.

# %%
plain, planned = plan.plain.peak_bytes / 1e6, plan.predicted.peak_bytes / 1e6
print(f"{plain:.0f} MB plain, {planned:.0f} MB planned")
for choice in plan.choices:
    print(f"{choice.part}: {choice.setting} ({choice.kind}), because {choice.why}")
plan.plot("plan.svg")

# %% [markdown]
# Less memory costs more time. `plan.front` has the plans for somewhat less and more memory.

# %%
for point in plan.front:
    slower = point.seconds / plan.plain.seconds
    print(f"{point.peak_bytes / 1e6:6.1f} MB  {slower:.2f}x time")

# %% [markdown]
# If no plan fits, the error names the smallest budget that works, and what to allow to get lower.

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
measured = step.measured.peak_bytes
print(f"loss {float(value):.3f}, measured {measured / 1e6:.1f} MB of 100 MB")
assert step.measured.peak_bytes <= plan.budget_bytes
