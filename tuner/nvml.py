"""Clocks, throttling and identity of a GPU, by NVIDIA's management library, which comes with the driver.

Nothing here is needed to run a kernel: where the library is missing or refuses, figures are zero and texts empty.
Constants: https://docs.nvidia.com/deploy/nvml-api, nvmlClockType_t and nvmlClocksEventReasons.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

_SM, _MEMORY = 1, 2
_UNCORRECTED, _EVER = 1, 1  # nvmlMemoryErrorType, nvmlEccCounterType
# Being idle, and clocks that someone set, are no limits.
POWER_CAP = "power cap"
_LIMITS = {
    0x04: POWER_CAP,
    0x08: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
_REASONS = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")  # since R535, before


@dataclass(frozen=True)
class Clocks:
    """A moment's clocks in MHz, and what keeps the GPU from running faster."""

    sm_mhz: int = 0
    memory_mhz: int = 0
    limits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Board:
    """A moment's power in W, temperature in degrees C and highest clocks in MHz; whether memory is checked (ECC), and
    errors it could not mend, ever. None is what the library does not tell."""

    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    most_sm_mhz: int | None = None
    most_memory_mhz: int | None = None
    ecc: bool | None = None
    uncorrected_errors: int | None = None


class Nvml:
    """The GPU at a PCI address such as "0000:3B:00.0"."""

    def __init__(self, pci_bus_id: str, library: str = "libnvidia-ml.so.1") -> None:
        self.uuid, self.driver = "", ""
        self._handle = ctypes.c_void_p()
        self._library: Any = None
        try:
            loaded = ctypes.CDLL(library)
        except OSError:
            return
        bus = pci_bus_id.encode()
        if loaded.nvmlInit_v2() or loaded.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(self._handle)):
            return
        self._library = loaded
        text = ctypes.create_string_buffer(96)
        if not loaded.nvmlDeviceGetUUID(self._handle, text, len(text)):
            self.uuid = text.value.decode()
        if not loaded.nvmlSystemGetDriverVersion(text, len(text)):
            self.driver = text.value.decode()

    def clocks(self) -> Clocks:
        """The present clocks and limits."""
        if self._library is None:
            return Clocks()
        sm, memory, reasons = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
        self._library.nvmlDeviceGetClockInfo(self._handle, _SM, ctypes.byref(sm))
        self._library.nvmlDeviceGetClockInfo(self._handle, _MEMORY, ctypes.byref(memory))
        for name in _REASONS:
            if hasattr(self._library, name):
                getattr(self._library, name)(self._handle, ctypes.byref(reasons))
                break
        limits = tuple(text for bit, text in _LIMITS.items() if reasons.value & bit)
        return Clocks(sm.value, memory.value, limits)

    def board(self) -> Board:
        """The present power and temperature, and what the board is set to."""
        ecc = self._ask("nvmlDeviceGetEccMode", pending=True)
        power, limit = (self._ask(f"nvmlDeviceGet{name}") for name in ("PowerUsage", "EnforcedPowerLimit"))
        return Board(
            power_w=None if power is None else power / 1e3,
            power_limit_w=None if limit is None else limit / 1e3,
            temperature_c=self._ask("nvmlDeviceGetTemperature", 0),
            most_sm_mhz=self._ask("nvmlDeviceGetMaxClockInfo", _SM),
            most_memory_mhz=self._ask("nvmlDeviceGetMaxClockInfo", _MEMORY),
            ecc=None if ecc is None else bool(ecc),
            uncorrected_errors=self._ask("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _EVER),
        )

    def _ask(self, name: str, *which: int, pending: bool = False) -> int | None:
        """One number; `pending`: the function tells what is to come as well, which is not asked for."""
        function = getattr(self._library, name, None)
        found = ctypes.c_ulonglong()  # zero above what a function writes, for all of them are little-endian
        after = (ctypes.byref(ctypes.c_uint()),) if pending else ()
        if function is None or function(self._handle, *which, ctypes.byref(found), *after):
            return None
        return found.value
