"""Read one expert layer of one tensor-parallel rank from a Hugging Face checkpoint folder in AutoAWQ's GEMM format.

config.json decides what the tensors are, never a name: some repositories called AWQ hold compressed-tensors. Only the
layer's own tensors are read, only the rank's rows and columns of them, and one expert at a time beside the result.
"""

from __future__ import annotations

import itertools
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
    files, layers = _layers(folder, contract)
    experts = _experts(layers, layer, contract, folder)
    local = contract.local_intermediate
    part = slice(rank * local, (rank + 1) * local)
    gate, up, down = experts.projections
    wide, tall = _shapes(contract)
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


@dataclass(frozen=True)
class Fit:
    """What `check` looked at: `path` of the experts of the first of `layers`, the layers that have experts."""

    path: str
    layers: tuple[int, ...]


def check(folder: str | Path, contract: Contract) -> Fit:
    """Whether the checkpoint is of the contract, from its headers alone: no weight is read.

    Looks at format, counts, and every tensor of every layer's experts by name, dtype and shape.
    Raises CheckpointError as `read_layer` does, but for scales f16 cannot hold.
    """
    folder = Path(folder)
    files, layers = _layers(folder, contract)
    found = [_experts(layers, layer, contract, folder) for layer in layers.found]
    wide, tall = _shapes(contract)
    with ExitStack() as stack:
        reader = _Reader(folder, files, contract, stack)
        for experts, expert in itertools.product(found, range(contract.experts)):
            for name, shape in zip(experts.projections, (wide, wide, tall), strict=True):
                reader.check(f"{experts.path}.{expert}.{name}", shape)
    return Fit(found[0].path, tuple(layers.found))


def _shapes(contract: Contract) -> tuple[tuple[int, int], tuple[int, int]]:
    """Full [K, N] of gate and up, and of down, as the checkpoint has them."""
    return (contract.hidden, contract.intermediate), (contract.intermediate, contract.hidden)


def _json(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}; expected a Hugging Face checkpoint's folder, with config.json and *.safetensors"
        ) from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise CheckpointError(f"{path}: not JSON: {error}; download it again") from None
    except RecursionError:
        raise CheckpointError(f"{path}: nested too deeply for a checkpoint's JSON; download it again") from None
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
    modules = found.get("modules_to_not_convert")
    if modules is not None and not (isinstance(modules, list) and all(isinstance(module, str) for module in modules)):
        raise CheckpointError(
            f"{where}.modules_to_not_convert = {json.dumps(modules)}: expected a list of module names; mend config.json"
        )


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
        problem = "is a folder" if path.is_dir() else error
        raise CheckpointError(
            f"{path}: {problem}; expected a safetensors file: download the whole checkpoint"
        ) from None
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}; download it again") from None


@dataclass(frozen=True)
class _Experts:
    path: str  # "model.layers.3.mlp.experts"
    projections: tuple[str, str, str]  # gate, up, down


@dataclass(frozen=True)
class _Layers:
    stem: str  # "model.layers"
    found: Mapping[int, Mapping[int, _Experts]]  # layer -> expert -> where, layers ascending
    quantization: Mapping[str, Any]


def _layers(folder: Path, contract: Contract) -> tuple[dict[str, str], _Layers]:
    """Tensor name -> file, and the layers with experts, of a checkpoint whose config.json fits the contract."""
    config = _json(folder, "config.json")
    text = config.get("text_config")
    sections = [text, config] if isinstance(text, dict) else [config]  # a multimodal model's language part comes first
    quantization = _quantization(sections, folder)
    _check_quantization(quantization, contract, folder)
    _check_counts(sections, contract, folder)
    files = _tensor_files(folder)
    stem, found = _stack(files, folder)
    return files, _Layers(stem, found, quantization)


