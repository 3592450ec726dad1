"""Imported last by a server of processes: garbage collections in these leave out what was imported before."""

import gc

gc.freeze()
