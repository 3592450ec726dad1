"""Thirty healthy models of torchvision, timm and transformers, trained from scratch as their papers do: no warning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_aigc.callbacks.health import GradientHealthMonitor

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries
STEPS, CLASSES, TOKENS, LENGTH = 20, 4, 60, 12
TEXT = {
    "vocab_size": TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT = {
    "vocab_size": TOKENS,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
Step = Callable[[Any, int], Tensor]


def images(step: int, side: int = 32) -> tuple[Tensor, Tensor]:
    """Eight images of four classes that differ in brightness and in a stripe."""
    draw = torch.Generator().manual_seed(step)
    y = torch.randint(0, CLASSES, (8,), generator=draw)
    x = torch.randn(8, 3, side, side, generator=draw) + 0.5 * y[:, None, None, None]
    return x, y


def words(step: int) -> Tensor:
    """Eight sentences that count upwards."""
    draw = torch.Generator().manual_seed(step)
    return (torch.randint(3, TOKENS - LENGTH, (8, 1), generator=draw) + torch.arange(LENGTH)).clamp(max=TOKENS - 1)


def classify(net: Any, step: int, side: int = 32) -> Tensor:
    x, y = images(step, side)
    return F.cross_entropy(net(x), y)


def classify_64(net: Any, step: int) -> Tensor:
    return classify(net, step, 64)


def of_images(net: Any, step: int) -> Tensor:
    x, y = images(step)
    return net(pixel_values=x, labels=y).loss


def of_words(net: Any, step: int) -> Tensor:
    ids = words(step)
    return net(input_ids=ids, labels=ids).loss


def contrastive(net: Any, step: int) -> Tensor:
    x, y = images(step)
    return net(input_ids=words(step) + 0 * y[:, None], pixel_values=x, return_loss=True).loss


def make_clip() -> nn.Module:
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=IMAGE, projection_dim=16)
    return transformers.CLIPModel(config)


def adamw(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, rate)


def sgd(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, rate, momentum=0.9)


def vision(name: str) -> Callable[[], nn.Module]:
    return lambda: getattr(torchvision.models, name)(num_classes=CLASSES)


def of_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=CLASSES, **options)


def of_transformers(kind: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**options))


VIT = {"img_size": 32, "patch_size": 8, "depth": 3}
MODELS: dict[str, tuple[Callable[[], nn.Module], Step, Callable[[Any], torch.optim.Optimizer]]] = {
    "resnet18, SGD": (vision("resnet18"), classify, sgd(5e-3)),
    "resnet18, AdamW": (vision("resnet18"), classify, adamw(1e-3)),
    "mobilenet_v2": (vision("mobilenet_v2"), classify, sgd(1e-3)),
    "mobilenet_v3_small": (vision("mobilenet_v3_small"), classify_64, adamw(1e-3)),
    "shufflenet": (vision("shufflenet_v2_x0_5"), classify_64, sgd(1e-2)),
    "squeezenet": (vision("squeezenet1_1"), classify_64, adamw(3e-4)),
    "efficientnet_b0": (vision("efficientnet_b0"), classify_64, adamw(1e-3)),
    "regnet": (vision("regnet_y_400mf"), classify_64, sgd(1e-3)),
    "densenet": (lambda: torchvision.models.DenseNet(8, (2, 2), 16, num_classes=CLASSES), classify, adamw(1e-3)),
    "vision transformer": (lambda: torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=CLASSES),
                           classify, adamw(1e-3)),
    "timm vit": (of_timm("vit_tiny_patch16_224", **VIT), classify, adamw(1e-3)),
    "timm deit, distilled token": (of_timm("deit_tiny_patch16_224", **VIT), classify, adamw(5e-4)),
    "timm convnext": (of_timm("convnext_atto"), classify_64, adamw(1e-3)),
    "timm resnet, zero-init residual": (of_timm("resnet18", zero_init_last=True), classify, sgd(1e-2)),
    "timm resmlp": (of_timm("resmlp_12_224", img_size=32), classify, adamw(1e-3)),
    "timm mixer": (of_timm("mixer_s32_224", img_size=64), classify_64, adamw(1e-3)),
    "timm cait, layer scale": (of_timm("cait_xxs24_224", img_size=32, depth=2), classify, adamw(1e-3)),
    "timm beit": (of_timm("beit_base_patch16_224", img_size=32, depth=2, embed_dim=48, num_heads=4), classify,
                  adamw(1e-3)),
    "timm swin": (of_timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(1, 1),
                          num_heads=(2, 4)), classify, adamw(1e-3)),
    "bert": (of_transformers("BertForMaskedLM", "BertConfig", **TEXT), of_words, adamw(1e-3)),
    "roberta": (of_transformers("RobertaForMaskedLM", "RobertaConfig", **TEXT), of_words, adamw(5e-4)),
    "electra": (of_transformers("ElectraForMaskedLM", "ElectraConfig", **TEXT, embedding_size=16), of_words,
                adamw(1e-3)),
    "gpt2": (of_transformers("GPT2LMHeadModel", "GPT2Config", **GPT), of_words, adamw(1e-3)),
    "llama": (of_transformers("LlamaForCausalLM", "LlamaConfig", **TEXT), of_words, adamw(1e-3)),
    "t5": (of_transformers("T5ForConditionalGeneration", "T5Config", vocab_size=TOKENS, d_model=32, d_kv=8, d_ff=64,
                           num_layers=2, num_heads=4, decoder_start_token_id=0), of_words, adamw(1e-3)),
    "mamba": (of_transformers("MambaForCausalLM", "MambaConfig", vocab_size=TOKENS, hidden_size=32, state_size=8,
                              num_hidden_layers=2), of_words, adamw(1e-3)),
    "transformers vit": (of_transformers("ViTForImageClassification", "ViTConfig", **IMAGE, num_labels=CLASSES),
                         of_images, adamw(1e-3)),
    "dinov2": (of_transformers("Dinov2ForImageClassification", "Dinov2Config", **IMAGE | {"mlp_ratio": 2},
                               num_labels=CLASSES), of_images, adamw(1e-3)),
    "clip, contrastive with logit_scale": (make_clip, contrastive, adamw(5e-4)),
    "autoencoder": (lambda: nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.SiLU(), nn.Conv2d(16, 4, 3, 2, 1), nn.SiLU(),
                                          nn.ConvTranspose2d(4, 16, 4, 2, 1), nn.ConvTranspose2d(16, 3, 4, 2, 1)),
                    lambda net, step: F.mse_loss(net(images(step)[0]), images(step)[0]), adamw(3e-3)),
}  # fmt: skip
QUICK = ("resnet18, SGD", "timm vit", "timm cait, layer scale", "gpt2", "clip, contrastive with logit_scale")
"""Models that gave false errors, or are unlike the others."""


class Foreign(LightningModule):
    """A model of another library in a LightningModule."""

    def __init__(self, net: nn.Module, step: Step, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.net, self.compute, self.make = net, step, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.compute(self.net, self.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())

    def train_dataloader(self) -> Any:
        return [0] * STEPS


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in MODELS]
)
def test_a_healthy_model_of_another_library_is_silent(name: str, tmp_path: Path) -> None:
    make, step, optimizer = MODELS[name]
    torch.manual_seed(0)
    monitor = GradientHealthMonitor(every_n_steps=2, page=False)
    Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[monitor], default_root_dir=tmp_path,
    ).fit(Foreign(make(), step, optimizer))  # fmt: skip
    assert [alert.line() for alert in monitor.alerts if alert.level != "info"] == []


class Sigmoids(nn.Sequential):
    """A deep network whose first layers get hardly any gradient, so that it learns nothing."""

    def __init__(self) -> None:
        layers = [layer for _ in range(14) for layer in (nn.Linear(16, 16), nn.Sigmoid())]
        super().__init__(nn.Flatten(), nn.Linear(3 * 32 * 32, 16), *layers, nn.Linear(16, CLASSES))


def test_gradients_that_vanish_from_the_start_are_named_where_nothing_is_learned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    monitor = GradientHealthMonitor(every_n_steps=1, page=False)
    Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[monitor], default_root_dir=tmp_path,
    ).fit(Foreign(Sigmoids(), classify, sgd(1e-3)))  # fmt: skip
    found = [alert for alert in monitor.alerts if alert.check == "vanishing" and alert.level == "warning"]
    assert found and found[0].layer.startswith("net.") and found[0].step <= 12
