"""Tools of this repository that measure nothing; run from its root: `python -m tools.<name>`."""
