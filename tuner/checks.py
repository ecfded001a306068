"""A whole verification as the command line shows it: cases, odd calls and the operator gate, line by line."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tuner import gate, verify
from tuner.contract import Contract
from tuner.errors import LaunchFailed, RequestError, TrialTimeout
from tuner.gate import GateRow
from tuner.options import Configs
from tuner.space import Config
from tuner.verify import HostExecutor, Layers, MachineExecutor, Verdict

_CASE = "{:<44} {:>9} {:>9} {:>7} {:>9} {:>10} {:>11}  {}"
_GATE = "{:>4} {:>6}  {:<12} {:<9} {:<8} {:>10} {:>8} {:>6} {:>10}  {:<5} {}"


@dataclass
class Verification:
    """Runs `sections` and keeps what they found. `replays`: runs of the fused plan on each case.

    Machine code is always compared with its source.

    Raises RequestError for a comparison of the CPU executor with itself.
    """

    contract: Contract
    configs: Configs
    executor: verify.Executor
    edges: bool
    operator_gate: bool
    against_host: bool
    replays: int
    verdicts: list[Verdict] = field(default_factory=list)
    gates: list[GateRow] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # what kept the gate from its rows

    def __post_init__(self) -> None:
        if self.against_host and isinstance(self.executor, HostExecutor):
            raise RequestError(
                "--against-host compares with the bits of the CPU executor: give --executor device with it, or sass"
            )
        self._layers = Layers(self.contract)
        self._host = HostExecutor() if self.against_host or isinstance(self.executor, MachineExecutor) else None

    @property
    def ok(self) -> bool:
        """Whether every case is right, and every row that the gate judges is there and passes."""
        right = bool(self.verdicts) and all(each.ok for each in self.verdicts)
        return right and not self._broken_gates() and not self.faults

    def _broken_gates(self) -> list[GateRow]:
        return [row for row in self.gates if row.gated and not row.ok]

    def sections(self) -> Iterator[tuple[str, Iterator[str]]]:
        """(heading, lines); a line comes when its case is done."""
        yield (
            f"{self.replays} runs of each case, and one stage by stage, must agree to the bit, within "
            f"{self.contract.tolerance:g} relative L2 of float64",
            self._cases(),
        )
        if self.edges:
            yield "Odd ids, maps and padding; the other plans must give the fused plan's bits", self._edges()
        if self.operator_gate:
            yield (
                "The operator gate (max abs 2e-3; 256 ULP unless within 2e-6). Published: two kernels of equal "
                "roundings, stage by stage; here: the op against float64 and against engine roundings, one judged",
                self._gates(),
            )

    def _cases(self) -> Iterator[str]:
        yield _CASE.format("case", "rel. L2", "max abs", "ulp", "hidden L2", "to engine", "digest", "")
        for level, config in self.configs.by_level.items():
            check = partial(verify.verify, self._layers, config, tokens=(level,))
            runs = check(self.executor, orders=tuple(range(self.replays)))
            yield from self._lines(runs, partial(check, orders=(0,)), config)

    def _edges(self) -> Iterator[str]:
        yield _CASE.format("case", "rel. L2", "max abs", "ulp", "hidden L2", "to engine", "digest", "")
        for config in dict.fromkeys(self.configs.by_level.values()):
            check = partial(verify.verify_edges, self._layers, config)
            yield from self._lines(check(self.executor), partial(check, plans=("fused",)), config)

    def _lines(
        self, runs: Iterator[Verdict], again: Callable[[HostExecutor], Iterator[Verdict]], config: Config
    ) -> Iterator[str]:
        others = again(self._host) if self._host else None
        for verdict in runs:
            note = ""
            if others is not None:
                other = next(others)
                same = other.digest == verdict.digest
                note = "same bits on the CPU" if same else "other bits on the CPU, as tensor cores may give"
                if not other.ok or (config.portable_bits and not same):
                    reason = f"{other.executor} gives {other.digest}{'' if other.ok else ', and is wrong'}"
                    verdict = replace(verdict, ok=False, reasons=(*verdict.reasons, reason))
            self.verdicts.append(verdict)
            yield _line(verdict, note)

    def _gates(self) -> Iterator[str]:
        yield _GATE.format(
            *("rank", "tokens", "routing", "stage", "against", "max abs", "max ULP", "signs", "non-finite", "gate"),
            "published",
        )
        for level, config in self.configs.by_level.items():
            try:
                for row in gate.gate(self._layers, config, self.executor, tokens=(level,)):
                    self.gates.append(row)
                    yield _gate_line(row)
            except (LaunchFailed, TrialTimeout) as error:
                self.faults.append(f"C{level}: {error}")
                yield f"FAULT {self.faults[-1]}"

    def summary(self) -> str:
        """The last line."""
        wrong = [each.case for each in self.verdicts if not each.ok]
        text = f"{len(self.verdicts) - len(wrong)} of {len(self.verdicts)} cases right, {self.executor.name}"
        if self.gates:
            judged = sum(row.gated for row in self.gates)
            passed = f"{judged - len(self._broken_gates())} of {judged} judged rows pass"
            text += f"; operator gate: {passed if judged else 'it judges no row of these levels and this contract'}"
        if self.faults:
            text += f"; kernels faulted in the gate at {len(self.faults)} levels"
        return text

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "contract": self.contract.name,
            "executor": self.executor.name,
            "configs": {str(n): config.key() for n, config in self.configs.by_level.items()},
            "origin": self.configs.origin,
            "ok": self.ok,
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
            "gate": [row.to_dict() for row in self.gates],
            "faults": self.faults,
        }


def _gate_line(row: GateRow) -> str:
    d = row.difference
    return _GATE.format(
        *(row.rank, row.tokens, row.routing, row.stage, row.against),
        *(f"{d.max_abs:.3g}", d.max_ulp, d.sign_flips, d.nonfinite + d.missing_inf),
        ("ok" if row.ok else "over") if row.gated else "-",
        "" if row.published is None else f"{row.published[0]:.3g} / {row.published[1]} ULP",
    )


def _line(verdict: Verdict, note: str) -> str:
    d, engine, hidden = verdict.difference, verdict.engine_distance, verdict.hidden
    words = "; ".join(verdict.reasons) if verdict.reasons else note
    return _CASE.format(
        verdict.case,
        "-" if d is None else f"{d.relative_l2:.2e}",
        "-" if d is None else f"{d.max_abs:.2e}",
        "-" if d is None else f"{d.max_scaled_ulp:.3f}",
        "-" if hidden is None else f"{hidden.relative_l2:.1e}",
        "-" if engine is None else f"{engine.relative_l2:.2e}",
        verdict.digest[:10] or "-",
        ("ok" if verdict.ok else "WRONG") + (f"  {words}" if words else ""),
    )
