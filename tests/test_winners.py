"""A tuned set is whole, is what its manifest says, renders again to the same bytes, and is never another run's."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeEvaluator, FakeVerifier, open_ledger, scattered
from small import SMALL

from tuner import choose, plan, render, search, space, winners
from tuner.errors import RequestError
from tuner.search import Job
from tuner.winners import Winners

LEVELS = (1, 2, 5)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Winners:
    folder = tmp_path_factory.mktemp("run")
    evaluator = FakeEvaluator(us=scattered)
    with open_ledger(folder, SMALL) as ledger:
        job = Job(SMALL, LEVELS)
        results = search.tune(job, evaluator, ledger)
        chosen = choose.winners(job, results, evaluator, ledger, FakeVerifier())
        return winners.gather(
            SMALL,
            "v100-predicted",
            evaluator,
            chosen,
            registers=lambda stage, config: 98 if stage == "w13" else 82,
            floor=lambda stage, tokens: 2.0 * tokens if stage == "w13" else 1.0 * tokens,
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


def test_a_levels_figures_are_sums_over_its_stages(tuned: Winners) -> None:
    level = tuned.levels[5]
    fastest = [min(scattered(stage, c, 5) for c in space.candidates(SMALL, stage)) for stage in ("w13", "w2")]
    default = space.default(SMALL)
    assert level.us == pytest.approx(sum(fastest))
    assert level.default_us == pytest.approx(scattered("w13", default.w13, 5) + scattered("w2", default.w2, 5))
    assert level.floor_us == pytest.approx(15.0)
    assert level.floor_share == pytest.approx(15.0 / sum(fastest))
    assert (level.stages["w13"].registers, level.stages["w2"].registers) == (98, 82)


def test_a_set_without_a_stages_default_has_no_default_time(tuned: Winners) -> None:
    level = tuned.levels[5]
    stages = {**level.stages, "w2": replace(level.stages["w2"], default_us=None)}
    assert replace(level, stages=stages).default_us is None


def test_what_is_written_reads_back_equal(tuned: Winners, folder: Path) -> None:
    again = winners.read(folder)
    assert winners.manifest(again) == winners.manifest(tuned)
    assert again.levels.keys() == set(LEVELS)
    assert again.levels[5].config == tuned.levels[5].config
    assert again.contract == SMALL


def test_the_manifest_names_the_word_device_toolchain_ledger_and_every_verdict(tuned: Winners, folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_text())
    assert (content["word"], content["device"], content["ledger"]) == ("predicted", "fake GPU", tuned.ledger)
    assert content["toolchain"] == {"nvrtc": "NVRTC 12.9.86"}
    assert [level["tokens"] for level in content["levels"]] == list(LEVELS)
    for level in content["levels"]:
        assert [verdict["ok"] for verdict in level["verdicts"]] == [True, True]
        assert level["stages"]["w13"]["timing"]["word"] == "predicted"
        assert "samples" not in level["stages"]["w13"]["timing"]


def test_a_measured_set_may_carry_timings_of_the_whole_op(tuned: Winners, tmp_path: Path) -> None:
    measured = {"us": 44.0, "word": "measured", "samples": [43.0, 44.0, 45.0]}
    level = replace(tuned.levels[1], whole=measured, all_experts={**measured, "us": 99.0})
    winners.write(replace(tuned, levels={1: level}), tmp_path / "set")
    again = winners.read(tmp_path / "set").levels[1]
    assert again.whole == {"us": 44.0, "word": "measured"}
    assert again.all_experts == {"us": 99.0, "word": "measured"}
    assert winners.read(tmp_path / "set").levels[1].us == pytest.approx(tuned.levels[1].us)


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
    assert names == {"w13", "w2", "compact", "w13_listed", "w2_listed"}


def test_levels_that_share_a_configuration_share_files(tuned: Winners, tmp_path: Path) -> None:
    one = replace(tuned, levels={1: tuned.levels[1]})
    same = replace(tuned, levels={1: tuned.levels[1], 2: tuned.levels[1]})
    assert winners.rerender(same).keys() == winners.rerender(one).keys()
    assert len(winners.rerender(one)) == 5


def test_the_kernels_of_a_level_are_its_configurations(tuned: Winners, folder: Path) -> None:
    level = json.loads((folder / "manifest.json").read_text())["levels"][0]
    sources = render.render(plan.make(SMALL, tuned.levels[1].config))
    for stage in ("w13", "w2"):
        assert (folder / level["kernels"]["fused"][stage]).read_text() == sources[stage].text
    assert set(level["kernels"]["staged"]) == {"compact", "w13", "w2"}


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


@pytest.mark.parametrize("schema", [0, 2, None, "1"])
def test_another_schema_is_refused(folder: Path, schema: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": schema}))
    with pytest.raises(RequestError, match="schema"):
        winners.read(folder)


def test_a_contract_that_was_changed_in_the_manifest_is_refused(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"hidden": 256', '"hidden": 512'))
    with pytest.raises(RequestError, match="digest"):
        winners.read(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
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
    path.write_text(json.dumps(json.loads(path.read_text()) | changes if changes else {"schema": 1}))
    for use in (lambda: winners.read(folder), lambda: winners.check_ours(tuned.ledger, folder)):
        with pytest.raises(RequestError, match=rf"manifest\.json: .*{named}.*delete the folder and tune again"):
            use()


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"w13": {}, "w2": {}}},
        {"config": space.parse("simt-t1-k7-u1-r1+simt-s1-k1-u1-r1").to_dict()},  # 7 does not divide the steps of K
        {"config": 3},
        {"stages": {}},
        {"stages": {"w13": {"us": 1.0}, "w2": {}}},
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


@pytest.mark.parametrize("files", [0, 1, 5])
def test_a_replacement_that_stops_anywhere_leaves_the_old_set_whole(
    tuned: Winners, folder: Path, monkeypatch: pytest.MonkeyPatch, files: int
) -> None:
    before = winners.manifest(winners.read(folder))
    default = space.default(SMALL)
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
