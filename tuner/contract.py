"""The shape contract: what one AWQ mixture-of-experts layer is, and what its kernels are tuned for.

A contract is a TOML file, one of tuner/contracts/ or any path. It is the key of everything downstream: the same shapes
give the same digest, whatever the model is called.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tuner.errors import ContractError

LAYOUTS = ("sm70-u4", "awq")
NUMERICS = ("exact", "engine")
ROUTINGS = ("uniform", "zipf", "round-robin", "single-hot", "hot")
ROUTING_FILES = (".json", ".npy")  # what tuner/routing.py reads
GROUPS = (32, 64, 128)
MAX_ROUTED_ROWS = 1024
BUILTIN_FOLDER = Path(__file__).parent / "contracts"

# Below, no kernel passes: rounding a Gaussian output to f16 alone costs 2.07e-4. Above, a wrong kernel could pass.
TOLERANCE_RANGE = (2.1e-4, 1e-2)
_DEFAULT_TOLERANCE = {"exact": 4e-4, "engine": 2e-3}

# (least, most). The largest expert, 65536 x 131072, is 2^30 words of eight weights: offsets inside one fit 32 bits.
_SIZES = {
    "tensor_parallel": (1, 64),
    "experts": (1, 4096),
    "top_k": (1, 64),
    "hidden": (32, 65536),
    "intermediate": (32, 65536),
}
_MAX_ROUTING_WEIGHT = 1e6  # sums of larger ones overflow sooner or later, and no share needs them

_REQUIRED = object()
# section -> key -> (type, default). None as a default: it follows from other keys.
_KEYS: dict[str, dict[str, tuple[type, object]]] = {
    "": {"name": (str, _REQUIRED), "model": (str, None)} | {key: (int, _REQUIRED) for key in _SIZES},
    "quantization": {
        "method": (str, "awq"),
        "bits": (int, 4),
        "checkpoint_group": (int, _REQUIRED),
        "group": (int, None),
        "zero_point": (bool, True),
    },
    "weights": {"layout": (str, "sm70-u4"), "stats_bytes": (int, None), "interleaved": (bool, None)},
    "tuning": {
        "levels": (list, list(range(1, 9))),
        "numerics": (str, "exact"),
        "tolerance": (float, None),
        "routings": (dict, {"uniform": 1.0}),
    },
}
_TYPE_WORDS = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list of integers",
    dict: "a table of name = weight",
}


@dataclass(frozen=True)
class Gemm:
    """One expert's matrix, K rows by N columns, quantised in groups of `group` consecutive rows."""

    k: int
    n: int
    group: int

    @property
    def groups(self) -> int:
        return self.k // self.group


