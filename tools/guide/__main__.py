"""`python -m tools.guide`."""

from tools.guide.commands import main

main()
