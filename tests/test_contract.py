"""Contracts: what is read, what is refused, and with which advice."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner import contract as contracts
from tuner.contract import Contract, Gemm
from tuner.errors import ContractError

QWEN38 = """
name = "mine"
tensor_parallel = 4
experts = 512
top_k = 10
hidden = 2560
intermediate = 640
[quantization]
checkpoint_group = 32
"""


def content(**changes: Any) -> dict[str, Any]:
    """qwen38-tp4's structure with `section__key` changed, or dropped where the value is None."""
    made = copy.deepcopy(contracts.load("qwen38-tp4").to_dict())
    for path, value in changes.items():
        section, _, key = path.rpartition("__")
        table = made[section] if section else made
        if value is None:
            del table[key]
        else:
            table[key] = value
    return made


def refusal(**changes: Any) -> str:
    with pytest.raises(ContractError) as caught:
        Contract.from_dict(content(**changes))
    assert caught.value.exit_status == 2
    return str(caught.value)


def test_qwen38_tp4_is_the_published_case() -> None:
    c = contracts.load("qwen38-tp4")
    assert (c.experts, c.top_k, c.hidden, c.intermediate, c.tensor_parallel) == (512, 10, 2560, 640, 4)
    assert (c.checkpoint_group, c.group, c.layout, c.stats_bytes, c.interleaved) == (32, 32, "sm70-u4", 3, True)
    assert (c.levels, c.numerics, c.tolerance) == ((1, 2, 4, 5, 8, 10, 12, 16, 20, 24, 32, 40), "exact", 4e-4)
    assert c.routings == (("uniform", 0.5), ("zipf", 0.5))
    assert (c.local_intermediate, c.max_tokens) == (160, 40)
    assert (c.w13, c.w2) == (Gemm(2560, 320, 32), Gemm(160, 2560, 32))
    assert (c.w13.groups, c.w2.groups) == (80, 5)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("qwen38-tp4", (512, 10, 2560, 640, 32, 32, 4)),
        ("qwen36-35b-tp2", (256, 8, 2048, 512, 128, 128, 2)),
        ("qwen36-35b-tp4", (256, 8, 2048, 512, 128, 128, 4)),
        ("qwen35-122b-tp2", (256, 8, 3072, 1024, 128, 128, 2)),
        ("qwen35-122b-tp4", (256, 8, 3072, 1024, 128, 128, 4)),
        ("qwen3-30b-tp2", (128, 8, 2048, 768, 128, 128, 2)),
        ("qwen3-30b-tp4-g64", (128, 8, 2048, 768, 128, 64, 4)),
        ("qwen3-30b-g32-tp2", (128, 8, 2048, 768, 32, 32, 2)),
        ("qwen3-30b-g32-tp4", (128, 8, 2048, 768, 32, 32, 4)),
        ("minimax-m27-tp4", (256, 8, 3072, 1536, 128, 128, 4)),
        ("minimax-m27-tp8-g64", (256, 8, 3072, 1536, 128, 64, 8)),
        ("qwen3-235b-tp4", (128, 8, 4096, 1536, 128, 128, 4)),
        ("qwen3-235b-tp8-g64", (128, 8, 4096, 1536, 128, 64, 8)),
        ("glm45-air-tp1", (128, 8, 4096, 1408, 128, 128, 1)),
        ("glm45-air-tp2-g64", (128, 8, 4096, 1408, 128, 64, 2)),
        ("mixtral-8x7b-tp2", (8, 2, 4096, 14336, 128, 128, 2)),
        ("mixtral-8x7b-tp4", (8, 2, 4096, 14336, 128, 128, 4)),
    ],
)
def test_a_built_in_contract_has_its_models_shape(name: str, shape: tuple[int, ...]) -> None:
    c = contracts.load(name)
    found = (c.experts, c.top_k, c.hidden, c.intermediate, c.checkpoint_group, c.group, c.tensor_parallel)
    assert (c.name, found) == (name, shape)


