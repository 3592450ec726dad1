"""Judgements of torch, torch_npu, CANN and triton-ascend by `lightning doctor`; its remedies are in its own table."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fakes.processes.doctor import fake_package, run_doctor
from lightning_aigc.cli.doctor import ascend_releases
from lightning_aigc.cli.doctor.ascend_releases import (
    RELEASES,
    TRITON_ASCEND_OF_CANN,
    Release,
    for_cann,
    is_version,
    judge_cann,
    judge_torch_npu,
    judge_triton_ascend,
)


@pytest.fixture
def cpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_releases, "has_cuda_build", lambda: False)


@pytest.mark.usefixtures("cpu_build")
@pytest.mark.parametrize(
    ("torch", "torch_npu", "mark"),
    [
        ("2.7.1+cpu", "2.7.1.post2", "ok"),
        ("2.8.0", "2.7.1", "problem"),
        ("2.7.0", "2.7.1", "problem"),
        (None, "2.7.1", "ok"),
    ],
)
def test_torch_npu_wants_the_torch_it_was_built_for(torch: str | None, torch_npu: str, mark: str) -> None:
    assert judge_torch_npu(torch, torch_npu)[0] == mark


@pytest.mark.parametrize(("version", "mark"), [("2.14.0", "problem"), ("2.13.0", "warn")])
def test_torch_npu_wants_a_cpu_build_of_torch(version: str, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ascend_releases, "has_cuda_build", lambda: True)
    judged = judge_torch_npu(version, version)
    assert judged[0] == mark and f"pip install torch=={version} --index-url" in judged[1]


def test_a_cuda_build_is_found_without_importing_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    assert not ascend_releases.has_cuda_build()
    (tmp_path / "torch" / "lib" / "libc10_cuda.so").write_text("")
    assert ascend_releases.has_cuda_build()


@pytest.mark.parametrize(
    ("torch_npu", "cann", "mark", "said"),
    [
        ("2.7.1", "8.3.RC1", "ok", "which torch_npu 2.7.1 was released for"),
        ("2.7.1.post2", "8.5.0", "ok", ""),
        ("2.12.0", "9.1.0", "ok", ""),
        ("2.7.1", "8.0.RC2", "warn", "install CANN 8.3.RC1"),
        (
            "2.12.0",
            "8.5.0",
            "warn",
            "install CANN 9.1.0, or for CANN 8.5.0: pip install torch==2.9.0 torch_npu==2.9.0 triton-ascend==3.2.0",
        ),
        (
            "2.13.0",
            "9.1.0",
            "note",
            "for CANN 9.1.0: pip install torch==2.14.0 torch_npu==2.14.0",
        ),
        ("2.13.0", "9.9.9", "note", "in no published table"),
        ("2.7.1", None, "problem", "install CANN 8.3.RC1, then `source"),
        ("2.13.0", None, "problem", "install the CANN that its README names"),
    ],
)
def test_cann_is_compared_with_the_published_table(torch_npu: str, cann: str | None, mark: str, said: str) -> None:
    judged = judge_cann(torch_npu, cann)
    assert judged[0] == mark and said in judged[1]


@pytest.mark.parametrize(
    ("triton_ascend", "cann", "mark", "said"),
    [
        ("3.2.0", "8.5.0", "ok", "triton-ascend 3.2.0"),
        ("3.2.0", None, "ok", ""),
        ("3.2.0", "9.0.0", "warn", "3.2.1 was released for CANN 9.0.0; install that"),
        ("3.2.0", "9.1.0", "warn", "was released for CANN 8.5.0, got CANN 9.1.0, for which none is published"),
        ("3.9.9", "9.1.0", "warn", "is in no published table"),
        (None, "8.5.0", "note", "for CANN 8.5.0 install triton-ascend==3.2.0"),
        (None, "9.1.0", "note", "is not installed"),
    ],
)
def test_triton_ascend_is_compared_with_cann(triton_ascend: str | None, cann: str | None, mark: str, said: str) -> None:
    judged = judge_triton_ascend(triton_ascend, cann)
    assert judged[0] == mark and said in judged[1]


@pytest.mark.usefixtures("cpu_build")
@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.torch_npu)
def test_what_the_table_holds_is_judged_well(release: Release) -> None:
    """The command for each CANN installs packages that the same table calls right."""
    assert judge_torch_npu(release.torch, release.torch_npu)[0] == "ok"
    assert judge_cann(release.torch_npu, release.cann)[0] == "ok"
    command = for_cann(release.cann)
    assert command is not None
    packages = dict(re.findall(r"([\w-]+)==(\S+)", command))
    assert judge_torch_npu(packages["torch"], packages["torch_npu"])[0] == "ok"
    assert judge_cann(packages["torch_npu"], release.cann)[0] == "ok"
    if "triton-ascend" in packages:
        assert judge_triton_ascend(packages["triton-ascend"], release.cann)[0] == "ok"


def test_the_newest_torch_of_a_cann_is_named_first() -> None:
    """`for_cann` takes the first row of a CANN."""
    for cann in {release.cann for release in RELEASES}:
        rows = [ascend_releases.numbers(release.torch) for release in RELEASES if release.cann == cann]
        assert rows == sorted(rows, reverse=True)
    assert len({release.torch_npu for release in RELEASES}) == len(RELEASES)
    assert {"8.5.0", "9.0.0"} <= TRITON_ASCEND_OF_CANN.keys()


def test_a_cann_may_have_more_numbers_than_its_release() -> None:
    assert is_version("8.5.0", "8.5.0") and is_version("8.5.0.1.123", "8.5.0") and is_version("8.3.rc1", "8.3.RC1")
    assert not is_version("8.3.RC11", "8.3.RC1") and not is_version("8.5.01", "8.5.0")


def test_doctor_prints_the_combination_that_belongs_together(tmp_path: Path) -> None:
    fake_package(tmp_path, "torch_npu", "2.13.0", "")
    fake_package(tmp_path, "triton_ascend", "3.2.0", "")
    (tmp_path / "cann").mkdir()
    (tmp_path / "cann" / "version.cfg").write_text("runtime_running_version=[8.5.0.1:CANN-8.5.0]\n")
    said = run_doctor(path=tmp_path, ASCEND_HOME_PATH=str(tmp_path / "cann")).stdout
    assert "for CANN 8.5.0: pip install torch==2.9.0 torch_npu==2.9.0 triton-ascend==3.2.0" in said
    assert "ok       triton-ascend 3.2.0" in said
