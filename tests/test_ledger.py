"""The ledger keeps every finished trial, whatever ends the process."""

import errno
import json
import os
from pathlib import Path

import pytest

from tuner.errors import RequestError
from tuner.ledger import Ledger, LedgerFull


def opened(path: Path, *, contract: str = "c0ffee", target: str = "v100-predicted", **circumstances: str) -> Ledger:
    return Ledger.open(
        path, contract=contract, target=target, circumstances=circumstances or {"space": "a", "toolchain": "x"}
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "ledger.jsonl"


def test_a_row_is_on_disk_before_append_returns(path: Path) -> None:
    with opened(path) as ledger:
        ledger.append("trial", us=1.5)
        assert json.loads(path.read_text().splitlines()[-1])["us"] == 1.5


def test_reopening_gives_the_same_id_and_rows(path: Path) -> None:
    with opened(path) as ledger:
        ledger.append("trial", us=1.5, config={"rows": 1})
        first, rows = ledger.id, list(ledger.rows("trial"))
    with opened(path) as ledger:
        assert ledger.id == first
        assert list(ledger.rows("trial")) == rows
        assert ledger.notes == ()


def test_two_new_ledgers_have_different_ids(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as a, opened(tmp_path / "b") as b:
        assert a.id != b.id


def test_a_row_reads_back_as_it_will_after_a_restart(path: Path) -> None:
    with opened(path) as ledger:
        assert ledger.append("trial", samples=(1.0, 2.0))["samples"] == [1.0, 2.0]


@pytest.mark.parametrize("keep", [1, 20, -1])
def test_a_torn_last_line_is_moved_aside_and_the_rows_before_it_stay(path: Path, keep: int) -> None:
    with opened(path) as ledger:
        ledger.append("trial", us=1.0)
        ledger.append("trial", us=2.0)
    whole = path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    torn = last[: keep if keep > 0 else len(last) - 2]
    path.write_bytes(whole[: -len(last)] + torn)
    with opened(path) as ledger:
        assert [row["us"] for row in ledger.rows("trial")] == [1.0]
        assert "torn" in ledger.notes[0]
        ledger.append("trial", us=3.0)
    assert path.with_name("ledger.jsonl.torn").read_bytes() == torn + b"\n"
    with opened(path) as ledger:
        assert [row["us"] for row in ledger.rows("trial")] == [1.0, 3.0]


def test_a_last_line_that_lacks_only_its_newline_is_kept(path: Path) -> None:
    with opened(path) as ledger:
        ledger.append("trial", us=1.0)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    with opened(path) as ledger:
        ledger.append("trial", us=2.0)
    with opened(path) as ledger:
        assert [row["us"] for row in ledger.rows("trial")] == [1.0, 2.0]


def test_a_ledger_torn_in_its_header_starts_anew(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"contract":"c0f')
    with opened(path) as ledger:
        assert "torn" in ledger.notes[0]
        ledger.append("trial", us=1.0)
    with opened(path) as ledger:
        assert [row["us"] for row in ledger.rows("trial")] == [1.0]


def test_a_changed_digit_in_a_middle_line_is_refused_with_its_line_number(path: Path) -> None:
    with opened(path) as ledger:
        ledger.append("trial", us=1.25)
        ledger.append("trial", us=2.5)
    damaged = path.read_bytes().replace(b"1.25", b"1.35")
    path.write_bytes(damaged)
    with pytest.raises(RequestError, match="line 3 of 4 is damaged"):
        opened(path)
    assert path.read_bytes() == damaged


@pytest.mark.parametrize(("key", "other"), [("contract", "decade"), ("target", "h200-measured")])
def test_a_ledger_of_another_contract_or_target_is_refused(path: Path, key: str, other: str) -> None:
    opened(path).close()
    with pytest.raises(RequestError, match=f"made for {key} .*'{other}'"):
        opened(path, **{key: other})


def test_a_ledger_of_another_contract_of_the_same_name_says_what_to_give(path: Path) -> None:
    opened(path).close()
    with pytest.raises(RequestError, match="another --output, give the contract another name, or move the file away"):
        opened(path, contract="decade")


def test_a_damaged_header_is_not_to_be_deleted(path: Path) -> None:
    opened(path).close()
    path.write_bytes(path.read_bytes().replace(b"c0ffee", b"c0ffeF"))
    with pytest.raises(RequestError, match=r"line 1 of 2, its header, is damaged.*move the file away") as caught:
        opened(path)
    assert "delete" not in str(caught.value)


def test_a_path_that_cannot_be_opened_is_a_wrong_request(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"ledger /dev/null/x/l\.jsonl cannot be opened .*another --output"):
        opened(Path("/dev/null/x/l.jsonl"))
    with pytest.raises(RequestError, match="Is a directory"):
        opened(tmp_path)


def test_a_file_that_is_no_ledger_is_refused_and_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("hello\nworld\n")
    with pytest.raises(RequestError, match="line 1"):
        opened(path)
    assert path.read_text() == "hello\nworld\n"


def test_a_second_holder_is_refused_until_the_first_lets_go(path: Path) -> None:
    first = opened(path)
    with pytest.raises(RequestError, match="another process"):
        opened(path)
    first.close()
    opened(path).close()


def test_rows_of_another_toolchain_are_kept_but_not_answers(path: Path) -> None:
    with opened(path, space="a", toolchain="NVRTC 12.9.86") as ledger:
        ledger.append("trial", us=1.0)
    with opened(path, space="a", toolchain="NVRTC 12.6.20") as ledger:
        assert list(ledger.rows("trial")) == []
        ledger.append("trial", us=2.0)
    with opened(path, toolchain="NVRTC 12.9.86", space="a") as ledger:
        assert [row["us"] for row in ledger.rows("trial")] == [1.0]


def test_circumstances_are_written_once_for_each_fingerprint(path: Path) -> None:
    for toolchain in ("x", "y", "x"):
        opened(path, space="a", toolchain=toolchain).close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["toolchain"] for row in rows if row["kind"] == "circumstances"] == ["x", "y"]


def test_a_full_disk_leaves_no_half_row(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        real(descriptor, data[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(path) as ledger:
        before = path.read_bytes()
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(LedgerFull, match="No space left"):
            ledger.append("trial", us=1.0)
        monkeypatch.undo()
        assert path.read_bytes() == before
        ledger.append("trial", us=2.0)
    with opened(path) as ledger:
        assert [row["us"] for row in ledger.rows("trial")] == [2.0]
