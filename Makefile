# Two commands on a bare machine with Python 3.11 and g++:  make tune  and  make test
PYTHON ?= python3
VENV ?= .venv
READY := $(VENV)/.ready
TORCH := $(VENV)/.torch

.PHONY: env tune test lab clean

env: $(READY)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@

# What exports run in, for their tests alone.
$(TORCH): $(READY)
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev,torch]'
	touch $@

tune: $(READY)
	$(VENV)/bin/python cli.py tune --contract qwen38-tp4

test: $(TORCH)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest -n 2

lab: $(TORCH)
	$(VENV)/bin/pytest -n 2 -m lab

clean:
	rm -rf $(VENV) tuned
