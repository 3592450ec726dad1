"""Agreement of our canny with kornia's and scikit-image's on the embedded images: F1 of the edges, and time.

    python -m benchmarks.studies.canny_agreement [--output benchmarks/results/studies/canny_agreement.jsonl]
    python -m benchmarks.studies.canny_agreement --thinning [--output ...]    # compare the two rules of thinning

Needs `pip install kornia scikit-image`, which the package does not depend on.
"""
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common.embedded_images import embedded_images
from benchmarks.common.rows import keep_row
from lightning_aigc.metrics.edge_fidelity import _gradient, canny, edge_counts, edge_magnitude, f1_of

LOW, HIGH, REPEATS = 0.1, 0.2, 5


def of_kornia(pictures_N3HW: Tensor) -> Tensor:
    import kornia

    edges: Tensor = kornia.filters.canny(pictures_N3HW, LOW, HIGH)[1]
    return edges


def of_skimage(pictures_N3HW: Tensor) -> Tensor:
    from skimage import feature

    luma = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    grey = (pictures_N3HW * luma).sum(1).numpy()
    found = [feature.canny(one, sigma=1.0, low_threshold=LOW, high_threshold=HIGH) for one in grey]
    return torch.from_numpy(np.stack(found))[:, None].float()


def interpolated(pictures_N3HW: Tensor) -> Tensor:
    """Our canny with scikit-image's thinning: it compares with interpolated neighbours in the exact direction."""
    gx, gy = _gradient(pictures_N3HW, 1.0)
    magnitude = (gx * gx + gy * gy + 1e-6).sqrt()
    height, width = magnitude.shape[-2:]
    around = F.pad(magnitude, (1, 1, 1, 1))
    flat, one_sign = gx.abs() >= gy.abs(), gx * gy >= 0
    share = torch.where(flat, gy.abs() / gx.abs().clamp_min(1e-12), gx.abs() / gy.abs().clamp_min(1e-12)).clamp(0, 1)

    def at(down: int, right: int) -> Tensor:
        return around[..., 1 + down : 1 + down + height, 1 + right : 1 + right + width]

    def beyond(way: int) -> Tensor:
        straight = torch.where(flat, at(0, way), at(way, 0))
        other = torch.where(one_sign, at(way, way), torch.where(flat, at(-way, way), at(way, -way)))
        return straight * (1 - share) + other * share

    thin = magnitude * ((magnitude >= beyond(1)) & (magnitude >= beyond(-1)))
    candidates, edges = thin >= LOW, thin >= HIGH
    while True:
        grown = candidates & (F.max_pool2d(edges.float(), 3, 1, 1) > 0)
        if torch.equal(grown, edges):
            return edges.float()
        edges = grown


def compare_thinnings(name: str, output: Path | None) -> None:
    """Write F1 of three pairs: if the last is below a library's bar, no canny can meet both bars."""
    images = embedded_images(name)
    ours, theirs, between = canny(images, LOW, HIGH), of_skimage(images), interpolated(images)
    pairs = {
        "ours_skimage": (ours, theirs),
        "interpolated_skimage": (between, theirs),
        "interpolated_ours": (between, ours),
    }
    scores = {f"f1_{pair}": round(float(f1_of(edge_counts(*both, 0))), 4) for pair, both in pairs.items()}
    keep_row({"benchmark": "canny_thinning", "pictures": name, "version": version("scikit-image")} | scores, output)


def timed(compute: Callable[[Tensor], Tensor], given: Tensor) -> tuple[Tensor, float]:
    """Returns: the result, and the median of REPEATS times in ms for 32 images, after one warm-up."""
    found = compute(given)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        compute(given[:32])
        times.append(1000 * (time.perf_counter() - began))
    return found, statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a .jsonl file to add the rows to")
    parser.add_argument("--thinning", action="store_true", help="compare the rules of thinning; needs no kornia")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in ("embedded:brand", "embedded:prior"):
        if given.thinning:
            compare_thinnings(name, given.output)
            continue
        images = embedded_images(name)
        ours, ours_ms = timed(lambda each: canny(each, LOW, HIGH), images)
        for other, compute in (("kornia", of_kornia), ("scikit-image", of_skimage)):
            theirs, theirs_ms = timed(compute, images)
            row = {
                "benchmark": "canny_agreement", "pictures": name, "count": len(images), "other": other,
                "version": version(other), "f1": round(float(f1_of(edge_counts(ours, theirs, 0))), 4),
                "f1_tolerance_1": round(float(f1_of(edge_counts(ours, theirs, 1))), 4),
                "edge_share": round(float(ours.mean()), 4), "other_edge_share": round(float(theirs.mean()), 4),
                "ms_of_32": round(ours_ms, 1), "other_ms_of_32": round(theirs_ms, 1),
            }  # fmt: skip
            if other == "kornia":
                import kornia

                theirs_magnitude = kornia.filters.canny(images, LOW, HIGH, hysteresis=False)[0]
                kept = theirs_magnitude > LOW  # kornia's array holds only the kept edges
                row["magnitude_max_difference"] = float((edge_magnitude(images) - theirs_magnitude)[kept].abs().max())
            keep_row(row, given.output)


if __name__ == "__main__":
    main()