@dataclass(frozen=True)
class Contract:
    """A valid contract; one that does not divide cannot be made. Raises ContractError with every broken rule."""

    name: str
    model: str
    tensor_parallel: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int  # the whole model's, not a rank's
    checkpoint_group: int  # rows sharing a scale in the checkpoint
    group: int  # rows sharing a scale at run time; divides checkpoint_group
    layout: str  # one of LAYOUTS
    stats_bytes: int  # sm70-u4: bytes a (group, column), 3 = {scale f16, zero u8}, 4 = half2 {s, -z*s}; awq: 0
    interleaved: bool  # sm70-u4: W13 columns are gate 0, up 0, gate 1, ...; else all gate, then all up. awq: False
    levels: tuple[int, ...]  # tokens in a decode step, ascending
    numerics: str  # one of NUMERICS
    tolerance: float  # relative L2 against float64
    routings: tuple[tuple[str, float], ...]  # (name or file, weight), by name; weights sum to 1

    def __post_init__(self) -> None:
        problems = [*_value_problems(self), *_shape_problems(self)]
        if problems:
            raise ContractError(_report(f"contract {self.name!r}", problems))

    @property
    def local_intermediate(self) -> int:
        """Intermediate features on one tensor-parallel rank."""
        return self.intermediate // self.tensor_parallel

    @property
    def max_tokens(self) -> int:
        return self.levels[-1]

    @property
    def w13(self) -> Gemm:
        """Gate and up projection of one rank: [hidden, 2 * local intermediate]."""
        return Gemm(self.hidden, 2 * self.local_intermediate, self.group)

    @property
    def w2(self) -> Gemm:
        """Down projection of one rank: [local intermediate, hidden]."""
        return Gemm(self.local_intermediate, self.hidden, self.group)

    def gemm(self, stage: Literal["w13", "w2"]) -> Gemm:
        """The matrix of a stage."""
        return self.w13 if stage == "w13" else self.w2

    def digest(self) -> str:
        """16 hex digits of everything but name and model."""
        content = {key: value for key, value in self.to_dict().items() if key not in ("name", "model")}
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """The TOML's own structure with every default filled in; from_dict reads it back to an equal contract."""
        return {
            "name": self.name,
            "model": self.model,
            **{key: getattr(self, key) for key in _SIZES},
            "quantization": {
                "method": "awq",
                "bits": 4,
                "checkpoint_group": self.checkpoint_group,
                "group": self.group,
                "zero_point": True,
            },
            "weights": {"layout": self.layout, "stats_bytes": self.stats_bytes, "interleaved": self.interleaved},
            "tuning": {
                "levels": list(self.levels),
                "numerics": self.numerics,
                "tolerance": self.tolerance,
                "routings": dict(self.routings),
            },
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], where: str = "") -> Contract:
        """Contract from the structure of its TOML; `where` opens the message. Raises ContractError."""
        values = _read_keys(content, where or "contract")
        quantization, tuning = values["quantization"], values["tuning"]
        fixed = {"method": "awq", "bits": 4, "zero_point": True}
        problems = [
            f"quantization.{key} = {_toml(quantization[key])}: only {key} = {_toml(value)} is supported"
            for key, value in fixed.items()
            if quantization[key] != value
        ]
        if problems:
            raise ContractError(_report(where or "contract", problems))
        packed = values["weights"]["layout"] == "sm70-u4"
        follows = {  # the keys whose default hangs on others
            "model": values[""]["name"],
            "group": quantization["checkpoint_group"],
            "stats_bytes": 3 if packed else 0,
            "interleaved": packed,
            "tolerance": _DEFAULT_TOLERANCE.get(tuning["numerics"], 4e-4),
        }
        flat = {key: value for table in values.values() for key, value in table.items() if key not in fixed}
        flat |= {key: default for key, default in follows.items() if flat[key] is None}
        flat |= {"levels": tuple(flat["levels"]), "routings": _normalised(flat["routings"])}
        try:
            return cls(**flat)
        except ContractError as error:
            raise ContractError(f"{where}: {error}" if where else str(error)) from None


def builtin() -> dict[str, Contract]:
    """The contracts that come with Voltune, by name, sorted."""
    return {path.stem: _from_file(path) for path in sorted(BUILTIN_FOLDER.glob("*.toml"))}


def load(name_or_path: str) -> Contract:
    """A built-in contract by name, or any contract by path (a text with a slash or ending in .toml).

    Raises ContractError: no such name or file, not TOML, or not a valid contract.
    """
    path = Path(name_or_path)
    if path.suffix == ".toml" or "/" in name_or_path:
        contract = _from_file(path, name_or_path)
        for routing, _ in contract.routings:
            if routing not in ROUTINGS and not Path(routing).is_file():
                raise ContractError(
                    f"{path}: tuning.routings: no file {routing!r} in {Path.cwd()}: record it or drop it"
                )
        return contract
    known = sorted(file.stem for file in BUILTIN_FOLDER.glob("*.toml"))
    if name_or_path not in known:
        hint = _did_you_mean(name_or_path, known)
        raise ContractError(
            f"no built-in contract {name_or_path!r}{hint}; built in: {', '.join(known)}; a path ends in .toml"
        )
    return _from_file(BUILTIN_FOLDER / f"{name_or_path}.toml")


