"""Scores of the same prompts and seeds, compared between two steps."""

from __future__ import annotations

import pytest

from lightning_aigc.report.paired_scores import improvement


def test_a_score_within_its_own_noise_is_no_better() -> None:
    better, noise = improvement([0.5, 0.7], [0.4, 0.4])
    assert better == pytest.approx(0.2)
    assert noise == pytest.approx(0.1)
    assert improvement([0.5], [0.4]) == (pytest.approx(0.1), 0.0)
