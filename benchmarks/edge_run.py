"""One run of protected_edges.py, under a name of its own: `python -m edge_run fit -c demo.yaml`."""

from lightning_aigc.cli import main

if __name__ == "__main__":
    main()
