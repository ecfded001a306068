"""A tuned set is whole, is what its manifest says, renders again to the same bytes, and is never another run's."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes import FEW, FakeEvaluator, FakeVerifier, open_ledger, scattered, timing

from tuner import choose, plan, render, search, space, winners
from tuner.errors import RequestError
from tuner.search import Job
from tuner.winners import Winners

LEVELS = (1, 2, 5)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Winners:
    folder = tmp_path_factory.mktemp("run")
    evaluator = FakeEvaluator(us=scattered)
    with open_ledger(folder, FEW) as ledger:
        job = Job(FEW, LEVELS)
        results = search.tune(job, evaluator, ledger)
        chosen = choose.winners(job, results, evaluator, ledger, FakeVerifier())
        return winners.gather(
            FEW,
            "v100-predicted",
            evaluator,
            chosen,
            registers=lambda config: 60 + config.w13.rows,
            floor=lambda tokens: 3.0004 * tokens,
            toolchain={"nvrtc": "NVRTC 12.9.86"},
            date="2026-11-29",
            ledger=ledger.id,
        )


@pytest.fixture
def folder(tmp_path: Path, tuned: Winners) -> Path:
    winners.write(tuned, tmp_path / "generated" / "v100-predicted")
    return tmp_path / "generated" / "v100-predicted"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_levels_figures_are_of_the_whole_op(tuned: Winners) -> None:
    level, fastest = tuned.levels[5], min(space.candidates(FEW), key=lambda config: scattered(config, 5))
    assert level.config == fastest
    assert level.us == round(scattered(fastest, 5), 3)
    assert level.default_us == round(scattered(space.default(FEW), 5), 3)
    assert level.floor_us == 15.002
    assert level.floor_share == pytest.approx(15.002 / scattered(fastest, 5), rel=1e-4)
    assert level.registers == 60 + fastest.w13.rows
    assert level.timing == json.loads(json.dumps(timing(scattered(fastest, 5)).to_dict()))
    assert (level.ambiguous, level.struck, level.all_experts) == (False, (), None)


def test_a_level_whose_default_failed_or_that_is_ambiguous_says_so(tmp_path: Path) -> None:
    default, fast = space.default(FEW), space.candidates(FEW)[0]
    assert fast != default

    def gathered(evaluator: FakeEvaluator, folder: Path) -> Winners:
        with open_ledger(folder, FEW) as ledger:
            job = Job(FEW, (1,))
            chosen = choose.winners(job, search.tune(job, evaluator, ledger), evaluator, ledger, FakeVerifier())
            return winners.gather(
                *(FEW, "v100-predicted", evaluator, chosen),
                registers=lambda config: 64,
                floor=lambda tokens: 1.0,
                toolchain={},
                date="2026-11-29",
                ledger=ledger.id,
            )

    failed = gathered(FakeEvaluator(us=scattered, failing=lambda config: config == default), tmp_path / "failed")
    assert (failed.levels[1].default_us, failed.levels[1].ambiguous) == (None, False)
    near = gathered(FakeEvaluator(us=lambda c, t: 99.0 if c == fast else 100.0), tmp_path / "near")
    assert (near.levels[1].config, near.levels[1].ambiguous) == (default, True)
    for made, name in ((failed, "failed"), (near, "near")):
        winners.write(made, tmp_path / name / "set")
        again = winners.read(tmp_path / name / "set").levels[1]
        assert (again.default_us, again.ambiguous) == (made.levels[1].default_us, made.levels[1].ambiguous)


def test_what_is_written_reads_back_equal(tuned: Winners, folder: Path) -> None:
    again = winners.read(folder)
    assert winners.manifest(again) == winners.manifest(tuned)
    unsampled = {
        tokens: replace(level, timing={name: value for name, value in level.timing.items() if name != "samples"})
        for tokens, level in tuned.levels.items()
    }
    assert again == replace(tuned, levels=unsampled)


def test_the_manifest_names_the_word_device_toolchain_ledger_and_every_verdict(tuned: Winners, folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    assert (content["word"], content["device"], content["ledger"]) == ("predicted", "V100", tuned.ledger)
    assert content["toolchain"] == {"nvrtc": "NVRTC 12.9.86"}
    assert [level["tokens"] for level in content["levels"]] == list(LEVELS)
    for level in content["levels"]:
        assert [verdict["ok"] for verdict in level["verdicts"]] == [True, True]
        assert level["timing"]["word"] == "predicted"
        assert "samples" not in level["timing"]


def test_a_measured_set_may_carry_the_time_of_all_experts(tuned: Winners, tmp_path: Path) -> None:
    measured = {"us": 99.0, "word": "measured", "samples": [98.0, 99.0, 100.0]}
    winners.write(replace(tuned, levels={1: replace(tuned.levels[1], all_experts=measured)}), tmp_path / "set")
    assert winners.read(tmp_path / "set").levels[1].all_experts == {"us": 99.0, "word": "measured"}


def test_the_manifest_is_stable_text(tuned: Winners) -> None:
    text = winners.manifest(tuned)
    assert text == winners.manifest(tuned)
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"


def test_rendering_again_gives_the_bytes_of_the_folder(folder: Path) -> None:
    texts = winners.rerender(winners.read(folder))
    files = contents(folder)
    del files["manifest.json"]
    assert {name: text.encode() for name, text in texts.items()} == files


def test_a_file_is_named_by_its_template_and_its_own_digest(folder: Path) -> None:
    names = set()
    for path in folder.glob("*.cu"):
        kind, digest = path.stem.rsplit("_", 1)
        names.add(kind)
        assert hashlib.sha256(path.read_bytes()).hexdigest().startswith(digest)
    assert names == {"op", "compact", "w13", "w2"}


def test_levels_that_share_a_configuration_share_files(tuned: Winners, tmp_path: Path) -> None:
    one = replace(tuned, levels={1: tuned.levels[1]})
    same = replace(tuned, levels={1: tuned.levels[1], 2: tuned.levels[1]})
    assert winners.rerender(same).keys() == winners.rerender(one).keys()
    assert len(winners.rerender(one)) == 4


def test_the_kernels_of_a_level_are_its_configurations(tuned: Winners, folder: Path) -> None:
    level = json.loads((folder / "manifest.json").read_text())["levels"][0]
    for name in ("fused", "staged"):
        sources = render.render(plan.make(FEW, tuned.levels[1].config, name))
        assert {stage: (folder / file).read_text() for stage, file in level["kernels"][name].items()} == {
            stage: source.text for stage, source in sources.items()
        }
    assert set(level["kernels"]["fused"]) == {"op"}
    assert set(level["kernels"]) == {"fused", "staged"}


def test_a_flipped_byte_in_a_kernel_is_refused(folder: Path) -> None:
    path = sorted(folder.glob("w2_*.cu"))[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RequestError, match=f"{path.name} has sha256 .* altered"):
        winners.read(folder)


def test_a_missing_kernel_is_refused(folder: Path) -> None:
    path = sorted(folder.glob("w13_*.cu"))[0]
    path.unlink()
    with pytest.raises(RequestError, match=f"{path.name} is missing"):
        winners.read(folder)


@pytest.mark.parametrize("schema", [0, 1, 3, None, "2"])
def test_another_schema_is_refused(folder: Path, schema: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": schema}))
    with pytest.raises(RequestError, match=rf"schema {schema!r}.* reads 2: .*or delete the folder and tune again"):
        winners.read(folder)


def test_a_contract_that_was_changed_in_the_manifest_is_refused(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"hidden": 128', '"hidden": 256'))
    with pytest.raises(RequestError, match="digest"):
        winners.read(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", "[" * 200_000, '{"schema": ' + "9" * 5000 + "}", "NaN"])
def test_a_manifest_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(RequestError, match=r"manifest\.json"):
        winners.read(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "contract, contract_digest"),
        ({"files": 3}, "files"),
        ({"files": {"../w2_0.cu": "0"}}, "files"),
        ({"files": {"w2_0.cu": 0}}, "files"),
        ({"ledger": None}, "ledger"),
        ({"levels": {}}, "levels"),
    ],
)
def test_a_manifest_with_keys_missing_or_of_another_kind_is_refused_by_name(
    tuned: Winners, folder: Path, changes: dict[str, object], named: str
) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes if changes else {"schema": 2}))
    for use in (lambda: winners.read(folder), lambda: winners.check_ours(tuned.ledger, folder)):
        with pytest.raises(RequestError, match=rf"manifest\.json: .*{named}.*delete the folder and tune again"):
            use()


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"w13": {}, "w2": {}, "resident": 512}},
        {"config": {name: value for name, value in space.default(FEW).to_dict().items() if name != "resident"}},
        {"config": {**space.default(FEW).to_dict(), "resident": "512"}},
        # 3 does not divide the steps of K
        {"config": space.parse("simt-t1-k3-u1-r1+simt-t3-k1-u1-r1+m512").to_dict()},
        {"config": 3},
        {"us": None},
        {"us": 0},
        {"us": "12"},
        {"us": -1},
        {"us": True},
        {"timing": {"us": 0}},
        {"tokens": 0},
        {"tokens": 10**9},
        {"tokens": True},
        {"verdicts": []},
        {"verdicts": ["ok"]},
        {"verdicts": [{"ok": False}]},
        {"verdicts": [{"ok": None}]},
        {"all_experts": {}},
        {"default_us": "12"},
        {"default_us": 0},
        {"floor_us": None},
        {"registers": None},
        {"ambiguous": None},
        {"timing": 3},
        {"all_experts": 3},
        {"tokens": "1"},
        {"tokens": None},
        {"verdicts": 3},
        {"verdicts": [{}]},
    ],
)
def test_a_level_that_is_none_is_refused_with_the_manifests_name(folder: Path, changes: dict[str, object]) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    content["levels"][0] |= changes
    path.write_text(json.dumps(content))
    with pytest.raises(RequestError, match=r"manifest\.json: .*cannot be used .*tune again"):
        winners.read(folder)


@pytest.mark.parametrize(
    "name",
    ["tokens", "config", "us", "default_us", "floor_us", "registers", "ambiguous", "timing", "verdicts", "struck"],
)
def test_a_level_that_lacks_a_value_is_refused_with_its_name(folder: Path, name: str) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["levels"][1][name]
    path.write_text(json.dumps(content))
    with pytest.raises(RequestError, match=rf"manifest\.json: .*cannot be used .*{name}.*tune again"):
        winners.read(folder)


def test_a_truncated_manifest_says_why_tune_stops_and_what_to_delete(tuned: Winners, folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RequestError, match=r"whose set the folder holds is not known: restore .* delete the folder"):
        winners.check_ours(tuned.ledger, folder)


def test_a_set_path_that_is_a_file_is_refused(tuned: Winners, tmp_path: Path) -> None:
    (tmp_path / "set").write_text("mine")
    with pytest.raises(RequestError, match=r"set is a file.*move it away"):
        winners.check_ours(tuned.ledger, tmp_path / "set")


def test_a_manifest_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(RequestError, match=r"manifest\.json cannot be read: Is a directory"):
        winners.read(tmp_path)


def test_a_folder_without_a_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no tuned set is there"):
        winners.read(tmp_path)


def test_a_set_of_another_ledger_is_not_overwritten(tuned: Winners, folder: Path) -> None:
    before = contents(folder)
    other = replace(tuned, ledger="3b7e", levels={1: tuned.levels[1]})
    with pytest.raises(RequestError, match=f"{folder.name} holds the set of ledger {tuned.ledger}.*delete the folder"):
        winners.write(other, folder)
    assert contents(folder) == before


def test_a_folder_of_other_files_is_not_written_into(tuned: Winners, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match=r"no manifest\.json"):
        winners.write(tuned, tmp_path)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


def test_the_same_ledger_replaces_its_set_and_drops_kernels_no_level_uses(tuned: Winners, folder: Path) -> None:
    one = replace(tuned, levels={1: tuned.levels[1]}, date="2026-11-30")
    winners.write(one, folder)
    assert winners.read(folder).date == "2026-11-30"
    assert set(contents(folder)) == {*winners.rerender(one), "manifest.json"}


def test_a_users_own_kernels_in_the_folder_stay(tuned: Winners, folder: Path) -> None:
    (folder / "mine.cu").write_text("mine")
    one = replace(tuned, levels={1: tuned.levels[1]})
    winners.write(one, folder)
    assert set(contents(folder)) == {*winners.rerender(one), "manifest.json", "mine.cu"}


def test_an_empty_folder_is_filled(tuned: Winners, tmp_path: Path) -> None:
    winners.write(tuned, tmp_path)
    assert winners.manifest(winners.read(tmp_path)) == winners.manifest(tuned)


def test_a_new_set_that_cannot_be_finished_leaves_nothing(
    tuned: Winners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, done = os.replace, []

    def failing(source: str, target: Path) -> None:
        if len(done) == 3:
            raise OSError("disk full")
        done.append(target)
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="disk full"):
        winners.write(tuned, tmp_path / "set")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("files", [0, 1, 4])
def test_a_replacement_that_stops_anywhere_leaves_the_old_set_whole(
    tuned: Winners, folder: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    before = winners.manifest(winners.read(folder))
    default = space.default(FEW)
    changed = replace(tuned.levels[1], config=default)
    real, done = os.replace, []

    def failing(source: str, target: Path) -> None:
        if len(done) == files:
            raise KeyboardInterrupt
        done.append(target)
        real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(KeyboardInterrupt):
        winners.write(replace(tuned, levels={1: changed}), folder)
    assert winners.manifest(winners.read(folder)) == before
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (lambda content: content.update(word="measured"), "its target is v100-predicted"),
        (lambda content: content.update(device="NVIDIA H200"), "its target is v100-predicted"),
        (lambda content: content.update(files={}), r"its files is \[\]"),
        (lambda content: content["levels"].append(content["levels"][0]), "its levels is"),
        (lambda content: content["levels"][0].update(us=1.0), "its level 1 is"),
    ],
    ids=["word", "device", "files", "level twice", "time"],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    changed: Callable[[dict[str, Any]], None], told: str, folder: Path
) -> None:
    path = folder / winners.MANIFEST
    content = json.loads(path.read_text())
    changed(content)
    path.write_text(json.dumps(content))
    with pytest.raises(RequestError, match=f"{told}.*it was altered"):
        winners.read(folder)
