"""Images that cannot be right; tests/callbacks/test_sample_grid.py has the broken ones."""

from __future__ import annotations

import warnings

import torch

from lightning_aigc.callbacks.sampling.checks import check_images


def test_good_pictures_raise_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check_images(torch.rand(2, 3, 8, 8)) == []
