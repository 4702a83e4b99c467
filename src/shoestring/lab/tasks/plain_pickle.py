"""Pickles of plain values and arrays of whole numbers, read without running anything of theirs.

NumPy's own `dtype.__setstate__` and `ndarray.__setstate__` trust what they are given: a crafted
state turns bytes into object pointers. So none of NumPy is called here. Small objects of ours take
what a pickle says about an array, and an array is made only of a known type, a shape and exactly
as many bytes. Python's own unpickler reads it: the one in C allocates what a pickle asks for.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np

KINDS = frozenset("u1 i1 u2 i2 u4 i4 u8 i8".split())
"""Whole numbers, as NumPy writes their types without the byte order."""


def load_arrays(data: bytes) -> Any:
    """The dictionary that was pickled; arrays in it are of whole numbers. Raises for all else."""
    found = _Unpickler(io.BytesIO(data), encoding="bytes").load()
    if type(found) is not dict:
        raise pickle.UnpicklingError(f"a {type(found).__name__} in place of a dictionary")
    return {
        name: value.made() if isinstance(value, _Array) else value for name, value in found.items()
    }


class _Kind:
    """An array's type, as a pickle describes it."""

    __slots__ = ("little", "name")

    def __init__(self, name: Any) -> None:
        name = name.decode("ascii") if isinstance(name, bytes) else name
        if name not in KINDS:
            raise pickle.UnpicklingError(f"an array of {name!r}")
        self.name, self.little = name, True

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode("ascii") if isinstance(state[1], bytes) else state[1]
        rest = tuple(state[2:8])
        if order not in ("<", ">", "|") or rest not in ((None, None, None, -1, -1, 0),):
            raise pickle.UnpicklingError("an array of a type that is not plain")
        self.little = order != ">"


class _Array:
    """An array, as a pickle describes it."""

    __slots__ = ("data", "kind", "order", "shape")

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, data = state
        if (
            type(shape) is not tuple
            or len(shape) > 2
            or not all(type(size) is int and 0 <= size < 2**31 for size in shape)
            or type(kind) is not _Kind
            or type(data) is not bytes
            or len(data) != math.prod(shape) * int(kind.name[1:])
        ):
            raise pickle.UnpicklingError("an array that does not fit its own shape")
        self.shape, self.kind, self.data = shape, kind, data
        self.order = "F" if fortran else "C"

    def made(self) -> np.ndarray[Any, Any]:
        """With memory of its own."""
        plain = np.dtype(("<" if self.kind.little else ">") + self.kind.name)
        flat = np.frombuffer(self.data, plain)
        order: Any = self.order
        return flat.reshape(self.shape, order=order).astype(plain.newbyteorder("="))


class _Call:
    """Something a pickle may call; it has no attributes that a pickle could set."""

    __slots__ = ()


class _NdarrayClass(_Call):
    """Stands for numpy.ndarray; nothing but an argument."""

    __slots__ = ()


class _DtypeClass(_Call):
    """Stands for numpy.dtype."""

    __slots__ = ()

    def __call__(self, name: Any, align: Any = False, copy: Any = False) -> _Kind:
        return _Kind(name)


class _Reconstruct(_Call):
    """Stands for the function that makes an empty array, which its state then fills."""

    __slots__ = ()

    def __call__(self, kind: Any, shape: Any, typecode: Any) -> _Array:
        if not isinstance(kind, _NdarrayClass):
            raise pickle.UnpicklingError("an array of another class")
        return _Array()


class _Encode(_Call):
    """Stands for _codecs.encode: how newer Pythons write bytes into pickles for older ones."""

    __slots__ = ()

    def __call__(self, text: Any, encoding: Any = "latin1") -> bytes:
        if type(text) is not str or encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError(f"bytes in {encoding!r}")
        return text.encode("latin1")


_KNOWN: dict[tuple[str, str], _Call] = {
    ("_codecs", "encode"): _Encode(),
    ("numpy", "ndarray"): _NdarrayClass(),
    ("numpy", "dtype"): _DtypeClass(),
    ("numpy.core.multiarray", "_reconstruct"): _Reconstruct(),
    ("numpy._core.multiarray", "_reconstruct"): _Reconstruct(),
}


class _Unpickler(pickle._Unpickler):
    """Knows five names and nothing that runs."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _KNOWN[module, name]
