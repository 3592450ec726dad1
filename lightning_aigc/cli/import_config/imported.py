"""Imported: values for our config that another trainer's file gave, and one line for each of its keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lightning_aigc.errors import ConfigError

PLACES = {
    "model": "model.init_args",
    "data": "data.init_args",
    "plugin": "trainer.plugins.init_args",
    "trainer": "trainer",
}
OFF: tuple[Any, ...] = (
    None,
    False,
    0,
    "",
    [],
    {},
    "none",
    "None",
    "NONE",
    "no",
    "off",
    "OFF",
    "NEVER",
    "false",
    "no_change",
)
SHOWN_LETTERS = 80


@dataclass(frozen=True)
class Take:
    """The key's value goes to `place`, such as `model.rank`, after `convert`."""

    place: str
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Unneeded:
    """The key needs nothing here: `reason` says what does its work."""

    reason: str


@dataclass(frozen=True)
class Missing:
    """Nothing here does what the key asks for."""

    reason: str


Rule = Take | Unneeded | Missing

MEMORY = Unneeded("trainer.plugins.init_args.memory, and base_quantization, save memory")
HUB = Unneeded("lightning export RUN --to hub --push OWNER/NAME publishes a run")
LOGGER = Unneeded("report.html and TensorBoard have the curves; trainer.logger adds others")
SNAPSHOT = Unneeded("snapshots every checkpointing_steps steps: --resume continues from the newest")
OBJECTIVE = Missing("the objective is the family's own")


@dataclass
class Imported:
    """The result of an import, before it becomes a YAML."""

    program: str
    path: Path
    values: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Value and reason by place: `model.rank`, `data.resolution`, `plugin.precision`, `trainer.max_epochs`."""
    lines: list[str] = field(default_factory=list)
    """One line for each key of the file."""
    notes: list[str] = field(default_factory=list)
    """One line for each value that the file does not give."""
    other_base: str | None = None
    """Base model of the command line, which takes precedence over the file's."""
    family: str | None = None
    """Name of the base's family."""
    is_full: bool = False
    """Whether all weights are trained instead of a LoRA."""
    seen: dict[str, Any] = field(default_factory=dict)
    """Every key of the file, and its value."""

    def take(self, key: str, place: str, value: Any, remark: str = "", text: str | None = None) -> None:
        """Take a value, and say so; `text` stands for the value in the line."""
        self.values[place] = (value, key)
        self.lines.append(f"{key}: {full_place(place)}: {text or shown(value)}" + (f", {remark}" if remark else ""))

    def unneeded(self, key: str, reason: str) -> None:
        self.lines.append(f"{key}: not needed: {reason}")

    def missing(self, key: str, reason: str) -> None:
        self.lines.append(f"{key}: has no counterpart: {reason}")

    def default(self, place: str, value: Any, reason: str | None = None) -> None:
        """Take a value that the file does not give, unless there is one; without a reason the program's default."""
        reason = reason or f"not in the file: {self.program}'{'' if self.program.endswith('s') else 's'} default"
        if place not in self.values:
            self.values[place] = (value, reason)
            self.notes.append(f"{full_place(place)}: {shown(value)}: {reason}")

    def value(self, place: str) -> Any:
        """The value of a place; None where there is none."""
        return self.values.get(place, (None, ""))[0]

    def answer(self, given: Mapping[str, Any], rules: Mapping[str, Rule], done: Collection[str] = ()) -> None:
        """Apply the rule of each key that is not in `done`. A rule of `a.*` is that of all keys below `a`."""
        self.seen |= given
        for key, value in given.items():
            if key in done:
                continue
            rule = rules.get(key) or _rule_above(key, rules)
            if isinstance(rule, Take) and value is not None:
                self.take(key, rule.place, _converted(rule, key, value, self.path))
            elif rule is None:
                near = get_close_matches(key, [name for name in rules if "*" not in name], n=1, cutoff=0.85)
                hint = f"; did you mean {near[0]}?" if near else ""
                self.lines.append(f"{key}: no key of {self.program} that is known here; ignored{hint}")
            elif _is_off(value):
                self.lines.append(f"{key}: off, as here")
            elif isinstance(rule, Unneeded):
                self.unneeded(key, rule.reason)
            elif isinstance(rule, Missing):
                self.missing(key, rule.reason)

    def close(self) -> None:
        """Give each key that only chose what was imported a line of its own."""
        for key, value in self.seen.items():
            above = key.partition(".")[0]
            if not any(line.startswith((f"{key}:", f"{key}.", f"{above}:")) for line in self.lines):
                self.lines.append(f"{key}: off, as here" if _is_off(value) else f"{key}: read: {shown(value)}")


def _rule_above(key: str, rules: Mapping[str, Rule]) -> Rule | None:
    parts = key.split(".")
    places = (f"{'.'.join(parts[:count])}.*" for count in range(len(parts) - 1, 0, -1))
    return next((rules[place] for place in places if place in rules), None)


def _converted(rule: Take, key: str, value: Any, path: Path) -> Any:
    try:
        return rule.convert(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {key} is {value!r}, which cannot be read ({error}); correct it") from error


def _is_off(value: Any) -> bool:
    return any(value == off and type(value) is type(off) for off in OFF) or value == 0.0


def full_place(place: str) -> str:
    """The key of our config for a place: `model.init_args.rank` for `model.rank`."""
    block, _, name = place.partition(".")
    return f"{PLACES[block]}.{name}" if block in PLACES else place


def shown(value: Any) -> str:
    """A value on one line, cut where it is long."""
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
    return text if len(text) <= SHOWN_LETTERS else f"{text[: SHOWN_LETTERS - 3]}..."


def flat(value: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested keys as dotted keys; lists stay values."""
    found: dict[str, Any] = {}
    for key, each in value.items():
        if isinstance(each, Mapping) and each:
            found |= flat(each, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = each
    return found


def as_bool(value: Any) -> bool:
    """A switch, also where a file writes it as text."""
    if isinstance(value, str):
        if value.lower() not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
            raise ValueError("wanted true or false")
        return value.lower() in ("true", "1", "yes", "on")
    return bool(value)


def as_int(value: Any) -> int:
    """A whole number, also from text such as 1e3."""
    number = float(value)
    if number != int(number):
        raise ValueError("wanted a whole number")
    return int(number)
