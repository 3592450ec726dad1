"""Import of DeepSpeed and accelerate config files."""
