"""Captions from sidecar files and tables, and their checks."""
