"""Frozen blocks in host memory: loss and gradients to the bit, bytes of a step, streams, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fakes.models.pipelines import make_batch, make_pipeline
from fakes.models.transformer_pipelines import MAKE
from fakes.npu.deferred_streams import Device
from fakes.processes.ranks import run_ranks
from fakes.runs.training_losses import example_losses
from lightning_aigc.diffusion import DiffusionLoRA
from lightning_aigc.diffusion.lora import training as lora_training
from lightning_aigc.diffusion.pipeline import streamed_base
from lightning_aigc.errors import ConfigError
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.precision.blocks import mmdit
from lightning_aigc.precision.memory import streamed_blocks
from lightning_aigc.precision.memory.streamed_blocks import StreamedBlocks, blocks_of, fitting_share, has_skips

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def small_weights_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny transformers' weights stream, and not only those of published sizes."""
    monkeypatch.setattr(streamed_blocks, "FEWEST_NUMBERS", 64)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}
    makers: dict[str, Callable[[Path], Path]] = MAKE | {"sd": make_pipeline, "sdxl": partial(make_pipeline, sdxl=True)}

    def folder(family: str) -> str:
        if family not in made:
            made[family] = str(makers[family](tmp_path_factory.mktemp(family)))
        return made[family]

    return folder


def make_module(path: str, share: float | None, memory: str | None = None, **options: Any) -> tuple[Any, Any]:
    """A module whose LoRA changes the output, and its streamed blocks."""
    torch.manual_seed(0)
    module = DiffusionLoRA(path, rank=4, max_train_steps=1, **options)
    module.configure_model()
    torch.manual_seed(5)
    for parameter in module.trainable_parameters():
        parameter.data = 0.3 * torch.randn_like(parameter)
    network = module.loaded().denoiser
    streamed = None
    if share is not None:
        streamed = StreamedBlocks(blocks_of(network), share, CPU, has_skips=has_skips(network))
    if memory is not None:
        FusedBackwardPrecision(precision="32-true", memory=memory).convert_module(module)  # type: ignore[arg-type]
    return module, streamed


