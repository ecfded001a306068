"""Clocks, throttling and identity of a GPU, by NVIDIA's management library, which comes with the driver.

Nothing here is needed to run a kernel: where the library is missing or refuses, figures are zero and texts empty.
Constants: https://docs.nvidia.com/deploy/nvml-api, nvmlClockType_t and nvmlClocksEventReasons.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

_SM, _MEMORY = 1, 2
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
