"""Operands in memory that executors on the CPU share: between guard pages, poisoned, inputs read-only.

In even orders the end of an operand, rounded up to 16 bytes, meets the guard pages, in odd orders its start meets those
below; what is left of its own pages holds 0xFF.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Mapping as Named

import numpy as np

from tuner.errors import LaunchFailed, MissingTool
from tuner.plan import Outputs, Plan, check_counters, resolve

Operands = Named[str, np.ndarray | int | None]

_PAGE = mmap.PAGESIZE
GUARD = 256 << 20  # address space only: an index that is wrong by a few expert strides still meets it
POISON = 0xFF


# ---- guarded memory ------------------------------------------------------------------------------------------------
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000


class Mapping:
    """`nbytes` of memory that worker processes share, between guard pages; freed when the last array over it is."""

    def __init__(self, nbytes: int, flush_right: bool) -> None:
        self.nbytes = nbytes
        self.pages = -(-max(nbytes, 1) // _PAGE) * _PAGE
        private, shared = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
        self._base = self._map(None, self.pages + 2 * GUARD, _PROT_NONE, private)
        weakref.finalize(self, _libc.munmap, self._base, self.pages + 2 * GUARD).atexit = False
        self.first = self._map(self._base + GUARD, self.pages, mmap.PROT_READ | mmap.PROT_WRITE, shared | _MAP_FIXED)
        self.address = self.first + (self.pages - -(-nbytes // 16) * 16 if flush_right else 0)
        self.__array_interface__ = {"data": (self.first, False), "shape": (self.pages,), "typestr": "|u1", "version": 3}

    @staticmethod
    def _map(address: int | None, nbytes: int, protection: int, flags: int) -> int:
        found = _libc.mmap(address, nbytes, protection, flags, -1, 0)
        if found is None or found == ctypes.c_void_p(-1).value:
            raise MissingTool(f"no memory for a buffer of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
        return int(found)

    @property
    def bytes(self) -> np.ndarray:
        """u8 [pages]: the data and what is left of its pages."""
        return np.asarray(self)

    def array(self, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        start = self.address - self.first
        return self.bytes[start : start + self.nbytes].view(dtype).reshape(shape)

    def freeze(self) -> None:
        if _libc.mprotect(self.first, self.pages, mmap.PROT_READ):
            raise MissingTool(f"an input cannot be made read-only: {os.strerror(ctypes.get_errno())}")
        self.__array_interface__["data"] = (self.first, True)

    def touched(self) -> int | None:
        """Where, counted from the data's start, something was written outside the data; None when nothing was."""
        start = self.address - self.first
        for lowest, part in ((0, self.bytes[:start]), (start + self.nbytes, self.bytes[start + self.nbytes :])):
            if (part != POISON).any():
                return lowest + int(np.argmax(part != POISON)) - start
        return None

    def offset(self, address: int) -> int | None:
        """`address` counted from the data's start; None when it is neither in the pages nor in their guards."""
        within = self._base <= address < self._base + self.pages + 2 * GUARD
        return address - self.address if within else None


_guarded: "weakref.WeakValueDictionary[int, Mapping]" = weakref.WeakValueDictionary()


def guard(array: np.ndarray) -> np.ndarray:
    """A read-only copy of `array` between guard pages, which `execute` uses in place instead of copying it again.

    For weights: made once, used by any number of runs, freed with the last array over it. It meets the guard pages at
    its end, and at its start as well if its size is a multiple of the page size, in every order. Raises MissingTool
    when there is no memory for it.
    """
    mapping = _fill(array, flush_right=True)
    _guarded[mapping.address] = mapping
    return mapping.array(array.dtype, array.shape)


def _fill(array: np.ndarray, flush_right: bool) -> Mapping:
    mapping = Mapping(array.nbytes, flush_right)
    start = mapping.address - mapping.first
    mapping.bytes[:start] = POISON
    mapping.bytes[start + array.nbytes :] = POISON
    mapping.array(array.dtype, array.shape)[...] = array
    mapping.freeze()
    return mapping


# ---- operands ------------------------------------------------------------------------------------------------------
class Memory:
    """The operands of one run: a mapping by buffer, and the 64-bit slot that a kernel's argument is read from."""

    def __init__(self, plan: Plan, operands: Operands, tokens: int, flush_right: bool) -> None:
        self.tokens = tokens
        self.flush_right = flush_right
        self.mappings: dict[str, Mapping] = {}
        self.results: dict[str, np.ndarray] = {}
        inputs, self._scalars = resolve(plan, operands, tokens)
        for name, given in inputs.items():
            self._put(name, given)
        for buffer in plan.buffers:
            if buffer.role != "input":
                mapping = self.mappings[buffer.name] = Mapping(buffer.nbytes(tokens), flush_right)
                mapping.bytes[:] = POISON
                result = mapping.array(np.dtype(buffer.dtype), buffer.dimensions(tokens))
                if buffer.role == "counters":
                    result[...] = 0
                self.results[buffer.name] = result

    def slot(self, name: str) -> int:
        if name in self._scalars:
            return self._scalars[name]
        mapping = self.mappings.get(name)
        return mapping.address if mapping else 0

    def _put(self, name: str, array: np.ndarray) -> None:
        mapping = _guarded.get(array.ctypes.data)
        in_place = mapping is not None and mapping.nbytes == array.nbytes and array.flags.c_contiguous
        self.mappings[name] = mapping if mapping and in_place else _fill(array, self.flush_right)

    def place(self, address: int) -> str:
        """What lies at an address, in words."""
        for name, mapping in self.mappings.items():
            offset = mapping.offset(address)
            if offset is not None:
                role = "" if name in self.results else " (an input)"
                return f"{name}{role}, byte {offset} of {mapping.nbytes}"
        if address < 1 << 20:
            return f"address {address:#x}, a null pointer: an absent operand, or shared memory in a launch without any"
        return f"address {address:#x}, which belongs to no operand"

    def outputs(self, plan: Plan) -> Outputs:
        """What the kernels left. Raises LaunchFailed for counters not left zero and outputs left unwritten."""
        check_counters(plan.buffers, self.results)
        for buffer in plan.buffers:
            if buffer.role == "output":
                _check_written(buffer.name, self.results[buffer.name])
        return Outputs({name: array.copy() for name, array in self.results.items()})

    def check_untouched(self, kernel: str) -> None:
        """Raises LaunchFailed where a kernel wrote beside an operand; inputs are read-only."""
        for name in self.results:
            mapping = self.mappings[name]
            touched = mapping.touched()
            if touched is not None:
                where = f"{name}, byte {touched} of {mapping.nbytes}"
                raise LaunchFailed(f"kernel {kernel} wrote outside a buffer: {where}")


def _check_written(name: str, array: np.ndarray) -> None:
    raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1, array.itemsize)
    unwritten = (raw == POISON).all(axis=1)
    if unwritten.any():
        index = tuple(int(i) for i in np.unravel_index(int(np.argmax(unwritten)), array.shape))
        more = f"{int(unwritten.sum()) - 1} more of {array.size} elements"
        raise LaunchFailed(f"unwritten output, still 0xFF bytes: {name}{list(index)} and {more}")
