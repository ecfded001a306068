"""The model against measurements: the files of tests/data replayed, and the fit that made its numbers."""

import json
import statistics
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest

from tuner import calibrate, contract, items, model, space
from tuner.calibrate import Observation, Quality
from tuner.errors import RequestError

DATA = Path(__file__).parent / "data"
FILES = sorted(DATA.glob("*.csv"))
QWEN = contract.load("qwen38-tp4")
KEY = "tensor-t1-k8-u5-r8+tensor-t8-k1-u5-r4+m512"
HEADER = f"# contract: qwen38-tp4\n# device: NVIDIA H200\n{','.join(calibrate.COLUMNS)}\n"


@cache
def observations() -> tuple[Observation, ...]:
    return tuple(calibrate.read(FILES))


@cache
def held_out() -> tuple[Quality, ...]:
    return tuple(each for each in calibrate.quality(observations()) if each.level.held_out)


def test_there_are_two_hundred_measurements_and_levels_that_were_not_fitted() -> None:
    assert len(observations()) >= 200
    assert {(each.level.tokens, each.level.routing) for each in held_out()} >= {
        (2, "uniform"),
        (8, "uniform"),
        (8, "hot"),
    }


def test_kernels_of_levels_that_were_not_fitted_are_ranked_as_measured() -> None:
    print("\n" + "\n".join(str(each) for each in calibrate.quality(observations())))
    assert statistics.median(each.spearman for each in held_out()) >= 0.6
    assert min(each.spearman for each in held_out()) >= 0.6


def test_the_models_favourites_hold_one_within_a_twentieth_of_the_measured_best() -> None:
    assert [str(each) for each in held_out() if each.regret > 0.05] == []


def test_the_median_error_of_levels_that_were_not_fitted_is_within_a_tenth_and_of_none_beyond_a_fifth() -> None:
    errors = [each.error for each in held_out()]
    assert statistics.median(errors) <= 0.10
    assert max(errors) <= 0.20


def test_later_kernels_that_nothing_was_fitted_to_are_ranked_as_measured() -> None:
    found = calibrate.quality(calibrate.read(sorted((DATA / "unfitted").glob("*.csv"))))
    print("\n" + "\n".join(str(each) for each in found))
    assert sum(each.kernels for each in found) >= 200
    assert min(each.spearman for each in found) >= 0.6
    assert [str(each) for each in found if each.regret > 0.05] == []
    assert statistics.median(each.error for each in found) <= 0.10
    assert max(each.error for each in found) <= 0.20


def test_the_models_numbers_are_those_of_the_fit() -> None:
    fitted = [each for each in observations() if not each.level.held_out]
    least = calibrate.loss(fitted, model.FITTED)
    for name, value in asdict(model.FITTED).items():
        for factor in (0.8, 1.25):
            low, high = calibrate.BOUNDS.get(name, (0.0, 1e9))
            moved = replace(model.FITTED, **{name: min(high, max(low, value * factor))})
            assert calibrate.loss(fitted, moved) > 0.99 * least, name


def test_a_search_finds_less_loss_and_sees_no_level_that_is_held_out() -> None:
    some = observations()[::9]
    fitted = [each for each in some if not each.level.held_out]
    start = replace(model.FITTED, dependent=6.0)
    found = calibrate.search(some, start, rounds=1)
    assert calibrate.loss(fitted, found) < calibrate.loss(fitted, start)
    assert calibrate.search(fitted, start, rounds=1) == found
    with pytest.raises(RequestError, match="nothing to fit"):
        calibrate.search([each for each in some if each.level.held_out])


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),  # 1 - 6 * 2 / (4 * 15)
        ([1, 1, 2], [1, 2, 3], 3**0.5 / 2),  # ranks 1.5, 1.5, 3
        ([1, 2, 3], [5, 5, 5], 0.0),
    ],
)
def test_spearman_is_the_correlation_of_ranks(a: list[float], b: list[float], expected: float) -> None:
    assert calibrate.spearman(a, b) == pytest.approx(expected)


