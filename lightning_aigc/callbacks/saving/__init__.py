"""SaveLoRA and SaveModel."""
