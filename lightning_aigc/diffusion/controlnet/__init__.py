"""ControlNet training, and ControlNet files."""
