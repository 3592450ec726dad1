"""The former home of `lightning_aigc.accumulation`."""

from lightning_aigc.renamed import renamed

__getattr__ = renamed(
    __name__,
    {
        name: f"lightning_aigc.accumulation.{name}"
        for name in ("AccumulationWindow", "effective_batch_size", "scale_to_mean")
    },
)
