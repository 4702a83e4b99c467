"""Where offloaded tensors lie: pinned host memory beside a GPU, a mapped file beside the CPU.

A file is allocated in full before it is mapped: a disk that fills says so then, and not by a
signal when a page is written. It has no name any more once it is mapped, so that it goes with its
tensor, or with the process.
"""

from __future__ import annotations

import itertools
import operator
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from ..torch_private.cuda_memory import free_idle_pinned_memory
from ..trace.fakes import is_fake
from ..trace.places import mark_elsewhere
from ..units import format_size

_IN_MEMORY = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/self/mounts")
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_SPARE_BYTES = 2**30
"""Of the host's memory, left to all else."""


def offloaded(tensor: torch.Tensor, folder: str, *, pinned: bool) -> torch.Tensor:
    """A copy of the tensor on the host. OSError if there is no room."""
    tensor = tensor.detach()
    place = place_for(tensor, folder, pinned=pinned)
    return place if is_fake(tensor) else place.copy_(tensor)


def place_for(tensor: torch.Tensor, folder: str, *, pinned: bool) -> torch.Tensor:
    """Room on the host for a tensor like this one. OSError if there is none."""
    if is_fake(tensor):
        made = torch.empty_like(tensor)
    elif pinned:
        made = _pinned(tensor)
    else:
        made = _mapped(tensor, folder)
    mark_elsewhere(made)
    return made


def pinned_bytes(nbytes: int) -> torch.Tensor:
    """So much pinned memory, which counts as elsewhere. OSError if there is none."""
    check_pinned(nbytes)
    flat = _pinned(torch.empty(nbytes, dtype=torch.uint8, device="meta"))
    mark_elsewhere(flat)
    return flat


def check_pinned(nbytes: int) -> None:
    """OSError if the host has less left, before the system ends the process for it."""
    free = free_for_pinned(taken := pinned_size(nbytes))
    if free is not None and taken > free - _SPARE_BYTES:
        raise OSError(f"the host has {format_size(free)} of memory left")


def pinned_size(nbytes: int) -> int:
    """As PyTorch takes it from the host: the next power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def free_for_pinned(wanted: int) -> int | None:
    """Memory that is left; what PyTorch keeps of earlier plans goes first, if it is needed."""
    free = available_bytes()
    if free is not None and wanted > free - _SPARE_BYTES:
        free_idle_pinned_memory()
        free = available_bytes()
    return free


def wait_when_gone(holder: object, streams: Sequence[Any], device: torch.device) -> None:
    """When it goes, what computes next waits for these streams: they copy into memory it held."""

    def wait() -> None:
        if not torch.cuda.is_current_stream_capturing():  # a graph cannot wait for what is outside
            for stream in streams:
                torch.cuda.current_stream(device).wait_stream(stream)

    weakref.finalize(holder, wait).atexit = False


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError as error:
        raise OSError(f"no pinned memory: {str(error).splitlines()[0]}") from None


def _mapped(tensor: torch.Tensor, folder: str) -> torch.Tensor:
    nbytes = tensor.numel() * tensor.element_size()
    with tempfile.NamedTemporaryFile(dir=folder, prefix="shoestring-") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        else:  # no such call on macOS
            for start in range(0, nbytes, 2**20):
                file.write(bytes(min(2**20, nbytes - start)))
            file.flush()
        try:
            storage = torch.UntypedStorage.from_file(file.name, True, nbytes)
        except RuntimeError as error:  # the process may map no more
            raise OSError(str(error).splitlines()[0]) from None
    assert isinstance(storage, torch.UntypedStorage)
    mark_elsewhere(storage)  # before there is a tensor of it, which would be counted
    made = torch.empty(0, dtype=tensor.dtype)
    return made.set_(storage, 0, tensor.shape, _strides(tensor))


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """As the tensor's where it fills its memory, else in order; no operation is run for it."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != filled:
            break
        filled *= size
    else:
        return tensor.stride()
    sizes = (max(size, 1) for size in tensor.shape[:0:-1])
    return tuple(itertools.accumulate(sizes, operator.mul, initial=1))[::-1][-tensor.dim() or 1 :]


def folder_for(given: str | None) -> str:
    """Where files go: as given, else where temporary ones go, if that is a disk."""
    if given is not None:
        if not os.path.isdir(given) or not os.access(given, os.W_OK):
            raise InputError(
                f"cannot write into the folder {given}", hint="give one that is there, on a disk"
            )
        return given
    usual = [tempfile.gettempdir(), "/var/tmp"]
    disks = [folder for folder in usual if os.access(folder, os.W_OK) and not in_memory(folder)]
    return disks[0] if disks else usual[0]


def in_memory(folder: str) -> bool:
    """Whether files of this folder lie in memory, where offloading to them saves nothing."""
    best, kind = "", ""
    try:
        lines = _MOUNTS.read_text().splitlines()
    except OSError:  # not Linux
        return False
    real = os.path.realpath(folder)
    for _, mounted, its_kind, *_ in (line.split() for line in lines):
        inside = real == mounted or real.startswith(mounted.rstrip("/") + "/")
        if inside and len(mounted) >= len(best):
            best, kind = mounted, its_kind
    return kind in _IN_MEMORY


def check_room(needed: int, folder: str | None, what: str = "optimizer state") -> None:
    """InputError if the host cannot hold so much: the disk of a folder, or its memory for None."""
    if folder is not None:
        free, where = shutil.disk_usage(folder).free, f"the disk of {folder}"
        hint = "give another folder: folder=…"
    else:
        known = free_for_pinned(needed)
        if known is None:
            return
        free, where, hint = known, "the host's memory", "leave less of it on the host"
    if needed > free:
        raise InputError(
            f"{what} of {format_size(needed)} has no room: {where} has {format_size(free)} left",
            hint=hint,
        )


def check_folder(given: str | None) -> None:
    """InputError for a folder that cannot be written, or whose files lie in memory."""
    folder = folder_for(given)
    if in_memory(folder):
        raise InputError(
            f"the folder {folder} lies in memory: nothing would be saved",
            hint="give one on a disk: folder=…",
        )


def available_bytes() -> int | None:
    """Memory of the host that is free or can be freed; None where that is not told."""
    try:
        text = _MEMORY.read_text()
    except OSError:
        return None
    rows = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    found = rows.get("MemAvailable", "").split()
    left = _left_to_container()
    known = [*([int(found[0]) * 1024] if found else []), *([] if left is None else [left])]
    return min(known, default=None)


def _left_to_container() -> int | None:
    """Of what a control group may use, where this process is in one with a limit."""
    try:
        limit, used, kinds = (
            (_GROUP / f"memory.{n}").read_text() for n in ("max", "current", "stat")
        )
    except OSError:
        return None
    if not limit.strip().isdigit():
        return None
    idle = sum(
        int(line.split()[1]) for line in kinds.splitlines() if line.startswith("inactive_file")
    )
    return max(int(limit) - int(used) + idle, 0)
