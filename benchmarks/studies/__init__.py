"""Studies: questions that were answered once. They are kept for their rows and not type-checked."""
