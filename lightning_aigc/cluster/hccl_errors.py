"""Meaning, usual cause and remedy of HCCL's and CANN's error codes in a log. Needs no torch.

Sources: EI and EJ codes: the table that HCCL itself prints from (error_info_list in CANN's open hcomm library) and
its fault guide (docs/en/user_guide/fault_diagnosis of hicann/hccl). Six-digit codes: CANN's rt_error_codes.h. Usual
causes, from threads: vllm-ascend#486, #1955, #2800 and #7676, LlamaFactory#975 and #3839, ms-swift#8281,
afd-plugin#229, Ascend/pytorch#43, #48, #54 and #62.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

OTHER_RANKS = "one rank died, hangs or got a different number of batches, and the others waited for it"
FIRST_ERROR = "find the rank whose log shows an error first; what the others report follows from it"


@dataclass(frozen=True)
class Explanation:
    """Meaning of a code, its usual cause, and its remedy."""

    meaning: str
    cause: str
    remedy: str


CODES = {
    "EI0001": Explanation(
        "an environment variable has an invalid value",
        "an HCCL_ variable outside its range, such as HCCL_CONNECT_TIMEOUT outside 120 to 7200",
        "the message names the variable and what it takes; correct or unset it",
    ),
    "EI0002": Explanation(
        "a collective waited too long for a peer",
        f"{OTHER_RANKS}; or the link between two nodes loses packets",
        f"{FIRST_ERROR}; give every rank equally many batches; raise HCCL_EXEC_TIMEOUT where rank 0 saves long;"
        " grep the plog for 'error cqe', which means the network",
    ),
    "EI0003": Explanation(
        "a collective got an invalid argument",
        "a dtype or a reduction that HCCL lacks: it has sum, prod, max and min, and no average",
        "the message names the operator, the argument and what it takes",
    ),
    "EI0004": Explanation(
        "the ranktable cannot be parsed",
        "RANK_TABLE_FILE names a file that is missing, unfinished (status is not completed) or not valid",
        "unset RANK_TABLE_FILE, which torch_npu does not need, or wait for the cluster to finish the file",
    ),
    "EI0005": Explanation(
        "two ranks called a collective with different arguments",
        "ranks run different code, configs or CANN versions, or their buckets differ because their parameters do",
        "the message names the argument and both values; compare versions and configs of the two ranks",
    ),
    "EI0006": Explanation(
        "a socket to a peer was not there in time",
        "a rank started later than HCCL_CONNECT_TIMEOUT (120 s unless set) allows, died before, or runs another"
        " collective",
        f"raise HCCL_CONNECT_TIMEOUT, for example to 1200, equally on all ranks; {FIRST_ERROR}; ask `hccn_tool -i 0"
        " -link -g` and on for ports that are down",
    ),
    "EI0007": Explanation(
        "a resource such as streams, notifies or memory ran out",
        "too many process groups, or other processes on the card",
        "the message names the resource; use fewer groups, and look with `npu-smi info` for other processes",
    ),
    "EI0008": Explanation(
        "two ranks have different HCCL versions",
        "CANN differs between nodes or containers",
        "install the same CANN on all nodes",
    ),
    "EI0009": Explanation(
        "a device could not open its link",
        "a network port is down, has no address or no cable",
        "for every card: `hccn_tool -i N -optical -g` (is a module present), `-ip -g` (an address), `-lldp -g` (a"
        " switch)",
    ),
    "EI0010": Explanation(
        "cards of one node cannot reach each other's memory",
        "a card is unhealthy, or a container sees only some of the cards that must talk directly",
        "look at the cards' health with `npu-smi info`; `export HCCL_INTRA_ROCE_ENABLE=1` takes the network instead",
    ),
    "EI0011": Explanation(
        "HCCL could not get memory on the card",
        "the model leaves too little: each process group takes buffers of HCCL_BUFFSIZE, 200 MB unless set",
        "lower the batch or HCCL_BUFFSIZE, and end other processes on the card",
    ),
    "EI0012": Explanation(
        "copying between cards failed (SDMA)",
        "a link between cards broke, a peer exited, or a tensor was freed before its collective had finished",
        f"{FIRST_ERROR}; keep a tensor until its work has been waited for",
    ),
    "EI0013": Explanation(
        "the network between two nodes gave up resending (error CQE)",
        "a port or switch dropped out for a while, or the peer's process exited",
        "the message names both ends: check their ports and the switch, and whether the peer exited first",
    ),
    "EI0014": Explanation(
        "the ranktable's content does not fit the machine",
        "it was written for other nodes or cards",
        "unset RANK_TABLE_FILE, or write it anew",
    ),
    "EI0015": Explanation(
        "ranks could not tell rank 0 about themselves",
        "a rank never reached init_process_group, or the host's network interface was chosen wrongly",
        "see in the message which ranks are missing; set HCCL_SOCKET_IFNAME to the interface that reaches the other"
        " nodes; raise HCCL_CONNECT_TIMEOUT",
    ),
    "EI0016": Explanation(
        "a configuration entry has an invalid value",
        "a key of hccl_config or of a config file outside its range",
        "the message names the entry and what it takes",
    ),
    "EI0017": Explanation(
        "the ranktable lacks an entry",
        "it was written by hand or for another version",
        "the message names the entry; unset RANK_TABLE_FILE or write it anew",
    ),
    "EI0018": Explanation(
        "the unified bus between two devices gave up resending (error CQE)",
        "a link dropped out for a while, the peer's process exited, or a chip's memory is faulty",
        "the message names both ends: check the link, whether the peer exited first, and the card's health",
    ),
    "EI0019": Explanation(
        "a port to listen on is taken on the host",
        "an earlier run still lives, or two runs share the host: HCCL takes ports 60000 to 60031",
        "end the earlier run, or give each run its own HCCL_IF_BASE_PORT",
    ),
    "EI0020": Explanation(
        "a port to listen on is taken on the card",
        "several processes share one card: each binds port 16666",
        "give each process its own card, or `export HCCL_NPU_SOCKET_PORT_RANGE=auto`",
    ),
    "EI9999": Explanation(
        "an inner error of HCCL, without a code of its own",
        "often the consequence of a rank that died or hung elsewhere",
        "read the lines that follow it; FUNC and timeouts there say more",
    ),
    "EJ0001": Explanation(
        "the card's communication process did not start",
        "the last run's process still holds the card",
        "end it, wait ten seconds and start again",
    ),
    "EJ0002": Explanation(
        "a network port of a card is down",
        "a cable, an optical module or the switch",
        "`hccn_tool -i N -link -g` for every card; the message suggests more",
    ),
    "EJ0003": Explanation(
        "a card's address or port cannot be bound",
        "the port is taken, or the address is not this card's",
        "end earlier runs; compare `hccn_tool -i N -ip -g` with /etc/hccn.conf and the ranktable",
    ),
    "EJ0004": Explanation(
        "an IP address is not valid",
        "an entry of the ranktable or of /etc/hccn.conf",
        "the message says which; correct it",
    ),
    "107019": Explanation("waiting took too long", OTHER_RANKS, FIRST_ERROR),
    "107020": Explanation("a task on the card took too long", OTHER_RANKS, FIRST_ERROR),
    "107022": Explanation("tasks of the card were aborted", "another rank failed and tore the run down", FIRST_ERROR),
    "207001": Explanation(
        "memory could not be allocated",
        "the card is full",
        "lower the batch; see who else uses the card: `npu-smi info`",
    ),
    "207018": Explanation(
        "the card is out of memory", "the card is full", "lower the batch; see who else uses the card: `npu-smi info`"
    ),
    "507010": Explanation(
        "the card's scheduler lost its heartbeat", "the card or its driver hangs", "look at `npu-smi info -t health`"
    ),
    "507011": Explanation(
        "running a task or a captured model failed on the card",
        "an operator before it failed, of which this is the report",
        "the first error in the plog names the operator; ASCEND_LAUNCH_BLOCKING=1 reports it where it was called",
    ),
    "507014": Explanation(
        "an operator ran too long on the cube cores",
        "a kernel hangs, often for an unusual shape",
        "ASCEND_LAUNCH_BLOCKING=1 names the operator",
    ),
    "507015": Explanation(
        "an operator failed on the cube cores",
        "an address or an index out of range, or a faulty kernel",
        "ASCEND_LAUNCH_BLOCKING=1 names the operator; look for indices out of range",
    ),
    "507018": Explanation(
        "an operator failed on the card's CPU",
        "an argument that the operator refuses, or a collective that failed there",
        "the lines around it name the operator",
    ),
    "507035": Explanation(
        "an operator failed on the vector cores",
        "an address or an index out of range, or a faulty kernel",
        "ASCEND_LAUNCH_BLOCKING=1 names the operator; look for indices out of range",
    ),
    "507046": Explanation("waiting for a stream took too long", OTHER_RANKS, FIRST_ERROR),
    "507047": Explanation("waiting for an event took too long", OTHER_RANKS, FIRST_ERROR),
    "507048": Explanation("a collective's task took too long", OTHER_RANKS, FIRST_ERROR),
    "507053": Explanation(
        "the card's memory is faulty", "hardware", "take the card out of the run; look at `npu-smi info -t ecc`"
    ),
    "507054": Explanation(
        "the card's memory has errors of several bits",
        "hardware",
        "take the card out of the run; look at `npu-smi info -t ecc`",
    ),
    "507056": Explanation("a link to another card failed", "hardware, or a peer that exited", FIRST_ERROR),
    "507057": Explanation("a remote card is suspected to be faulty", "the peer failed or exited", FIRST_ERROR),
    "507899": Explanation(
        "the driver failed",
        "driver and CANN do not fit, or the container lacks a device or shared memory",
        "compare the driver's version with CANN's notes; run containers with all cards of a node and --ipc=host",
    ),
    "507904": Explanation("repeating a collective failed", "the network between nodes", "see EI0013"),
}

_NAMED = re.compile(r"\bE[IJ]\d{4}\b")
# A number alone could be a process or a size, so something must call it an error or a return value.
_NUMBERED = re.compile(r"(?i)(?:err(?:or)?|ret(?:urn)?|result|exception)[\w ]{0,8}?(?:code|no|is)?[\s:=\[(]+(\d{6})\b")


def explain(text: str) -> list[str]:
    """Return a line for each code found in a log, in the order of their first appearance."""
    found = sorted(
        [(match.start(), match[0]) for match in _NAMED.finditer(text)]
        + [(match.start(), match[1]) for match in _NUMBERED.finditer(text) if match[1] in CODES]
    )
    counts = Counter(code for _, code in found)  # keeps the order in which codes were first counted
    return [f"{code}{f' ({times} times)' if times > 1 else ''}: {_explained(code)}" for code, times in counts.items()]


def _explained(code: str) -> str:
    explanation = CODES.get(code)
    if explanation is None:
        return "not in this table; search for it on https://www.hiascend.com/en/document"
    return f"{explanation.meaning}. Likely cause: {explanation.cause}. Do: {explanation.remedy}."
