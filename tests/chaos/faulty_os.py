"""File operations that end the process, or fail, at a chosen one: before, inside or after it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

OPERATIONS = (
    "open",
    "write",
    "fsync",
    "replace",
    "rename",
    "unlink",
    "ftruncate",
    "mkdir",
    "rmdir",
)
ENDED = 77


class Faulty:
    """Stands in `os` for what writes; counts, and does harm at operation `at`, counted from 1."""

    def __init__(self, at: int = 0, when: str = "before", error: int | None = None) -> None:
        self.at, self.when, self.error = at, when, error
        self.count = 0
        self.kinds: list[str] = []
        self._real = {name: getattr(os, name) for name in OPERATIONS}

    def __enter__(self) -> Faulty:
        for name, real in self._real.items():
            setattr(os, name, self._wrapped(name, real))
        return self

    def __exit__(self, *error: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            if not _writes(name, args):
                return real(*args, **kwargs)
            self.count += 1
            self.kinds.append(name)
            if self.error is not None:
                if self.at and self.count >= self.at and name not in ("unlink", "rmdir"):
                    raise OSError(self.error, os.strerror(self.error))
                return real(*args, **kwargs)
            if self.count != self.at:
                return real(*args, **kwargs)
            try:
                if self.when == "inside" and name == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                elif self.when != "before":
                    real(*args, **kwargs)
            finally:
                os._exit(ENDED)

        return operation


def _writes(name: str, args: tuple[Any, ...]) -> bool:
    if name == "open":
        return bool(args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return name != "write" or args[0] > 2
