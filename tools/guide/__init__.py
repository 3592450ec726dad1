"""docs/guide.md: make each pitfall, detect it, cure it, and write the results into the page."""
