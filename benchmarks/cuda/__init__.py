"""Every benchmark that needs a CUDA card, in one command."""
