"""Host: this machine's environment and the answers of a probe that runs in a subprocess, for `lightning doctor`."""

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

from lightning_aigc.cli.doctor.ascend_releases import Verdict

PROBE = Path(__file__).with_name("probe.py")
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
    """The environment and the probe, which tests replace."""

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @functools.cached_property
    def probe(self) -> dict[str, dict[str, Any]]:
        """The probe's answers by question; an error for each question that it did not answer."""
        try:
            done = subprocess.run(
                [sys.executable, "-P", str(PROBE)],
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT_S,
                env={**self.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": self._search_path()},
                errors="replace",
            )
            output, end = done.stdout, f"it ended with status {done.returncode}"
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode(errors="replace") if isinstance(error.stdout, bytes) else ""
            end = f"no answer in {PROBE_TIMEOUT_S} s"
        lines = [line.partition(" ") for line in output.splitlines() if re.match(r"\w+ \{", line)]
        answers: dict[str, dict[str, Any]] = defaultdict(lambda: {"error": f"the probe did not get there: {end}"})
        answers.update({name: json.loads(answer) for name, _, answer in lines})
        return answers

    def _search_path(self) -> str:
        """PYTHONPATH for the probe, so that it imports what this process can, including an uninstalled checkout."""
        return os.pathsep.join(filter(None, (self.environ.get("PYTHONPATH"), *sys.path)))

    def ask(self, question: str) -> Any:
        """The probe's answer to one question. Raises: RuntimeError with the probe's error."""
        answer = self.probe[question]
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    @property
    def backend(self) -> str:
        """The communication backend of the cards here: hccl, nccl or gloo."""
        for kind, backend in (("npu", "hccl"), ("cuda", "nccl")):
            if self.probe[kind].get("value"):
                return backend
        return "gloo"


Findings = list[Verdict]
Check = Callable[[Host], Findings]


def run_check(name: str, check: Check, host: Host) -> list[Finding]:
    """Run one check; an exception becomes a finding."""
    try:
        return [Finding(name, mark, text) for mark, text in check(host)]
    except Exception as error:
        text = re.sub(r"^RuntimeError: ", "", f"{type(error).__name__}: {error}")
        return [Finding(name, "unknown", f"the check failed: {text}")]
