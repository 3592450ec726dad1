"""Non-finite values: find the module that first computed one, and log the steps that a loss scale skipped."""
