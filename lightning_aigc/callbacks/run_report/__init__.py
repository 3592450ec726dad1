"""RunReport: scores before and after, curves and facts of a run."""