def test_built_in_contracts_are_sorted_and_differ_in_digest() -> None:
    known = contracts.builtin()
    assert list(known) == sorted(known)
    assert all(name == c.name for name, c in known.items())
    assert len({c.digest() for c in known.values()}) == len(known) == 17


@pytest.mark.parametrize(
    ("broken", "advice"),
    [
        ({"tensor_parallel": 8}, "80 % 32 = 16 (640 / 8 = 80 a rank)|nearest valid: tensor_parallel = 4"),
        (
            {"quantization__checkpoint_group": 128, "quantization__group": None},
            "160 % 128 = 32 (640 / 4 = 160 a rank)|nearest valid: group = 32",
        ),
        ({"tensor_parallel": 3}, "intermediate % tensor_parallel = 0: 640 % 3 = 1|nearest valid: tensor_parallel = 4"),
        ({"hidden": 2568}, "hidden % group = 0: 2568 % 32 = 8|nearest valid: hidden = 2560"),
        ({"hidden": 2568}, "hidden % 32 = 0: 2568 % 32 = 8 (N of W2, sm70-u4)"),
        ({"intermediate": 1000}, "(2 * intermediate / tensor_parallel) % 32 = 0: 500 % 32 = 20 (N of W13, sm70-u4)"),
        ({"hidden": 2592, "weights": {"layout": "awq"}}, 'hidden % 64 = 0: 2592 % 64 = 32|layout = "sm70-u4"'),
        ({"intermediate": 1000, "weights": {"layout": "awq"}}, "(intermediate / tensor_parallel) % 32 = 0: 250 % 32"),
        ({"quantization__group": 64}, "checkpoint_group % group = 0: 32 % 64 = 32|nearest valid: group = 32"),
        ({"quantization__group": 16}, "group in (32, 64, 128): group = 16|nearest valid: group = 32"),
        ({"quantization__group": 0}, "group in (32, 64, 128): group = 0|nearest valid: group = 32"),
        ({"quantization__checkpoint_group": -1}, "checkpoint_group = -1: expected at least 32"),
        ({"top_k": 32, "experts": 16}, "top_k <= experts: top_k = 32, experts = 16|nearest valid: top_k = 16"),
        ({"tuning__levels": [1, 104]}, "104 * 10 = 1040 routed rows|nearest valid: a highest level of 102"),
        ({"tuning__levels": [4, 2, 2, 0]}, "[4, 2, 2, 0]: expected distinct token counts >= 1|nearest valid: [2, 4]"),
        ({"tuning__levels": []}, "nearest valid: [1]"),
        ({"experts": 5000}, "experts = 5000: expected 1 to 4096|nearest valid: 4096"),
        ({"tensor_parallel": 0}, "tensor_parallel = 0: expected 1 to 64|nearest valid: 1"),
        ({"hidden": 0}, "hidden = 0: expected 32 to 65536"),
        ({"hidden": 10**32 - 1}, f"hidden = {10**32 - 1}: expected 32 to 65536; nearest valid: 65536"),
        ({"top_k": 10**30}, f"top_k = {10**30}: expected 1 to 64; nearest valid: 64"),
        ({"top_k": 100, "experts": 5}, "top_k = 100: expected 1 to 64; nearest valid: 5"),
        ({"hidden": 0x10**5000}, "hidden = an integer too long to print: expected an integer"),
        ({"weights": 0x10**5000}, "weights = an integer too long to print: expected a table"),
        ({"weights__stats_bytes": 5}, "weights.stats_bytes = 5|nearest valid: 4"),
        ({"weights__layout": "awq"}, "weights.stats_bytes = 3, interleaved = true: the awq layout"),
        ({"weights__layout": "sm70u4"}, "weights.layout = 'sm70u4'|did you mean sm70-u4?"),
        ({"tuning__numerics": "exakt", "tuning__tolerance": None}, "tuning.numerics = 'exakt'|did you mean exact?"),
        ({"tuning__tolerance": 1e-4}, "tuning.tolerance = 0.0001: expected 0.00021"),
        ({"tuning__tolerance": float("nan")}, "tuning.tolerance = nan: expected 0.00021"),
        ({"tuning__routings": {"zip": 1}}, "tuning.routings.zip|did you mean zipf?"),
        ({"tuning__routings": {"zipf": 0}}, "tuning.routings.zipf = 0.0: expected a weight > 0"),
        ({"tuning__routings": {"zipf": -1, "uniform": 3}}, "tuning.routings.zipf = -1.0: expected a weight > 0"),
        ({"tuning__routings": {"zipf": float("inf")}}, "tuning.routings.zipf = inf: expected a weight > 0"),
        (
            {"tuning__routings": {"zipf": 1e308, "uniform": 1e308}},
            "zipf = 1e+308: expected a weight > 0, at most 1e+06",
        ),
        (
            {"tuning__routings": {"zipf": float("inf"), "hot": -float("inf")}},
            "hot = -inf: expected|zipf = inf: expected",
        ),
        (
            {"tuning__routings": {"./rec.txt": 1}},
            "tuning.routings../rec.txt|or the path of a recorded .json or .npy file",
        ),
        ({"tuning__routings": {"folder/rec": 1}}, "tuning.routings.folder/rec|a recorded .json or .npy file"),
        ({"tuning__routings": {}}, "tuning.routings is empty"),
        ({"quantization__bits": 8}, "quantization.bits = 8: only bits = 4 is supported"),
        ({"quantization__zero_point": False}, "quantization.zero_point = false: only zero_point = true"),
        ({"quantization__method": "gptq"}, 'quantization.method = "gptq": only method = "awq"'),
        ({"name": "Qwen 3"}, "name = 'Qwen 3': expected at most 64 of a-z, 0-9"),
        ({"hiden": 2560, "hidden": None}, "unknown key hiden; did you mean hidden?|missing key hidden"),
        ({"group": 32}, "unknown key group; it belongs under [quantization]"),
        ({"tuning__top_k": 8}, "unknown key tuning.top_k; it belongs above the first table"),
        ({"weights__xyz": 1}, "unknown key weights.xyz; expected one of layout, stats_bytes, interleaved"),
        ({"experts": True}, "experts = true: expected an integer"),
        ({"experts": 512.0}, "experts = 512.0: expected an integer"),
        ({"tuning__tolerance": True}, "tuning.tolerance = true: expected a number"),
        ({"tuning__tolerance": 10**400}, "expected a number"),
        ({"weights__interleaved": 1}, "weights.interleaved = 1: expected true or false"),
        ({"tuning__levels": [1, True]}, "tuning.levels = [1, true]: expected a list of integers"),
        ({"tuning__levels": 8}, "tuning.levels = 8: expected a list of integers"),
        ({"tuning__routings": ["zipf"]}, 'tuning.routings = ["zipf"]: expected a table of name = weight'),
        ({"tuning__routings": {"zipf": "1"}}, "expected a table of name = weight"),
        ({"weights": 3}, "weights = 3: expected a table [weights]"),
        ({"name": 7}, "name = 7: expected a string"),
    ],
)
def test_a_refusal_names_the_rule_the_values_and_a_valid_choice(broken: dict[str, Any], advice: str) -> None:
    message = refusal(**broken)
    for part in advice.split("|"):
        assert part in message


