"""`lightning doctor`: checks of the machine and its software."""
