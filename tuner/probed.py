"""Reads a probe's file, which is anyone's: what is not whole and strictly typed is refused; what is odd is marked.

No figure of it becomes more than what it is, someone's word: predictions are set beside it, the model is fitted to it
for the reader to judge, and winners are proposed in print. No set is written: a set's verdicts are of kernels that ran
under the eyes of the version that writes them, and nothing ties these to the GPU they name. To have a measured set, run
`tune` there.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tuner import build, calibrate, chain, choose, measure, model, probing, render
from tuner.build import Image
from tuner.calibrate import FIT_LEVELS, FIT_ROUTING, Level, Observation, Quality
from tuner.contract import Contract
from tuner.errors import BuildFailed, RequestError, VoltuneError
from tuner.model import FITTED, Fit, Resources
from tuner.probing import LOADS, SCHEMA, Kit

Check = Callable[[object], bool]
_US = 1e7  # at most: ten seconds
CELL_HEADERS = ("tokens", "routing", "arm", "predicted us", "measured us", "measured / predicted", "loads alone us")
WINNER_HEADERS = ("tokens", "proposed", "us", "default us", "carried winner us", "saves at least", "remark")


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


@dataclass(frozen=True)
class Probed:
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
        yield f"engines beside it, whose ops were not run: {found or 'none'}"


def _differs(kind: str, record: Mapping[str, Any]) -> bool:
    return kind == "replays" and (len(record["outputs"]) != 1 or sum(record["outputs"].values()) != record["runs"])


def read(path: Path, contract: Contract) -> Probed:
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
    return Probed(path, kit, header["gpu"]["name"], header["code"], header["date"], found.records, cells, marks)


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
    told = [*us, *content["wrong"]]
    sound = tokens in kit.contract.levels and routed in routings and sorted(told) == sorted([*kit.kernels, "copy"])
    if not sound or len({len(samples) for samples in us.values()}) != 1 or not min(map(len, us.values())):
        raise RequestError(f"{path}: the timing of C{tokens} {routed} is of no level, routing or kernel of the probe's")
    return Cell(tokens, routed, us)


def _marks(found: chain.Chain, header: Mapping[str, Any], kit: Kit) -> Iterator[str]:
    if not found.whole:
        yield "it breaks off before its end: what would follow is unknown"
    if header["gpu"]["capability"] != [7, 0] or header["code"] != "cubin":
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


# What it means


@dataclass(frozen=True)
class Proposal:
    """A level's winner by the file: saves: at least this share of the default's time; None where the default stays."""

    tokens: int
    config: str
    us: float
    default_us: float | None
    carried_us: float | None
    saves: float | None
    remark: str

    def cells(self) -> tuple[object, ...]:
        """In the order of WINNER_HEADERS."""
        saves = "" if self.saves is None else f"{self.saves:.1%}"
        return self.tokens, self.config, self.us, self.default_us, self.carried_us, saves, self.remark


@dataclass(frozen=True)
class Findings:
    """What the reading machine makes of a file. rows: of CELL_HEADERS; fit and refitted where it could be fitted."""

    rows: tuple[tuple[object, ...], ...]
    quality: tuple[Quality, ...]
    fit: Fit | None
    refitted: tuple[Quality, ...]
    proposals: tuple[Proposal, ...]
    remarks: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "predicted_against_measured": [dict(zip(CELL_HEADERS, row, strict=True)) for row in self.rows],
            "quality": [str(each) for each in self.quality],
            "fit": None if self.fit is None else asdict(self.fit),
            "refitted": [str(each) for each in self.refitted],
            "proposed": [asdict(each) for each in self.proposals],
            "remarks": list(self.remarks),
        }


def findings(probed: Probed) -> Findings:
    """Predictions, fit and proposals. The kernels are built here: registers are not taken from the file.

    Raises RequestError where the kernels that were timed are not those this version builds; BuildFailed, MissingTool.
    """
    resources = _resources(probed)
    remarks = []
    observed: list[Observation] = []
    try:
        device = model.device(probed.gpu).name
    except RequestError as error:
        remarks.append(f"no prediction: {error}")
    else:
        observed = list(_observations(probed, resources, device))
    quality = calibrate.quality(observed)
    fit, refitted = None, []
    if any(not each.level.held_out for each in observed):
        fit = calibrate.search(observed)
        refitted = calibrate.quality(observed, fit)
    elif observed:
        remarks.append(f"no fit: no timing at {' or '.join(map(str, FIT_LEVELS))} tokens under {FIT_ROUTING} routing")
    v100 = not any(mark.startswith("it is no V100") for mark in probed.marks)
    proposals = tuple(_proposals(probed)) if v100 else ()
    return Findings(tuple(_rows(probed, observed)), tuple(quality), fit, tuple(refitted), proposals, tuple(remarks))


def measurements(probed: Probed) -> str:
    """The medians as a file for `python -m tuner.calibrate`, to be fitted together with others. Raises like `findings`,
    and RequestError for a GPU that is not described."""
    device = model.device(probed.gpu).name
    rows = [
        (each.level.tokens, each.level.routing, each.plan.config.key(), each.us, each.resources)
        for each in _observations(probed, _resources(probed), device)
    ]
    said = {"date": probed.date, "method": f"a probe's answer, {probed.code}, cold CUDA graph; by its sender's word"}
    said["registers and spills"] = f"{probed.kit.compiler} for sm_70"
    return calibrate.text(probed.kit.contract, probed.gpu, said, rows)


def _resources(probed: Probed) -> Mapping[str, Image]:
    kit = probed.kit
    sources = {name: render.render(probing.plan_of(kit.contract, name))["op"] for name in kit.kernels}
    outcomes = build.build_many(list(sources.values()))
    for outcome in outcomes:
        if isinstance(outcome, BuildFailed):
            raise outcome
    built = {name: each for name, each in zip(sources, outcomes, strict=True) if isinstance(each, Image)}
    others = [name for name, image in built.items() if image.digest != kit.kernels[name]]
    if others:
        raise RequestError(
            f"{probed.path} timed other kernels than this version builds ({len(others)} of {len(built)}, by "
            f"{kit.compiler}): read it with the version that made the probe"
        )
    return built


def _observations(probed: Probed, images: Mapping[str, Image], device: str) -> Iterator[Observation]:
    contract = probed.kit.contract
    for cell in probed.cells:
        level = Level(contract, device, cell.tokens, cell.routing)
        for name, samples in cell.us.items():
            if name != "copy" and not name.startswith(LOADS) and name not in probed.wrong:
                made = probing.plan_of(contract, name)
                held = Resources.of(images[name], made.launch("op"), cell.tokens)
                yield Observation(level, made, held, statistics.median(samples))


def _rows(probed: Probed, observed: Sequence[Observation]) -> Iterator[tuple[object, ...]]:
    kit = probed.kit
    for cell in probed.cells:
        carried = {found[cell.tokens]: target for target, found in kit.winners.items() if cell.tokens in found}
        for key in dict.fromkeys([*carried, kit.default]):
            us = cell.median(key)
            of = [
                each
                for each in observed
                if each.plan.config.key() == key
                and (each.level.tokens, each.level.routing) == (cell.tokens, cell.routing)
            ]
            predicted = round(of[0].predicted(FITTED), 2) if of else None
            ratio = us / predicted if us and predicted else None
            label = f"winner of {carried[key]}" if key in carried else "default"
            yield cell.tokens, cell.routing, label, predicted, us, ratio, cell.median(LOADS + key)


def _proposals(probed: Probed) -> Iterator[Proposal]:
    """By the rule of choose.py: the default is replaced only by what is surely faster by its margin."""
    contract, default = probed.kit.contract, probed.kit.default
    shares = dict(contract.routings)
    for tokens in contract.levels:
        cells = [cell for cell in probed.cells if cell.tokens == tokens]
        if {cell.routing for cell in cells} != set(shares):
            continue
        rounds = min(len(samples) for cell in cells for samples in cell.us.values())
        arms = set.intersection(*(set(cell.us) for cell in cells)) - probed.wrong - {"copy"}
        weights = [shares[cell.routing] for cell in cells]
        mixed = {
            name: np.average([cell.us[name][:rounds] for cell in cells], axis=0, weights=weights).tolist()
            for name in arms
            if not name.startswith(LOADS)
        }
        if not mixed:
            continue
        us = {name: float(np.median(samples)) for name, samples in mixed.items()}
        best = min(us, key=lambda name: (us[name], name))
        carried = [us[found[tokens]] for found in probed.kit.winners.values() if found.get(tokens) in us]
        carried_us = min(carried, default=None)
        if default not in us:
            yield Proposal(tokens, best, us[best], None, carried_us, None, "the default failed")
            continue
        saves = measure.saving(mixed[best], mixed[default])[0]
        if best != default and saves >= choose.MARGIN:
            yield Proposal(tokens, best, us[best], us[default], carried_us, saves, "")
        else:
            remark = "" if best == default else f"AMBIGUOUS: {best} looked faster, by less than {choose.MARGIN:.0%}"
            yield Proposal(tokens, default, us[default], us[default], carried_us, None, remark)