@pytest.mark.parametrize("key", ["hidden", "intermediate", "tensor_parallel", "top_k", "experts"])
@pytest.mark.parametrize("value", [-1, 0, 10**32 - 1])
def test_a_size_out_of_range_brings_one_suggestion_which_is_valid(key: str, value: int) -> None:
    lines = refusal(**{key: value}).splitlines()
    assert len(lines) == 1
    assert "  " not in lines[0]
    if "nearest valid: " in lines[0]:
        suggested = int(lines[0].rpartition("nearest valid: ")[2])
        Contract.from_dict(content(tuning__levels=[1], **{key: suggested}))


def test_a_size_out_of_range_whose_limit_does_not_divide_brings_no_suggestion() -> None:
    assert refusal(intermediate=10**6, tensor_parallel=5).endswith("intermediate = 1000000: expected 32 to 65536")


def test_no_suggestion_leaves_the_range() -> None:
    found = [
        int(n) for n in re.findall(r"= (\d+)", refusal(quantization__checkpoint_group=10**6).rpartition("valid:")[2])
    ]
    assert all(n <= 65536 for n in found)


def test_all_that_is_wrong_is_said_at_once() -> None:
    message = refusal(top_k=0, tensor_parallel=8, tuning__levels=[0])
    assert message.count("\n  - ") == 4
    assert all(word in message for word in ("top_k = 0", "80 % 32", "tuning.levels = [0]", "nearest valid"))


