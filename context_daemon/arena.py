"""The node's page arena: anonymous shared memory that the daemon creates and a worker maps.

A memfd has no name in any file system: it goes with its last holder, so that nothing is left behind by any death, and a new
machine can never find an old one's. A worker opens it through the daemon's entry in /proc, which asks for the same user.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from contextlib import suppress

MIN_BYTES = 1 << 20
_LIBC = ctypes.CDLL(None)  # calls through it run without the interpreter's lock
_MADV_POPULATE_WRITE = 23
_SLABS = 16  # at least so many, so that several layouts share one arena


def slab_bytes(total_bytes: int) -> int:
    """Room for the pages of any usual model (16 tokens of 70B class are 5 MiB), or a part of a small arena."""
    return min(64 << 20, max(MIN_BYTES // _SLABS, total_bytes // _SLABS))


class Arena:
    """`view` is all of it. Pages of memory are taken from the machine as they are first written."""

    def __init__(self, total_bytes: int) -> None:
        """Raises ValueError for a size that holds nothing and OSError when the machine refuses."""
        if total_bytes < MIN_BYTES:
            raise ValueError(f"an arena of {total_bytes} bytes: give at least {MIN_BYTES}")
        self.arena_id = secrets.token_hex(8)
        self.total_bytes = total_bytes
        self._fd = os.memfd_create("tideover-arena", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, total_bytes)
        self._map = mmap.mmap(self._fd, total_bytes)
        self.view = memoryview(self._map)

    @property
    def path(self) -> str:
        """Where a process of the same user on this machine opens it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Whoever still reads a part of it, a write that was cut off say, keeps that part until it lets go."""
        self.view.release()
        with suppress(BufferError):
            self._map.close()
        os.close(self._fd)


class MappedArena:
    """A worker's side of it. Stays readable and writable for as long as it is mapped, also when the daemon is dead."""

    def __init__(self, path: str, total_bytes: int) -> None:
        """Raises OSError when the daemon is gone, is another user's, or lives in another PID namespace."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(descriptor, total_bytes)
        finally:
            os.close(descriptor)
        self.view = memoryview(self._map)

    def populate(self, offset: int, size: int) -> None:
        """Have memory behind a part before it is written: a first write to each 4 KiB costs microseconds, and the engine's
        thread is the wrong one to pay them. Only a hint: an older kernel (before 5.14) leaves it to the first write."""
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map, start))
        _LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(offset + size - start), _MADV_POPULATE_WRITE)
