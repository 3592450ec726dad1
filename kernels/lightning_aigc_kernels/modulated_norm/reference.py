"""modulated_norm and gated_residual in plain torch, the reference of the kernels.

Dimensions: N samples, T tokens, C channels. Statistics and products are at least float32, and results are rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_aigc_kernels.modulated_norm.modulation import Gradients, Modulation, Needs, wide_dtype

aten = torch.ops.aten


def modulated_norm(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    norm: str = "layer",
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """norm(x) * (1 + scale) + shift of [N, T, C], with torch's autograd and in the order of diffusers' blocks."""
    if norm == "layer":
        y = F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    else:
        y = rms_norm(x, weight, eps)
        y = y if bias is None else y + bias
    if scale is not None:
        y = y * (1 + (scale if scale.dim() == 3 else scale[:, None]))
    return y if shift is None else y + (shift if shift.dim() == 3 else shift[:, None])


def gated_residual(
    x: Tensor,
    gate: Tensor | None,
    y: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 1e-5,
    rms: bool = False,
) -> Tensor:
    """x + gate * y, or x + gate * RMSNorm(y), with torch's autograd and in the order of diffusers' blocks."""
    if rms or norm_weight is not None:
        y = rms_norm(y, norm_weight, eps)
    return x + (y if gate is None else (gate if gate.dim() == 3 else gate[:, None]) * y)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """diffusers' RMSNorm: the variance in float32, and half precision before the weight."""
    variance = x.to(wide_dtype(x)).pow(2).mean(-1, keepdim=True)
    y = x * torch.rsqrt(variance + eps)
    return y.to(x.dtype) if weight is None else y.to(weight.dtype) * weight


def forward(x_NTC: Tensor, modulation: Modulation, dtype: torch.dtype, residual_NTC: Tensor | None = None) -> Tensor:
    """norm(x) * slope + offset, and the residual where there is one, in `dtype`."""
    if residual_NTC is not None and modulation.norm == "none" and modulation.scale is not None:
        return _plain_residual(x_NTC, modulation.scale, residual_NTC, dtype)
    slopes_NC, offsets_NC = _slope_and_offset(x_NTC, modulation)
    samples = []
    for n, x_TC in enumerate(x_NTC):
        y_TC = _normalize(x_TC, modulation, slopes_NC[n], None if offsets_NC is None else offsets_NC[n])
        samples.append((y_TC if residual_NTC is None else y_TC.add_(residual_NTC[n])).to(dtype))
    return _stack(samples, x_NTC, dtype)


def backward(
    dy_NTC: Tensor, x_NTC: Tensor | None, modulation: Modulation, dtype: torch.dtype, needs: Needs
) -> Gradients:
    """The needed gradients: dx in `dtype`, each other one in its tensor's dtype.

    Args: x may be None where no gradient reads it, as without a norm and with only dx needed.
    """
    mask = needs.x, *modulation.sums(needs)
    if modulation.norm == "none" and modulation.scale is not None and mask == (True, False, False):
        # In one pass: torch rounds a product in half precision once.
        return (dy_NTC * modulation.scale[:, None]).to(dtype).contiguous(), None, None, None, None
    slopes_NC, _ = _slope_and_offset(dy_NTC if x_NTC is None else x_NTC, modulation)
    dx, dslopes, doffsets = [], [], []
    for n, dy_TC in enumerate(dy_NTC):
        x_TC = None if x_NTC is None else x_NTC[n]
        dx_TC, dslope_C, doffset_C = _normalize_backward(dy_TC, x_TC, modulation, slopes_NC[n], mask)
        if dx_TC is not None:
            dx.append(dx_TC.to(dtype))
        if dslope_C is not None:
            dslopes.append(dslope_C)
        if doffset_C is not None:
            doffsets.append(doffset_C)
    dx_NTC = _stack(dx, dy_NTC, dtype) if mask[0] else None
    dslope_NC, doffset_NC = (
        _stack(sums, slopes_NC, slopes_NC.dtype) if need else None
        for sums, need in zip((dslopes, doffsets), mask[1:], strict=True)
    )
    return dx_NTC, *_spread_sums(dslope_NC, doffset_NC, modulation, needs)


