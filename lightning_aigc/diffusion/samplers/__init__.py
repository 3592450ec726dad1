"""Sampling from the files of a finished run."""
