"""Whether this CPU gives equal bits to products of one matrix in two layouts."""

from __future__ import annotations

import torch

HAS_EQUAL_BITS = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
"""Others round a product by its layout: tests compare their results within rounding."""
