"""Read one expert layer of one tensor-parallel rank from a Hugging Face checkpoint folder in AutoAWQ's GEMM format.

config.json decides what the tensors are, never a name: some repositories called AWQ hold compressed-tensors. Only the
layer's own tensors are read, only the rank's rows and columns of them, and one expert at a time beside the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (registers "bfloat16" with numpy, which safetensors asks for by name)
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from tuner.awq import Integers, LayerWeights, check_rank, pack, unpack_columns
from tuner.contract import Contract
from tuner.errors import CheckpointError

# gate, up, down as the model families name them.
_PROJECTIONS = {"gate_proj": ("gate_proj", "up_proj", "down_proj"), "w1": ("w1", "w3", "w2")}
_EXPERT = re.compile(r"((?:.+\.)?layers)\.(\d+)\.(.+)\.experts\.(\d+)\.(gate_proj|w1)\.qweight")

# The contract's field, and what config.json may call it, the expert's own intermediate size before the dense layers'.
_COUNTS = {
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok",),
    "hidden": ("hidden_size",),
    "intermediate": ("moe_intermediate_size", "intermediate_size"),
}


def read_layer(folder: str | Path, contract: Contract, layer: int, rank: int) -> LayerWeights:
    """The experts of `layer` on tensor-parallel `rank`, in the contract's layout.

    Rank r of T takes columns [r*I/T, (r+1)*I/T) of gate and of up, and the same rows of down. A runtime group smaller
    than the checkpoint's repeats scales and zeros. bf16 scales become f16, rounded to nearest where f16 is subnormal.

    Raises CheckpointError: not AWQ GEMM 4-bit, does not fit the contract, no such layer, tensors missing, of another
    shape or dtype, or scales f16 cannot hold. Raises ContractError: no such rank.
    """
    check_rank(contract, rank)
    folder = Path(folder)
    config = _json(folder, "config.json")
    text = config.get("text_config")
    sections = [text, config] if isinstance(text, dict) else [config]  # a multimodal model's language part comes first
    quantization = _quantization(sections, folder)
    _check_quantization(quantization, contract, folder)
    _check_counts(sections, contract, folder)
    files = _tensor_files(folder)
    experts = _find_experts(files, layer, contract, folder)
    _check_converted(quantization, experts.path, folder)
    local = contract.local_intermediate
    part = slice(rank * local, (rank + 1) * local)
    gate, up, down = experts.projections
    wide, tall = (contract.hidden, contract.intermediate), (contract.intermediate, contract.hidden)
    with ExitStack() as stack:
        reader = _Reader(folder, files, contract, stack)

        def w13() -> Iterator[Integers]:
            for expert in range(contract.experts):
                halves = [
                    reader.matrix(f"{experts.path}.{expert}.{name}", wide, slice(0, wide[0]), part)
                    for name in (gate, up)
                ]
                yield Integers(*(np.concatenate([getattr(half, field) for half in halves], axis=1) for field in "qzs"))

        def w2() -> Iterator[Integers]:
            for expert in range(contract.experts):
                yield reader.matrix(f"{experts.path}.{expert}.{down}", tall, part, slice(0, tall[1]))

        return LayerWeights(pack(contract, "w13", w13()), pack(contract, "w2", w2()))


def _json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}; expected a Hugging Face checkpoint's folder, with config.json and *.safetensors"
        ) from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise CheckpointError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found a {type(content).__name__}")
    return content


def _quantization(sections: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    for section in sections:
        found = section.get("quantization_config")
        if isinstance(found, dict):
            return found
    raise CheckpointError(
        f"{folder / 'config.json'}: no quantization_config, so its weights are not quantised; expected AWQ GEMM, 4 bits"
    )


def _check_quantization(found: Mapping[str, Any], contract: Contract, folder: Path) -> None:
    """quant_method first: with another method the rest of the keys mean something else."""
    where = f"{folder / 'config.json'}: quantization_config"
    method = found.get("quant_method")
    if method != "awq":
        raise CheckpointError(
            f'{where}.quant_method = {json.dumps(method)}: expected "awq"; whatever the folder is called, '
            "these tensors are packed in another way: take a checkpoint in AutoAWQ's GEMM version"
        )
    version = found.get("version", found.get("format", "gemm"))  # absent means gemm to every reader of this format
    expected = {"version": "gemm", "bits": 4, "zero_point": True, "group_size": contract.checkpoint_group}
    values = {**found, "version": version.lower() if isinstance(version, str) else version}
    wrong = [
        f"{key} = {json.dumps(values.get(key))}, expected {json.dumps(value)}"
        for key, value in expected.items()
        if values.get(key) != value or isinstance(values.get(key), bool) != isinstance(value, bool)
    ]
    if wrong:
        hint = (
            f"; contract {contract.name!r} has checkpoint_group = {contract.checkpoint_group}"
            if "group" in wrong[-1]
            else ""
        )
        raise CheckpointError(f"{where}: {'; '.join(wrong)}{hint}")


def _check_counts(sections: list[dict[str, Any]], contract: Contract, folder: Path) -> None:
    """A count config.json does not state is left to the shapes of the tensors."""
    wrong = []
    for field, names in _COUNTS.items():
        stated = [(name, section[name]) for name in names for section in sections if section.get(name) is not None]
        if stated and stated[0][1] != getattr(contract, field):
            wrong.append(
                f"{stated[0][0]} = {json.dumps(stated[0][1])}, the contract's {field} = {getattr(contract, field)}"
            )
    if wrong:
        raise CheckpointError(
            f"{folder / 'config.json'} does not fit contract {contract.name!r}: {'; '.join(wrong)}; "
            "choose or write this model's contract"
        )


def _tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index, or from a checkpoint of one file."""
    index, single = "model.safetensors.index.json", "model.safetensors"
    if (folder / index).exists():
        files = _json(folder, index).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise CheckpointError(f"{folder / index}: expected weight_map, an object of tensor name and file name")
        return files
    if not (folder / single).exists():
        raise CheckpointError(
            f"{folder}: expected {index} or {single} beside config.json; download the whole checkpoint"
        )
    with ExitStack() as stack:
        return dict.fromkeys(_open(folder / single, stack).keys(), single)


