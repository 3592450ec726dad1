"""Four folders need a toolchain of their own and stay out of `make test`; their make targets name them.

triton/        upstream Triton, and a GPU or TRITON_INTERPRET=1          make test-triton
nvidia/        upstream Triton without its interpreter                   make test-triton
ascend/        triton-ascend, which has the same import name             make test-ascend
npu_contract/  torch_npu, which renames a torch device for the process   make test-ascend

A skip would hide a broken toolchain: a folder that is named on the command line is collected, whatever is missing.
"""

import os
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where tests/kernels/ops run: cpu or cuda")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--device") != "cpu":  # float64 is the reference's on every device, which warns once
        config.addinivalue_line("filterwarnings", "ignore::lightning_aigc_kernels.dispatch.FallbackWarning")


def installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


interpreted = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = [
    folder
    for folder, here in {
        "triton": installed("triton") and (interpreted or torch.cuda.is_available()),
        "nvidia": installed("triton") and not interpreted,
        "ascend": installed("triton-ascend"),
        "npu_contract": installed("torch_npu"),
    }.items()
    if not here
]
