"""What a V100 engine itself does with the same weights: the ops of 1Cat-vLLM, where that is installed.

It holds its weights as sm70-u4, so that its ops are given those that are already on the GPU. What they want was read in
the engine's public source, of several versions that differ; so the schema that an op is registered with decides: its
arguments are given by name, and one that asks for anything else is not called. The engine's own converter must make of
one expert what is held here, byte for byte. What a step allocates and zeroes around these ops is left out.

No code here has met the engine: its tests have ops of the same schemas, on the CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tuner import awq, tensors
from tuner.contract import Contract
from tuner.device import Resident
from tuner.errors import MissingTool
from tuner.tensors import Array, Replay, Step

PACKAGE, LIBRARIES = "vllm", ("vllm._C", "vllm._moe_C")  # importing the libraries registers the ops
LATER = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch")  # where later versions of vLLM have some of them
# One token in two launches; one token in one op; any number of tokens, sorted by expert. The engine prefers the first.
QPN, SINGLE, GROUPED = "engine:qpn-m1", "engine:single-token", "engine:grouped"
ROUTES = (QPN, SINGLE, GROUPED)

Sample = Mapping[str, tuple[Array, Array, Array]]  # "w13", "w2": an expert's q, scales, zeros in awq's order
Calls = Sequence[Callable[[], Any]]


def sample(contract: Contract, weights: awq.LayerWeights) -> Sample:
    """The first expert, as a checkpoint has it."""
    experts = {which: awq.integers(contract, weights, which, 0) for which in ("w13", "w2")}
    return {which: (awq.pack_columns(one.q), one.s, awq.pack_columns(one.z)) for which, one in experts.items()}


def routes(tokens: int) -> tuple[str, ...]:
    """Those that take so many tokens."""
    return ROUTES if tokens == 1 else (GROUPED,)


class Engine:
    """The engine's ops for a contract. Any method raises MissingTool where the engine has not what it takes, and
    LaunchFailed."""

    def __init__(self, contract: Contract, one: Sample) -> None:
        if contract.layout != "sm70-u4":
            raise MissingTool(f"the engine's ops read sm70-u4, and {contract.name} has {contract.layout}")
        self._torch, self._contract, self._sample = tensors.load(), contract, one
        for name in (*LIBRARIES, *LATER):
            try:
                importlib.import_module(name)
            except (ImportError, OSError, RuntimeError) as error:
                if name in LATER and isinstance(error, ModuleNotFoundError):
                    continue
                raise MissingTool(f"{name} cannot be imported: {type(error).__name__}: {error}") from error

    def run(self, route: str, weights: Mapping[str, Resident], step: Step) -> Array:
        """The layer's output, f16 [M, H]."""
        with tensors.faults(f"running {route}"):
            calls, out = self._calls(route, self._bank(weights), step)
            for call in calls:
                call()
            found: Array = out.cpu().numpy()
            return found

    def capture(
        self, route: str, layers: Sequence[Mapping[str, Resident]], steps: Sequence[Step], calls: int
    ) -> Replay:
        """A CUDA graph of `calls` layers, each on the next step and the next copy of the weights."""
        with tensors.faults(f"capturing {route}"):
            banks = [self._bank(layer) for layer in layers]
            made = [self._calls(route, banks[i % len(banks)], steps[i % len(steps)])[0] for i in range(calls)]
            turns = [partial(_all, each) for each in made]
            return tensors.capture(self._torch, turns, turns)

    def _op(self, name: str, spare: Mapping[str, Any] | None = None, **given: Any) -> Callable[[], Any]:
        """A call of "library.op" with all of `given`, and of `spare` what it has arguments for."""
        found = self._find(name)
        if found is None:
            raise MissingTool(f"the engine here has no {name}")
        arguments = found._schema.arguments
        taken = {argument.name for argument in arguments}
        asked = {argument.name for argument in arguments if not argument.has_default_value()}
        given |= {key: value for key, value in (spare or {}).items() if key in taken}
        if wrong := sorted((asked - given.keys()) | (given.keys() - taken)):
            raise MissingTool(f"the engine's op is another than is known here, see {', '.join(wrong)}: {found._schema}")
        return partial(found, **given)

    def _find(self, name: str) -> Any:
        library, op = name.split(".")
        return getattr(getattr(getattr(self._torch.ops, library), op, None), "default", None)

    # Weights

    def _bank(self, weights: Mapping[str, Resident]) -> dict[str, Any]:
        """One copy's words q13 and q2, statistics s13 and s2, and the engine's pointers to those of every expert."""
        held = tensors.views(self._torch, weights)
        bank: dict[str, Any] = {}
        for which, label in (("w13", "13"), ("w2", "2")):
            q, stats = held[f"{which.upper()}_Q"], self._statistics(held[f"{which.upper()}_SCALES"])
            k_ld, q_ld = self._strides(which, q[0], stats[0])
            build = {"tm_weights": q, "tm_scales": stats, "k_ld": k_ld, "q_ld": q_ld}
            pointers = self._op("_C.awq_moe_build_strided_ptrs", **build, num_experts=self._contract.experts)()
            bank |= {f"q{label}": q, f"s{label}": stats, f"{which}_w": pointers[0], f"{which}_s": pointers[1]}
        return bank

    def _statistics(self, held: Any) -> Any:
        """As they are, where the engine has 3-byte ones too; else 4-byte ones made of them."""
        torch = self._torch
        if held.dtype != torch.uint8 or self._find("_C.awq_sm70_prepare_compact") is not None:
            return held
        scales = held[..., :2].contiguous().view(torch.float16)[..., 0]
        biases = (-(held[..., 2].float() * scales.float())).half()
        return torch.stack((scales, biases), -1).view(torch.int32)[..., 0]

    def _strides(self, which: str, q: Any, stats: Any) -> tuple[int, int]:
        """What the converter says of its matrices: words from one block of columns to the next, and columns; a minus
        sign there marks 3-byte statistics."""
        torch = self._torch
        kernel, scales, zeros = (
            torch.from_numpy(part.view(np.int32) if part.dtype == np.uint32 else part).to(q.device)
            for part in self._sample[which]
        )
        name = "_C.awq_sm70_prepare" + ("_compact" if stats.dtype == torch.uint8 else "")
        given = {"_kernel": kernel, "_scaling_factors": scales, "_zeros": zeros, "group_size": self._contract.group}
        interleave = self._contract.interleaved and which == "w13"
        made, made_stats, strides = self._op(name, **given, interleave_gated_silu=interleave)()
        if not (torch.equal(made.flatten(), q.flatten()) and torch.equal(made_stats.flatten(), stats.flatten())):
            raise MissingTool(f"{name} makes other bytes of an expert's {which} than sm70-u4 has: it would be misread")
        return int(strides[0]), int(strides[1])

    # Steps

    def _calls(self, route: str, bank: Mapping[str, Any], step: Step) -> tuple[Calls, Any]:
        """One layer's calls in order, and the tensor they leave its output in."""
        torch, contract = self._torch, self._contract
        where = bank["q13"].device
        x, ids, topk_weights = (torch.from_numpy(part).to(where) for part in step)
        ids = ids.int()
        if route != GROUPED and not contract.interleaved:
            raise MissingTool(f"{route} takes interleaved columns, and {contract.name} has none")
        slots, width = ids.numel(), contract.w13.n

        def half(*shape: int) -> Any:
            return torch.empty(shape, dtype=torch.float16, device=where)

        out, inner = half(*x.shape), half(slots, width // 2)
        if route == QPN:
            weights = {"w13": bank["q13"], "s13": bank["s13"], "w2": bank["q2"], "s2": bank["s2"]}
            given = {"out": out, "intermediate": inner, "input": x, "ids": ids, "topk": topk_weights}
            return [self._op("_C.awq_moe_qpn_m1_sm70_out", **given, **weights)], out
        rows, routed = half(slots, contract.hidden), half(slots, contract.hidden)
        if route == SINGLE:
            return [self._single(bank, x, ids, topk_weights, (rows, inner, routed, out))], out
        sort, offsets, offsets64, places = self._sort(x, ids, rows)
        dispatch = "_C.awq_moe_gemm_sm70_per_expert_dispatch_out"
        older = self._find(dispatch) is None
        fused = older and contract.interleaved  # an older version's W13 ends in SiLU
        multiply = partial(self._op, "_C.awq_moe_gemm_sm70_out" if older else dispatch)
        shared = {"expert_offsets": offsets, "num_experts": contract.experts, "group_size": contract.group}

        def stage(which: str, source: Any, target: Any, gated: bool) -> Callable[[], Any]:
            shape = awq.gemm(contract, which)
            given = {"out": target, "sorted_input": source, "k": shape.k, "n": shape.n, "gated_silu": gated}
            pointers = {"strided_ptrs_w": bank[f"{which}_w"], "strided_ptrs_s": bank[f"{which}_s"]}
            return multiply(**given, **pointers, **shared)

        both = inner if fused else half(slots, width)
        calls: list[Callable[[], Any]] = [sort, partial(offsets.copy_, offsets64), stage("w13", rows, both, fused)]
        if not fused:
            name = "_C.silu_and_mul_interleaved" if contract.interleaved else "_C.silu_and_mul"
            calls.append(self._op(name, result=inner, input=both))
        given = {"permuted_hidden_states": routed, "topk_weights": topk_weights, "inv_permuted_idx": places}
        end = {"expert_first_token_offset": offsets64, "topk": contract.top_k, "hidden_states": out}
        return [*calls, stage("w2", inner, routed, False), self._op("_moe_C.moe_unpermute", **given, **end)], out

    def _single(
        self, bank: Mapping[str, Any], x: Any, ids: Any, topk_weights: Any, between: tuple[Any, ...]
    ) -> Callable[[], Any]:
        torch, k = self._torch, self._contract.top_k
        compact, inner, routed, out = between
        given = {"out": out, "x": x, "topk_weights": topk_weights, "topk_ids": ids, "compact_input": compact}
        given |= {"intermediate": inner, "sorted_output": routed}
        for which in ("w13", "w2"):
            shape = awq.gemm(self._contract, which)
            given |= {f"{which}_k": shape.k, f"{which}_n": shape.n}
            for part in ("w", "s"):
                rows = bank[f"{which}_{part}"].view(self._contract.experts, -1)
                given[f"src_{which}_ptrs_{part}_rows"] = rows
                given[f"dst_{which}_ptrs_{part}_rows"] = torch.empty_like(rows[:k])
        given |= {"group_size": self._contract.group, "hidden_logical_size": self._contract.hidden}
        given["expert_offsets"] = torch.arange(k + 1, dtype=torch.int32, device=x.device)
        given["inv_permuted_idx"] = torch.arange(k, dtype=torch.int32, device=x.device).view(1, k)
        spare = {"sorted_weights": torch.empty(k, dtype=torch.float32, device=x.device)}
        return self._op("_C.awq_moe_single_token_sm70_out", spare, **given)

    def _sort(self, x: Any, ids: Any, rows: Any) -> tuple[Callable[[], Any], Any, Any, Any]:
        """The call that sorts x into rows by expert; the experts' offsets in int32 and int64, and each slot's row."""
        torch, experts, slots = self._torch, self._contract.experts, ids.numel()
        integers = partial(torch.empty, dtype=torch.int32, device=x.device)
        offsets, offsets64 = integers(experts + 1), torch.empty(experts + 1, dtype=torch.int64, device=x.device)
        places = integers(tuple(ids.shape))
        order = torch.arange(slots, dtype=torch.int32, device=x.device).view(ids.shape)
        given = {"input": x, "topk_ids": ids, "token_expert_indices": order, "expert_map": None, "n_expert": experts}
        given |= {"n_local_expert": experts, "topk": self._contract.top_k, "permuted_input": rows}
        given |= {"expert_first_token_offset": offsets64, "inv_permuted_idx": places, "permuted_idx": integers(slots)}
        spare = {"align_block_size": None, "m_indices": integers(slots)}
        name = "_moe_C.moe_permute_with_scratch"
        if self._find(name) is None:
            return self._op("_moe_C.moe_permute", spare, **given), offsets, offsets64, places
        size = self._op("_moe_C.moe_permute_sort_workspace_size", num_expanded_rows=slots, n_expert=experts)()
        given["sort_workspace"] = torch.empty(size, dtype=torch.int8, device=x.device)
        given |= {each: integers(slots) for each in ("permuted_experts_id", "sorted_row_idx", "topk_ids_for_sort")}
        return self._op(name, spare, **given), offsets, offsets64, places


def _all(calls: Calls) -> None:
    for call in calls:
        call()
