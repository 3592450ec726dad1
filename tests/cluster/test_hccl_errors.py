"""Codes are found where logs write them, and nowhere else."""

from __future__ import annotations

import pytest

from lightning_aigc.cluster.hccl_errors import CODES, explain

REAL = """\
[rank1]: RuntimeError: InnerRunOpApi:torch_npu/csrc/framework/OpParamMaker.cpp:281 OPS function error: HcclAllreduce
[rank1]: EI0006: [PID: 1292363] 2025-04-08-18:07:20.444.436 Getting socket times out. Reason: Remote Rank did not send
[PID: 2103452] 2025-11-03-20:18:46.447.213 Resource_Error_Insufficient_Device_Memory(EI0011): Failed to allocate
EI0006: 2024-08-05-18:15:21.270.506 Getting socket times out.
RuntimeError: NPU function error: c10_npu::acl::AclrtSynchronizeStreamWithTimeout(stream()), error code is 507011
"""


def codes_in(text: str) -> list[str]:
    return [line.split(":")[0] for line in explain(text)]


def test_a_log_names_each_code_once_in_order_and_how_often() -> None:
    assert codes_in(REAL) == ["EI0006 (2 times)", "EI0011", "507011"]


def test_numbers_and_names_share_one_order() -> None:
    assert codes_in("error code is 507046\nEI0006\nerror code is 507011") == ["507046", "EI0006", "507011"]


@pytest.mark.parametrize(
    "text",
    [
        "aclrtSynchronizeDevice, error code is 507046",
        "ACL stream synchronize failed, error code:507046",
        "wait for compute device to finish failed, runtime result = 507046.[FUNC:ReportCallError]",
        "ret[507046]",
        "call acl failed, retCode=507046",
        "NPU warning, error code is 507046[Error]:",
    ],
)
def test_numbers_are_found_as_cann_writes_them(text: str) -> None:
    assert codes_in(text) == ["507046"]


@pytest.mark.parametrize(
    "text", ["[PID: 507046]", "507046 bytes sent", "12:00:00.507.046", "error code is 5070461", "x"]
)
def test_other_numbers_are_no_codes(text: str) -> None:
    assert explain(text) == []


def test_a_line_says_meaning_cause_and_remedy() -> None:
    (line,) = explain("(EI0002): Notify register times out")
    assert (
        "waited too long for a peer" in line and "Likely cause: one rank died" in line and "HCCL_EXEC_TIMEOUT" in line
    )


def test_an_unknown_hccl_code_says_where_to_look() -> None:
    assert explain("EI0777: new") == [
        "EI0777: not in this table; search for it on https://www.hiascend.com/en/document"
    ]


def test_every_documented_hccl_code_is_known() -> None:
    documented = {f"EI{i:04}" for i in range(1, 21)} | {f"EJ{i:04}" for i in range(1, 5)}
    assert documented <= CODES.keys()
