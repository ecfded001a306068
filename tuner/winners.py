"""The tuned set of a contract and target: a manifest and the rendered kernels, in a folder that is checked in.

A folder holds `manifest.json` and one .cu file for each different kernel of the levels' winners, named by its template
and the first 16 hex digits of its sha256. The manifest is put in place last and a .cu file is never changed, so that a
reader finds a whole set at every moment.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner import plan, render, space
from tuner.choose import LevelResult
from tuner.contract import Contract
from tuner.errors import InvalidConfig, RequestError
from tuner.plan import PlanName
from tuner.search import Evaluator
from tuner.space import Config

SCHEMA = 2
MANIFEST = "manifest.json"
_KINDS = {
    **dict.fromkeys(("contract_digest", "target", "word", "device", "date", "ledger"), str),
    **dict.fromkeys(("contract", "toolchain", "files"), dict),
    "levels": list,
}
_LEVEL_KINDS = {
    **dict.fromkeys(("tokens", "registers"), int),
    **dict.fromkeys(("us", "floor_us"), float | int),
    **dict.fromkeys(("verdicts", "struck"), list),
    **{"default_us": float | int | None, "ambiguous": bool, "timing": dict, "all_experts": dict | None},
}
PLANS: tuple[PlanName, ...] = ("fused", "staged")  # whose kernels a set holds: the whole op, and the stages alone


@dataclass(frozen=True)
class LevelWinner:
    """The winner of one token count, with every verdict that admitted it; times in microseconds, in the set's word."""

    config: Config
    us: float
    default_us: float | None  # None where the default failed
    floor_us: float  # what the weights' bytes alone take
    registers: int
    ambiguous: bool  # something looked faster than the default, but not by the margin: the default stays
    timing: Mapping[str, Any]  # as the evaluator gave it; the manifest leaves raw samples to the ledger
    verdicts: tuple[Mapping[str, Any], ...]
    struck: tuple[str, ...] = ()  # configurations whose verdict failed
    all_experts: Mapping[str, Any] | None = None  # a Timing of the same tiles walking every expert, where measured

    @property
    def floor_share(self) -> float:
        """Floor over time, 1 at best."""
        return self.floor_us / self.us


@dataclass(frozen=True)
class Winners:
    """A tuned set. `target` is device class and word ("v100-predicted"); `ledger` the id of the ledger it came from."""

    contract: Contract
    target: str
    word: str
    device: str
    levels: Mapping[int, LevelWinner]
    toolchain: Mapping[str, str]
    date: str  # YYYY-MM-DD
    ledger: str


def target(device_name: str, word: str) -> str:
    """A set's folder name: the GPU without brand, memory size and its commonest socket, and the word.

    >>> target("V100-PCIE-32GB", "predicted"), target("NVIDIA H200", "measured"), target("V100-SXM2-32GB", "predicted")
    ('v100-predicted', 'h200-measured', 'v100-sxm2-predicted')
    """
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    slug = re.sub(r"^((nvidia|tesla)-)+|-\d+gb$", "", slug).removesuffix("-pcie")
    return f"{slug}-{word}"


def gather(
    contract: Contract,
    target: str,
    evaluator: Evaluator,
    results: Sequence[LevelResult],
    *,
    registers: Callable[[Config], int],
    floor: Callable[[int], float],
    toolchain: Mapping[str, str],
    date: str,
    ledger: str,
) -> Winners:
    """Winners from chosen levels, in whole nanoseconds, as the manifest has them.

    registers: of a configuration's kernel. floor: in us, of a token count.
    """
    levels = {
        result.tokens: LevelWinner(
            config=result.winner.config,
            us=round(result.winner.us, 3),
            default_us=None if result.default is None else round(result.default.us, 3),
            floor_us=round(floor(result.tokens), 3),
            registers=registers(result.winner.config),
            ambiguous=result.ambiguous,
            timing=result.winner.timing,
            verdicts=result.verdicts,
            struck=result.struck,
        )
        for result in results
    }
    return Winners(contract, target, evaluator.word, evaluator.device, levels, toolchain, date, ledger)


def rerender(winners: Winners) -> dict[str, str]:
    """File name -> text of every kernel of the set, from its contract and configurations alone."""
    return {name: text for level in winners.levels.values() for name, text in _kernels(winners, level)[1].items()}


