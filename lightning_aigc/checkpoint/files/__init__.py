"""The files of a snapshot: layout, writing, publishing and reading."""
