"""Results of runs: records, pages, and the comparison of several runs.

Nothing here imports torch; altair and vl-convert are imported when a page is made.
"""

from lightning_aigc.report.record import RunRecord

__all__ = ["RunRecord"]
