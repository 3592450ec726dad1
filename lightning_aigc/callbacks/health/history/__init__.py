"""Histories of losses, gradient norms and optimizer states."""
