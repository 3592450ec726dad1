"""A budget in place of a level: what is kept fits it, by a count of what is alive, and no gradient changes by a bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fakes.kept_bytes import kept_bytes, step_peak_bytes
from fakes.models.small_models import EXACT, call_unet, gradients, make_unet, with_lora, worst_difference
from lightning_aigc.errors import ConfigError
from lightning_aigc.precision import FusedBackwardPrecision
from lightning_aigc.precision.memory import recompute
from lightning_aigc.precision.memory.budget import MemoryBudget
from lightning_aigc.precision.swaps import Swapped, swap_forwards
from lightning_aigc.quantization import quantize_frozen_

WIDE: dict[str, Any] = {"block_out_channels": (32, 64)}
SDXL: dict[str, Any] = {**WIDE, "use_linear_projection": True, "transformer_layers_per_block": 2}


@pytest.fixture(autouse=True)
def attentions_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "LONG_ATTENTION_TOKENS", 200)  # those of the first of two resolutions


def call_of(batch: int = 2, height: int = 16, width: int = 16, tokens: int = 5) -> Callable[[nn.Module], Tensor]:
    def call(unet: Any) -> Tensor:
        torch.manual_seed(2)
        given = torch.randn(batch, 4, height, width), torch.full((batch,), 10), torch.randn(batch, tokens, 24)
        output: Tensor = unet(*given).sample
        return output

    return call


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def planner_of(swapped: Swapped) -> Any:
    assert swapped.planner is not None
    return swapped.planner


@pytest.fixture(params=[WIDE, pytest.param(SDXL, marks=pytest.mark.long)], ids=["sd", "sdxl"])
def unet(request: pytest.FixtureRequest) -> nn.Module:
    return with_lora(make_unet(**request.param))


def at_level(unet: nn.Module, level: str, call: Callable[[nn.Module], Tensor] = call_unet) -> tuple[int, Any]:
    swapped = swap_forwards(unet, memory=level)  # type: ignore[arg-type]
    found = kept_bytes(unet, call), gradients(unet, call)
    swapped.restore()
    return found


def test_what_is_kept_fits_the_budget_and_gradients_keep_their_bits(unet: nn.Module) -> None:
    native = kept_bytes(unet, call_unet)
    least, wanted = at_level(unet, "max")
    assert same_bits(at_level(unet, "lean")[1], wanted)
    before = 0
    for share in (0.2, 0.25, 0.3, 0.4, 0.5, 1.0):
        swapped = swap_forwards(unet, memory=MemoryBudget(kept=share))
        assert same_bits(gradients(unet, call_unet), wanted)  # the step that is counted
        kept = kept_bytes(unet, call_unet)
        assert max(least, before) <= kept <= share * native
        assert share > 0.5 or kept > 0.93 * share * native  # and uses it
        assert same_bits(gradients(unet, call_unet), wanted)
        swapped.restore()
        before = kept


def test_no_block_keeps_less_than_at_max(unet: nn.Module) -> None:
    swapped = swap_forwards(unet, memory=MemoryBudget(kept=0.3))
    gradients(unet, call_unet)
    (plan,) = planner_of(swapped).plans.values()
    saved = [options.saved for options in plan.options.values()]
    assert 0 < len(saved) == plan.blocks - plan.recomputed
    for (module, signature), options in plan.options.items():
        tokens = next(shape for shape, _ in signature[3:])
        pixels = tokens[2] * tokens[3] if len(tokens) == 4 else tokens[1]
        has_attention = type(module).__name__ != "ResnetBlock2D"
        assert not options.recomputes
        assert not (has_attention and pixels >= 200) or "output" in options.saved.attn1
    swapped.restore()


def test_the_least_share_is_named_and_can_be_had(unet: nn.Module) -> None:
    swapped = swap_forwards(unet, memory=MemoryBudget(kept=0.02))
    with pytest.raises(
        ConfigError, match=r"^memory=\{kept: 0.02\} cannot be met: .*; use kept: [\d.]+ or more$"
    ) as met:
        call_unet(unet)
    swapped.restore()
    share = float(re.findall(r"kept: ([\d.]+) or", str(met.value))[0])
    swapped = swap_forwards(unet, memory=MemoryBudget(kept=share))
    call_unet(unet)
    assert kept_bytes(unet, call_unet) <= share * kept_bytes_natively(unet, swapped)
    assert unet.training and not unet._forward_hooks and not unet._forward_pre_hooks  # nothing stays behind


def kept_bytes_natively(unet: nn.Module, swapped: Swapped) -> int:
    swapped.restore()
    return kept_bytes(unet, call_unet)


def test_a_planned_step_leaves_nothing_of_autograds_graph_alive(unet: nn.Module) -> None:
    """An operator that saves its own result, by hooks that return it, is kept by itself: a node without backward."""
    swapped = swap_forwards(unet, memory=MemoryBudget(kept=0.5))
    trained = [p for p in unet.parameters() if p.requires_grad]

    def nodes() -> list[Any]:
        return [p.view_as(p).grad_fn.next_functions[0][0] for p in trained]  # type: ignore[union-attr]

    for node in nodes() + (held := nodes()):
        node.metadata["of the planned step"] = True
    gradients(unet, call_unet)
    node = None
    held.clear()
    assert not any("of the planned step" in node.metadata for node in nodes())
    swapped.restore()


def test_each_batch_and_picture_size_has_a_plan_of_its_own() -> None:
    unet = with_lora(make_unet(**WIDE))
    sizes = [call_of(), call_of(batch=3), call_of(height=8, width=24), call_of(tokens=11), call_of()]
    native = [kept_bytes(unet, call) for call in sizes]
    wanted = [at_level(unet, "lean", call)[1] for call in sizes]
    swapped = swap_forwards(unet, memory=MemoryBudget(kept=0.3))
    for _ in range(2):
        assert all(same_bits(gradients(unet, call), grads) for call, grads in zip(sizes, wanted, strict=True))
    assert len(planner_of(swapped).plans) == 4
    assert all(kept_bytes(unet, call) <= 0.3 * n for call, n in zip(sizes, native, strict=True))


def test_a_later_size_that_cannot_fit_saves_the_least(unet: nn.Module) -> None:
    swapped = swap_forwards(unet, memory=MemoryBudget(kept=0.2))
    call_unet(unet)
    planner_of(swapped).budget = MemoryBudget(kept=0.01)
    call = call_of(batch=1)
    assert same_bits(gradients(unet, call), at_level_of_copy("max", unet, swapped, call))


def at_level_of_copy(level: str, unet: nn.Module, swapped: Swapped, call: Callable[[nn.Module], Tensor]) -> Any:
    again = gradients(unet, call)  # the plan of the least
    assert len(planner_of(swapped).plans) == 2
    swapped.restore()
    assert same_bits(at_level(unet, level, call)[1], again)
    return again


def test_plans_depend_on_model_shapes_and_budget_alone() -> None:
    lines, chosen = set(), []
    for seed in (5, 6):
        unet = with_lora(make_unet(**WIDE))
        torch.manual_seed(seed)
        swapped = swap_forwards(unet, memory=MemoryBudget(kept=0.25))
        gradients(unet, call_unet)
        (plan,) = planner_of(swapped).plans.values()
        names = {module: name for name, module in unet.named_modules()}
        chosen.append({names[module]: options.saved for (module, _), options in plan.options.items()})
        lines.add(planner_of(swapped).line)
    assert chosen[0] == chosen[1] and len(chosen[0]) > 2
    (line,) = lines
    assert re.match(
        r"memory=\{kept: 0.25\}: saves [\d.]+ of native's [\d.]+ MiB \(0\.2\d*; at least 0\.\d+\): \d+ of \d+ blocks"
        r" save what pays most, \d+ run again in backward, which repeats about [\d.]+% of a step's operations$",
        line,
    ), line


@pytest.mark.parametrize("share", [0.25, 0.6])
def test_gradient_checkpointing_may_be_on(share: float) -> None:
    unet: Any = with_lora(make_unet(**WIDE))
    wanted = at_level(unet, "max")[1]
    native = kept_bytes(unet, call_unet)
    unet.enable_gradient_checkpointing()
    swapped = swap_forwards(unet, memory=MemoryBudget(kept=share))
    for _ in range(3):
        assert same_bits(gradients(unet, call_unet), wanted)
    assert kept_bytes(unet, call_unet) <= share * native
    swapped.restore()


def test_dropout_draws_the_same_masks_in_a_step_that_is_counted() -> None:
    def call(unet: nn.Module) -> Tensor:
        given = call_of()
        return given(unet)

    unet = with_lora(make_unet(**WIDE), lora_dropout=0.5)
    wanted = gradients(unet, call)
    swapped = swap_forwards(unet, memory=MemoryBudget(kept=0.6))
    for _ in range(2):
        assert worst_difference(gradients(unet, call), wanted) < 1e-4
    swapped.restore()


@pytest.mark.usefixtures("float64")
def test_full_fine_tuning_gradients_are_those_of_the_unets_own_forward() -> None:
    unet = make_unet(**WIDE)
    wanted, native = gradients(unet, call_unet), kept_bytes(unet, call_unet)
    swapped = swap_forwards(unet, memory=MemoryBudget(kept=0.3))
    for _ in range(2):
        assert worst_difference(gradients(unet, call_unet), wanted) < EXACT
    assert kept_bytes(unet, call_unet) <= 0.3 * native
    swapped.restore()


class Packed(Tensor):
    """A frozen weight that is held in another form, and made for each operator."""

    _half: Tensor

    @staticmethod
    def __new__(cls, half: Tensor) -> Packed:
        made = Tensor._make_wrapper_subclass(cls, half.shape, dtype=torch.float32)  # type: ignore[attr-defined]
        made._half = half
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_half"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: object) -> Packed:
        return Packed(inner["_half"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Packed(args[0]._half)
        plain = torch.utils._pytree.tree_map(lambda a: a._half.float() if isinstance(a, Packed) else a, (args, kwargs))
        return func(*plain[0], **(plain[1] or {}))


def test_frozen_weights_may_be_a_tensor_subclass() -> None:
    unet: Any = with_lora(make_unet(**WIDE))
    packed = [m for m in unet.modules() if type(m) in (nn.Linear, nn.Conv2d) and not m.weight.requires_grad]
    for layer in packed:
        layer.weight = nn.Parameter(layer.weight.detach().bfloat16().float(), requires_grad=False)
    native, wanted = kept_bytes(unet, call_unet), at_level(unet, "max")[1]
    for layer in packed:
        layer.weight = nn.Parameter(Packed(layer.weight.detach().bfloat16()), requires_grad=False)
    swapped = swap_forwards(unet, memory=MemoryBudget(kept=0.3))
    for _ in range(2):
        assert same_bits(gradients(unet, call_unet), wanted)
    (plan,) = planner_of(swapped).plans.values()
    assert plan.kept <= 0.3 * plan.native < 0.33 * native
    swapped.restore()


def test_a_steps_peak_fits_peak_gb() -> None:
    unet = with_lora(make_unet(block_out_channels=(32, 64), sample_size=32))
    call = call_of(batch=4, height=32, width=32)
    optimizer = torch.optim.AdamW([p for p in unet.parameters() if p.requires_grad])

    def step(module: nn.Module) -> None:
        call(module).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    weights = sum(p.nbytes for p in unet.parameters())
    peaks = []
    for gib in (0.045, 0.06, 0.09):
        swapped = swap_forwards(unet, memory=MemoryBudget(peak_gb=gib))
        planner_of(swapped).optimizers = [optimizer]
        step(unet)
        states = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
        peaks.append((weights + states + step_peak_bytes(unet, step)) / 2**30)
        assert peaks[-1] <= gib
        swapped.restore()
    assert peaks[0] < peaks[1]
    swapped = swap_forwards(unet, memory=MemoryBudget(peak_gb=0.001))
    with pytest.raises(
        ConfigError, match=r"memory=\{peak_gb: 0.001\} cannot be met: a step needs .*; use peak_gb: 0\.0"
    ):
        call(unet)
    swapped.restore()


def test_a_peak_budget_says_what_an_int8_base_would_spare_and_the_packed_base_spares_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unet = with_lora(make_unet(block_out_channels=(32, 64), sample_size=32))
    call = call_of(batch=2, height=32, width=32)

    def plan_within(gib: float) -> Any:
        swapped = swap_forwards(unet, memory=MemoryBudget(peak_gb=gib))
        try:
            call(unet)
        finally:
            swapped.restore()
        (plan,) = planner_of(swapped).plans.values()
        return plan

    assert plan_within(1).with_int8 is None  # there is room for all
    plan = plan_within(0.015)
    saved, repeated = plan.with_int8
    assert 0 < saved < sum(p.nbytes for p in unet.parameters() if not p.requires_grad)
    assert repeated < plan.repeated - 0.01 * plan.operations
    said = plan.summary(MemoryBudget(peak_gb=0.015))
    assert f"int8 the weights take {saved / 2**30:.3g} GiB less, and about {repeated / plan.operations:.1%}" in said

    monkeypatch.setattr("lightning_aigc.quantization.layers.FEWEST_NUMBERS", 0)
    quantize_frozen_(unet, "int8", skip=[])
    packed = plan_within(0.015)
    assert packed.with_int8 is None
    assert abs(packed.repeated - repeated) <= 0.01 * plan.operations


def test_fit_saves_all_that_pays_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_aigc.precision.memory import footprint

    unet = with_lora(make_unet(**WIDE))

    def plan_with(free: float) -> Any:
        monkeypatch.setattr(footprint, "_free_on_host", lambda: int(free))
        swapped = swap_forwards(unet, memory=MemoryBudget(fit=True))
        try:
            call_unet(unet)
            (plan,) = planner_of(swapped).plans.values()
        finally:
            swapped.restore()
        return plan

    roomy = plan_with(2**40)
    assert roomy.recomputed == 0 and roomy.repeated == 0
    with pytest.raises(
        ConfigError,
        match=r"^memory=fit cannot be met: .* it needs [\d.]+ GiB; use base_quantization: int8, .*, a smaller",
    ) as met:
        plan_with(0)
    weights = sum(p.nbytes for p in unet.parameters())
    needed = float(re.findall(r"needs ([\d.]+) GiB; use", str(met.value))[0]) * 2**30
    tight = plan_with(1.02 * needed / footprint.FIT_SHARE - weights)
    assert roomy.least <= tight.kept < roomy.kept


@pytest.mark.parametrize(
    "precision",
    [
        # The tests above run in float32, and autocast to float16 takes the path of bfloat16's.
        *(pytest.param(name, marks=pytest.mark.long) for name in ("32-true", "16-mixed")),
        *("bf16-mixed", "bf16-true", "bf16-forward-fp16-backward"),
    ],
)
def test_every_precision_keeps_its_bits(precision: Any) -> None:
    found = []
    for memory in ("max", {"kept": 0.35}):
        unet = with_lora(make_unet(**WIDE))
        plugin = FusedBackwardPrecision(precision, memory=memory)  # type: ignore[arg-type]
        plugin.convert_module(unet)

        def call(unet: Any) -> Tensor:
            dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
            torch.manual_seed(2)
            given = torch.randn(2, 4, 16, 16, dtype=dtype), torch.tensor([10, 900]), torch.randn(2, 5, 24, dtype=dtype)
            with plugin.forward_context():  # noqa: B023
                output: Tensor = unet(*given).sample
            return output

        gradients(unet, call)
        found.append((gradients(unet, call), kept_bytes(unet, call)))
        plugin.teardown()
    assert same_bits(found[1][0], found[0][0])
    assert kept_bytes(unet, call) * 0.35 >= found[1][1] > found[0][1]