def _spread_sums(
    dslope_NC: Tensor | None, doffset_NC: Tensor | None, modulation: Modulation, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The needed gradients of scale, shift, weight and bias from those of a sample's slope (before weight and scale)
    and offset."""
    scale_NC, shift_NC, weight_C, bias_C, *_, one_plus = modulation
    dscale_NC = dweight_C = dbias_C = None
    if needs.scale:
        assert dslope_NC is not None and scale_NC is not None
        dscale_NC = dslope_NC if weight_C is None else dslope_NC * weight_C
        if bias_C is not None:
            assert doffset_NC is not None
            dscale_NC = torch.addcmul(dscale_NC, doffset_NC, bias_C.to(dscale_NC.dtype))
        dscale_NC = dscale_NC.to(scale_NC.dtype)
    if needs.weight:
        assert dslope_NC is not None and weight_C is not None
        dweight_C = _times_scale(dslope_NC, scale_NC, one_plus).sum(0).to(weight_C.dtype)
    if needs.bias:
        assert doffset_NC is not None and bias_C is not None
        dbias_C = _times_scale(doffset_NC, scale_NC, one_plus).sum(0).to(bias_C.dtype)
    dshift_NC = (
        doffset_NC.to(shift_NC.dtype) if needs.shift and doffset_NC is not None and shift_NC is not None else None
    )
    return dscale_NC, dshift_NC, dweight_C, dbias_C


def _times_scale(sums_NC: Tensor, scale_NC: Tensor | None, one_plus: bool) -> Tensor:
    if scale_NC is None:
        return sums_NC
    return torch.addcmul(sums_NC, sums_NC, scale_NC.to(sums_NC.dtype)) if one_plus else sums_NC * scale_NC


def _slope_and_offset(x_NTC: Tensor, modulation: Modulation) -> tuple[Tensor, Tensor | None]:
    """Both [N, C] in at least float32; without any tensor the slope is ones."""
    scale_NC, shift_NC, weight_C, bias_C, *_, one_plus = modulation
    wide = wide_dtype(x_NTC)
    slope = scale_NC if scale_NC is None else scale_NC.to(wide) + float(one_plus)
    offset = bias_C if bias_C is None or slope is None else bias_C * slope
    if shift_NC is not None:
        offset = shift_NC if offset is None else offset + shift_NC
    if weight_C is not None:
        slope = weight_C if slope is None else slope * weight_C
    if slope is None:
        slope = x_NTC.new_ones(x_NTC.shape[2], dtype=wide)
    shape = x_NTC.shape[0], x_NTC.shape[2]
    # Norm kernels ignore strides.
    slope = slope.to(wide).expand(shape).contiguous()
    return slope, None if offset is None else offset.to(wide).expand(shape).contiguous()


def _normalize(x_TC: Tensor, modulation: Modulation, slope_C: Tensor, offset_C: Tensor | None) -> Tensor:
    """norm(x) * slope + offset of one sample, a new tensor in x's or a wider dtype."""
    if modulation.norm == "layer":
        return _layer_norm(x_TC, slope_C, offset_C, modulation.eps)[0]
    wide_TC = x_TC.to(slope_C.dtype)
    xhat_TC = wide_TC * _rstd(wide_TC, modulation.eps) if modulation.norm == "rms" else wide_TC
    z_TC = xhat_TC * slope_C
    return z_TC if offset_C is None else z_TC.add_(offset_C)


def _normalize_backward(
    dy_TC: Tensor, x_TC: Tensor | None, modulation: Modulation, slope_C: Tensor, mask: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """For one sample dx, and the sums over tokens of dy * norm(x) and of dy; each where the mask says so."""
    if modulation.norm == "layer" and x_TC is not None and not any(mask[1:]):
        _, mean_T1, rstd_T1 = _layer_norm(x_TC, slope_C, None, modulation.eps)
        return _layer_norm_backward(dy_TC, x_TC, slope_C, mean_T1, rstd_T1), None, None
    dy_TC = dy_TC.to(slope_C.dtype)
    dx_TC, dslope_C, doffset_C = None, None, dy_TC.sum(0) if mask[2] else None
    if x_TC is None or modulation.norm == "none":
        if mask[1] and x_TC is not None:
            dslope_C = (dy_TC * x_TC).sum(0)
        return dy_TC * slope_C if mask[0] else None, dslope_C, doffset_C
    x_TC = x_TC.to(slope_C.dtype)
    if modulation.norm == "layer":
        # The sums of torch 2.13's layer norm on a CPU are up to five times as far from float64 as those of `sum`.
        xhat_TC, mean_T1, rstd_T1 = aten.native_layer_norm(x_TC, x_TC.shape[-1:], None, None, modulation.eps)
    else:
        rstd_T1 = _rstd(x_TC, modulation.eps)
        xhat_TC = x_TC * rstd_T1
    if mask[1]:
        dslope_C = (dy_TC * xhat_TC).sum(0)
    if mask[0] and modulation.norm == "layer":
        dx_TC = _layer_norm_backward(dy_TC, x_TC, slope_C, mean_T1, rstd_T1)
    elif mask[0]:
        dxhat_TC = dy_TC * slope_C
        projection_T1 = (dxhat_TC * xhat_TC).mean(-1, keepdim=True)
        dx_TC = dxhat_TC.addcmul_(xhat_TC, projection_T1, value=-1).mul_(rstd_T1)
    return dx_TC, dslope_C, doffset_C


def _layer_norm(x_TC: Tensor, slope_C: Tensor, offset_C: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and mean and reciprocal deviation of each token [T, 1]."""
    y_TC, mean_T1, rstd_T1 = aten.native_layer_norm(_cast_for(slope_C, x_TC), x_TC.shape[-1:], slope_C, offset_C, eps)
    return y_TC, mean_T1, rstd_T1


def _layer_norm_backward(dy_TC: Tensor, x_TC: Tensor, slope_C: Tensor, mean_T1: Tensor, rstd_T1: Tensor) -> Tensor:
    x_TC = _cast_for(slope_C, x_TC)
    dx_TC: Tensor = aten.native_layer_norm_backward(
        dy_TC.to(x_TC.dtype), x_TC, x_TC.shape[-1:], mean_T1, rstd_T1, slope_C, None, (True, False, False)
    )[0]
    return dx_TC


def _cast_for(slope_C: Tensor, x_TC: Tensor) -> Tensor:
    """Cast x to the dtype that its device's layer norm takes with this slope.

    On a CPU, half-precision x may have a float32 slope, and the result is rounded once.
    """
    return x_TC if x_TC.device.type == "cpu" else x_TC.to(slope_C.dtype)


def _rstd(x_TC: Tensor, eps: float) -> Tensor:
    """The reciprocal root mean square of each token, [T, 1]."""
    return (x_TC.square().mean(-1, keepdim=True) + eps).rsqrt_()


def _plain_residual(y_NTC: Tensor, gate_NC: Tensor, x_NTC: Tensor, dtype: torch.dtype) -> Tensor:
    """x + gate * y in one pass: addcmul is rounded once where the dtypes are the same."""
    common = torch.promote_types(dtype, gate_NC.dtype)
    out = torch.addcmul(x_NTC.to(common), gate_NC[:, None].to(common), y_NTC.to(common))
    return out.to(dtype).contiguous()


def _stack(samples: list[Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
    """The samples as one contiguous tensor."""
    if not samples:
        return like.new_empty(like.shape, dtype=dtype)
    if len(samples) > 1:
        return torch.stack(samples)
    # A view returned by an autograd.Function may not be changed in place, so this is not marked as a view.
    alone: Tensor = aten._unsafe_view(samples[0].contiguous(), (1, *samples[0].shape))
    return alone
