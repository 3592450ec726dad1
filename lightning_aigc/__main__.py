"""`python -m lightning_aigc`: the `lightning` command, independent of which package owns that script."""

from lightning_aigc.cli import main

main()
