"""What a probe's answer means: predictions beside what was measured, the model fitted to it, winners that would follow.

No figure of it becomes more than what it is, someone's word. Winners are proposed in print, and no set is written: a
set's verdicts are of kernels that ran under the eyes of the version that writes them, and nothing ties an answer to the
GPU it names. To have a measured set, run `tune` there.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tuner import build, calibrate, choose, engine, measure, model, probing, render
from tuner.answer import Answer
from tuner.build import Image
from tuner.calibrate import FIT_LEVELS, FIT_ROUTING, Level, Observation, Quality
from tuner.errors import RequestError
from tuner.model import FITTED, Fit, Resources
from tuner.probing import LOADS

CELL_HEADERS = ("tokens", "routing", "arm", "predicted us", "measured us", "measured / predicted", "loads alone us")
FIT_CELLS = 2  # of FIT_LEVELS, at least: one does not tell what grows with the tokens from what does not
WINNER_HEADERS = ("tokens", "proposed", "us", "default us", "carried winner us", "saves at least", "remark")


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
    """What the reading machine makes of a file. rows: of CELL_HEADERS; fit and refitted where one is worth having."""

    rows: tuple[tuple[object, ...], ...]
    quality: tuple[Quality, ...]
    fit: Fit | None
    refitted: tuple[Quality, ...]
    proposals: tuple[Proposal, ...]
    remarks: tuple[str, ...]
    observed: tuple[Observation, ...]  # what predictions could be set beside: none of a GPU that is not described

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


def findings(answer: Answer) -> Findings:
    """Predictions, fit and proposals. The kernels are built here: registers are not taken from the file.

    Raises RequestError where the kernels that were timed are not those this version builds; BuildFailed, MissingTool.
    """
    resources = _resources(answer)
    remarks = []
    observed: list[Observation] = []
    try:
        device = model.device(answer.gpu).name
    except RequestError as error:
        remarks.append(f"no prediction: {error}")
    else:
        observed = list(_observations(answer, resources, device))
    quality = calibrate.quality(observed)
    fit, why = _fit(observed) if observed else (None, "")
    refitted = calibrate.quality(observed, fit) if fit is not None else []
    if why:
        remarks.append(f"no fit to this file: {why}")
    if answer.code == "ptx":
        remarks.append("PTX was timed: predictions rest on the sm_70 code's registers and instructions, not on its own")
    if answer.imitated:
        remarks.append(
            f"tensor-core kernels are slow on {answer.gpu}, which is no fault of the model: their PTX multiplies by "
            "m8n8k4, a V100's own instruction that newer GPUs only imitate; the model takes them for builds for that "
            "GPU, so that no prediction stands beside them, and neither quality nor fit counts them"
        )
    proposals = tuple(_proposals(answer)) if answer.v100 else ()
    rows = tuple(_rows(answer, observed))
    return Findings(rows, tuple(quality), fit, tuple(refitted), proposals, tuple(remarks), tuple(observed))


def _fit(observed: Sequence[Observation]) -> tuple[Fit | None, str]:
    """A Fit that predicts the levels it was not fitted to better than the model as it is; or None, and why there is
    none. Its numbers are as many as a small file's kernels: where nothing is held out, it may fit anything."""
    held = [each for each in observed if each.level.held_out]
    cells = {each.level for each in observed} - {each.level for each in held}
    if len(cells) < FIT_CELLS or not held:
        levels = ", ".join(map(str, FIT_LEVELS))
        return None, (
            f"{len(cells)} timed at one of {levels} tokens under {FIT_ROUTING} routing and "
            f"{len({each.level for each in held})} elsewhere; a fit takes {FIT_CELLS} of them and one to judge it by"
        )
    fit = calibrate.search(observed)
    before, after = (calibrate.loss(held, each) for each in (FITTED, fit))
    if after >= before:
        return None, f"where not fitted, it is no better than the model as it is (loss {after:.3f}, {before:.3f})"
    return fit, ""


def measurements(answer: Answer, means: Findings) -> str:
    """The medians as a file for `python -m tuner.calibrate`, to be fitted together with others. Raises RequestError for
    a GPU that is not described."""
    model.device(answer.gpu)
    rows = [
        (each.level.tokens, each.level.routing, each.plan.config.key(), each.us, each.resources)
        for each in means.observed
    ]
    said = {"date": answer.date, "method": f"a probe's answer, {answer.code}, cold CUDA graph; by its sender's word"}
    said["registers and spills"] = f"{answer.kit.compiler} for sm_70"
    return calibrate.text(answer.kit.contract, answer.gpu, said, rows)


def _resources(answer: Answer) -> Mapping[str, Image]:
    kit = answer.kit
    sources = {name: render.render(probing.plan_of(kit.contract, name))["op"] for name in kit.kernels}
    built = dict(zip(sources, build.build_all(list(sources.values())), strict=True))
    others = [name for name, image in built.items() if image.digest != kit.kernels[name]]
    if others:
        raise RequestError(
            f"{answer.path} timed other kernels than this version builds ({len(others)} of {len(built)}, by "
            f"{kit.compiler}): read it with the version that made the probe"
        )
    return built


def _observations(answer: Answer, images: Mapping[str, Image], device: str) -> Iterator[Observation]:
    contract, left_out = answer.kit.contract, answer.wrong | answer.imitated
    for cell in answer.cells:
        level = Level(contract, device, cell.tokens, cell.routing)
        for name in cell.configs:
            if name not in left_out:
                made = probing.plan_of(contract, name)
                held = Resources.of(images[name], made.launch("op"), cell.tokens)
                work = calibrate.counted(contract, made.config, device)
                yield Observation(level, made, held, statistics.median(cell.us[name]), work)


def _rows(answer: Answer, observed: Sequence[Observation]) -> Iterator[tuple[object, ...]]:
    kit = answer.kit
    for cell in answer.cells:
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
        for route in engine.ROUTES:
            if route in cell.us:
                yield cell.tokens, cell.routing, route, None, cell.median(route), None, None


def _proposals(answer: Answer) -> Iterator[Proposal]:
    """By the rule of choose.py: the default is replaced only by what is surely faster by its margin."""
    contract, default = answer.kit.contract, answer.kit.default
    shares = dict(contract.routings)
    for tokens in contract.levels:
        cells = [cell for cell in answer.cells if cell.tokens == tokens]
        if {cell.routing for cell in cells} != set(shares):
            continue
        rounds = min(len(samples) for cell in cells for samples in cell.us.values())
        arms = set.intersection(*(set(cell.configs) for cell in cells)) - answer.wrong
        weights = [shares[cell.routing] for cell in cells]
        mixed = {
            name: np.average([cell.us[name][:rounds] for cell in cells], axis=0, weights=weights).tolist()
            for name in arms
        }
        if not mixed:
            continue
        us = {name: float(np.median(samples)) for name, samples in mixed.items()}
        best = min(us, key=lambda name: (us[name], name))
        carried = [us[found[tokens]] for found in answer.kit.winners.values() if found.get(tokens) in us]
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
