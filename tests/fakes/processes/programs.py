"""Beginning of programs that tests run in an interpreter of their own."""

WITHOUT_COLLECTIONS = "import atexit, gc; gc.disable(); atexit.register(gc.freeze)\n"
"""Collect no garbage: collections during the imports of torch and Lightning take a third of a short program's time."""
