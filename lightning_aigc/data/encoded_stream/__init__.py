"""Encoded images as a stream of shards: written by `lightning encode`, read in training from disks or any address."""
