"""Error of the cost model of `lightning plan` against scaling that others have published.

    python -m benchmarks.gradient_sync.published_scaling

The smallest run of each series is taken as measured, and the others are predicted from sizes and links alone: a card's
samples, the trained parameters, the bandwidth of a card inside its node and of a node to others, the bytes that the
optimizer moves. One constant is fitted, on one series: the spread of a card's step, on FLUX.1 on B200. Prints a row for
each run and writes them to its file.

Sources of the measured steps: MLPerf Training, `train_step_time` of the logs of v5.1 (FLUX.1, University of Florida and
NVIDIA) and images a second of v4.0 (Stable Diffusion 2, NVIDIA), github.com/mlcommons/training_results_v5.1 and _v4.0.
Their configs say what was sent: Stable Diffusion in float16 without overlap (`ddp_overlap: False`, `precision: 16`),
FLUX.1 in bfloat16 in buckets of 512 M parameters with sharded optimizer states. The runs on 512 and 1,152 cards split
each layer over four cards (`TP=4`), which this project does not do and the model does not know.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from benchmarks import RESULTS
from lightning_aigc.cluster.cost_model import Measured, job_of, predict
from lightning_aigc.cluster.workload import BF16_BYTES, CARD_SPREAD, FP32_BYTES, Job, Links, Shape

FILE = RESULTS / "gradient_sync" / "published_scaling.jsonl"
ADAMW_BYTES = 28
"""Moved for each parameter by AdamW of 16-bit weights with float32 copies: gradient 2, weight 2, three states twice."""


@dataclass(frozen=True)
class Series:
    """Runs of one model on one machine, of which the first is taken as measured."""

    model: str
    card: str
    job: Job
    links: Links
    memory_Bps: float  # noqa: N815  bytes a second, as the unit is written
    shares_states: bool
    """Whether each rank updates a share of the weights, as ZeRO-1 does."""
    runs: tuple[Measured, ...]
    beyond: frozenset[int] = frozenset()
    """Ranks of runs that split layers over cards."""


def job(parameters: float, bucket_bytes: float, overlap_share: float) -> Job:
    return Job(
        trainable=parameters,
        forward_s=1.0,
        backward_s=2.0,
        bucket_bytes=bucket_bytes,
        overlap_share=overlap_share,
        device="cuda",
        spread=CARD_SPREAD,
        node_bytes=BF16_BYTES,
    )


SD2, FLUX = 866e6, 11.9e9
BUCKET = 512e6 * FP32_BYTES
SERIES = (
    Series(
        "Stable Diffusion 2",
        "H100",
        job(SD2, SD2 * FP32_BYTES, 0.0),
        Links(450e9, 8 * 50e9, 3e-6, 5e-6),
        3.35e12,
        False,
        tuple(
            Measured(Shape(nodes, 8), batch, batch / images_a_second)
            for nodes, batch, images_a_second in (
                (1, 64, 126.0),
                (8, 16, 110.5),
                (16, 8, 91.8),
                (64, 4, 73.6),
                (128, 2, 48.8),
            )
        ),
    ),
    Series(
        "FLUX.1",
        "B200",
        job(FLUX, BUCKET, 0.9),
        Links(900e9, 8 * 50e9, 3e-6, 5e-6),
        8e12,
        True,
        tuple(
            Measured(Shape(nodes, 8), 32, step_s)
            for nodes, step_s in ((2, 0.6204), (4, 0.6165), (8, 0.6303), (9, 0.6302), (16, 0.6499))
        ),
    ),
    Series(
        "FLUX.1",
        "GB200",
        job(FLUX, BUCKET, 0.9),
        Links(900e9, 64 * 50e9, 3e-6, 5e-6),
        8e12,
        True,
        (
            Measured(Shape(1, 16), 32, 0.5675),
            Measured(Shape(1, 72), 32, 0.5743),
            Measured(Shape(8, 64), 4, 0.1839),
            Measured(Shape(18, 64), 2, 0.1334),
        ),
        frozenset({512, 1152}),
    ),
)


def rows(spread: float = CARD_SPREAD) -> Iterator[dict[str, Any]]:
    """Measured and predicted efficiency of each run, in percent of its series' first."""
    for series in SERIES:
        first, *others = series.runs
        for run in others:
            fixed = {
                of.shape: ADAMW_BYTES
                * series.job.trainable
                / series.memory_Bps
                / (of.shape.ranks if series.shares_states else 1)
                for of in (first, run)
            }
            base = replace(series.job, spread=spread, fixed_s=fixed[first.shape])
            timed = replace(job_of(first, "bf16", base, series.links, run.batch), fixed_s=fixed[run.shape])
            predicted_s = predict("bf16", timed, run.shape, series.links).step_s
            measured, predicted = (
                100 * (first.step_s / first.batch) / (s / run.batch) for s in (run.step_s, predicted_s)
            )
            yield {
                "benchmark": "published_scaling",
                "modelled": True,
                "model": series.model,
                "card": series.card,
                "ranks": run.shape.ranks,
                "batch": run.batch,
                "from_ranks": first.shape.ranks,
                "from_batch": first.batch,
                "measured_step_s": round(run.step_s, 4),
                "predicted_step_s": round(predicted_s, 4),
                "measured_efficiency": round(measured, 1),
                "predicted_efficiency": round(predicted, 1),
                "error_points": round(predicted - measured, 1),
                "splits_layers": run.shape.ranks in series.beyond,
                "spread": spread,
            }


def main() -> None:
    lines = [json.dumps(row | {"date": str(date.today())}) for row in rows()]
    print("\n".join(lines))
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
