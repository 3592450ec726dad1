"""`lightning plan`: modelled bytes, time and memory of a training on several cards."""
