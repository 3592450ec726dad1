"""Sample images: one way to draw, shard over ranks, score and write them, for every callback that shows some."""
