"""The checked-in sets are whole, are what this version renders, and say of themselves what is true."""

import functools
import json
from pathlib import Path

import pytest

from tuner import build, contract, evidence, inspection, plan, render, winners
from tuner.winners import Winners

GENERATED = Path(__file__).parent.parent / "generated"
FOLDERS = sorted(path.parent for path in GENERATED.glob(f"*/*/{winners.MANIFEST}"))
PREDICTED = [folder for folder in FOLDERS if folder.name == "v100-predicted"]
each_set = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}/{folder.name}")


def test_there_is_a_predicted_set_for_the_main_contract() -> None:
    assert GENERATED / "qwen38-tp4" / "v100-predicted" in PREDICTED


@each_set
def test_the_set_renders_again_to_its_own_bytes_and_holds_no_other_file(folder: Path) -> None:
    texts = winners.rerender(winners.read(folder))
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    manifest = found.pop(winners.MANIFEST)
    found.pop(evidence.FILE, None)
    assert found == {name: text.encode() for name, text in texts.items()}
    assert manifest.decode() == winners.manifest(winners.read(folder))


@each_set
def test_the_sets_contract_is_the_built_in_one_of_that_name(folder: Path) -> None:
    found = winners.read(folder).contract
    assert found == contract.load(folder.parent.name)


@each_set
def test_every_level_has_verdicts_and_all_of_them_are_right(folder: Path) -> None:
    made = winners.read(folder)
    assert made.levels
    assert made.levels.keys() <= set(made.contract.levels)
    for level in made.levels.values():
        assert level.verdicts
        assert all(verdict["ok"] and not verdict["reasons"] for verdict in level.verdicts)


def words(made: Winners) -> set[str]:
    timings = [each for level in made.levels.values() for each in (level.timing, level.all_experts) if each is not None]
    return {made.word, *(timing["word"] for timing in timings)}


@each_set
def test_every_figure_carries_the_folders_word_and_gpu(folder: Path) -> None:
    made = winners.read(folder)
    gpu, word = folder.name.rsplit("-", 1)
    assert made.target == folder.name
    assert words(made) == {word}
    assert gpu.split("-")[0] in made.device.lower()
    assert made.toolchain["compiler"].startswith("NVRTC ")
    assert ("driver" in made.toolchain) == (word == "measured")


@each_set
def test_no_winner_is_slower_than_the_default_or_faster_than_its_bytes(folder: Path) -> None:
    for level in winners.read(folder).levels.values():
        assert level.floor_us <= level.us
        assert level.default_us is None or level.us <= level.default_us


each_predicted = pytest.mark.parametrize("folder", PREDICTED, ids=lambda folder: folder.parent.name)


@each_predicted
def test_the_predicted_winners_build_for_sm_70_without_spills_and_with_the_manifests_registers(folder: Path) -> None:
    made = winners.read(folder)
    for level in made.levels.values():
        image = build.build(render.render(plan.make(made.contract, level.config))["op"])
        assert image.arch == "sm_70"
        assert image.spill_bytes == 0
        assert image.registers == level.registers


@functools.cache
def machine_code(folder: Path) -> list[evidence.Evidence]:
    made = winners.read(folder)
    return inspection.machine_code(made.contract, {n: level.config for n, level in made.levels.items()}, made.device)


@each_predicted
def test_the_machine_code_of_the_predicted_winners_is_what_is_demanded_of_it(folder: Path) -> None:
    found = machine_code(folder)
    assert {each.tokens for each in found} == set(winners.read(folder).levels)
    assert {f"{each.stage} at {each.tokens}: {fault}" for each in found for fault in each.faults} == set()


@each_predicted
def test_no_predicted_winner_takes_more_instructions_for_its_weights_than_recorded(folder: Path) -> None:
    made = winners.read(folder)
    assert evidence.worse(evidence.read(folder), evidence.report(machine_code(folder), made.device)) == []


@each_predicted
def test_the_record_is_of_these_winners(folder: Path) -> None:
    """What fails here only asks for the record to be made again, with the command in CONTRIBUTING."""
    made = winners.read(folder)
    assert evidence.read(folder) == json.loads(json.dumps(evidence.report(machine_code(folder), made.device)))
