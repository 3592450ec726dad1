"""The bias of joint_attention's keys: what it means for the numbers, and biases that do not fit.

The op's contract with biases is held in test_joint_attention.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_aigc_kernels import AttentionStream, joint_attention

HEADS, WIDTH = 2, 12


def text_and_picture(text: Tensor, picture: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The picture's output, and the gradients of text and picture, which are their own queries, keys and values."""
    leaves = [text.requires_grad_(), picture.requires_grad_()]
    streams = [AttentionStream(text, text, text, key_bias=bias), AttentionStream(picture, picture, picture)]
    y = joint_attention(streams, HEADS)[0][1]
    return y.detach(), *torch.autograd.grad(y.square().sum(), leaves)


@pytest.mark.parametrize("tokens", [3, 20, 600])  # more than one block of keys of torch's kernel
def test_tokens_that_are_left_out_are_as_if_they_were_not_there(tokens: int) -> None:
    text, picture = (torch.randn(2, length, WIDTH, dtype=torch.float64) for length in (tokens + 4, 9))
    bias = torch.zeros(1, tokens + 4)
    bias[:, :tokens] = -torch.inf
    y, dtext, dpicture = text_and_picture(text, picture, bias)
    alone = text_and_picture(text[:, tokens:].detach(), picture, None)
    for ours, expected in zip((y, dtext[:, tokens:], dpicture), alone, strict=True):
        torch.testing.assert_close(ours, expected)
    assert not dtext[:, :tokens].any()


def test_a_token_with_the_log_of_three_counts_three_times() -> None:
    text, picture = (torch.randn(2, length, WIDTH, dtype=torch.float64) for length in (5, 9))
    bias = torch.zeros(2, 5)
    bias[:, 4] = torch.tensor(3.0).log()
    y, dtext, dpicture = text_and_picture(text, picture, bias)
    repeated = torch.cat([text, text[:, 4:], text[:, 4:]], 1).detach()
    expected, dthree, dtheirs = text_and_picture(repeated, picture, None)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-6)  # the bias is a float32
    torch.testing.assert_close(dpicture, dtheirs, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(dtext[:, 4], dthree[:, 4:].sum(1), rtol=1e-6, atol=1e-5)


def test_a_bias_that_does_not_fit_is_named() -> None:
    x = torch.randn(2, 5, WIDTH)
    stream = AttentionStream(x, x, x)
    wanted = r"joint_attention's stream 0 wants a key_bias \(2, 5\) or \(1, 5\) in float32, got "
    with pytest.raises(ValueError, match=wanted + r"\(2, 4\) in torch.float32$"):
        joint_attention([stream._replace(key_bias=torch.zeros(2, 4))], HEADS)
    mask = torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=wanted + r"\(2, 5\) in torch.bool; of a mask: torch.where"):
        joint_attention([stream._replace(key_bias=mask)], HEADS)
    with pytest.raises(ValueError, match=r"stream 0 gives key_bias no gradient, .*; use key_bias.detach"):
        joint_attention([stream._replace(key_bias=torch.zeros(1, 5, requires_grad=True))], HEADS)
