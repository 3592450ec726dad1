"""`python -m lightning_aigc` is the `lightning` command, whoever owns that script."""

from lightning_aigc.cli import main

main()
