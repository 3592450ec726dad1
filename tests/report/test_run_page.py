"""report.html: every part of a record is on the page, safe with any text, and valid Vega-Lite."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from fakes.runs.run_records import full_record
from lightning_aigc.report.charts import progress_chart
from lightning_aigc.report.curves import score_rows, smooth, thin
from lightning_aigc.report.health_charts import MOST_COLUMNS, alert_chart, norm_heat_map
from lightning_aigc.report.paired_scores import Check
from lightning_aigc.report.record import Curve, Health, LoRAFile, RateChange, RunRecord
from lightning_aigc.report.run_page import cost, render_run_page
from lightning_aigc.report.units import bytes_text, memory_text, speed_text, time_text
from lightning_aigc.report.usage import diffusers_snippet, usage_html
from lightning_aigc.report.vega import write_picture


def markup(page: str) -> str:
    return re.sub(r"(?s)<script.*?</script>", "", page)


def test_every_part_of_a_record_is_on_the_page(tmp_path: Path) -> None:
    page = markup(render_run_page(full_record(tmp_path)))
    for said in (
        "0.15 → 0.35", "seed", "0.88 GiB", "AdaptiveLR changed the rate once", "a peak", "1 error",
        "int3 between 2 ranks", "1 step skipped", "snapshots taken", "zorp.safetensors",
        "&lt;lora:zorp:0.8&gt;", "a note", "a: 1",
    ):  # fmt: skip
        assert said in page, said


def test_text_of_users_is_escaped(tmp_path: Path) -> None:
    made = full_record(tmp_path)
    made.name, made.config, made.notes = "<u>run</u>", "<s>config</s>", ["</script><i>note</i>"]
    made.rate_changes = [RateChange(1, 0.5, "</script><q>why</q>")]
    made.curves = {"lr": Curve([1, 2], [0.1, 0.1])}
    page = render_run_page(made)
    for raw in ("<u>", "<s>config", "<i>note", "<q>why", "<b>mug"):
        assert raw not in page


def test_a_record_of_nothing_is_a_page_without_charts() -> None:
    page = render_run_page(RunRecord("empty", is_finished=True))
    assert "Not scored" in page and "<script" not in page and len(page) < 10_000


def test_only_the_page_of_an_unfinished_run_renews_itself(tmp_path: Path) -> None:
    made = full_record(tmp_path)
    assert "location.reload" not in render_run_page(made)
    page = render_run_page(made, renewed_every_s=20)
    assert page.count("location.reload") == 1 and ",20000)" in page and "renews itself every 20 s" in markup(page)


def test_charts_are_valid_vega_lite_and_pictures_of_them_can_be_written(tmp_path: Path) -> None:
    made = full_record(tmp_path)
    made.curves |= {"loss": Curve([1, 2], [1.0, 0.5]), "val_loss": Curve([2], [0.7]), "lr": Curve([1, 2], [0.1, 0.2])}
    assert made.health is not None
    charts: list[Any] = [progress_chart(made), norm_heat_map(made.health), alert_chart(made.health.alerts, 7)]
    for chart in charts:
        chart.to_dict(validate=True)
    write_picture(charts[0], tmp_path / "a.png")
    write_picture(charts[0], tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    drawing = (tmp_path / "a.svg").read_text()
    assert "var(--" not in drawing and "CLIP-T" in drawing and "Learning rate" in drawing


def test_a_score_carries_the_noise_of_its_difference_to_step_zero() -> None:
    first, last = score_rows(
        [Check(0, {"clip_t": [0.1, 0.5], "clip_i": []}), Check(5, {"clip_t": [0.3, 0.9], "clip_i": []})], "clip_t"
    )
    assert first["noise"] == 0 and last["value"] == 0.6
    assert last["noise"] == round(math.sqrt(0.02 / 2), 5) and last["low"] < last["value"] < last["high"]


def test_scores_that_are_not_finite_are_left_out() -> None:
    assert score_rows([Check(0, {"clip_t": [0.1], "clip_i": [math.nan]})], "clip_i") == []


def test_long_curves_are_thinned_by_means_and_end_at_their_last_step() -> None:
    long = thin(Curve(list(range(1, 2001)), [float(i % 2) for i in range(2000)]), most=100)
    assert len(long.steps) == 100 and long.steps[-1] == 2000 and set(long.values) == {0.5}
    assert smooth([1.0, math.nan, 3.0], window=2) == [1.0, 1.0, 2.0]


def test_a_long_heat_map_shows_the_largest_norm_of_its_columns() -> None:
    looks = 3 * MOST_COLUMNS
    health = Health([], list(range(looks)), {"a": [1.0] * (looks - 1) + [50.0]})
    chart: Any = norm_heat_map(health)
    (rows,) = chart.to_dict()["datasets"].values()
    assert len(rows) == MOST_COLUMNS and rows[-1]["norm"] == 50.0


def test_preservation_is_shown_with_its_share_and_cost() -> None:
    figures = {"preserve_share": 0.25, "preserve_weight": 0.5, "preserve_step_ratio": 1.43}
    shown = cost(RunRecord("mug", figures=figures))
    assert shown["of a batch preserved, weight 0.5, at most 1.4 × a plain step"] == "25%"
    assert not any("preserved" in label for label in cost(RunRecord("mug")))


def test_numbers_have_units() -> None:
    assert [time_text(s) for s in (8.41, 200, 7500)] == ["8.4 s", "3 min 20 s", "2 h 05 min"]
    assert speed_text(300, 60) == "5 steps/s" and speed_text(10, 60) == "6 s/step" and speed_text(0, 0) == "-"
    assert memory_text(7600) == "7.42 GiB" and bytes_text(13_900_000) == "13.9 MB" and bytes_text(12) == "12 bytes"


def test_the_snippet_is_python_with_the_runs_own_names() -> None:
    snippet = diffusers_snippet(LoRAFile("runs/x/zorp.safetensors", "zorp", "sd15/"), 'a "zorp" mug')
    compile(snippet, "snippet", "exec")
    assert 'from_pretrained("sd15/")' in snippet and 'weight_name="zorp.safetensors"' in snippet
    single = diffusers_snippet(LoRAFile("zorp.safetensors", None, "sd15.safetensors"), "a mug")
    compile(single, "snippet", "exec")
    assert 'from_single_file("sd15.safetensors")' in single
    of_xl = LoRAFile("zorp.safetensors", None, "my_xl.safetensors", base_pipeline="StableDiffusionXLPipeline")
    assert 'StableDiffusionXLPipeline.from_single_file("my_xl.safetensors")' in diffusers_snippet(of_xl, "a mug")
    edit = LoRAFile("runs/x/edit.safetensors", None, "kontext/", edits=True, edit_pipeline="FluxKontextPipeline")
    snippet = diffusers_snippet(edit, "make it red")
    compile(snippet, "snippet", "exec")
    assert "pipe(image=load_image(\"before.png\"), prompt='make it red')" in snippet
    assert "FluxKontextPipeline.from_pretrained" in snippet and "A1111" not in usage_html(edit, "make it red")
    alone = usage_html(LoRAFile("runs/x/edit.safetensors", None, "embedded:sd3", edits=True), "make it red")
    assert "lightning sample -c runs/x/config.yaml --source before.png --prompts" in alone
    assert "diffusers has no pipeline that edits with this base" in alone and "DiffusionPipeline" not in alone
    lokr = diffusers_snippet(LoRAFile("runs/x/v1.5.safetensors", None, "flux/", lokr_of="transformer"), "a mug")
    compile(lokr, "snippet", "exec")
    assert (
        'load_lora_adapter("runs/x", weight_name="v1.5.safetensors", prefix="transformer", adapter_name="v1_5")' in lokr
    )
    of_unet = diffusers_snippet(LoRAFile("runs/x/zorp.safetensors", None, "sd15/", lokr_of="unet"), "a mug")
    compile(of_unet, "snippet", "exec")
    assert "--to diffusers -o runs/x/zorp.diffusers.safetensors" in of_unet
    assert 'weight_name="zorp.diffusers.safetensors", prefix="unet", adapter_name="zorp")' in of_unet
    assert "zorp a mug" in usage_html(LoRAFile("zorp.safetensors", "zorp", "sd15/"), "a mug")
