"""`lightning doctor`: report this machine's setup and conflicts in it, and explain the HCCL codes of a log.

It also works where importing torch fails: nothing here imports torch, and every check is independent.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lightning_aigc.cli.doctor.checks import CHECKS
from lightning_aigc.cli.doctor.host import Finding, Host, run_check
from lightning_aigc.cluster.hccl_errors import explain
from lightning_aigc.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.description = "Report this machine's setup and conflicts in it; exits with 1 if there is a problem."
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument(
        "--explain-log", "--explain_log", type=Path, metavar="FILE", help="only explain the HCCL codes in a log"
    )


def run(args: argparse.Namespace) -> int:
    """Run the checks, or explain a log, and print the result; returns the exit status.

    Raises: ConfigError for a log that cannot be read.
    """
    if args.explain_log is not None:
        return explain_log(args.explain_log, as_json=args.json)
    host = Host()
    findings = [finding for name, check in CHECKS.items() for finding in run_check(name, check, host)]
    counts = Counter(finding.mark for finding in findings)
    if args.json:
        found = [finding.as_dict() for finding in findings]
        print(json.dumps({"problems": counts["problem"], "warnings": counts["warn"], "findings": found}, indent=1))
    else:
        print(as_text(findings))
    return int(counts["problem"] > 0)


def explain_log(path: Path, *, as_json: bool) -> int:
    """Print one line per HCCL or CANN code in a log."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"--explain-log: {path} cannot be read: {error.strerror}; give the path of a log") from error
    lines = explain(text)
    if as_json:
        print(json.dumps({"codes": lines}, indent=1))
    else:
        print(
            "\n".join(lines) or f"{path} holds no HCCL or CANN error code (EI0006, EJ0001, error code is 507046, ...)"
        )
    return 0


def as_text(findings: Sequence[Finding]) -> str:
    """The findings grouped by check, and a count as the last line."""
    lines, subject = [], None
    for finding in findings:
        if finding.check != subject:
            subject = finding.check
            lines.append(subject)
        lines.append(f"  {finding.mark:<8} {finding.text}")
    counts = Counter(finding.mark for finding in findings)
    lines.append(f"{counts['problem']} problems, {counts['warn']} warnings")
    return "\n".join(lines)
