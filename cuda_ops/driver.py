"""CUDA's driver by ctypes: copies in batches, and page-locking of host memory.

Functions are looked up by the version of CUDA that fixes their arguments, never by name alone: the meaning of a plain
name changes with the driver. A batch runs after the earlier work of its stream (`srcAccessOrder` is STREAM), and reads
no source before that.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cuda_ops.dma import CopyPieces

LIBRARY = "libcuda.so.1"
INVALID_VALUE = 1
NOT_SUPPORTED = 801
_FOUND = 0
_IN_STREAM_ORDER = 1
_PORTABLE, _MAPPED = 1, 2


class _Location(ctypes.Structure):
    """CUmemLocation; ignored for page-locked and device memory."""

    _fields_ = (("type", c_uint), ("id", c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", c_uint),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", c_uint),
    )


class _Symbol(NamedTuple):
    """A function of the driver."""

    name: str
    version: int
    """The first CUDA version with these arguments, as 12080."""
    arguments: tuple[Any, ...]


_BATCH = _Symbol(
    "cuMemcpyBatchAsync",
    12080,
    # Targets, sources, sizes, count, attributes, first copy of each, their number, the failed copy, stream.
    (c_void_p, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p, c_size_t, POINTER(c_size_t), c_void_p),
)
_ONE = _Symbol("cuMemcpyAsync", 4000, (c_uint64, c_uint64, c_size_t, c_void_p))
_REGISTER = _Symbol("cuMemHostRegister", 6050, (c_void_p, c_size_t, c_uint))
_UNREGISTER = _Symbol("cuMemHostUnregister", 4000, (c_void_p,))
_SYNCHRONIZE = _Symbol("cuCtxSynchronize", 2000, ())
_DEVICE = _Symbol("cuDeviceGet", 2000, (POINTER(c_int), c_int))
_RETAIN = _Symbol("cuDevicePrimaryCtxRetain", 7000, (POINTER(c_void_p), c_int))
_PUSH = _Symbol("cuCtxPushCurrent", 4000, (c_void_p,))
_POP = _Symbol("cuCtxPopCurrent", 4000, (POINTER(c_void_p),))
_NEEDED = (_ONE, _REGISTER, _UNREGISTER, _SYNCHRONIZE, _DEVICE, _RETAIN, _PUSH, _POP)


class DriverError(RuntimeError):
    """The driver refused a call."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what}: CUDA error {code}")
        self.code = code


