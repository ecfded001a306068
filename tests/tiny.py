"""A contract file that the whole command line runs on in seconds."""

from pathlib import Path

from tuner import contract

TOML = """
name = "tiny"
tensor_parallel = 1
experts = 8
top_k = 2
hidden = 128
intermediate = 64

[quantization]
checkpoint_group = 32

[tuning]
levels = [1, 2]
"""
KEY = "simt-t2-k4-u1-r2+simt-t4-k2-u1-r2+m512"  # its default


def write(folder: Path, text: str = TOML) -> str:
    path = folder / "tiny.toml"
    path.write_text(text)
    return str(path)


def load(folder: Path) -> contract.Contract:
    return contract.load(write(folder))