def _open(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="numpy"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error}; the index names this file: download the whole checkpoint") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}; download it again") from None


@dataclass(frozen=True)
class _Experts:
    path: str  # "model.layers.3.mlp.experts"
    projections: tuple[str, str, str]  # gate, up, down


def _find_experts(files: Mapping[str, str], layer: int, contract: Contract, folder: Path) -> _Experts:
    """Where the layer's experts are. Of several stacks of layers the longest is the model; a draft head is short."""
    stacks: dict[str, dict[int, dict[int, _Experts]]] = {}
    for name in files:
        if match := _EXPERT.fullmatch(name):
            stem, number, block, expert, gate = match.groups()
            path = f"{stem}.{number}.{block}.experts"
            stacks.setdefault(stem, {}).setdefault(int(number), {})[int(expert)] = _Experts(path, _PROJECTIONS[gate])
    if not stacks:
        sample = next((name for name in files if "experts" in name), "none")
        raise CheckpointError(
            f"{folder}: no tensor is called ...layers.L....experts.E.gate_proj.qweight (or w1); "
            f"the first that speaks of experts: {sample}"
        )
    longest = max(len(layers) for layers in stacks.values())
    stems = [stem for stem, layers in stacks.items() if len(layers) == longest]
    if len(stems) > 1:
        raise CheckpointError(
            f"{folder}: {' and '.join(sorted(stems))} hold experts of {longest} layers each; expected one such stack"
        )
    layers = stacks[stems[0]]
    if layer not in layers:
        raise CheckpointError(
            f"{folder}: layer {layer} has no experts; {stems[0]} has them in {len(layers)} layers "
            f"from {min(layers)} to {max(layers)}"
        )
    missing = sorted(set(range(contract.experts)) - set(layers[layer]))
    path = next(iter(layers[layer].values())).path
    if missing or len(layers[layer]) != contract.experts:
        raise CheckpointError(
            f"{folder}: {path} has {len(layers[layer])} experts{f', not {missing[0]}' if missing else ''}; "
            f"contract {contract.name!r} has {contract.experts}"
        )
    return next(iter(layers[layer].values()))


