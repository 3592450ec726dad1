"""`lightning report`: several runs on one page, as a Markdown table and as one image of their curves."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_aigc.errors import ConfigError, DataError, UserError

PAGES, TABLES = (".html", ".htm"), (".md", ".markdown", ".txt")
"""Endings of what is written, none of which a run's measurements have."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments to its parser."""
    parser.description = (
        "Compare runs by the report.json that RunReport leaves in each run's folder; a Markdown table goes to stdout. "
        "With one run, --output writes its own page again, also while it trains."
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's trainer.default_root_dir")
    parser.add_argument("-o", "--output", type=Path, metavar="PAGE.html", help="write one page that opens anywhere")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write the table to a file as well")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="write the curves as one .png or .svg")


def run(args: argparse.Namespace) -> int:
    """Read the runs, write what was asked for, print the table; returns the exit status.

    Raises: UserError with what to change.
    """
    from lightning_aigc.atomic_file import write_text
    from lightning_aigc.report.charts import progress_chart
    from lightning_aigc.report.comparison import as_markdown, comparison_chart
    from lightning_aigc.report.comparison_page import render_comparison_page
    from lightning_aigc.report.record import read_run
    from lightning_aigc.report.run_page import render_run_page
    from lightning_aigc.report.vega import check_picture, write_picture

    if args.picture is not None:
        check_picture(args.picture)
    for option, path, endings in (("--output", args.output, PAGES), ("--markdown", args.markdown, TABLES)):
        if path is not None and path.suffix.lower() not in endings:
            raise ConfigError(f"{option} must end in {' or '.join(endings)}, got {path}; name another file")
    records = [read_run(folder) for folder in dict.fromkeys(args.runs)]
    is_single = len(records) == 1
    try:
        text = as_markdown(records)
        if args.output is not None:
            write_text(args.output, render_run_page(records[0]) if is_single else render_comparison_page(records))
        if args.markdown is not None:
            write_text(args.markdown, text + "\n")
        if args.picture is not None:
            chart = progress_chart(records[0]) if is_single else comparison_chart(records)
            if chart is None:
                raise ConfigError(f"there is nothing to draw in {args.picture}: the runs have no losses and no scores")
            write_picture(chart, args.picture)
    except UserError:
        raise
    except (ValueError, LookupError, ArithmeticError) as error:
        raise DataError(
            f"the report.json of {' or '.join(map(str, args.runs))} has values that do not fit together"
            f" ({type(error).__name__}: {error}): it was edited; leave that run out, or run it again"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename}: {error.strerror}; name another file") from error
    print(text)
    return 0