class Driver:
    """See `cuda_ops.dma.Memcpy` for the copies."""

    def __init__(self, library: Any) -> None:
        """`library`: libcuda, loaded by ctypes. Raises OSError if required functions are missing."""
        try:
            self._look_up = library.cuGetProcAddress_v2
        except AttributeError:
            raise OSError("the driver is older than CUDA 12 (no cuGetProcAddress_v2)") from None
        self._look_up.argtypes = (c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int))
        self._batch = self._find(_BATCH)
        self._calls = {symbol.name: self._find(symbol) for symbol in _NEEDED}
        """Functions by name."""
        if missing := [name for name, found in self._calls.items() if found is None]:
            raise OSError(f"the driver lacks {', '.join(missing)}")
        self._attributes = _Attributes(_IN_STREAM_ORDER)
        self._first = c_size_t(0)
        self.why_single = "" if self._batch else "the driver is older than CUDA 12.8"
        """The reason why copies are made one by one; empty if they are not."""

    def _find(self, symbol: _Symbol) -> Any:
        found, status = c_void_p(), c_int(-1)
        code = self._look_up(
            symbol.name.encode(), ctypes.byref(found), symbol.version, 0, ctypes.byref(status)
        )
        if code or status.value != _FOUND or not found.value:
            return None
        return ctypes.CFUNCTYPE(c_int, *symbol.arguments)(found.value)

    def probe(self, pieces: CopyPieces, stream: Any) -> None:
        """Try a batch of copies, at the start: if this driver refuses it, copies are made one by one from then on.

        Raises DriverError if it refuses these as well.
        """
        code = self._submit(pieces, stream)[0] if self._batch else 0
        if code in (INVALID_VALUE, NOT_SUPPORTED):
            self._batch, self.why_single = None, f"the driver refuses batches (CUDA error {code})"
        if self._batch is None or code:
            self.copy(pieces, stream)

    def copy(self, pieces: CopyPieces, stream: Any) -> None:
        """See `cuda_ops.dma.Memcpy`. Raises DriverError."""
        if self._batch is None:
            self._copy_singly(pieces, stream)
            return
        code, wrong = self._submit(pieces, stream)
        if code == INVALID_VALUE:
            # Not an incapable driver, or `probe` would have noticed, but a wrong argument.
            raise DriverError(f"cuMemcpyBatchAsync refused {_described(pieces, wrong)}, which is a bug", code)
        if code:
            raise DriverError(f"cuMemcpyBatchAsync of {len(pieces.sizes)} copies", code)

    def _submit(self, pieces: CopyPieces, stream: Any) -> tuple[int, int]:
        """Return the driver's answer, and the copy that it considers wrong."""
        targets, sources, sizes = (np.ascontiguousarray(each, np.uint64) for each in pieces)
        wrong = c_size_t(sizes.size)
        code = self._batch(
            targets.ctypes.data,
            sources.ctypes.data,
            sizes.ctypes.data,
            sizes.size,
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._first),
            1,
            ctypes.byref(wrong),
            stream.cuda_stream,
        )
        return int(code), int(wrong.value)

    def _copy_singly(self, pieces: CopyPieces, stream: Any) -> None:
        for index, (target, source, size) in enumerate(zip(*(each.tolist() for each in pieces), strict=True)):
            code = self._calls[_ONE.name](target, source, size, stream.cuda_stream)
            if code:
                raise DriverError(f"cuMemcpyAsync refused {_described(pieces, index)}", code)

    def locker(self, device: int) -> GpuLocker:
        """Return the page-locker of host memory for a GPU, by its number. Raises DriverError without its context."""
        return GpuLocker(self._calls, device)


class GpuLocker:
    """Page-locks host memory for a GPU; see `cuda_ops.host_memory.PageLocker`.

    Both calls need a context. Memory is released by any thread, which may have none, or that of another GPU; so the
    one of this GPU, which is also torch's, is made current for them.
    """

    def __init__(self, calls: Mapping[str, Any], device: int) -> None:
        """`calls`: the driver's functions by name."""
        self._calls, handle, self._context = calls, c_int(), c_void_p()
        code = calls[_DEVICE.name](ctypes.byref(handle), device)
        code = code or calls[_RETAIN.name](ctypes.byref(self._context), handle)
        if code:
            raise DriverError(f"cuDevicePrimaryCtxRetain of GPU {device}", code)

    @contextmanager
    def _current(self) -> Iterator[None]:
        if code := self._calls[_PUSH.name](self._context):
            raise DriverError("cuCtxPushCurrent", code)
        try:
            yield
        finally:
            self._calls[_POP.name](ctypes.byref(c_void_p()))

    def register(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory, for copies and kernels of any GPU. Raises DriverError."""
        with self._current():
            code = self._calls[_REGISTER.name](address, num_bytes, _PORTABLE | _MAPPED)
        if code:
            raise DriverError(f"cuMemHostRegister of {num_bytes:,} bytes", code)

    def unregister(self, addresses: Sequence[int]) -> None:
        """Undo `register`, once all work submitted to the GPU has ended. Raises DriverError."""
        with self._current():
            codes = [self._calls[_SYNCHRONIZE.name]()]
            codes += [self._calls[_UNREGISTER.name](address) for address in addresses]
        if code := next(filter(None, codes), 0):
            raise DriverError("cuMemHostUnregister", code)


def _described(pieces: CopyPieces, index: int) -> str:
    if not 0 <= index < pieces.sizes.size:
        return f"a call of {pieces.sizes.size} copies"
    target, source, size = (int(each[index]) for each in pieces)
    return f"copy {index} of {pieces.sizes.size}, {size:,} bytes from {source:#x} to {target:#x}"


@cache
def load() -> Driver:
    """Load the driver of this machine. Raises OSError, with the reason, if there is no usable one."""
    return Driver(ctypes.CDLL(LIBRARY))
