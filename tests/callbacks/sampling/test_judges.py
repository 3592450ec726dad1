"""Edits are judged by the pairs whose sources they start from."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from lightning_aigc.callbacks.sampling.judges import EditJudge, as_pixels
from lightning_aigc.data import ImageCaptionData
from lightning_aigc.metrics import CLIPSimilarity
from tools.embedded import edits


@pytest.mark.parametrize("table", ["metadata.jsonl", "captions.csv"])
def test_a_described_target_has_a_clip_t_and_the_others_none(tmp_path: Path, table: str) -> None:
    pairs = edits.held_out(edits.ORANGE, 4)
    rows = []
    for number, pair in enumerate(pairs):
        for side, pixels in (("a", pair.source), ("b", pair.target)):
            Image.fromarray(pixels).save(tmp_path / f"{number}{side}.png")
        said = pair.description if number < 2 else ""
        named = {"file_name": f"{number}b.png", "text": f"edit {number}", "source": f"{number}a.png"}
        rows.append(named | {"target_caption": said})
    if table.endswith("jsonl"):
        (tmp_path / table).write_text("\n".join(json.dumps(row) for row in rows))
    else:
        with (tmp_path / table).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    data = ImageCaptionData(train_data_dir=str(tmp_path), resolution=64, cache_dir=str(tmp_path / "cache"))
    asked = [(f"edit {number}", 7) for number in range(4)]
    targets = torch.stack([as_pixels(data.edit_target(*pair)) for pair in asked])
    found = EditJudge("embedded:clip", None, data).scores(targets, asked)
    torch.testing.assert_close(found["direction"], torch.ones(4), rtol=0, atol=1e-4)
    wanted = CLIPSimilarity("embedded:clip").scores(targets[:2], [pair.description for pair in pairs[:2]])["clip_t"]
    torch.testing.assert_close(found["clip_t"][:2], wanted)
    with pytest.warns(UserWarning, match=r"'make it purple' is the instruction of no pair, .*such as 'edit \d'"):
        data.edit_target("make it purple", 0)
    data.edit_target("make it purple", 1)  # a warning is an error here
    assert bool(found["clip_t"][2:].isnan().all()) and bool((found["kept"] > 0.98).all())