@settings(max_examples=200, deadline=None)
@given(
    tensor_parallel=st.integers(1, 16),
    checkpoint_group=st.sampled_from([32, 64, 128, 256]),
    group=st.sampled_from([16, 32, 48, 64, 128]),
    hidden=st.integers(1, 40).map(lambda n: n * 32),
    intermediate=st.integers(1, 80).map(lambda n: n * 16),
    layout=st.sampled_from(["sm70-u4", "awq"]),
)
def test_a_shape_is_accepted_exactly_when_it_divides_and_the_advice_divides(
    tensor_parallel: int, checkpoint_group: int, group: int, hidden: int, intermediate: int, layout: str
) -> None:
    shape: dict[str, Any] = {
        "tensor_parallel": tensor_parallel,
        "hidden": hidden,
        "intermediate": max(intermediate, 32),
        "quantization": {"checkpoint_group": checkpoint_group, "group": group},
        "weights": {"layout": layout},
    }
    local, rest = divmod(shape["intermediate"], tensor_parallel)
    divides = (
        rest == 0
        and group in (32, 64, 128)
        and not any((checkpoint_group % group, hidden % checkpoint_group, local % group))
        and shape["intermediate"] % checkpoint_group == 0
        and (layout == "sm70-u4" or hidden % 64 == 0)
    )
    rest_of_it = {"name": "x", "experts": 4, "top_k": 2}
    if divides:
        assert Contract.from_dict(shape | rest_of_it).local_intermediate == local
        return
    with pytest.raises(ContractError) as caught:
        Contract.from_dict(shape | rest_of_it)
    advice = str(caught.value).rpartition("nearest valid: ")[2]
    for choice in advice.split(", or "):
        changed = copy.deepcopy(shape)
        for key, value in re.findall(r'(\w+) = "?([\w-]+)"?', choice):
            table = {"layout": "weights", "group": "quantization", "checkpoint_group": "quantization"}.get(key)
            (changed[table] if table else changed)[key] = value if key == "layout" else int(value)
        Contract.from_dict(changed | rest_of_it)


def test_only_name_and_model_leave_the_digest_alone() -> None:
    base = contracts.load("qwen38-tp4")
    assert base.digest() == "89504e567faa4d7e"  # winners on disk are found by it
    assert replace(base, name="other", model="Other").digest() == base.digest()
    changes: list[dict[str, Any]] = [
        {"tensor_parallel": 2},
        {"experts": 256},
        {"top_k": 8},
        {"hidden": 2048},
        {"intermediate": 1280},
        {"checkpoint_group": 64},
        {"intermediate": 1024, "checkpoint_group": 64, "group": 64},
        {"intermediate": 1024, "checkpoint_group": 64},
        {"layout": "awq", "stats_bytes": 0, "interleaved": False},
        {"stats_bytes": 4},
        {"interleaved": False},
        {"levels": (1, 2)},
        {"numerics": "engine"},
        {"tolerance": 5e-4},
        {"routings": (("uniform", 1.0),)},
    ]
    digests = {replace(base, **change).digest() for change in changes} | {base.digest()}
    assert len(digests) == len(changes) + 1


