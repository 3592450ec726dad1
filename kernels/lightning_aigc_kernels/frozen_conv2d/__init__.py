"""Convolution and linear layer with a frozen weight, as ops that do not save their input."""

from lightning_aigc_kernels.frozen_conv2d.op import frozen_conv2d, frozen_linear

__all__ = ["frozen_conv2d", "frozen_linear"]
