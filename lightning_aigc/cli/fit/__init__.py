"""fit, validate, test and predict: the parser, its error messages, and errors shared by all ranks."""
