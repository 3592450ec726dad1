"""Imports of the server that processes are forked from.

Garbage collections during the imports took a fifth of their time, so there are none. Those in the forked processes
leave out everything that is imported here, and are rare, as in the tests' own process.
"""

import contextlib
import gc
import os
from importlib import import_module

gc.disable()
os.environ.pop("PYTHONPATH")
if (before := os.environ.pop("PYTHONPATH_OF_TESTS")) != "":  # for the interpreters that a forked process starts
    os.environ["PYTHONPATH"] = before
for name in (
    *("lightning_aigc", "torch", "torch._dynamo", "lightning.pytorch", "pytest", "lightning_aigc.cli.fit.aigc_cli"),
    *("lightning_aigc.gradient_sync.compressor", "lightning_aigc.callbacks", "lightning_aigc.strategies"),
    *("lightning_aigc.strategies.zero.stage_1", "lightning_aigc.strategies.zero.stages_2_3"),  # compiles optimizers
    *("diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion", "peft", "open_clip"),  # most runs need them
):
    import_module(name)
with contextlib.suppress(ImportError):  # where there is no Numba
    import_module("lightning_aigc_kernels.quantize_blocks.cpu_kernel")
gc.freeze()
gc.set_threshold(20_000, 20, 100)
gc.enable()