def _from_file(path: Path, given: str = "") -> Contract:
    """The contract in `path`, which the caller wrote as `given`. Raises ContractError."""
    try:
        content = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise ContractError(
            f"{given or path}: no such file; give a contract's TOML file, or a built-in name without folder and .toml"
        ) from None
    except OSError as error:
        raise ContractError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ContractError(f"{path}: not TOML: {error}") from None
    except ValueError:  # Python reads no longer number
        raise ContractError(
            f"{path}: holds an integer of thousands of digits; a contract's sizes are at most {_SIZES['hidden'][1]}"
        ) from None
    except RecursionError:
        raise ContractError(
            f"{path}: nested too deeply; a contract has tables of one level, lists of integers"
        ) from None
    return Contract.from_dict(content, str(path))


def _read_keys(content: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Every section with its defaults; raises ContractError with all unknown and missing keys and all wrong types."""
    problems: list[str] = []
    values: dict[str, dict[str, Any]] = {}
    for section, keys in _KEYS.items():
        table = content.get(section, {}) if section else content
        if not isinstance(table, Mapping):
            problems.append(f"{section} = {_toml(table)}: expected a table [{section}]")
            continue
        prefix = f"{section}." if section else ""
        allowed = [*keys, *([] if section else [name for name in _KEYS if name])]
        problems += [
            f"unknown key {prefix}{key}{_key_hint(key, section, allowed)}" for key in table if key not in allowed
        ]
        values[section] = {}
        for key, (kind, default) in keys.items():
            value = table.get(key, default)
            values[section][key] = value
            if value is _REQUIRED:
                problems.append(f"missing key {prefix}{key}: expected {_TYPE_WORDS[kind]}")
            elif value is not None and not _is(value, kind):
                problems.append(f"{prefix}{key} = {_toml(value)}: expected {_TYPE_WORDS[kind]}")
    if problems:
        raise ContractError(_report(where, problems))
    return values


def _is(value: object, kind: type) -> bool:
    if kind is list:
        return isinstance(value, list) and all(_is(item, int) for item in value)
    if kind is dict:
        return isinstance(value, Mapping) and all(
            isinstance(name, str) and _is(weight, float) for name, weight in value.items()
        )
    if isinstance(value, bool):  # a bool is an int to Python, not to a reader of TOML
        return kind is bool
    if kind is float and isinstance(value, int):
        return abs(value) < 2**53  # beyond, a float would be another number
    if isinstance(value, int) and value.bit_length() > 1024:  # hexadecimal has no limit, but printing has
        return False
    return isinstance(value, kind)


def _key_hint(key: str, section: str, allowed: list[str]) -> str:
    home = next((name for name, keys in _KEYS.items() if key in keys and name != section), None)
    if home is not None:
        return f"; it belongs {f'under [{home}]' if home else 'above the first table'}"
    return _did_you_mean(key, allowed) or f"; expected one of {', '.join(allowed)}"


def _normalised(weights: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """By name, summing to 1; weights that already do stay bit for bit: writing and reading back changes nothing."""
    usable = all(0 < weight <= _MAX_ROUTING_WEIGHT for weight in weights.values())  # else they are refused as written
    total = math.fsum(weights.values()) if usable else 1.0
    divisor = total if abs(total - 1) > 1e-12 else 1.0
    return tuple((name, float(weight) / divisor) for name, weight in sorted(weights.items()))


def _value_problems(c: Contract) -> Iterator[str]:
    """Rules on one value at a time, and on levels against top_k."""
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", c.name) or len(c.name) > 64:
        yield f"name = {c.name!r}: expected at most 64 of a-z, 0-9 and single dashes: it names folders and ops"
    outside = _outside(c)
    clamped = {key: min(max(getattr(c, key), least), most) for key, (least, most) in _SIZES.items()}
    if "experts" in outside:
        clamped["experts"] = max(clamped["experts"], clamped["top_k"])
    clamped["top_k"] = min(clamped["top_k"], clamped["experts"])
    shape = {key: clamped[key] for key in ("tensor_parallel", "hidden", "intermediate")}
    divides = c.checkpoint_group >= 32 and not any(replace(_Shape.of(c), **shape).problems())
    for key in outside:
        advice = f"; nearest valid: {clamped[key]}" if divides or key not in shape else ""
        yield f"{key} = {getattr(c, key)}: expected {_SIZES[key][0]} to {_SIZES[key][1]}{advice}"
    if c.top_k > c.experts and not {"top_k", "experts"} & {*outside}:
        yield f"top_k <= experts: top_k = {c.top_k}, experts = {c.experts}; nearest valid: top_k = {c.experts}"
    for key, value, choices in (("weights.layout", c.layout, LAYOUTS), ("tuning.numerics", c.numerics, NUMERICS)):
        if value not in choices:
            yield f"{key} = {value!r}{_did_you_mean(value, choices)}; expected one of {', '.join(choices)}"
    if c.layout == "sm70-u4" and c.stats_bytes not in (3, 4):
        nearest = 3 if c.stats_bytes < 4 else 4
        yield f"weights.stats_bytes = {c.stats_bytes}: sm70-u4 has 3 or 4 a (group, column); nearest valid: {nearest}"
    if c.layout == "awq" and (c.stats_bytes or c.interleaved):
        yield (
            f"weights.stats_bytes = {c.stats_bytes}, interleaved = {_toml(c.interleaved)}: the awq layout is the "
            "checkpoint's own tensors; leave both keys out"
        )
    yield from _level_problems(c)
    low, high = TOLERANCE_RANGE
    if not low <= c.tolerance <= high:  # NaN lands here too
        yield f"tuning.tolerance = {c.tolerance}: expected {low} (rounding the output to f16 costs that much) to {high}"
    yield from _routing_problems(c.routings)


def _outside(c: Contract) -> list[str]:
    """The sizes out of their range; the rules between sizes are silent about them."""
    return [key for key, (least, most) in _SIZES.items() if not least <= getattr(c, key) <= most]


def _level_problems(c: Contract) -> Iterator[str]:
    levels = list(c.levels)
    valid = sorted({level for level in levels if level >= 1})
    if not levels or levels != valid:
        yield f"tuning.levels = {levels}: expected distinct token counts >= 1, ascending; nearest valid: {valid or [1]}"
    elif "top_k" not in _outside(c) and levels[-1] * c.top_k > MAX_ROUTED_ROWS:
        yield (
            f"levels[-1] * top_k <= {MAX_ROUTED_ROWS}: {levels[-1]} * {c.top_k} = {levels[-1] * c.top_k} routed rows, "
            "more than one CTA compacts in its shared memory; "
            f"nearest valid: a highest level of {MAX_ROUTED_ROWS // c.top_k}"
        )


def _routing_problems(routings: tuple[tuple[str, float], ...]) -> Iterator[str]:
    if not routings:
        yield f"tuning.routings is empty: expected one or more of {', '.join(ROUTINGS)}, or a recorded file"
    for name, weight in routings:
        # Whether a file exists is asked where a contract file is loaded, not where a manifest that carries one is read
        # on another machine.
        if name not in ROUTINGS and Path(name).suffix not in ROUTING_FILES:
            yield (
                f"tuning.routings.{name}{_did_you_mean(name, ROUTINGS)}; expected one of {', '.join(ROUTINGS)}, "
                f"or the path of a recorded {' or '.join(ROUTING_FILES)} file"
            )
        if not 0 < weight <= _MAX_ROUTING_WEIGHT:  # NaN lands here too
            yield f"tuning.routings.{name} = {weight}: expected a weight > 0, at most {_MAX_ROUTING_WEIGHT:.0e}"


@dataclass(frozen=True)
class _Shape:
    """The numbers the divisibility rules speak of, by themselves so that nearby ones can be tried."""

    tensor_parallel: int
    group: int
    hidden: int
    intermediate: int
    layout: str
    checkpoint_group: int

    @classmethod
    def of(cls, c: Contract) -> _Shape:
        return cls(c.tensor_parallel, c.group, c.hidden, c.intermediate, c.layout, c.checkpoint_group)

    def problems(self) -> Iterator[str]:
        local = self.intermediate // self.tensor_parallel
        note = f" ({self.intermediate} / {self.tensor_parallel} = {local} a rank)"
        yield from _remainder("hidden % checkpoint_group", self.hidden, self.checkpoint_group)
        yield from _remainder("intermediate % checkpoint_group", self.intermediate, self.checkpoint_group)
        yield from _remainder("intermediate % tensor_parallel", self.intermediate, self.tensor_parallel)
        if self.group not in GROUPS:
            yield f"group in {GROUPS}: group = {self.group}; kernels step through K by 32, a scale serves 128 at most"
            return
        yield from _remainder("checkpoint_group % group", self.checkpoint_group, self.group)
        yield from _remainder("hidden % group", self.hidden, self.group)
        if self.intermediate % self.tensor_parallel == 0:
            yield from _remainder("(intermediate / tensor_parallel) % group", local, self.group, note)
            if self.layout == "sm70-u4":
                yield from _remainder(
                    "(2 * intermediate / tensor_parallel) % 32", 2 * local, 32, " (N of W13, sm70-u4)"
                )
                yield from _remainder("hidden % 32", self.hidden, 32, " (N of W2, sm70-u4)")
            else:
                yield from _remainder("(intermediate / tensor_parallel) % 32", local, 32, note)
                yield from _remainder("hidden % 64", self.hidden, 64, " (N of W2, awq)")


def _remainder(rule: str, value: int, divisor: int, note: str = "") -> Iterator[str]:
    if value % divisor:
        yield f"{rule} = 0: {value} % {divisor} = {value % divisor}{note}"


def _shape_problems(c: Contract) -> list[str]:
    if c.checkpoint_group < 32:
        return [
            f"quantization.checkpoint_group = {c.checkpoint_group}: expected at least 32, the smallest the kernels run"
        ]
    if {"tensor_parallel", "hidden", "intermediate"} & {*_outside(c)}:
        return []  # named by their ranges already
    shape = _Shape.of(c)
    problems = list(shape.problems())
    return [*problems, f"nearest valid: {_nearest(shape)}"] if problems else []


def _nearest(shape: _Shape) -> str:
    """The changes of fewest keys that make the shape valid, of keys one is free to choose before the model's own."""
    step = math.lcm(64, shape.checkpoint_group)
    free: dict[str, list[Any]] = {
        "group": sorted(GROUPS, key=lambda g: abs(g - shape.group)),
        "tensor_parallel": sorted((2**n for n in range(7)), key=lambda t: abs(math.log2(t / shape.tensor_parallel))),
        "layout": list(LAYOUTS),
    }
    model: dict[str, list[Any]] = {
        "checkpoint_group": sorted(GROUPS, key=lambda g: abs(g - shape.checkpoint_group)),
        "hidden": _multiples_near(shape.hidden, step, _SIZES["hidden"][1]),
        "intermediate": _multiples_near(
            shape.intermediate,
            math.lcm(step, shape.tensor_parallel * max(shape.group, 32)),
            _SIZES["intermediate"][1],
        ),
    }
    for choices in (free, free | model):
        for count in range(1, len(choices) + 1):
            found = [
                text for keys in itertools.combinations(choices, count) if (text := _first_fit(shape, keys, choices))
            ]
            if found:
                return ", or ".join(found[:2])
    return "none near these numbers: check hidden and intermediate against the model's config.json"


def _first_fit(shape: _Shape, keys: tuple[str, ...], choices: dict[str, list[Any]]) -> str | None:
    for values in itertools.product(*(choices[key] for key in keys)):
        changes = dict(zip(keys, values, strict=True))
        if not any(replace(shape, **changes).problems()):
            return " and ".join(f"{key} = {_toml(value)}" for key, value in changes.items())
    return None


def _multiples_near(value: int, step: int, most: int) -> list[int]:
    down = value // step * step
    near = {max(down, step), down + step}
    return sorted((m for m in near if m <= most), key=lambda m: abs(m - value))


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _toml(value: object) -> str:
    try:
        return json.dumps(value, default=str)
    except ValueError:
        return "an integer too long to print"


def _report(where: str, problems: list[str]) -> str:
    return (
        f"{where}: {problems[0]}"
        if len(problems) == 1
        else f"{where}:" + "".join(f"\n  - {problem}" for problem in problems)
    )
