"""Generates, verifies and tunes SM70 CUDA kernels for AWQ mixture-of-experts decode."""

__version__ = "0.1.0"
