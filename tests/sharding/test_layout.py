"""Groups, gathered bytes and kept activations of a small diffusers U-Net sharded over two gloo ranks."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fakes.models.pipelines import make_text_encoder
from fakes.processes.gathered_bytes import gathered_bytes, watch_gathered
from fakes.processes.ranks import run_ranks
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.precision.context import count_saved
from lightning_aigc.precision.memory.saved_tensors import owned_by
from lightning_aigc.precision.swaps import swap_forwards
from lightning_aigc.sharding.full_parameters import full_parameters
from lightning_aigc.sharding.groups import make_groups, split_by_dtype
from lightning_aigc.sharding.layout import shard_model
from lightning_aigc.sharding.local_parts import original_class

BLOCKS = ("ResnetBlock2D", "BasicTransformerBlock")


def unet() -> Any:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), block_out_channels=(32, 64), layers_per_block=1,
        cross_attention_dim=16, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip


class Holder(nn.Module):
    """A root that is called by a step, as a LightningModule is."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = unet()

    def training_step(self, x: Tensor) -> Tensor:
        return self.unet(x, torch.tensor([7]), torch.ones(1, 4, 16)).sample.square().mean()


def work(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    results: dict[str, Any] = {}

    stock = unet()
    for module in list(stock.modules()):
        if type(module).__name__ in BLOCKS:
            fully_shard(module, mesh=mesh)
    swapped = swap_forwards(stock, memory="lean")
    results["swapped"] = dict(swapped.blocks)

    for memory in ("off", "max"):
        alone, sharded = Holder(), Holder()
        for holder in (alone, sharded):
            FusedBackwardPrecision("32-true", memory=memory).convert_module(holder)
        groups = shard_model(sharded, mesh, stage=3, compute_dtype=None, offload=False, called=("training_step",))
        peaks = watch_gathered(sharded)
        kept = {}
        for name, holder in (("alone", alone), ("sharded", sharded)):
            with count_saved(owned_by(holder)) as saved:
                loss = holder.training_step(x)
            kept[name] = saved.total()
            loss.backward()
            results[memory, name] = float(loss)
        results[memory, "kept"] = kept
        results[memory, "peak"] = max(peaks)
        results[memory, "after"] = gathered_bytes(sharded)
        results[memory, "blocks"] = sorted((4 * group.numel for group in groups), reverse=True)
        gradients = zip(alone.parameters(), sharded.parameters(), strict=True)
        results[memory, "gradients"] = max(float((a.grad - s.grad.full_tensor()).abs().max()) for a, s in gradients)  # type: ignore[union-attr]

    text = make_text_encoder()
    ids = torch.tensor([[1, 2, 3]])
    results["hidden alone"] = copy.deepcopy(text)(ids, output_hidden_states=True).hidden_states
    shard_model(text, mesh, stage=2, compute_dtype=None, offload=False, called=())
    results["hidden sharded"] = text(ids, output_hidden_states=True).hidden_states
    results["class"] = type(text).__name__

    with full_parameters(sharded):
        if rank == 0:  # alone, without a collective
            with torch.no_grad():
                results["alone"] = float(
                    sharded.unet.to("cpu")(x, torch.tensor([7]), torch.ones(1, 4, 16)).sample.sum()
                )
    with torch.no_grad():
        results["together"] = float(sharded.unet(x, torch.tensor([7]), torch.ones(1, 4, 16)).sample.sum())
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, 2, tmp_path_factory.mktemp("layout"))


def test_swaps_see_the_blocks_of_a_model_that_was_sharded_before(ranks: list[dict[str, Any]]) -> None:
    expected = swap_forwards(unet(), memory="lean").blocks
    assert ranks[0]["swapped"] == dict(expected)


@pytest.mark.parametrize("memory", ["off", "max"])
def test_a_step_gathers_at_most_two_of_the_largest_blocks(ranks: list[dict[str, Any]], memory: str) -> None:
    largest = ranks[0][memory, "blocks"]
    assert 0 < ranks[0][memory, "peak"] <= largest[0] + largest[1]
    assert ranks[0][memory, "after"] == 0


@pytest.mark.parametrize("memory", ["off", "max"])
def test_a_sharded_model_keeps_the_activations_of_a_whole_one(ranks: list[dict[str, Any]], memory: str) -> None:
    kept = ranks[0][memory, "kept"]
    assert kept["sharded"] == kept["alone"]
    assert ranks[0][memory, "alone"] == ranks[0][memory, "sharded"]
    assert ranks[0][memory, "gradients"] < 1e-6


def test_one_rank_may_draw_alone_while_weights_are_whole(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["alone"] == pytest.approx(ranks[0]["together"], rel=1e-6)


def test_a_sharded_text_encoder_returns_its_hidden_states(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["class"].startswith("FSDP")
    torch.testing.assert_close(ranks[0]["hidden sharded"], ranks[0]["hidden alone"])


def test_frozen_parameters_are_in_no_group_and_float32_lora_in_one_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    model[1].lora = nn.Linear(8, 2)
    model[0].bias.requires_grad_(False)
    groups = make_groups(model)
    names = [name for group in groups for name, _ in group.parameters]
    assert sorted(names) == ["0.weight", "1.bias", "1.lora.bias", "1.lora.weight", "1.weight"]
    apart = [owners for group in groups for owners, _ in split_by_dtype(group)]
    lora_alone = any(group.module is model[1].lora for group in groups)
    assert lora_alone or apart == [[model[1].lora]]


def test_a_block_is_one_group_and_a_block_of_blocks_none() -> None:
    from diffusers import SD3Transformer2DModel

    with torch.device("meta"):
        transformer = SD3Transformer2DModel(num_layers=2)  # layers of more than a million values inside
        model = unet()  # whose up blocks are blocks by name, too
    inside = [group.name for group in make_groups(nn.ModuleDict({"of": transformer})) if "blocks" in group.name]
    assert sorted(inside) == ["of.transformer_blocks.0", "of.transformer_blocks.1"]
    assert type(model.up_blocks[1]).__name__ in model._no_split_modules
    blocks = [type(group.module).__name__ for group in make_groups(model) if group.is_block]
    assert set(blocks) == {"ResnetBlock2D", "BasicTransformerBlock"}


def test_the_class_of_a_plain_module_is_its_own() -> None:
    assert original_class(nn.Linear(1, 1)) is nn.Linear
