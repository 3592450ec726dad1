"""The store at which ranks meet that come and go: `python -m lightning_aigc.gradient_sync.elastic --port 29400`."""

from __future__ import annotations

import argparse
import threading
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lightning_aigc.gradient_sync.elastic", description=__doc__)
    parser.add_argument("--port", type=int, default=29400, help="port that the ranks' `rendezvous` names")
    port = parser.parse_args().port
    store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    print(f"ranks meet at port {store.port} of this machine, until this process ends", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