def test_configurations_of_one_kernel_count_once_with_their_mean(tmp_path: Path) -> None:
    file = tmp_path / "some.csv"
    rows = [(KEY, 10.0), (KEY.replace("m512", "m640"), 12.0), (KEY.replace("m512", "m768"), 15.0)]
    file.write_text(HEADER + "".join(f"4,uniform,{key},{us},128,0,9000\n" for key, us in rows))
    found = calibrate.read([file])
    assert [each.us for each in found] == [11.0, 15.0]  # 256 threads: two CTAs an SM, and three
    assert found[0].resources == model.Resources(128, 9000, 0)
    assert str(found[0].level) == "qwen38-tp4, H200, 4 tokens, uniform"


def test_a_v100s_kernels_are_predicted_by_what_their_code_does(tmp_path: Path) -> None:
    file = tmp_path / "some.csv"
    good, spills = "tensor-t1-k8-u2-r8+tensor-t8-k1-u5-r4+m512", KEY
    rows = f"4,uniform,{good},50.0,128,0,9000\n4,uniform,{spills},60.0,128,144,9000\n"
    file.write_text(HEADER + rows)
    assert [each.work for each in calibrate.read([file])] == [None, None]
    file.write_text(HEADER.replace("NVIDIA H200", "Tesla V100-PCIE-32GB") + rows)
    counted, assumed = calibrate.read([file])
    assert counted.work is not None
    assert counted.work.basis == items.BASIS
    assert counted.predicted(model.FITTED) != replace(counted, work=None).predicted(model.FITTED)
    assert assumed.work is None


@pytest.mark.parametrize("text", ["", "tokens,us\n1,2\n", HEADER, HEADER.replace("spill_bytes,", "") + "1,u,k,1,2,3\n"])
def test_a_file_without_its_header_or_rows_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(RequestError, match=r"bad\.csv: expected"):
        calibrate.read([file])


def ledger(tmp_path: Path, **timing: object) -> Path:
    path = tmp_path / "ledger.jsonl"
    header = {"kind": "header", "version": 1, "contract": QWEN.digest(), "target": "H200"}
    about = {"us": 17.0, "device": "sm_90 build on NVIDIA H200", "word": "measured", "details": {}}
    trial = {"kind": "trial", "tokens": 4, "key": KEY, "timing": {**about, **timing}}
    failed = {"kind": "trial", "tokens": 4, "key": KEY, "timing": None, "failure": {"class": "BuildFailed"}}
    path.write_text("".join(json.dumps(row) + "\n" for row in (header, trial, failed)))
    return path


def test_a_ledgers_trials_become_a_file_with_what_their_kernels_take(tmp_path: Path) -> None:
    file = tmp_path / "more.csv"
    routed = {"us_by_routing": {"uniform": 16.87, "zipf": 17.5}}
    calibrate.main(["import", str(ledger(tmp_path, details=routed)), str(file)])
    found = calibrate.read([file])
    assert [(each.level.routing, each.us) for each in found] == [("uniform", 16.87), ("zipf", 17.5)]
    # What NVRTC makes of this kernel, as in the checked-in measurements.
    assert {(each.resources.registers, each.resources.spill_bytes) for each in found} == {(126, 0)}
    assert space.parse(KEY) == found[0].plan.config


@pytest.mark.parametrize(
    ("timing", "message"),
    [
        ({"word": "predicted"}, "expected measured trials"),
        ({"details": {}}, "does not tell the contract's routings apart"),
    ],
)
def test_a_ledger_of_something_else_is_refused(tmp_path: Path, timing: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        calibrate.from_ledger(ledger(tmp_path, **timing))


def test_a_ledger_of_an_unknown_contract_asks_for_its_file(tmp_path: Path) -> None:
    path = ledger(tmp_path)
    path.write_text(path.read_text().replace(QWEN.digest(), "0" * 16))
    with pytest.raises(RequestError, match="not built in; give its file"):
        calibrate.from_ledger(path)


def test_a_report_has_a_line_for_each_level(capsys: pytest.CaptureFixture[str]) -> None:
    calibrate.main(["report", *map(str, FILES)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len({each.level for each in observations()})
    assert sum(line.startswith("held out") for line in lines) == len(held_out())
