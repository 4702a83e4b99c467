"""What each of several gloo processes takes for a step: storages that live, with their sizes."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoestring.step.apply import apply
from shoestring.techniques import (
    Checkpointing,
    ChunkedLoss,
    GradientRelease,
    Microbatching,
    Offload,
    OptimizerState,
    Precision,
)
from shoestring.trace.places import is_elsewhere

WIDE, ROWS = 128, 64
CHOSEN: dict[str, list[Any]] = {
    "plain": [],
    "recomputed": [Checkpointing("residual-1")],
    "microbatched": [Microbatching(4)],
    "8-bit state": [OptimizerState(8)],
    "bf16": [Precision("bf16")],
    "on the host": [Offload()],
    "released": [GradientRelease(fold=False)],
    "chunked loss": [ChunkedLoss(64)],
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDE)
        self.up, self.down = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build() -> nn.Module:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(5)]
    return nn.Sequential(nn.Linear(32, WIDE), nn.Sequential(*blocks), nn.Linear(WIDE, 257))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, 32), torch.randint(257, (ROWS,))


def loss(model: nn.Module, data: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(data[0]), data[1])


class Meter(TorchDispatchMode):
    """Bytes of all storages that operations have made and that still live; FSDP resizes its own."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._note(held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._note(made)
        self._count()
        return made

    def _note(self, tree: Any) -> None:
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor) and not is_elsewhere(tensor):
                self._add(getattr(tensor, "_local_tensor", tensor).untyped_storage())

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def _count(self) -> None:
        self._live = {k: held for k, held in self._live.items() if not held[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._live.values()))

    def __enter__(self) -> Any:
        plain = self._plain = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            found = plain(storage, size)
            self._add(storage)
            self._count()
            return found

        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._plain  # type: ignore[method-assign]
        super().__exit__(*error)


def measured(kind: str, plan: str, optimizer: str) -> int:
    """Of the third step."""
    model = build()
    updates = OPTIMIZERS[optimizer](model)
    step = apply(CHOSEN[plan], model, updates, loss=loss, parallel=kind)
    data = batch()
    for _ in range(2):
        step(data)
    state = [dict(held) for held in updates.state.values()]
    with Meter([list(model.parameters()), state, data]) as meter:
        step(data)
    return meter.peak_bytes


def child(rank: int, ranks: int, folder: str, jobs: list[tuple[str, str, str]]) -> None:
    store = dist.FileStore(f"{folder}/store", ranks)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    found = {"-".join(job): measured(*job) for job in jobs}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def peaks(ranks: int, folder: str, jobs: list[tuple[str, str, str]]) -> list[dict[str, int]]:
    """Of each rank."""
    mp.start_processes(child, (ranks, folder, jobs), nprocs=ranks, start_method="spawn")
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


if __name__ == "__main__":
    some = [(k, p, o) for k in ("ddp", "fsdp") for p in CHOSEN for o in OPTIMIZERS]
    print(json.dumps(peaks(int(sys.argv[1]), sys.argv[2], some), indent=1))
