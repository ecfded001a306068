"""GPUs as data, what a kernel takes of them, and how many of its CTAs an SM holds."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from tuner.errors import InvalidConfig, RequestError
from tuner.plan import Launch

WARP = 32


@dataclass(frozen=True)
class Device:
    """A GPU as the model and the plan's validity rules see it; units and sources stand in devices.toml."""

    name: str
    arch: str
    sms: int
    clock_mhz: float
    bandwidth_gbs: float
    stream_gbs: float
    l2_gbs: float
    l2_bytes: int
    latency_ns: float
    l2_latency_ns: float
    shared_per_sm: int
    shared_per_block: int
    shared_reserved: int
    registers_per_sm: int
    registers_per_thread: int
    warps_per_sm: int
    blocks_per_sm: int
    threads_per_block: int
    fp32_lanes: int
    int_lanes: int
    issue_per_clock: int
    launch_us: float


@cache
def devices() -> dict[str, Device]:
    """Every described GPU, by name. Raises RequestError for a table whose keys are not Device's."""
    tables: dict[str, dict[str, Any]] = {}
    wanted = {field.name for field in fields(Device)} - {"name"}
    for name, table in tomllib.loads((Path(__file__).parent / "devices.toml").read_text(encoding="utf-8")).items():
        tables[name] = filled = tables.get(table.pop("like", ""), {}) | table
        if filled.keys() != wanted:
            raise RequestError(f"devices.toml [{name}]: keys differ from Device's: {sorted(filled.keys() ^ wanted)}")
    return {name: Device(name=name, **table) for name, table in tables.items()}


def device(name: str) -> Device:
    """The GPU whose name stands in `name`, which may be a driver's: "Tesla V100-PCIE-32GB", "NVIDIA H200".

    Raises RequestError with the known names.
    """
    known = devices()
    found = [known[key] for key in known if key.lower() in name.lower()]
    if len(found) != 1:
        raise RequestError(
            f"no description of device {name!r}; described: {', '.join(known)}; add a table to tuner/devices.toml"
        )
    return found[0]


class BuiltKernel(Protocol):
    """What the model wants of a build.Image."""

    @property
    def registers(self) -> int: ...
    @property
    def spill_bytes(self) -> int: ...
    @property
    def static_shared_bytes(self) -> int: ...


@dataclass(frozen=True)
class Resources:
    """Registers a thread, shared bytes a CTA (static and dynamic), spill stores and loads in bytes a thread."""

    registers: int
    shared: int
    spill_bytes: int = 0

    @classmethod
    def of(cls, image: BuiltKernel, launch: Launch, tokens: int) -> Resources:
        return cls(image.registers, image.static_shared_bytes + launch.shared.at(tokens), image.spill_bytes)


@dataclass(frozen=True)
class Occupancy:
    """CTAs and warps resident on one SM, and what stops another CTA."""

    blocks: int
    warps: int
    limit: str


def occupancy(dev: Device, threads: int, resources: Resources) -> Occupancy:
    """Resident CTAs by the rules of NVIDIA's occupancy calculator (registers in units of 256 a warp, warps in fours).

    Raises InvalidConfig where not even one CTA fits.
    """
    warps = math.ceil(threads / WARP)
    a_warp = math.ceil(max(resources.registers, 16) * WARP / 256) * 256
    register_warps = dev.registers_per_sm // a_warp // 4 * 4
    shared = math.ceil((resources.shared + dev.shared_reserved) / 256) * 256
    limits = {
        "warps": dev.warps_per_sm // warps,
        "blocks": dev.blocks_per_sm,
        "registers": register_warps // warps,
        "shared memory": dev.shared_per_sm // max(shared, 1),
    }
    limit, blocks = min(limits.items(), key=lambda item: item[1])
    too_large = resources.registers > dev.registers_per_thread or resources.shared > dev.shared_per_block
    if blocks < 1 or too_large or threads > dev.threads_per_block:
        raise InvalidConfig(
            f"a CTA of {threads} threads, {resources.registers} registers a thread and {resources.shared} bytes of "
            f"shared memory does not fit an SM of {dev.name} ({limit}); fewer warps, rows or steps in flight would"
        )
    return Occupancy(blocks, blocks * warps, limit)