def _check_converted(quantization: Mapping[str, Any], path: str, folder: Path) -> None:
    """Whole dotted parts are compared: "gate" means the router, not gate_proj."""
    for module in quantization.get("modules_to_not_convert") or ():
        if f".{str(module).strip('.')}." in f".{path}.":
            raise CheckpointError(
                f"{folder / 'config.json'}: quantization_config.modules_to_not_convert has {module!r}, "
                f"which leaves {path} unquantised; expected AWQ experts: take another layer or checkpoint"
            )


class _Reader:
    """Reads parts of AWQ matrices; every file is opened once, when first needed, and closed with the stack."""

    def __init__(self, folder: Path, files: Mapping[str, str], contract: Contract, stack: ExitStack) -> None:
        self._folder, self._files, self._contract, self._stack = folder, files, contract, stack
        self._opened: dict[str, Any] = {}

    def matrix(self, name: str, shape: tuple[int, int], rows: slice, columns: slice) -> Integers:
        """Rows and columns of the AWQ matrix `name` of full `shape` [K, N], with the contract's runtime groups."""
        (k, n), coarse, fine = shape, self._contract.checkpoint_group, self._contract.group
        words = slice(columns.start // 8, columns.stop // 8)
        groups = slice(rows.start // coarse, -(-rows.stop // coarse))
        q = self._part(f"{name}.qweight", ("I32",), (k, n // 8), rows, words)
        z = self._part(f"{name}.qzeros", ("I32",), (k // coarse, n // 8), groups, words)
        s = self._part(f"{name}.scales", ("F16", "BF16"), (k // coarse, n), groups, columns)
        # A rank may begin inside a checkpoint group, never inside a runtime group.
        first = (rows.start - groups.start * coarse) // fine
        kept = slice(first, first + (rows.stop - rows.start) // fine)
        zeros = np.repeat(unpack_columns(z.view(np.uint32)), coarse // fine, axis=0)[kept]
        scales = np.repeat(_half(s, name), coarse // fine, axis=0)[kept]
        return Integers(unpack_columns(q.view(np.uint32)), zeros, scales)

    def _part(
        self, name: str, dtypes: tuple[str, ...], shape: tuple[int, int], rows: slice, columns: slice
    ) -> NDArray[Any]:
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(
                f"{self._folder}: tensor {name} is missing; expected {' or '.join(dtypes)} {list(shape)}"
            )
        if file not in self._opened:
            self._opened[file] = _open(self._folder / file, self._stack)
        try:
            tensor = self._opened[file].get_slice(name)
        except SafetensorError:
            raise CheckpointError(
                f"{self._folder / file}: no tensor {name}, though the index says so; download it again"
            ) from None
        if tensor.get_dtype() not in dtypes or list(tensor.get_shape()) != list(shape):
            raise CheckpointError(
                f"{self._folder / file}: {name} is {tensor.get_dtype()} {tensor.get_shape()}; "
                f"contract {self._contract.name!r} makes it {' or '.join(dtypes)} {list(shape)}"
            )
        return np.ascontiguousarray(tensor[rows, columns])


def _half(scales: NDArray[Any], name: str) -> NDArray[np.float16]:
    """f16 scales; refuses those that are not finite in f16, or that f16 turns from something into nothing."""
    wide = scales.astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        half = wide.astype(np.float16)
    lost = ~np.isfinite(half) | ((half == 0) & (wide != 0))
    if lost.any():
        group, column = (int(i) for i in np.argwhere(lost)[0])
        raise CheckpointError(
            f"{name}.scales has {wide[group, column]!s} ({int(lost.sum())} such), which f16 cannot hold: "
            "its largest is 65504, its smallest 6e-8; the kernels take f16 scales"
        )
    return half
