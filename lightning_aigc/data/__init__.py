"""Image folders, captions, aspect-ratio buckets, latent and text caches."""

from lightning_aigc.data.cache.encoder import Encoder
from lightning_aigc.data.encoded_stream.encoded_image_data import EncodedImageData
from lightning_aigc.data.image_caption_data import ImageCaptionData
from lightning_aigc.data.report.report import DataReport

__all__ = ["DataReport", "EncodedImageData", "Encoder", "ImageCaptionData"]
