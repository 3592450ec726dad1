"""GEGLU and SwiGLU as one op."""

from lightning_aigc_kernels.geglu.op import Activation, geglu, swiglu

__all__ = ["Activation", "geglu", "swiglu"]
