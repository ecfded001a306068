"""Evaluators and verdicts that need neither GPU nor compiler."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from small import SMALL

from tuner import search, space
from tuner.contract import Contract
from tuner.errors import BuildFailed, VoltuneError
from tuner.ledger import Ledger
from tuner.measure import Compared, Timing
from tuner.space import Config
from tuner.verify import Verdict

# A contract of few configurations, all of which a test can try.
FEW = replace(SMALL, name="few", hidden=128, intermediate=32)


def timing(us: float) -> Timing:
    return Timing(us, us, us, (us, us), "V100", {}, "predicted")


def landscape(config: Config, tokens: int) -> float:
    """More in flight and eight warps to split K are faster; rows and threads cost a little. No two are alike."""
    tiles = (config.w13, config.w2)
    shape = sum(8 / tile.unroll + abs(tile.split_k - 8) + tile.tiles / 4 + tile.rows / 10 for tile in tiles)
    return 10.0 * tokens + shape + config.resident / 1024 + zlib.crc32(config.key().encode()) / 2**32 / 1000


def scattered(config: Config, tokens: int) -> float:
    """No pattern, no ties, and far apart in the best places: 10 us and up."""
    return 10.0 + tokens + zlib.crc32(config.key().encode()) / 2**32 * 1000


@dataclass
class FakeEvaluator:
    us: Callable[[Config, int], float] = landscape
    failing: Callable[[Config], bool] = lambda config: False
    error: Callable[[], BaseException] = lambda: BuildFailed("ptxas said no")
    word: str = "predicted"
    device: str = "V100"
    calls: list[tuple[int, str]] = field(default_factory=list)

    def evaluate(self, config: Config, tokens: int) -> Timing:
        self.calls.append((tokens, config.key()))
        if self.failing(config):
            raise self.error()
        return timing(self.us(config, tokens))


class ComparingEvaluator(FakeEvaluator):
    """Re-measures to the same times, with an interval `slack` wide to either side of the saving."""

    slack = 0.0
    compared = 0

    def compare(self, configs: Sequence[Config], tokens: int) -> list[Compared]:
        self.compared += 1
        times = [self.us(config, tokens) for config in configs]
        saved = [1 - us / times[0] for us in times]
        return [Compared(timing(us), s - self.slack, s + self.slack) for us, s in zip(times, saved, strict=True)]


def verdict(ok: bool) -> Verdict:
    reasons = () if ok else ("output 0.9 ulp",)
    return Verdict(ok, "emulated on CPU", "rank 0, C1, uniform, gaussian", None, None, reasons)


@dataclass
class FakeVerifier:
    wrong: Callable[[Config], bool] = lambda config: False
    faulting: Callable[[Config], bool] = lambda config: False
    error: Callable[[], VoltuneError] = lambda: BuildFailed("g++ said no")
    calls: list[tuple[str, int]] = field(default_factory=list)

    def __call__(self, config: Config, tokens: int) -> Iterable[Verdict]:
        self.calls.append((config.key(), tokens))
        if self.faulting(config):
            raise self.error()
        yield verdict(True)
        yield verdict(not self.wrong(config))


def open_ledger(folder: Path, contract: Contract, toolchain: str = "NVRTC 12.9.86") -> Ledger:
    circumstances = search.circumstances(contract, FakeEvaluator(), toolchain=toolchain)
    return Ledger.open(
        folder / "ledger.jsonl", contract=contract.digest(), target="v100-predicted", circumstances=circumstances
    )


def keys(contract: Contract) -> list[str]:
    return [config.key() for config in space.candidates(contract)]