def step(module: Any) -> dict[str, Tensor]:
    """The losses and gradients of a training step."""
    module.zero_grad()
    torch.manual_seed(3)
    losses = example_losses(module, make_batch())
    losses.mean().backward()
    return {"losses": losses.detach()} | {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


U_NETS = ("sd", "sdxl")


@pytest.mark.parametrize("memory", ["lean", "max"])
def test_streamed_blocks_run_the_fused_ops_of_a_card_as_resident_ones_do(
    memory: str, folder_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their first run records nothing for backward, where modules run their own forward when sampling."""
    monkeypatch.setattr(mmdit, "KERNEL_DEVICES", ("cpu",))
    wanted = step(make_module(folder_of("flux"), None, memory)[0])
    assert same(step(make_module(folder_of("flux"), 0.0, memory)[0]), wanted)


@pytest.mark.parametrize(
    "memory", [None, pytest.param("lean", marks=pytest.mark.long), pytest.param("max", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("base", [None, "nf4", pytest.param("int8", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "family",
    [
        "flux",
        "sdxl",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("sd", "z_image", "sd3", "flux2", "qwen_image", "chroma", "krea2")
        ),
    ],
)
def test_a_step_with_streamed_blocks_has_the_resident_ones_bits(
    family: str, base: str | None, memory: str | None, folder_of: Callable[[str], str]
) -> None:
    wanted = step(make_module(folder_of(family), None, memory, base_quantization=base)[0])
    for share in (0.0, 0.5):
        module, streamed = make_module(folder_of(family), share, memory, base_quantization=base)
        for _ in range(2):
            streamed.link.sent_bytes = 0
            assert same(step(module), wanted)
            if family in U_NETS:
                # Blocks before the first trained weight do not run in backward.
                assert streamed.step_bytes / 2 < streamed.link.sent_bytes <= streamed.step_bytes
            else:
                assert streamed.link.sent_bytes == streamed.step_bytes
        blocks = len(streamed.chosen)
        assert len(streamed.free) + len(streamed.coming) == streamed.slots == min(2, blocks)
        if len({host.nbytes for host in streamed.hosts}) == 1:
            assert streamed.step_bytes == (2 * blocks - streamed.slots) * streamed.hosts[0].nbytes


@pytest.mark.parametrize("family", ["sd", pytest.param("sdxl", marks=pytest.mark.long)])
@pytest.mark.parametrize("memory", [None, pytest.param("max", marks=pytest.mark.long)])
def test_text_that_every_block_reads_gets_the_resident_gradients(
    family: str, memory: str | None, folder_of: Callable[[str], str]
) -> None:
    resident, _ = make_module(folder_of(family), None, memory, train_text_encoder=True)
    module, _ = make_module(folder_of(family), 0.0, memory, train_text_encoder=True)
    wanted = step(resident)
    assert any(name.startswith("text_encoders") for name in wanted) and same(step(module), wanted)


class Adds(nn.Module):
    """Reads its input three times, through a cast that changes nothing, and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = x.float().contiguous()
        return torch.cat([h[:, :32] + self.linear(h)[:, :32], torch.stack([h, 3 * h]).sum(0)[:, 32:]], 1)


def test_each_use_of_an_input_is_added_in_the_order_of_a_resident_block() -> None:
    def gradient(has_skips: bool | None) -> Tensor:
        torch.manual_seed(0)
        blocks = [Adds().requires_grad_(False) for _ in range(3)]
        if has_skips is not None:
            StreamedBlocks(blocks, 0.0, CPU, has_skips=has_skips)
        x = torch.randn(256, 64, requires_grad=True)
        found, skips = x * 1.0, []
        for block in blocks:
            skips.append(found)
            found = block(found)
        sum(skips, start=found).sin().sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(True), gradient(None)) and not torch.equal(gradient(False), gradient(None))


def test_samples_and_autocast_are_the_resident_ones(folder_of: Callable[[str], str]) -> None:
    path = folder_of("flux")
    (resident, _), (module, _) = make_module(path, None), make_module(path, 0.0)
    images = [each.sample(["a red cup"], [1], num_inference_steps=2) for each in (resident, module)]
    assert torch.equal(*images)
    found = []
    for each in (resident, module):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(step(each))
    assert same(*found)


def test_streamed_weights_stay_on_the_host_when_the_module_moves_and_are_there_to_read(
    folder_of: Callable[[str], str],
) -> None:
    module, streamed = make_module(folder_of("flux"), 0.0)
    resident, _ = make_module(folder_of("flux"), None)
    for (name, one), other in zip(module.named_parameters(), resident.parameters(), strict=True):
        assert torch.equal(one, other), name
    held = {id(p) for host in streamed.hosts for p in host.waiting}
    moved = copy.copy(module.loaded().denoiser)
    torch.nn.Module.to(moved, "meta")
    places = {id(p) in held: p.device.type for p in moved.parameters()}
    assert places == {True: "cpu", False: "meta"}


@pytest.mark.parametrize("side_runs_at_once", [False, True])
def test_copies_on_a_stream_of_their_own_are_ordered_on_the_simulated_device(side_runs_at_once: bool) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16, bias=False).requires_grad_(False)
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(x, self.linear.weight) * self.scale

    def run(streams: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.ModuleList(Block() for _ in range(5))
        x, found = torch.randn(4, 16), []
        device = Device(side_runs_at_once=side_runs_at_once)
        streamed = StreamedBlocks(list(net), 0.0, CPU)
        if streams:
            streamed.link.backend, streamed.link.stream = device, device.Stream()
        for _ in range(2):
            net.zero_grad()
            with device:
                y = x
                for block in net:
                    y = block(y)
                y.sum().backward()
                device.current.run()
            found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        return found

    wanted, found = run(streams=False), run(streams=True)
    assert len(wanted) == 10 and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_the_share_that_fits_leaves_room_for_the_slots() -> None:
    blocks = [nn.Linear(64, 64, bias=False).requires_grad_(False) for _ in range(8)]  # 16 KiB each
    kib = 1024
    assert fitting_share(blocks, 200 * kib, 60 * kib) == 1.0
    assert fitting_share(blocks, 128 * kib, 32 * kib) == pytest.approx((96 - 32) / 128)
    assert fitting_share(blocks, 40 * kib, 32 * kib) == 0.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"base_location": "host"}, r"must be null, fit, or \{device: 0\.6\}.*got 'host'"),
        ({"base_location": {"device": 1.5}}, r"got \{'device': 1\.5\}"),
        ({"base_location": {"cpu": 0.5}}, r"got \{'cpu': 0\.5\}"),
    ],
)
def test_values_that_mean_nothing_are_refused(
    options: dict[str, Any], said: str, folder_of: Callable[[str], str]
) -> None:
    with pytest.raises(ConfigError, match=said):
        DiffusionLoRA(folder_of("flux"), **options)


@pytest.mark.parametrize("name", ["sd", "sdxl"])
def test_a_unets_blocks_come_in_the_order_of_their_calls(name: str, folder_of: Callable[[str], str]) -> None:
    module, streamed = make_module(folder_of(name), 0.0)
    called: list[int] = []
    hold = streamed.hold

    def noting(number: int, towards: int) -> None:
        if towards == 1:
            called.append(number)
        hold(number, towards)

    streamed.hold = noting
    step(module)
    assert called == list(range(len(streamed.chosen)))


