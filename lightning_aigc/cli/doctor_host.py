"""The machine as `lightning doctor` sees it: its environment and the answers of a probe in a process of its own."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_aigc.cli import doctor_versions as versions

PROBE = Path(__file__).with_name("doctor_probe.py")
PROBE_TIMEOUT_S = 180


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    mark: str
    """ok, note, warn, problem, or unknown."""
    text: str

    as_dict = asdict


@dataclass
class Host:
    """What the checks ask, so that a test can answer."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @functools.cached_property
    def probe(self) -> dict[str, dict[str, Any]]:
        """The probe's answers by question; empty when it could not even start."""
        try:
            done = subprocess.run(
                [sys.executable, "-P", str(PROBE)],
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT_S,
                env={**self.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": self._search_path()},
                errors="replace",
            )
            said, end = done.stdout, f"it ended with status {done.returncode}"
        except subprocess.TimeoutExpired as error:
            said = (error.stdout or b"").decode(errors="replace") if isinstance(error.stdout, bytes) else ""
            end = f"no answer in {PROBE_TIMEOUT_S} s"
        lines = [line.partition(" ") for line in said.splitlines() if re.match(r"\w+ \{", line)]
        answers: dict[str, dict[str, Any]] = defaultdict(lambda: {"error": f"the probe did not get there: {end}"})
        answers.update({name: json.loads(answer) for name, _, answer in lines})
        return answers

    def _search_path(self) -> str:
        """What this process can import, the probe can: a checkout that is not installed, too."""
        return os.pathsep.join(filter(None, (self.environ.get("PYTHONPATH"), *sys.path)))

    def ask(self, question: str) -> Any:
        """The probe's value. Raises: RuntimeError with what the probe met."""
        answer = self.probe[question]
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    @property
    def backend(self) -> str:
        """hccl, nccl or gloo: what the cards here would speak."""
        for kind, backend in (("npu", "hccl"), ("cuda", "nccl")):
            if self.probe[kind].get("value"):
                return backend
        return "gloo"


Findings = list[versions.Verdict]
Check = Callable[[Host], Findings]


def run_check(name: str, check: Check, host: Host) -> list[Finding]:
    """Do one check; an error in it becomes a finding of its own."""
    try:
        return [Finding(name, mark, text) for mark, text in check(host)]
    except Exception as error:
        text = re.sub(r"^RuntimeError: ", "", f"{type(error).__name__}: {error}")
        return [Finding(name, "unknown", f"could not find out: {text}")]
