"""What a cluster looks like and what gradient sync costs on it. Nothing here imports torch: `lightning doctor` needs it
where torch does not start."""
