"""What the command line's texts mean, and whose configurations are taken."""

from dataclasses import replace
from pathlib import Path

import pytest
from small import SMALL

from tuner import options, space, winners
from tuner.contract import Contract
from tuner.errors import MissingTool, RequestError
from tuner.space import Config
from tuner.verify import HostExecutor
from tuner.winners import LevelWinner, Winners

# SMALL has the levels 1, 2, 5 and 12.
DEFAULT = space.default(SMALL)
OTHER = space.parse("simt-t2-k4-u1-r1+simt-t8-k1-u1-r1+m768")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, (1, 2, 5, 12)),
        ("5", (5,)),
        ("2-5", (2, 5)),
        ("3-11", (5,)),
        ("12,1", (1, 12)),
        (" 1 , 2 - 5,5 ", (1, 2, 5)),
    ],
)
def test_token_counts_are_numbers_ranges_and_lists(text: str | None, found: tuple[int, ...]) -> None:
    assert options.levels(SMALL, text) == found


@pytest.mark.parametrize("text", ["3", "3-4", "0-5", "2-13", "1,7"])
def test_token_counts_the_contract_does_not_have_are_refused(text: str) -> None:
    with pytest.raises(RequestError, match="contract small has the levels 1, 2, 5, 12; name some of them"):
        options.levels(SMALL, text)


def test_a_reversed_range_is_said_to_be_one() -> None:
    with pytest.raises(RequestError, match="concurrency '5-2': the range is reversed; give 2-5"):
        options.levels(SMALL, "1, 5-2")


@pytest.mark.parametrize("text", ["", "two", "1,", "1;2", "-1", "1-2-5", "1.5", "9" * 5000, "²"])
def test_what_is_no_token_count_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="expected token counts such as 8, 2-8 or 1,2,4"):
        options.levels(SMALL, text)


@pytest.mark.parametrize(
    ("text", "found"), [(None, None), ("90s", 90.0), ("10m", 600.0), ("2h", 7200.0), ("1.5m", 90.0)]
)
def test_times_are_in_seconds_minutes_and_hours(text: str | None, found: float | None) -> None:
    assert options.seconds(text) == found


@pytest.mark.parametrize("text", ["", "10", "0s", "0.0h", "-5m", "1e3s", "5 m", "5M", "1" * 400 + "h"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="expected a time such as 90s, 10m or 2h"):
        options.seconds(text)


def put(folder: Path, config: Config, *, contract: Contract = SMALL, levels: tuple[int, ...] = (1, 5)) -> None:
    target = folder.name if "-" in folder.name else "v100-predicted"
    device, word = target.rsplit("-", 1)
    level = LevelWinner(
        config=config,
        us=2.0,
        default_us=2.0,
        floor_us=1.0,
        registers=32,
        ambiguous=False,
        timing={"us": 2.0, "word": word},
        verdicts=({"ok": True},),
    )
    made = Winners(contract, target, word, device, dict.fromkeys(levels, level), {}, "2026-01-01", "id")
    winners.write(made, folder)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Where sets of SMALL are looked for: a user's own, and the checked-in ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "GENERATED", tmp_path / "generated")
    return Path("tuned/small"), tmp_path / "generated/small"


def taken(levels: tuple[int, ...] = (1, 5), key: str | None = None, folder: Path | None = None) -> options.Configs:
    return options.configs(SMALL, key, folder, levels)


def test_without_a_set_every_level_gets_the_default(places: tuple[Path, Path]) -> None:
    assert taken() == options.Configs({1: DEFAULT, 5: DEFAULT}, "default")


def test_a_key_serves_every_level_whatever_sets_there_are(places: tuple[Path, Path]) -> None:
    put(places[0] / "v100-predicted", DEFAULT)
    assert taken(key=OTHER.key()) == options.Configs({1: OTHER, 5: OTHER}, OTHER.key())


def test_a_users_own_set_comes_before_a_checked_in_one_even_of_a_v100(places: tuple[Path, Path]) -> None:
    own, ours = places
    put(ours / "v100-measured", DEFAULT)
    assert taken().origin == f"winners of {ours}/v100-measured"
    put(own / "h200-measured", OTHER)
    assert taken() == options.Configs(
        {1: OTHER, 5: OTHER}, "winners of tuned/small/h200-measured", Path("tuned/small/h200-measured")
    )


def test_a_v100s_set_comes_first_and_a_measured_one_before_a_predicted_one(places: tuple[Path, Path]) -> None:
    own, _ = places
    put(own / "a100-measured", DEFAULT)
    put(own / "v100-predicted", DEFAULT)
    assert taken().origin == "winners of tuned/small/v100-predicted"
    put(own / "v100-measured", DEFAULT)
    assert taken().origin == "winners of tuned/small/v100-measured"


def test_a_level_that_the_set_lacks_gets_the_default_and_that_is_said(places: tuple[Path, Path]) -> None:
    put(places[0] / "v100-predicted", OTHER)
    found = taken((1, 2, 12))
    assert found.by_level == {1: OTHER, 2: DEFAULT, 12: DEFAULT}
    assert found.origin.endswith(", default at 2, 12")


def test_a_set_of_other_shapes_under_the_same_name_is_passed_over(places: tuple[Path, Path]) -> None:
    own, ours = places
    put(own / "v100-predicted", OTHER, contract=replace(SMALL, experts=7))
    put(ours / "v100-predicted", OTHER)
    assert taken().origin == f"winners of {ours}/v100-predicted"


def test_a_folder_that_is_named_is_the_only_one_looked_at(places: tuple[Path, Path], tmp_path: Path) -> None:
    put(places[0] / "v100-predicted", DEFAULT)
    put(tmp_path / "set", OTHER)
    assert taken(folder=tmp_path / "set").by_level == {1: OTHER, 5: OTHER}


def test_the_cpu_runs_no_gpu_code() -> None:
    with options.executor("host", "auto") as found:
        assert isinstance(found, HostExecutor)
    with pytest.raises(RequestError, match="--code cubin says what a GPU runs"), options.executor("host", "cubin"):
        pass


def test_no_gpu_is_a_missing_tool_with_what_works_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "available", lambda: (False, "no GPU"))
    with pytest.raises(MissingTool, match="no GPU; --executor host emulates"), options.executor("device", "auto"):
        pass
