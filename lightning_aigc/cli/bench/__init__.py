"""`lightning bench`: rows that other projects publish, measured on this machine."""