def test_the_order_of_routings_and_a_common_factor_of_their_weights_change_nothing() -> None:
    one = Contract.from_dict(content(tuning__routings={"zipf": 3, "uniform": 1}))
    other = Contract.from_dict(content(tuning__routings={"uniform": 0.25, "zipf": 0.75}))
    assert one == other
    assert one.routings == (("uniform", 0.25), ("zipf", 0.75))


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5))
def test_writing_a_contract_and_reading_it_back_changes_nothing(weights: list[float]) -> None:
    routings = dict(zip(contracts.ROUTINGS, weights, strict=False))
    once = Contract.from_dict(content(tuning__routings=routings))
    twice = Contract.from_dict(once.to_dict())
    assert twice == once
    assert twice.digest() == once.digest()


def test_the_keys_left_out_get_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(QWEN38)
    c = contracts.load(str(path))
    whole = contracts.load("qwen38-tp4")
    levels = (1, 2, 3, 4, 5, 6, 7, 8)
    assert c == replace(whole, name="mine", model="mine", levels=levels, routings=(("uniform", 1.0),))
    path.write_text(QWEN38 + '[weights]\nlayout = "awq"\n[tuning]\nnumerics = "engine"\n')
    c = contracts.load(str(path))
    assert (c.stats_bytes, c.interleaved, c.tolerance) == (0, False, 2e-3)


def test_a_contract_file_that_cannot_be_read_is_refused_with_its_path(tmp_path: Path) -> None:
    files = {"broken.toml": b"name = \n", "latin.toml": b'name = "\xe9"\n'}
    for name, text in files.items():
        (tmp_path / name).write_bytes(text)
        with pytest.raises(ContractError, match=rf"{name}: not TOML: "):
            contracts.load(str(tmp_path / name))
    with pytest.raises(ContractError, match=r"gone\.toml: no such file; give a contract's TOML file"):
        contracts.load(str(tmp_path / "gone.toml"))
    with pytest.raises(ContractError, match="cannot be read: Is a directory"):
        contracts.load(str(tmp_path))
    (tmp_path / "long.toml").write_text(f"hidden = {'9' * 5000}\n")
    with pytest.raises(ContractError, match=r"long\.toml: holds an integer of thousands of digits; .* at most 65536"):
        contracts.load(str(tmp_path / "long.toml"))
    (tmp_path / "deep.toml").write_text(f"hidden = {'[' * 5000}\n")
    with pytest.raises(ContractError, match=r"deep\.toml: nested too deeply; .* tables of one level"):
        contracts.load(str(tmp_path / "deep.toml"))


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_bytes(b"\xef\xbb\xbf" + QWEN38.encode())
    assert contracts.load(str(tmp_path / "mine.toml")).name == "mine"


def test_a_text_with_a_slash_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ContractError, match=r"^\./noext: no such file; "):
        contracts.load("./noext")
    (tmp_path / "noext").write_text(QWEN38)
    assert contracts.load("./noext").name == "mine"


def test_a_refused_contract_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(QWEN38.replace("tensor_parallel = 4", "tensor_parallel = 8"))
    with pytest.raises(ContractError, match=r"mine\.toml: contract 'mine':"):
        contracts.load(str(path))


def test_an_unknown_name_brings_the_known_ones_and_the_closest() -> None:
    with pytest.raises(ContractError) as caught:
        contracts.load("qwen38-tp8")
    assert "no built-in contract 'qwen38-tp8'; did you mean qwen38-tp4?" in str(caught.value)
    assert all(name in str(caught.value) for name in contracts.builtin())


def test_a_recorded_routing_has_to_be_there_when_the_file_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.toml"
    path.write_text(QWEN38 + '[tuning.routings]\n"recorded.json" = 1\n')
    with pytest.raises(ContractError, match=r"no file 'recorded\.json' in "):
        contracts.load("./mine.toml")
    (tmp_path / "recorded.json").touch()
    assert contracts.load("./mine.toml").routings == (("recorded.json", 1.0),)
