"""The processes that train together: who they are, and what they tell each other.

Every function is for one process alone, too, where it does nothing; with several, all ranks must
call it at the same point.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar, cast, get_args

import torch
import torch.distributed as dist

from ..errors import InputError, ShoestringError

ShardingName = Literal["ddp", "fsdp"]
KINDS = get_args(ShardingName)

T = TypeVar("T")


def ranks() -> int:
    """How many processes train together; 1 where there is no process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process among them; rank 0 writes what there is to write."""
    return dist.get_rank() if ranks() > 1 else 0


def launched() -> int:
    """The number of processes that torchrun started; 1 without it."""
    return _number("WORLD_SIZE") if os.environ.get("WORLD_SIZE") else 1


def is_first() -> bool:
    """Whether this process is the one that speaks; known before there is a group."""
    return os.environ.get("RANK", "0") == "0" or launched() == 1


def local_device(name: str | None) -> str | None:
    """The GPU torchrun means for this process, unless one is named."""
    wants_cuda = name == "cuda" or (name is None and torch.cuda.is_available())
    return f"cuda:{_number('LOCAL_RANK')}" if launched() > 1 and wants_cuda else name


def parallel_for(wanted: str | None) -> ShardingName | None:
    """How the processes torchrun started train: `ddp` unless said; alone, nothing can be said."""
    if launched() > 1:
        return cast(ShardingName, wanted or "ddp")
    if wanted is not None:
        raise InputError(
            f"--parallel {wanted} is for several processes",
            hint="torchrun --nproc-per-node 2 -m shoestring train …",
        )
    return None


_LOST = re.compile("Connection closed by peer|Connection reset|Broken pipe|remote process exited")


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another rank is gone."""
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the processes torchrun started, and leave them at the end; alone, do nothing.

    Where another rank ends early, this one says so in a line: the reason is that rank's.
    """
    if launched() == 1 or dist.is_initialized():
        yield
        return
    store = _met()
    known: dict[str, Any] = {"store": store, "rank": _number("RANK"), "world_size": launched()}
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, **known)
    else:
        dist.init_process_group("gloo", **known)
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise ShoestringError(
            f"rank {dist.get_rank()} stops: another rank ended", hint="see what that one said"
        ) from error
    finally:
        dist.destroy_process_group()


JOIN_SECONDS = 60.0
"""For all ranks to start; SHOESTRING_JOIN_SECONDS says otherwise."""


def _met() -> dist.Store:
    """Where all ranks have met; ShoestringError where one of them does not come.

    Only the first wait needs a limit of its own: later the connection says who is gone.
    """
    limit = timedelta(seconds=float(os.environ.get("SHOESTRING_JOIN_SECONDS", JOIN_SECONDS)))
    mine, all_of_them = _number("RANK"), range(launched())
    try:
        store, _, _ = next(iter(dist.rendezvous("env://", mine, launched(), timeout=limit)))
        store.set(f"shoestring/here/{mine}", "yes")
        store.wait([f"shoestring/here/{number}" for number in all_of_them], limit)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise ShoestringError(
            f"rank {mine}: not all {launched()} ranks started within {limit.seconds} s",
            hint="start them with torchrun, which ends all when one ends; "
            f"({str(error).strip().partition(chr(10))[0][:200]})",
        ) from error
    return dist.PrefixStore("shoestring", store)


def _number(name: str) -> int:
    """A variable that torchrun sets."""
    given = os.environ.get(name, "")
    if not given.isdecimal() or len(given) > 9:
        raise InputError(
            f"WORLD_SIZE is {os.environ.get('WORLD_SIZE')}, and {name} is {given!r}",
            hint="torchrun --nproc-per-node 2 -m shoestring train …",
        )
    return int(given)


def communication_device() -> torch.device:
    """Where the process group's tensors must lie."""
    nccl = "nccl" in str(dist.get_backend())
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def largest(number: int) -> int:
    """Of the numbers of all ranks; waits for them."""
    if ranks() == 1:
        return number
    own = torch.tensor(number, dtype=torch.int64, device=communication_device())
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return int(own)


def from_all(value: T) -> list[T]:
    """The values of all ranks, in their order, on every rank."""
    if ranks() == 1:
        return [value]
    values: list[Any] = [None] * ranks()
    dist.all_gather_object(values, value)
    return values


def on_first(call: Callable[[], T]) -> T:
    """Call a function on rank 0 and share its result; its error is raised on every rank."""
    if ranks() == 1:
        return call()
    held: list[Any] = [None]
    if rank() == 0:
        try:
            held = [call()]
        except ShoestringError as error:
            held = [_Failed(error)]
    dist.broadcast_object_list(held, 0)
    if isinstance(held[0], _Failed):
        raise held[0].error
    return held[0]


@dataclass(frozen=True)
class _Failed:
    error: ShoestringError
