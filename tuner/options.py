"""What the command line's options mean: token counts, times, configurations and executors from their texts."""

import contextlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tuner import plan, space, verify, winners
from tuner.contract import Contract
from tuner.device import available
from tuner.errors import InvalidConfig, MissingTool, RequestError
from tuner.measure import DeviceExecutor
from tuner.space import Config
from tuner.verify import HostExecutor, MachineExecutor

ExecutorName = Literal["host", "sass", "device"]
CodeName = Literal["auto", "cubin", "ptx", "native"]

GENERATED = Path(__file__).parent.parent / "generated"
TUNED = Path("tuned")  # below the working folder


def levels(contract: Contract, text: str | None) -> tuple[int, ...]:
    """The contract's token counts that "8", "2-8" or "1,2,4" names, ascending; all of them without a text.

    A range takes the levels within it; its ends need not be levels, but must not lie beyond them. Raises RequestError.
    """
    if text is None:
        return contract.levels
    wanted: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", part)
        if match is None:
            raise RequestError(f"concurrency {text!r}: expected token counts such as 8, 2-8 or 1,2,4")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise RequestError(f"concurrency {part.strip()!r}: the range is reversed; give {last}-{first}")
        within = {level for level in contract.levels if first <= level <= last}
        if not within or first < contract.levels[0] or last > contract.levels[-1]:
            raise RequestError(
                f"concurrency {part.strip()!r}: contract {contract.name} has the levels "
                f"{', '.join(map(str, contract.levels))}; name some of them, or add levels to the contract"
            )
        wanted |= within
    return tuple(sorted(wanted))


def seconds(text: str | None) -> float | None:
    """Seconds of "90s", "10m" or "2h". Raises RequestError."""
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smh])", text)
    if match is None or float(match[1]) == 0:
        raise RequestError(f"budget {text!r}: expected a time such as 90s, 10m or 2h")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]]


@dataclass(frozen=True)
class Configs:
    """A configuration for each level, where they come from in words, and the tuned set if it is one."""

    by_level: Mapping[int, Config]
    origin: str
    folder: Path | None = None


def configs(contract: Contract, key: str | None, folder: Path | None, wanted: Sequence[int]) -> Configs:
    """The configuration `key` names, else the winners of the set in `folder`, else of the first set found of the
    contract, else the default. Raises RequestError where the key or the set does not fit the contract."""
    if key is not None and folder is not None:
        raise RequestError(f"--config {key} and --set {folder} both name configurations: give one of them")
    if key is not None:
        try:
            chosen = space.parse(key)
            plan.make(contract, chosen)
        except InvalidConfig as error:
            raise RequestError(str(error)) from None
        return Configs(dict.fromkeys(wanted, chosen), key)
    default = space.default(contract)
    for place in [folder] if folder else sets(contract):
        found = winners.read(place)
        if found.contract.digest() == contract.digest():
            missing = [str(n) for n in wanted if n not in found.levels]
            origin = f"winners of {place}" + (f", default at {', '.join(missing)}" if missing else "")
            return Configs({n: found.levels[n].config if n in found.levels else default for n in wanted}, origin, place)
        if folder:
            raise RequestError(
                f"{folder} is tuned for a contract with digest {found.contract.digest()}, and {contract.name} has "
                f"{contract.digest()}: give a set of this contract, or --config"
            )
    return Configs(dict.fromkeys(wanted, default), "default")


def v100_set(contract: Contract, folder: Path | None) -> Path:
    """`folder`, or the first set of the contract that is tuned for a V100. Raises RequestError where none is, or where
    `folder` holds another contract's."""
    places = [folder] if folder else [place for place in sets(contract) if place.name.startswith("v100")]
    for place in places:
        if winners.read(place).contract.digest() == contract.digest():
            return place
    if folder:
        raise RequestError(f"{folder} is tuned for another contract than {contract.name}: give a set of this one")
    raise RequestError(
        f"no set of contract {contract.name} is tuned for a V100: run tune --contract {contract.name} first"
    )


def sets(contract: Contract) -> list[Path]:
    """Folders of sets of a contract of that name: a user's own before the checked-in ones, V100s before others."""
    own, ours = ([p.parent for p in base.glob(f"{contract.name}/*/{winners.MANIFEST}")] for base in (TUNED, GENERATED))
    return [p for group in (own, ours) for p in sorted(group, key=lambda p: (not p.name.startswith("v100"), p.name))]


def only(configs: Configs) -> tuple[Config, int]:
    """The one level's configuration and token count. Raises RequestError where there are several."""
    if len(configs.by_level) != 1:
        raise RequestError(f"token counts {', '.join(map(str, configs.by_level))}: expected one, such as 4")
    ((tokens, config),) = configs.by_level.items()
    return config, tokens


@contextlib.contextmanager
def executor(name: ExecutorName, code: CodeName) -> Iterator[verify.Executor]:
    """What runs kernels: the CPU, from their source or their sm_70 code, or this machine's GPU.

    Raises MissingTool; RequestError for a code on the CPU.
    """
    if name == "device":
        found, reason = available()
        if not found:
            raise MissingTool(f"{reason}; --executor host emulates without one")
        with DeviceExecutor(None if code == "auto" else code) as device:
            yield device
    elif code != "auto":
        raise RequestError(f"--code {code} says what a GPU runs: give --executor device with it")
    else:
        yield MachineExecutor() if name == "sass" else HostExecutor()


def output_folder(path: Path) -> Path:
    """`path`, where a folder can be made. Raises RequestError where not, before any work is done for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".output-"):
            return path
    except OSError as error:
        raise RequestError(
            f"--output {path}: nothing can be written there ({error.strerror}); give a folder where something can"
        ) from None
