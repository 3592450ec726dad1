"""torch.distributed underneath gradient sync: process groups, counted collectives, and their errors."""