def _stack(files: Mapping[str, str], folder: Path) -> tuple[str, dict[int, dict[int, _Experts]]]:
    """The model's stack of layers: of several the longest, since a draft head is short."""
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
    return stems[0], dict(sorted(stacks[stems[0]].items()))


def _experts(layers: _Layers, layer: int, contract: Contract, folder: Path) -> _Experts:
    """Where the layer's experts are, all of which it has, and all of them quantised."""
    if layer not in layers.found:
        raise CheckpointError(
            f"{folder}: layer {layer} has no experts; {layers.stem} has them in {len(layers.found)} layers "
            f"from {min(layers.found)} to {max(layers.found)}"
        )
    found = layers.found[layer]
    missing = sorted(set(range(contract.experts)) - set(found))
    first = next(iter(found.values()))
    if missing or len(found) != contract.experts:
        lack = (
            f"lacks expert {missing[0]} (no tensor {missing[0]}.{first.projections[0]}.qweight): it " if missing else ""
        )
        raise CheckpointError(
            f"{folder}: {first.path} {lack}has {len(found)}{'' if missing else ' experts'}, "
            f"contract {contract.name!r} has {contract.experts}; download the whole checkpoint or write its contract"
        )
    _check_converted(layers.quantization, first.path, folder)
    return first


def _check_converted(quantization: Mapping[str, Any], path: str, folder: Path) -> None:
    """Whole dotted parts are compared: "gate" means the router, not gate_proj."""
    for module in quantization.get("modules_to_not_convert") or ():
        if f".{module.strip('.')}." in f".{path}.":
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
        coarse, fine = self._contract.checkpoint_group, self._contract.group
        words = slice(columns.start // 8, columns.stop // 8)
        groups = slice(rows.start // coarse, -(-rows.stop // coarse))
        qweight, qzeros, scales = self.check(name, shape)
        q, z, s = (
            np.ascontiguousarray(part)
            for part in (qweight[rows, words], qzeros[groups, words], scales[groups, columns])
        )
        # A rank may begin inside a checkpoint group, never inside a runtime group.
        first = (rows.start - groups.start * coarse) // fine
        kept = slice(first, first + (rows.stop - rows.start) // fine)
        zeros = np.repeat(unpack_columns(z.view(np.uint32)), coarse // fine, axis=0)[kept]
        halves = np.repeat(_half(s, name), coarse // fine, axis=0)[kept]
        return Integers(unpack_columns(q.view(np.uint32)), zeros, halves)

    def check(self, name: str, shape: tuple[int, int]) -> tuple[Any, Any, Any]:
        """qweight, qzeros and scales of the AWQ matrix `name` of full `shape` [K, N], unread: safetensors' slices."""
        (k, n), groups = shape, shape[0] // self._contract.checkpoint_group
        return (
            self._tensor(f"{name}.qweight", ("I32",), [k, n // 8]),
            self._tensor(f"{name}.qzeros", ("I32",), [groups, n // 8]),
            self._tensor(f"{name}.scales", ("F16", "BF16"), [groups, n]),
        )

    def _tensor(self, name: str, dtypes: tuple[str, ...], shape: list[int]) -> Any:
        file = self._files.get(name)
        if file is None:
            raise CheckpointError(f"{self._folder}: tensor {name} is missing; expected {' or '.join(dtypes)} {shape}")
        if file not in self._opened:
            self._opened[file] = _open(self._folder / file, self._stack)
        try:
            tensor = self._opened[file].get_slice(name)
        except SafetensorError:
            raise CheckpointError(
                f"{self._folder / file}: no tensor {name}, though the index says so; download it again"
            ) from None
        if tensor.get_dtype() not in dtypes or list(tensor.get_shape()) != shape:
            raise CheckpointError(
                f"{self._folder / file}: {name} is {tensor.get_dtype()} {tensor.get_shape()}; "
                f"contract {self._contract.name!r} makes it {' or '.join(dtypes)} {shape}"
            )
        return tensor


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
