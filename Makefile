# Every target sets itself up: `make demo` on a fresh machine needs Python 3.11 or newer and a package index, nothing else.
DEVICE ?= cpu
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
comma := ,
READY := $(VENV)/.ready-$(DEVICE)
EXTRAS := dev$(if $(filter-out cpu,$(DEVICE)),$(comma)$(DEVICE))
# One thread a process: two torch threads on two busy cores are several times slower than one.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check check-demo embedded clean

demo: $(READY)  ## fine-tune the tiny Stable Diffusion on its brand; results in runs/demo
	$(BIN)/lightning fit -c configs/sd_lora_demo.yaml

test: $(READY)  ## every test that needs no accelerator
	$(BIN)/python -m pytest -q

check: $(READY)  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check-demo: $(READY)  ## what the demo must reach, read from its summary.json
	$(BIN)/python benchmarks/check_demo.py runs/demo/summary.json

embedded: $(READY)  ## make the embedded models and pictures anew, about an hour on one core
	$(BIN)/python -m lightning_aigc.tiny.make build/tiny

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; run make PYTHON=python3.11")'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch torchvision
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

clean:  ## remove what was built, but not runs/
	rm -rf $(VENV) build *.egg-info
