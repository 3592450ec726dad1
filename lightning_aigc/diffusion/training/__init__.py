"""DiffusionTraining and full fine-tuning."""
