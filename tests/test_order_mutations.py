"""Every barrier of the templates is taken out in turn, and everything that hands on between CTAs made plain: the CPU
executor must tell of two warps that meet in a word of shared memory, or of a store that no fence lets out.

Which barriers there are is not written down, since templates change. What the executor cannot tell is, with the reason.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import small
from small import SMALL, TENSOR

from tuner import cases, host, plan, render, space, verify
from tuner.contract import Contract
from tuner.errors import LaunchFailed, TrialTimeout
from tuner.plan import Plan, PlanName
from tuner.render import Source
from tuner.space import Config

# Split K or not, and several passes of a segment's rows, on both families; segments from ids, from a list, from a sort.
SPLIT_FIRST = space.parse("simt-t2-k2-u2-r1+simt-t4-k1-u1-r1+m512")
SPLIT_BOTH = space.parse("simt-t2-k2-u2-r1+simt-t2-k2-u1-r1+m512")
MANY = replace(SMALL, experts=40)  # more than a word of bits has
Subject = tuple[PlanName, Contract, Config]
SUBJECTS: tuple[Subject, ...] = (
    *(("fused", SMALL, config) for config in (SPLIT_FIRST, TENSOR, SPLIT_BOTH)),
    *((name, MANY, SPLIT_FIRST) for name in ("staged", "sorted")),
)
TOKENS = 12  # more slots than a warp has lanes
BARRIER = "__syncthreads();"

MEET = "since the last barrier"
UNFENCED = "let no fence follow"


@pytest.fixture(autouse=True)
def _quick_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_FLAGS", tuple("-Og" if flag == "-O2" else flag for flag in host._FLAGS))


def subject(of: Subject) -> tuple[Plan, dict[str, Source]]:
    name, contract, config = of
    made = plan.make(contract, config, name)
    return made, render.render(made)


def told(made: Plan, sources: Mapping[str, Source]) -> Iterator[str]:
    """What the executor tells of a plan's kernels, one routing and order after another."""
    for routed in ("uniform", "single-hot"):
        case = cases.make_case(made.contract, TOKENS, routed, "gaussian")
        operands = verify.operands(made, small.weights(made.contract), case)
        for order in (0, 1):
            try:
                host.execute(made, sources, operands, TOKENS, order=order, timeout_s=20.0)
            except (LaunchFailed, TrialTimeout) as error:
                yield str(error)


def site(text: str, at: int) -> str:
    """A barrier by its neighbours, which are the same in every kernel that holds it."""
    return " ".join(f"{text[:at][-90:]} # {text[at + len(BARRIER) :][:60]}".split())


def barriers() -> dict[str, list[tuple[int, str, int]]]:
    """Of each barrier the (subject, stage, place) where it can be taken out."""
    found: dict[str, list[tuple[int, str, int]]] = {}
    for index, of in enumerate(SUBJECTS):
        for stage, source in subject(of)[1].items():
            for match in re.finditer(re.escape(BARRIER), source.text):
                found.setdefault(site(source.text, match.start()), []).append((index, stage, match.start()))
    return found


BARRIERS = barriers()


@pytest.mark.parametrize("name", BARRIERS)
def test_a_barrier_left_out_is_told_as_two_warps_that_meet(name: str) -> None:
    def found() -> Iterator[str]:
        for index, stage, at in BARRIERS[name]:
            made, sources = subject(SUBJECTS[index])
            text = sources[stage].text
            broken = text[:at] + ";" + text[at + len(BARRIER) :]
            yield from told(made, {**sources, stage: replace(sources[stage], text=broken)})

    assert any(MEET in each for each in found())


# What hands on between CTAs or warps, made plain, and what is told of it.
WEAKENED = {
    "a published value": (
        "__atomic_store_n(address, value, __ATOMIC_RELAXED)",
        "*address = value",
        UNFENCED,
    ),
    "a ticket": ("atomicInc(counters, 0x7fffffffu)", "(*counters)++", UNFENCED),
    "a count of readers": (
        "atomicAdd(readers + slots[threadIdx.x], 1u)",
        "readers[slots[threadIdx.x]] += 1u",
        UNFENCED,
    ),
    "an expert's slots": (
        "atomicExch(&shared.first[e], slot);",
        "shared.first[e]; shared.first[e] = slot;",
        MEET,
    ),
    "an expert's bit": (
        "atomicOr(&shared.present[e / 32], 1u << e % 32)",
        "shared.present[e / 32] |= 1u << e % 32",
        MEET,
    ),
}
# Nothing tells of it: memory has no cache here that a plain load could be served from again and again.
UNTOLD = {"a load of a published value": ("__atomic_load_n(address, __ATOMIC_RELAXED)", "*address")}


def weakened(old: str, new: str) -> Iterator[str]:
    made, sources = subject(SUBJECTS[0])
    assert any(old in source.text for source in sources.values())
    yield from told(made, {stage: replace(one, text=one.text.replace(old, new)) for stage, one in sources.items()})


@pytest.mark.parametrize("name", WEAKENED)
def test_what_hands_on_is_missed_when_it_is_made_plain(name: str) -> None:
    old, new, wanted = WEAKENED[name]
    assert any(wanted in each for each in weakened(old, new))


@pytest.mark.parametrize("name", UNTOLD)
def test_what_the_executor_cannot_tell_of_leaves_it_content(name: str) -> None:
    assert list(weakened(*UNTOLD[name])) == []


def test_everything_that_hands_on_is_tried() -> None:
    """A fence or an atomic that is new to the templates comes with its row above."""
    rows = [row[0] for row in (*WEAKENED.values(), *UNTOLD.values())]
    for of in SUBJECTS:
        for source in subject(of)[1].values():
            text = source.text
            for row in rows:
                text = text.replace(row, "")
            assert re.findall(r"__threadfence\w*\(|__atomic_\w+\(|\batomic[A-Z]\w*\(|\bvolatile \w+ ?\*", text) == []


@pytest.mark.parametrize("of", SUBJECTS, ids=lambda of: f"{of[0]} {of[2].key()}")
def test_nothing_is_told_of_kernels_that_are_whole(of: Subject) -> None:
    assert list(told(*subject(of))) == []
