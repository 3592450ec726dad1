"""The list of a dataset's images, from folders, shards and the hub."""
