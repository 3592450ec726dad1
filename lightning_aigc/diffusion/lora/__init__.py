"""LoRA training, and LoRA files of this and other programs."""
