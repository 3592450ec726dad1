"""Every name of `torch.npu` that lightning_aigc uses, with the arguments of the calls.

One table for three tests: the sources use no other name, and the real torch_npu and the fake accept these arguments.
"""

from __future__ import annotations

from typing import Any

CALLS: dict[str, tuple[Any, ...]] = {
    "is_available": (),
    "is_initialized": (),
    "is_bf16_supported": (),
    "_is_in_bad_fork": (),
    "device_count": (),
    "current_device": (),
    "set_device": ("npu:0",),
    "device": ("npu:0",),
    "get_device_name": ("npu:0",),
    "synchronize": ("npu:0",),
    "empty_cache": (),
    "memory_stats": ("npu:0",),
    "memory_allocated": ("npu:0",),
    "memory_reserved": ("npu:0",),
    "max_memory_allocated": ("npu:0",),
    "reset_peak_memory_stats": ("npu:0",),
    "mem_get_info": ("npu:0",),
    "utilization": ("npu:0",),
    "get_rng_state": ("npu:0",),
    "set_rng_state": ("a state", "npu:0"),
    "graph_pool_handle": (),
    "NPUGraph": (),
    "graph": ("a graph",),
    "Stream": ("npu:0",),
    "Event": (),
    "stream": ("a stream",),
    "current_stream": ("npu:0",),
    "set_stream": ("a stream",),
    "amp.GradScaler": (),
}
STREAM_CALLS: dict[str, tuple[Any, ...]] = {
    "wait_stream": ("a stream",),
    "wait_event": ("an event",),
    "record_event": (),
    "synchronize": (),
}
EVENT_CALLS: dict[str, tuple[Any, ...]] = {
    "record": ("a stream",),
    "wait": ("a stream",),
    "query": (),
    "synchronize": (),
    "elapsed_time": ("an event",),
}
