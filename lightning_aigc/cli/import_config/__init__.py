"""`lightning import-config`: the config of another trainer as one of `lightning fit`, with a line for each key."""
