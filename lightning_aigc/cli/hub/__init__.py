"""`lightning export --to hub`: a folder with a model card for the Hugging Face Hub, and its upload."""
