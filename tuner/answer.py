"""A probe's answer, which is anyone's: what is not whole and strictly typed is refused; what is odd is marked."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner import chain, engine, probing, verify
from tuner.contract import Contract
from tuner.errors import RequestError, VoltuneError
from tuner.probing import LOADS, SCHEMA, Kit

Check = Callable[[object], bool]
_US = 1e7  # at most: ten seconds


# What may stand in a file


def _number(low: float, high: float) -> Check:
    return lambda value: type(value) in (int, float) and low <= value <= high  # type: ignore[operator]


def _integer(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value <= high


def _text(most: int) -> Check:
    return lambda value: isinstance(value, str) and len(value) <= most and value.isprintable()


def _lines(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 2000 and value.replace("\n", "").isprintable()


def _date(value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value) is not None


def _record(checks: Mapping[str, Check]) -> Check:
    return lambda value: (
        isinstance(value, dict)
        and value.keys() == checks.keys()
        and all(check(value[name]) for name, check in checks.items())
    )


def _list(check: Check, most: int) -> Check:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(check, value))


def _map(name: Check, check: Check, most: int = 256) -> Check:
    return lambda value: (
        isinstance(value, dict) and len(value) <= most and all(map(name, value)) and all(map(check, value.values()))
    )


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _boolean(value: object) -> bool:
    return type(value) is bool


_SAMPLES = _list(_number(1e-3, _US), 1000)
_CLOCKS = {
    "sm_mhz": _integer(0, 10_000),
    "memory_mhz": _integer(0, 20_000),
    "limits": _list(_text(40), 8),
    "discarded_rounds": _integer(0, 10_000),
}
_GPU = {
    **dict.fromkeys(("name", "driver"), _text(100)),
    **dict.fromkeys(("sms", "l2_bytes", "shared_per_block", "memory_bytes"), _integer(0, 1 << 50)),
    "capability": _list(_integer(0, 100), 2),
}
_KINDS: dict[str, dict[str, Check]] = {
    "header": {
        "schema": lambda value: value == SCHEMA and type(value) is int,
        "kit": lambda value: isinstance(value, dict),
        "code": lambda value: value in ("cubin", "ptx"),
        "gpu": _record(_GPU),
        "date": _date,
        "python": _text(40),
        "numpy": _text(40),
        "engines": _map(_text(40), _text(100)),
    },
    "board": {
        "when": lambda value: value in ("before", "after"),
        "power_w": _or_none(_number(0, 10_000)),
        "power_limit_w": _or_none(_number(0, 10_000)),
        "temperature_c": _or_none(_integer(0, 200)),
        "most_sm_mhz": _or_none(_integer(0, 10_000)),
        "most_memory_mhz": _or_none(_integer(0, 20_000)),
        "ecc": _or_none(_boolean),
        "uncorrected_errors": _or_none(_integer(0, 1 << 62)),
    },
    "empty": {"us": _SAMPLES, **_CLOCKS},
    "bandwidth": {"us": _map(lambda value: value in [str(size) for size in probing.SIZES], _SAMPLES), **_CLOCKS},
    "verdict": {
        "arm": _text(100),
        "rank": _integer(0, 1024),
        "tokens": _integer(1, 1024),
        "case": _text(100),
        "inputs": _text(64),
        "ok": _boolean,
        "output": _text(16),
        "relative_l2": _or_none(_number(0, 1e30)),
        "max_abs": _or_none(_number(0, 1e30)),
        "reasons": _list(_lines, 4),
    },
    "replays": {
        "arm": _text(100),
        "tokens": _integer(1, 1024),
        "runs": _integer(1, 1_000_000),
        "outputs": _map(_text(16), _integer(1, 1_000_000), 16),
    },
    "engine": {
        "arm": lambda value: value in engine.ROUTES,
        "tokens": _integer(1, 1024),
        "case": _text(100),
        "inputs": _text(64),
        "nonfinite": _integer(0, 1 << 40),
        **dict.fromkeys(("relative_l2", "engine_l2", "engine_ulps"), _number(0, 1e30)),
    },
    "no engine": {"arm": lambda value: value in engine.ROUTES, "reason": _lines},
    "cell": {
        "tokens": _integer(1, 1024),
        "routing": _text(100),
        "us": _map(_text(110), _SAMPLES),
        "wrong": _map(_text(110), _lines),
        "layers": _integer(1, 1_000_000),
        "layers_wanted": _integer(1, 1_000_000),
        **_CLOCKS,
    },
    "skipped": {"what": _text(200)},
    "fault": {"what": _text(200), "reason": _lines},
    chain.END: {"seconds": _number(0, 1e6)},
}


@dataclass(frozen=True)
class Cell:
    """us [round] by arm, of one token count and routing."""

    tokens: int
    routing: str
    us: Mapping[str, Sequence[float]]

    def median(self, arm: str) -> float | None:
        return statistics.median(self.us[arm]) if arm in self.us else None

    @property
    def configs(self) -> Iterator[str]:
        """Arms that are kernels of the op: no loads, copy, or engine."""
        return (name for name in self.us if name not in ("copy", *engine.ROUTES) and not name.startswith(LOADS))


@dataclass(frozen=True)
class Answer:
    """A file that is whole as far as it goes. marks: what keeps it from being taken as it stands."""

    path: Path
    kit: Kit
    gpu: str
    code: str
    date: str
    records: tuple[tuple[str, Mapping[str, Any]], ...]
    cells: tuple[Cell, ...]
    marks: tuple[str, ...]

    @property
    def v100(self) -> bool:
        """Whether it says to be of sm_70 code on a GPU of that kind."""
        return _of_v100(self.records[0][1])

    @property
    def imitated(self) -> frozenset[str]:
        """Arms on tensor cores, if the GPU has no unit for their m8n8k4, as sm_70 alone has."""
        if self.records[0][1]["gpu"]["capability"] == [7, 0]:
            return frozenset()
        return frozenset(name for name in self.kit.kernels if name.removeprefix(LOADS).startswith("tensor-"))

    @property
    def wrong(self) -> frozenset[str]:
        """Arms with a verdict that is not good, whose replays differed, or that were not fit to be timed somewhere."""
        verdicts = {each["arm"] for kind, each in self.records if kind == "verdict" and not each["ok"]}
        verdicts |= {name for kind, each in self.records if kind == "cell" for name in each["wrong"]}
        return frozenset(verdicts | {each["arm"] for kind, each in self.records if _differs(kind, each)})

    def told(self) -> Iterator[str]:
        """What the file says of the GPU itself, line by line."""
        yield f"{self.gpu}, {self.date}, {'sm_70 code' if self.code == 'cubin' else 'PTX'}, as the file has it"
        for kind, each in self.records:
            if kind == "board":
                facts = [f"{name} {value}" for name, value in each.items() if name != "when" and value is not None]
                yield f"board {each['when']}: {', '.join(facts) or 'NVML told nothing'}"
            elif kind == "empty" and each["us"]:
                yield f"two empty launches as a graph: {statistics.median(each['us']):.2f} us"
            elif kind == "bandwidth":
                rates = [(int(size), int(size) / statistics.median(us) / 1e3) for size, us in each["us"].items() if us]
                yield "read, GB/s: " + ", ".join(f"{size >> 20} MB {rate:.0f}" for size, rate in sorted(rates))
        verdicts = [each["ok"] for kind, each in self.records if kind == "verdict"]
        yield f"verdicts: {sum(verdicts)} of {len(verdicts)} good"
        engines = self.records[0][1]["engines"]
        found = ", ".join(f"{name} {version}" for name, version in engines.items())
        yield f"engines beside it: {found or 'none'}"
        for kind, each in self.records:
            if kind == "engine":
                yield (
                    f"{each['arm']}, C{each['tokens']}: relative L2 {each['relative_l2']:.2g} to float64, "
                    f"{each['engine_l2']:.2g} and {each['engine_ulps']:.2g} f16 spacings to engine numerics (kernels "
                    f"here may have {verify.ENGINE_L2:.2g} and {verify.ENGINE_ULPS:g}); {each['nonfinite']} not finite"
                )
            elif kind == "no engine":
                yield f"{each['arm']} is not timed: {each['reason']}"


def _of_v100(header: Mapping[str, Any]) -> bool:
    return bool(header["gpu"]["capability"] == [7, 0] and header["code"] == "cubin")


def _differs(kind: str, record: Mapping[str, Any]) -> bool:
    return kind == "replays" and (len(record["outputs"]) != 1 or sum(record["outputs"].values()) != record["runs"])


def read(path: Path, contract: Contract) -> Answer:
    """The file of a probe of this contract. Raises RequestError for one that cannot be believed to be that."""
    found = chain.read(path)
    for n, (kind, content) in enumerate(found.records):
        checks = _KINDS.get(kind)
        if checks is None or (kind == "header") != (n == 0):
            raise RequestError(f"{path}, line {n + 1}: a record of kind {kind!r} does not belong there")
        wrong = sorted(checks.keys() ^ content.keys()) or [
            name for name, check in checks.items() if not check(content[name])
        ]
        if wrong:
            raise RequestError(f"{path}, line {n + 1}: missing, unknown or out of range: {', '.join(wrong)[:200]}")
    if not found.records:
        raise RequestError(f"{path}: no record in it: it is no probe's file, or broke off at once")
    header = found.records[0][1]
    kit = _kit(path, header["kit"], contract)
    cells = tuple(_cell(path, kit, content) for kind, content in found.records if kind == "cell")
    places = [(cell.tokens, cell.routing) for cell in cells]
    if len(set(places)) != len(places):
        raise RequestError(f"{path}: a token count and routing stands twice in it")
    strangers = {each["arm"] for kind, each in found.records if kind in ("verdict", "replays")} - set(kit.chosen)
    if strangers:
        raise RequestError(f"{path}: verdicts of what the probe does not carry: {', '.join(sorted(strangers))[:200]}")
    marks = tuple(_marks(found, header, kit))
    return Answer(path, kit, header["gpu"]["name"], header["code"], header["date"], found.records, cells, marks)


def _kit(path: Path, content: Mapping[str, Any], contract: Contract) -> Kit:
    """The kit, if it is one of the contract. Raises RequestError."""
    digest = content.get("contract_digest")
    if digest != contract.digest():
        raise RequestError(f"{path} is of a contract {str(digest)[:64]!r}, and {contract.name} has {contract.digest()}")
    try:
        kit = Kit.from_dict(content)
        for name in kit.kernels:
            probing.plan_of(contract, name)
        known = kit.contract == contract and set(kit.chosen) <= set(kit.kernels) and len(kit.kernels) <= 200
        texts = (*kit.kernels.values(), *kit.sets.values(), *kit.sets, kit.compiler)
        known = known and all(isinstance(text, str) and text.isprintable() for text in texts)
    except (VoltuneError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"{path}, line 1: its kit is none ({type(error).__name__}: {error})"[:400]) from None
    if not known:
        raise RequestError(f"{path}, line 1: its kit is none: winners without a kernel, or another contract")
    return kit


def _cell(path: Path, kit: Kit, content: Mapping[str, Any]) -> Cell:
    tokens, routed, us = content["tokens"], content["routing"], content["us"]
    routings = [name for name, _ in kit.contract.routings]
    told = [name for name in (*us, *content["wrong"]) if name not in engine.routes(tokens)]
    sound = tokens in kit.contract.levels and routed in routings and sorted(told) == sorted([*kit.kernels, "copy"])
    if not sound or len({len(samples) for samples in us.values()}) != 1 or not min(map(len, us.values())):
        raise RequestError(f"{path}: the timing of C{tokens} {routed} is of no level, routing or kernel of the probe's")
    return Cell(tokens, routed, us)


def _marks(found: chain.Chain, header: Mapping[str, Any], kit: Kit) -> Iterator[str]:
    if not found.whole:
        yield "it breaks off before its end: what would follow is unknown"
    if not _of_v100(header):
        yield "it is no V100's sm_70 code that was timed: no winner of it is proposed for a V100"
    told = {(kind, each["arm"]) for kind, each in found.records if "arm" in each}
    for arm in kit.chosen:
        lacks = [kind for kind in ("verdict", "replays") if (kind, arm) not in told]
        if lacks:
            yield f"no {' and no '.join(lacks)} of {arm} in it"
    skipped = [each["what"] for kind, each in found.records if kind == "skipped"]
    if skipped:
        yield f"no time was left for {len(skipped)} parts, from {skipped[0]} to {skipped[-1]}"
    for kind, each in found.records:
        if kind == "verdict" and not each["ok"]:
            yield f"WRONG on that GPU: {each['arm']}, rank {each['rank']}, {each['case']}: {'; '.join(each['reasons'])}"
        elif _differs(kind, each):
            yield f"runs differ: {each['arm']} gave {len(each['outputs'])} outputs in {each['runs']} replays"
        elif kind == "fault":
            yield f"failed: {each['what']}: {each['reason']}"
        elif kind == "board" and each["uncorrected_errors"]:
            yield f"{each['uncorrected_errors']} memory errors of that board could not be mended"
        elif kind == "cell":
            title = f"C{each['tokens']} {each['routing']}"
            if each["wrong"]:
                first, reason = min(each["wrong"].items())
                yield f"{title}: {len(each['wrong'])} kernels were not fit to be timed, {first}: {reason}"
            if each["discarded_rounds"] or each["limits"]:
                yield (
                    f"{title}: {each['discarded_rounds']} rounds discarded at lowered clocks; "
                    f"limits: {', '.join(each['limits']) or 'none'}"
                )
            if each["layers"] < each["layers_wanted"]:
                yield f"{title}: not cold: {each['layers']} of {each['layers_wanted']} copies of the weights fitted"
