"""Published training throughput on Ascend cards, with model, size, batch, precision, cards and source of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_aigc.cli.bench.architectures import ARCHITECTURES, Architecture

GIB = 2**30
HALF_BYTES = 2
STATE_BYTES = 16
"""float32 weight, gradient and AdamW's two states of a trained parameter."""
GATHERED_BYTES = 4
"""float32 weight, which zero_2 holds in full on each card until backward."""
CONTEXT_GIB = 1.5
"""Driver, kernels and the allocator's rounding: assumed."""


@dataclass(frozen=True)
class Source:
    """The page that a figure stands on, and the machine behind it."""

    publisher: str
    chip: str
    software: str
    repository: str
    page: str
    commit: str

    @property
    def address(self) -> str:
        return f"https://github.com/{self.repository}/blob/{self.commit}/{self.page}"


@dataclass(frozen=True)
class PublishedRow:
    """A line of another project's table, and the run here that is closest to it."""

    name: str
    source: Source
    task: str
    """The name in the publisher's table."""
    model: str
    """Key of `ARCHITECTURES`."""
    method: Literal["lora", "full"]
    pixels: int
    batch: int
    """Samples of a card in a step."""
    precision: Literal["bf16-mixed", "16-mixed"]
    cards: int
    samples_s: float
    """Rate of all cards together."""
    activations_gib: float
    """Peak of a step above weights and states at `memory`: counted on shapes (benchmarks/precision/step_shapes.py), and
    where the step contains the autoencoder, its share assumed."""
    trained: float
    """Trained parameters."""
    gathered_gib: float = 0.0
    """Weights of two blocks, which zero_3 gathers."""
    rank: int = 0
    sources: int = 0
    """Source images of an edit."""
    memory: Literal["off", "balanced", "lean", "max"] = "lean"
    strategy: Literal["npu_sparse", "zero_2", "zero_3"] = "npu_sparse"
    """On several cards; npu_sparse in its dense mode."""
    encodes_images: bool = False
    """Whether the published step contains the autoencoder, as the run here then does."""
    differs: str = ""
    """Work of the published step that the run here leaves out, or other known differences."""

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.model]

    def needed_gib(self, cards: int) -> float:
        """Estimated memory of each of `cards` cards."""
        sharded = cards if self.strategy != "npu_sparse" else 1
        parameters = self.architecture.parameters
        if self.method == "full":
            stored = (GATHERED_BYTES * (sharded - 1) + STATE_BYTES) * parameters / sharded
        else:
            stored = (HALF_BYTES * parameters + STATE_BYTES * self.trained) / sharded
        gathered = self.gathered_gib if sharded > 1 else 0.0
        return stored / GIB + gathered + self.activations_gib + CONTEXT_GIB


def _mindspeed(page: str, software: str) -> Source:
    """A page of MindSpeed-MM as of 2026-07-21."""
    return Source(
        "MindSpeed-MM", "Atlas 900 A2 PODc", software, "Ascend/MindSpeed-MM",
        f"examples/diffusers/{page}/README.md", "d84a56510d032049aee9c44ca2a2f91685b7537c",
    )  # fmt: skip


def _mindone(page: str, commit: str) -> Source:
    return Source(
        "mindone", "Ascend 910*", "MindSpore 2.3.1 in graph mode, CANN 8.0.RC2.beta1", "mindspore-lab/mindone",
        f"examples/stable_diffusion_xl/docs/{page}", commit,
    )  # fmt: skip


LAYERS = "their LoRA has the script's default layers, here all of attention"
SDXL = _mindspeed("sdxl", "torch 2.7.1, DeepSpeed ZeRO-2")
SD3 = _mindspeed("sd3", "torch 2.1, DeepSpeed ZeRO-2")
FLUX2 = _mindspeed("flux2", "torch 2.7.1, FSDP2")
ROWS = (
    PublishedRow(
        "sdxl-full", SDXL, task="SDXL_train_bf16", model="SDXL", method="full", pixels=1024, batch=4,
        precision="bf16-mixed", cards=8, samples_s=29.92, strategy="zero_2", activations_gib=6.7, trained=2.567e9,
        differs="theirs recomputes activations, and leaves the loading of data out",
    ),
    PublishedRow(
        "sdxl-full-fp16", SDXL, task="SDXL_train_fp16", model="SDXL", method="full", pixels=1024, batch=4,
        precision="16-mixed", cards=8, samples_s=28.51, strategy="zero_2", activations_gib=6.7, trained=2.567e9,
        differs="theirs recomputes activations, and leaves the loading of data out",
    ),
    PublishedRow(
        "sd35-lora", SD3, task="Dreambooth-Lora", model="Stable Diffusion 3.5 large", method="lora", rank=4,
        pixels=512, batch=8, precision="16-mixed", cards=8, samples_s=47.93, activations_gib=3.5, trained=5.9e6,
        encodes_images=True, differs="theirs runs three text encoders in each step, here texts are encoded before",
    ),
    PublishedRow(
        "flux2-lora", FLUX2, task="text to image", model="FLUX.2 dev", method="lora", rank=16, pixels=1024, batch=1,
        precision="bf16-mixed", cards=8, samples_s=1.28, memory="max", strategy="zero_3", activations_gib=4.7,
        trained=112e6, differs=LAYERS, gathered_gib=3.7,
    ),
    PublishedRow(
        "flux2-edit-lora", FLUX2, task="image to image", model="FLUX.2 dev", method="lora", rank=16, pixels=1024,
        batch=1, precision="bf16-mixed", cards=8, samples_s=0.61, memory="max", strategy="zero_3",
        activations_gib=9.3, trained=112e6, sources=1, differs=LAYERS, gathered_gib=3.7,
    ),
    PublishedRow(
        "mindone-sdxl-lora", _mindone("lora_finetune.md", "86abb1c559a60f9b69019bbc492e5a53f9a04613"),
        task="LoRA, flash attention", model="SDXL", method="lora", rank=4, pixels=1024, batch=1,
        precision="16-mixed", cards=1, samples_s=2.24, activations_gib=4.5, trained=5.8e6, encodes_images=True,
        differs="theirs runs two text encoders in each step, here texts are encoded before",
    ),
    PublishedRow(
        "mindone-sdxl-full", _mindone("vanilla_finetune.md", "8c288a7cb7a6fa64addcf257241fe33cdc9e92dd"),
        task="all weights, flash attention", model="SDXL", method="full", pixels=1024, batch=4,
        precision="16-mixed", cards=8, samples_s=29.91, strategy="zero_2", activations_gib=6.7, trained=2.567e9,
        differs="theirs has 16-bit weights; whether it reads encoded images from a cache is not told",
    ),
)  # fmt: skip
SETS = {"mindspeed-mm": ROWS}
"""By the name for `--as`: the rows of MindSpeed-MM, and those of mindone for the same models."""
