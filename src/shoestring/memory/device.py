"""The `device` accounting: what PyTorch's allocator will show for the plain step.

The trace holds when each storage was made and dropped, under autograd's own rules. On the CPU that
is the answer. On CUDA three things are added: workspaces and temporaries inside a kernel (by rule,
`memory.workspaces`), the caching allocator's rounding (`memory.allocator`), and cuBLAS's buffer.
"""

from __future__ import annotations

from ..trace.graph import Role, Trace
from .timeline import Change, Timeline, build


def device_timeline(trace: Trace) -> Timeline:
    """Bytes by role at every operation of the step."""
    changes: list[Change] = []
    for storage in trace.storages:
        if storage.birth >= storage.death or not storage.nbytes:
            continue
        changes.append(Change(max(storage.birth, 0), storage.nbytes, storage.role, storage.module))
        changes.append(Change(storage.death, -storage.nbytes, storage.role, storage.module))
    labels = [(op.name, str(op.phase), op.module) for op in trace.ops]
    return build(changes, labels)


def counted_on_device(role: Role) -> bool:
    """Every role is resident on the device."""
    return role in Role
