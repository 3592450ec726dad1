"""Workflows and metadata of a release: their commands exist, actions are pinned, and version and address are one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_aigc
from lightning_aigc.cli import OWN_VERBS, TRAINER_VERBS, main
from tools import release

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.name: path for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))}
PINNED = re.compile(r"^\s*- uses: [\w/.-]+@[0-9a-f]{40} # v\d+(\.\d+)*$")
VERBS = {*TRAINER_VERBS, *OWN_VERBS, "--help"}


def read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.load(WORKFLOWS[name].read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    return loaded


def commands(name: str) -> Iterator[list[str]]:
    """The words of each command of a workflow."""
    for job in read(name)["jobs"].values():
        for step in job["steps"]:
            for line in step.get("run", "").split("&&"):
                if line.strip():
                    yield shlex.split(line)


def test_there_are_checks_and_a_release() -> None:
    assert WORKFLOWS.keys() == {"ci.yml", "release.yml"}


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_action_is_pinned_by_a_commit_and_names_its_version(name: str) -> None:
    lines = [line for line in WORKFLOWS[name].read_text(encoding="utf-8").splitlines() if "uses:" in line]
    assert lines and [line for line in lines if not PINNED.match(line)] == []


@pytest.mark.parametrize("name", WORKFLOWS)
def test_targets_modules_and_files_of_the_commands_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    seen = set()
    for words in commands(name):
        seen.add(words[0])
        if words[0] == "make":
            assert words[1] in targets, words
        elif words[:2] == ["python", "-m"] and words[2].startswith("tools."):
            assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").is_file(), words
        elif words[:3] == ["python", "-m", "pytest"]:
            paths = [word for word in words if word.startswith("tests/")]
            assert paths and [path for path in paths if not (ROOT / path).exists()] == []
        elif words[:4] == ["python", "-m", "pip", "install"] and "-c" in words:
            assert (ROOT / words[words.index("-c") + 1]).is_file(), words
        elif words[0] == "lightning":
            assert words[1] in VERBS, words
        else:
            assert words[0] in ("python", "git", "test"), words
    assert {"ci.yml": {"make", "python", "lightning"}, "release.yml": {"python", "lightning"}}[name] <= seen


def test_the_short_demo_is_a_command_line_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    (short,) = [words[1:] for words in commands("ci.yml") if words[:2] == ["lightning", "demo"]]
    with pytest.raises(SystemExit) as stop:
        main([*short, "--print_config"])
    assert stop.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"]["max_train_steps"] == 20


def test_the_local_run_has_the_targets_of_the_workflow() -> None:
    local = set(re.findall(r"make ([\w-]+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8")))
    assert {words[1] for words in commands("ci.yml") if words[0] == "make"} <= local


def test_the_pythons_are_those_of_the_metadata() -> None:
    pythons = read("ci.yml")["jobs"]["tests"]["strategy"]["matrix"]["python"]
    assert f">={pythons[0]}" == release.project()["requires-python"]
    tested = {name.rpartition(" ")[2] for name in release.project()["classifiers"] if ":: 3." in name}
    assert tested <= set(pythons)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_job_has_only_the_rights_that_it_names(name: str) -> None:
    workflow = read(name)
    assert workflow["permissions"] == {}
    may_write = {
        job: sorted(right for right, level in given.get("permissions", {"all": "write"}).items() if level == "write")
        for job, given in workflow["jobs"].items()
    }
    wanted = {"publish": ["attestations", "id-token"]} if name == "release.yml" else {}
    assert {job: rights for job, rights in may_write.items() if rights} == wanted


def test_a_release_is_tried_before_it_is_published_without_a_password() -> None:
    jobs = read("release.yml")["jobs"]
    assert jobs["try"]["needs"] == "build" and jobs["publish"]["needs"] == "try"
    assert jobs["publish"]["environment"]["name"] == "pypi"
    *_, attest, publish = jobs["publish"]["steps"]
    assert attest["uses"].startswith("actions/attest-build-provenance@")
    assert publish["uses"].startswith("pypa/gh-action-pypi-publish@") and "with" not in publish
    assert "secrets." not in WORKFLOWS["release.yml"].read_text(encoding="utf-8")


def test_a_tag_of_another_version_is_refused() -> None:
    release.check_tag(f"v{lightning_aigc.__version__}")
    with pytest.raises(SystemExit, match=r"got tag v9\.9\.9, wanted v"):
        release.check_tag("v9.9.9")


def test_the_readme_of_the_index_has_addresses_that_lead_to_files() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text, about = release.with_addresses(readme), release.project()
    assert not release.LINK.search(text)
    start = rf"\]\(https://(?:github\.com|raw\.githubusercontent\.com)/[\w-]+/[\w-]+(?:/blob)?/v{about['version']}/"
    files = re.findall(rf"{start}([^)#]+)", text)
    assert len(files) == len(release.LINK.findall(readme))
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_version_and_address_are_the_same_everywhere() -> None:
    about = release.project()
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert about["version"] == lightning_aigc.__version__ == cited["version"]
    assert cited["repository-code"] == about["urls"]["Repository"]
    assert all(url.startswith(about["urls"]["Repository"]) for url in about["urls"].values())
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(r"^## (\S+)", changelog, re.MULTILINE)[1] == about["version"]  # type: ignore[index]