def write(winners: Winners, folder: Path) -> None:
    """Put the set into `folder`, replacing an earlier one of the same ledger.

    Raises RequestError where the folder holds a set of another ledger, or files that are no set.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            fresh.chmod(0o755)
            _fill(winners, fresh)
            fresh.rename(folder)
        except BaseException:
            shutil.rmtree(fresh)
            raise
        return
    check_ours(winners.ledger, folder)
    _fill(winners, folder)


def read(folder: Path) -> Winners:
    """The set in `folder`.

    Raises RequestError: no set, of another schema, a manifest that is none, or a kernel that is missing or altered.
    """
    content = _manifest(folder)
    for name, digest in content["files"].items():
        path = folder / name
        if not path.is_file():
            raise RequestError(f"{path} is missing, and {MANIFEST} names it: restore it, or tune again")
        found = _digest(path.read_bytes())
        if found != digest:
            raise RequestError(f"{path} has sha256 {found}, not {digest}: it was altered; restore it, or tune again")
    contract = Contract.from_dict(content["contract"], str(folder / MANIFEST))
    if contract.digest() != content["contract_digest"]:
        raise RequestError(
            f"{folder / MANIFEST}: its contract has digest {contract.digest()}, not {content['contract_digest']}: "
            "it was altered, or made by another version of Voltune; tune again"
        )
    try:
        levels = dict(_level(contract, level) for level in content["levels"])
    except (InvalidConfig, KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(
            f"{folder / MANIFEST}: a level in it cannot be used ({type(error).__name__}: {error}): "
            "it was altered; restore it, or tune again"
        ) from error
    _check_agrees(folder, content)
    same = {name: content[name] for name in ("target", "word", "device", "toolchain", "date", "ledger")}
    return Winners(contract=contract, levels=levels, **same)


def _check_agrees(folder: Path, content: Mapping[str, Any]) -> None:
    """Raises RequestError where a manifest says in one place what another denies."""
    levels, word = content["levels"], content["word"]
    tokens = [level["tokens"] for level in levels]
    expected = {
        "target": target(content["device"].rpartition(" on ")[2], word),
        "files": sorted(
            {name for level in levels for kernels in level["kernels"].values() for name in kernels.values()}
        ),
        "levels": sorted(set(tokens)),
    }
    found = {"target": content["target"], "files": sorted(content["files"]), "levels": tokens}
    for level in levels:
        said, timing = f"level {level['tokens']}", level["timing"]
        found[said], expected[said] = (level["us"], timing.get("word")), (round(timing["us"], 3), word)
    wrong = [name for name in expected if found[name] != expected[name]]
    if wrong:
        raise RequestError(
            f"{folder / MANIFEST}: its {wrong[0]} is {found[wrong[0]]}, where the rest of it says "
            f"{expected[wrong[0]]}: it was altered; restore it, or tune again"
        )


def manifest(winners: Winners) -> str:
    """manifest.json: keys sorted, levels ascending, one value a line, so that two sets compare line by line."""
    files: dict[str, str] = {}
    levels = []
    for tokens, level in sorted(winners.levels.items()):
        kernels, texts = _kernels(winners, level)
        files |= {name: _digest(text.encode()) for name, text in texts.items()}
        levels.append(
            {
                "tokens": tokens,
                "config": level.config.to_dict(),
                "kernels": kernels,
                "us": level.us,
                "default_us": level.default_us,
                "floor_us": level.floor_us,
                "floor_share": round(level.floor_share, 4),
                "registers": level.registers,
                "ambiguous": level.ambiguous,
                "timing": _summary(level.timing),
                "verdicts": list(level.verdicts),
                "struck": list(level.struck),
                "all_experts": _summary(level.all_experts),
            }
        )
    content = {
        "schema": SCHEMA,
        "contract": winners.contract.to_dict(),
        "contract_digest": winners.contract.digest(),
        "target": winners.target,
        "word": winners.word,
        "device": winners.device,
        "toolchain": dict(winners.toolchain),
        "date": winners.date,
        "ledger": winners.ledger,
        "levels": levels,
        "files": files,
    }
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _summary(timing: Mapping[str, Any] | None) -> dict[str, Any] | None:
    return None if timing is None else {name: value for name, value in timing.items() if name != "samples"}


def _level(contract: Contract, content: Mapping[str, Any]) -> tuple[int, LevelWinner]:
    """A level of a manifest. What is no level raises InvalidConfig, or what Python does where a value is not there."""
    wrong = [name for name, kind in _LEVEL_KINDS.items() if not isinstance(content[name], kind)]
    times = {"us": content["us"], "floor_us": content["floor_us"], "timing": content["timing"].get("us")}
    times |= {"default_us": content["default_us"]} if content["default_us"] is not None else {}
    times |= {"all_experts": content["all_experts"].get("us")} if content["all_experts"] is not None else {}
    wrong += [name for name, us in times.items() if isinstance(us, bool) or not isinstance(us, int | float) or us <= 0]
    if type(content["tokens"]) is not int or not 1 <= content["tokens"] <= contract.max_tokens:
        wrong.append("tokens")
    if not content["verdicts"] or not all(verdict["ok"] is True for verdict in content["verdicts"]):
        wrong.append("verdicts")
    if wrong:
        raise ValueError(f"expected other values for {', '.join(sorted(set(wrong)))}")
    names = ("us", "default_us", "floor_us", "registers", "ambiguous", "timing", "all_experts")
    level = LevelWinner(
        config=space.from_dict(content["config"]),
        verdicts=tuple(content["verdicts"]),
        struck=tuple(content["struck"]),
        **{name: content[name] for name in names},
    )
    plan.make(contract, level.config)
    return content["tokens"], level


def _kernels(winners: Winners, level: LevelWinner) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Plan -> stage -> file name, and file name -> text."""
    names: dict[str, dict[str, str]] = {}
    texts: dict[str, str] = {}
    for each in PLANS:
        names[each] = {}
        for stage, source in render.render(plan.make(winners.contract, level.config, each)).items():
            names[each][stage] = source.file_name
            texts[source.file_name] = source.text
    return names, texts


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    remedy = "restore the file, or delete the folder and tune again"
    try:
        content = json.loads(path.read_bytes(), parse_constant=_no_number)
    except (FileNotFoundError, NotADirectoryError):
        raise RequestError(
            f"no {MANIFEST} in {folder}: no tuned set is there; run tune, or give another folder"
        ) from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number too long, nested too deeply
        raise RequestError(
            f"{path} is not JSON ({error}), so that whose set the folder holds is not known: {remedy}"
        ) from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}; {remedy}") from None
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise RequestError(
            f"{path} has schema {schema!r}, and this Voltune reads {SCHEMA}: use the version that wrote it, or "
            "delete the folder and tune again"
        )
    wrong = [name for name, kind in _KINDS.items() if not isinstance(content.get(name), kind)]
    if "files" not in wrong and not all(_is_kernel(*item) for item in content["files"].items()):
        wrong.append("files")
    if wrong:
        raise RequestError(f"{path}: missing or not what a manifest has: {', '.join(sorted(wrong))}; {remedy}")
    return dict(content)


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _is_kernel(name: str, digest: object) -> bool:
    """Whether a manifest's entry is of a file in its own folder: `_fill` deletes what a former manifest names."""
    return Path(name).name == name and name.endswith(".cu") and isinstance(digest, str)


def check_ours(ledger: str, folder: Path) -> None:
    """Whether `write` may put a set of that ledger into `folder`. Raises RequestError as it does."""
    if folder.exists() and not folder.is_dir():
        raise RequestError(f"{folder} is a file, and a tuned set is a folder: move it away, or give another folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / MANIFEST).exists():
        raise RequestError(f"{folder} holds files but no {MANIFEST}: move them away, or give another folder")
    owner = _manifest(folder)["ledger"]
    if owner != ledger:
        raise RequestError(
            f"{folder} holds the set of ledger {owner}, and this run's is {ledger}: it is not overwritten; "
            "delete the folder if the new set shall replace it, or give another one"
        )


def _fill(winners: Winners, folder: Path) -> None:
    texts = rerender(winners)
    former = _manifest(folder)["files"] if (folder / MANIFEST).exists() else {}
    for name, text in texts.items():
        write_file(folder / name, text)
    write_file(folder / MANIFEST, manifest(winners))
    for name in former:
        if name not in texts:
            (folder / name).unlink(missing_ok=True)


def write_file(path: Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file so that it is there whole or not at all."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