class ZeRO23Strategy:
    label = "zero_3"
    root_device = torch.device("cuda")


def run_with(strategy: Any = None, **precision: Any) -> Any:
    cuda = SimpleNamespace(root_device=torch.device("cuda"))
    return SimpleNamespace(
        strategy=strategy or cuda,
        num_devices=1,
        precision_plugin=SimpleNamespace(**({"memory": "lean"} | precision)),
    )


@pytest.mark.parametrize(
    ("trainer", "options", "said"),
    [
        (run_with(ZeRO23Strategy()), {}, "zero_3 cuts weights over the ranks itself; use strategy ddp"),
        (run_with(SimpleNamespace(root_device=CPU)), {}, "computes on the CPU"),
        (run_with(), {"gradient_checkpointing": True}, "set model.init_args.gradient_checkpointing: false"),
        (run_with(), {"dropout": True}, "set model.init_args.lora_dropout: 0"),
        (run_with(memory={"kept": 0.5}), {}, "set memory: lean"),
        (run_with(graph=True), {}, "set graph: auto or false"),
    ],
)
def test_runs_that_streaming_does_not_go_with_are_refused(trainer: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        streamed_base.check_run(
            trainer, {"device": 0.5}, **({"gradient_checkpointing": False, "dropout": False} | options)
        )


def test_too_little_host_memory_is_said_with_the_numbers(
    folder_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _ = make_module(folder_of("flux"), None)
    memory = SimpleNamespace(available=3 * 2**30)
    monkeypatch.setattr(streamed_base.psutil, "virtual_memory", lambda: memory)
    with pytest.raises(
        ConfigError, match=r"would wait in host memory, which has 3\.0 GiB left, and 4 of them stay free"
    ):
        streamed_base.stream_base(module, module.loaded(), {"device": 0.5}, run_with(SimpleNamespace(root_device=CPU)))


def test_as_much_as_fits_is_everything_where_the_run_computes_in_host_memory(folder_of: Callable[[str], str]) -> None:
    """A config that was written for a card passes a dry run on a CPU."""
    streamed_base.check_run(
        run_with(SimpleNamespace(root_device=CPU)), "fit", gradient_checkpointing=False, dropout=False
    )
    module, _ = make_module(folder_of("flux"), None)
    assert streamed_base.stream_base(module, module.loaded(), "fit", Trainer(accelerator="cpu", logger=False)) is None


LOCATIONS = {"resident": None, "half": {"device": 0.5}, "fit": "fit"}


def fit_on_two_ranks(rank: int, path: str, folder: str, strategy: str) -> dict[str, tuple[dict[str, Tensor], int]]:
    """The trained weights, and the number of frozen weights that wait in host memory, for each of LOCATIONS."""
    streamed_blocks.FEWEST_NUMBERS = 64
    lora_training.check_run = lambda *args, **options: None  # ranks on a CPU, where nothing streams
    streamed_base._share_that_fits = lambda *args: (0.0, 0.9)[rank]  # of cards of which others use one
    found = {}
    for name, location in LOCATIONS.items():
        torch.manual_seed(0)
        module = DiffusionLoRA(path, rank=4, max_train_steps=3, learning_rate=1e-2, base_location=location)  # type: ignore[arg-type]
        trainer = Trainer(
            default_root_dir=folder, accelerator="cpu", devices=2, strategy=strategy, max_steps=3, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False,
        )  # fmt: skip
        batches = [make_batch(seed=2 * number + rank) for number in range(3)]
        torch.manual_seed(1)
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        trained = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
        streamed = module.method.streamed
        found[name] = (trained, 0 if streamed is None else sum(len(host.waiting) for host in streamed.hosts))
    return found


@pytest.mark.parametrize(("strategy", "family"), [("ddp", "flux"), ("npu_sparse", "sd"), ("zero_1", "sd")])
def test_ranks_stream_the_same_blocks_and_train_to_the_resident_runs_bits(
    strategy: str, family: str, folder_of: Callable[[str], str], tmp_path: Path
) -> None:
    first, second = run_ranks(
        fit_on_two_ranks, 2, tmp_path, folder_of(family), str(tmp_path / "run"), strategy, gloo=False
    )
    for name, (trained, waiting) in first.items():
        assert second[name][1] == waiting and same(second[name][0], trained)
        assert bool(waiting) == (name != "resident") and same(trained, first["resident"][0])
    assert first["fit"][1] > first["half"][1]


def test_a_cpu_run_is_refused_before_the_first_step(folder_of: Callable[[str], str], tmp_path: Path) -> None:
    module = DiffusionLoRA(folder_of("flux"), rank=4, max_train_steps=1, base_location={"device": 0.5})
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_checkpointing=False)
    data = DataLoader([make_batch()], batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="this run computes on the CPU"):
        trainer.fit(module, data)
