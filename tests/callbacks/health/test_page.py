"""health.html: whole, readable without a network, and safe with any name."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from typing import Any

from lightning_aigc.callbacks.health.alerts.alerts import Alert, Level
from lightning_aigc.callbacks.health.history.norm_history import MOST_LOOKS, NormHistory
from lightning_aigc.callbacks.health.page import MOST_ROWS, render_health_page

VOID = {"meta", "link", "br", "img", "wbr"}


class Balance(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def specs(page: str) -> list[Any]:
    """The page's charts; the loss of a single look is a chart without a line."""
    found = [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]
    return [spec for spec in found if spec.get("title") != "Loss, at each look"]


def rows(spec: Any) -> list[Any]:
    (found,) = spec["datasets"].values()
    return list(found)


def alert(step: int, level: Level, layer: str = "a.weight") -> Alert:
    return Alert(step, "vanishing", layer, level, "message", "cause", "model.init_args.learning_rate: 1e-4", since=10)


def record(layers: int = 3, looks: int = 5) -> NormHistory:
    made = NormHistory()
    for look in range(looks):
        norms = [10.0 ** (layer - look) for layer in range(layers)]
        made.add(10 * look, [f"blocks.{layer}.weight" for layer in range(layers)], norms, 1.0 / (look + 1))
    return made


def test_the_page_is_well_formed_and_asks_for_nothing_else() -> None:
    page = render_health_page("run", [alert(10, "info"), alert(20, "error")], record(), {"steps": "40"})
    balance = Balance()
    balance.feed(page)
    assert balance.open == []
    markup = re.sub(r"(?s)<script.*?</script>", "", page)
    assert not re.search(r"(src|href)=|https?://|@import|url\(", markup)
    assert "default-src 'none'" in markup  # the browser itself refuses any address


def test_names_are_escaped() -> None:
    page = render_health_page("<b>", [alert(10, "error", "<script>x</script>")], record(), {"<i>": "&"})
    assert "<script>x" not in page
    markup = re.sub(r"(?s)<script.*?</script>", "", page)
    assert "<i>" not in markup and "<b>: health" not in markup


def test_an_alert_that_got_worse_is_one_row_at_its_worst_and_a_mark_for_each_level() -> None:
    page = render_health_page("run", [alert(10, "info"), alert(20, "warning"), alert(100, "error")], record(), {})
    assert page.replace("<wbr>", "").count("<code>a.weight</code>") == 1
    assert "(since step 10)" in page
    (timeline,) = [spec for spec in specs(page) if "encoding" in spec]
    assert [row["level"] for row in rows(timeline)] == ["info", "warning", "error"]
    assert "1 error, 1 warning, 1 info" in page


def test_a_run_without_alerts_or_looks_still_has_a_page() -> None:
    page = render_health_page("run", [], NormHistory(), {})
    assert "No check found anything." in page and "No look at the gradients was taken." in page


def test_none_is_grey_and_not_finite_is_red() -> None:
    made = NormHistory()
    made.add(1, ["a", "b", "c"], [1.0, math.nan, math.inf], 1.0)
    (heat,) = specs(render_health_page("run", [], made, {}))
    cells = {cell["layer"]: cell["kind"] for cell in rows(heat)}
    assert cells == {"a": "norm", "b": "none", "c": "not finite"}


def test_many_layers_are_drawn_by_block() -> None:
    made = NormHistory()
    made.add(1, [f"blocks.0.layer{i}.weight" for i in range(MOST_ROWS + 1)], [1.0] * (MOST_ROWS + 1), 1.0)
    page = render_health_page("run", [], made, {})
    assert "Gradient norm by block and step" in page and "layer7" not in page


def test_a_long_run_keeps_a_bounded_record_from_its_first_step_to_its_last() -> None:
    made = record(layers=2, looks=5 * MOST_LOOKS)
    assert MOST_LOOKS / 2 <= len(made.steps) <= MOST_LOOKS
    assert made.steps[0] == 0 and made.steps[-1] >= 10 * (5 * MOST_LOOKS - 17)
    assert len({b - a for a, b in zip(made.steps[:-1], made.steps[1:], strict=True)}) == 1
