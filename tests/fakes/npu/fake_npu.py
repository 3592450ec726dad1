"""A simulated "npu" device in Python, for machines without an NPU: torch's PrivateUse1 backend over CPU tensors.

A tensor on npu is an `NpuTensor` that wraps a CPU tensor. Every operator runs on the wrapped CPU tensors and its
results are wrapped again; autograd, modules and optimizers work because this happens below autograd. It tests which
device code uses, not speed or an Ascend's numerics. `install()` cannot be undone: use it in a separate process.

Every tensor reports npu:0 for any index, because torch's autograd engine supports one device of a Python backend; each
rank of a training sees its card under that name. Features that an Ascend lacks are refused: float64 and complex tensors
may be moved and viewed but not computed with, and no tensor has channels_last (a channels_last tensor from the CPU
becomes contiguous) or a sparse layout.

Torch requests pinned memory from a backend in C++, which a Python backend cannot provide; DDP needs it with
`find_unused_parameters` or `static_graph`. With `pin_everything()` ordinary memory counts as pinned.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from fakes.npu import npu_ops
from fakes.npu.npu_module import NpuModule
from lightning_aigc._attention_masks import expand_masks
from lightning_aigc._real_rotary import QWEN_IMAGE, Z_IMAGE, use_real_rotary

CAST_TO_HALF = (
    *("linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "conv2d", "convolution"),
    "scaled_dot_product_attention",
)
CAST_TO_FLOAT = ("layer_norm", "group_norm", "mse_loss", "softmax.int", "exp", "sum")
"""Operators that autocast sends to float32: a part of torch_npu's list, enough for a U-Net."""

CARRY_NUMBERS = {
    *("empty", "empty_strided", "_to_copy", "copy_", "clone", "detach", "alias", "lift_fresh"),
    *("_local_scalar_dense", "is_pinned", "view", "_unsafe_view", "reshape", "t", "transpose", "permute"),
    *("expand", "select", "slice", "squeeze", "unsqueeze"),
}
"""Operators that take any dtype, because they compute nothing."""
TAKE_OTHER_DEVICES = {"copy_", "index", "index_put", "index_put_", "_index_put_impl_", "is_pinned", "equal"}
"""Operators that read a tensor of the CPU, too; any takes one without dimensions."""
FILL_AN_EMPTY_TENSOR = (
    "arange",
    "arange.start",
    "arange.start_step",
    "eye",
    "eye.m",
    "linspace",
    "logspace",
    "randperm",
)
"""Operators that torch runs by resizing an empty tensor, which an NpuTensor cannot follow; they run on the CPU."""
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of a tensor's dimensions."""


class NpuTensor(torch.Tensor):
    """A tensor that says "npu" and computes on the CPU tensor inside."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor, /, requires_grad: bool = False, **attributes: Any) -> Any:
        """Wrap a CPU tensor. accelerate calls a parameter's class, which is this one, to make it on meta."""
        if inside.is_meta:
            return torch.nn.Parameter(inside, requires_grad)
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inside.size(),
            strides=inside.stride(),
            storage_offset=inside.storage_offset(),
            dtype=inside.dtype,
            layout=inside.layout,
            device=torch.device("npu", 0),
        )
        tensor.inside = inside
        return tensor

    def __repr__(self) -> str:
        return f"NpuTensor({self.inside!r})"

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value: NpuTensor) -> None:
        """Become another tensor, as a parameter does in `module.to(dtype)`, with the tensor inside of it."""
        torch.Tensor.data.__set__(self, value)
        self.inside = value.inside

    def tolist(self) -> Any:
        return self.inside.tolist()

    def new_tensor(self, data: Any, **kwargs: Any) -> torch.Tensor:
        return self.inside.new_tensor(data, **kwargs).to("npu")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the real backend saves: by way of a CPU copy."""
        if isinstance(self, torch.nn.Parameter):
            return torch._utils._rebuild_parameter, (self.data, self.requires_grad, {})
        arguments = (self.inside.detach(), self.dtype, str(self.device), self.requires_grad)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, arguments

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            npu_ops.check_attention(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(cls, kind) for kind in kinds):
            return NotImplemented  # a tensor of npu tensors, such as a packed weight, decides first
        if op.namespace == "lightning_aigc" and not torch._C._dispatch_has_kernel_for_dispatch_key(
            op.name(), "PrivateUse1"
        ):
            return OPDEFS[op._schema.name]._init_fn(*args, **(kwargs or {}))  # its reference runs on npu tensors
        return run_on_cpu(op, args, kwargs or {})


def run_on_cpu(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Unwrap, run, and wrap what belongs on the npu; a tensor that was changed in place stays the object it was."""
    aten = torch.ops.aten
    leaves = tree_leaves((args, kwargs))
    given = [leaf for leaf in leaves if isinstance(leaf, NpuTensor)]
    wanted = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    if given:
        refuse_another_device(op, leaves)
    result = op(*tree_map(_to_cpu, args), **tree_map(_to_cpu, kwargs))
    if op.namespace == "_c10d_functional":
        # Gloo goes on writing after the call, and what is asked to wait is the NpuTensor, which torch does not know.
        result = tree_map_only(torch.Tensor, torch.ops._c10d_functional.wait_tensor, result)
    if (
        op in (aten.empty_strided.default, aten._to_copy.default)
        and kwargs.get("memory_format") not in CHANNELS_LAST.values()
    ):
        result = _without_channels_last(result)
    if wanted is None or wanted.type == "npu":
        refuse_what_an_ascend_lacks(op, [*given, *tree_leaves(result)], kwargs)
    if op is aten.is_pinned.default:
        return False
    if op is aten._local_scalar_dense.default:
        return result
    if wanted is not None and wanted.type != "npu":  # .to("cpu")
        return result
    if op is aten.copy_.default and not isinstance(args[0], NpuTensor):
        return args[0]
    same = {id(tensor.inside): tensor for tensor in given}

    def wrap(value: Any) -> Any:
        if isinstance(value, NpuTensor) or not isinstance(value, torch.Tensor):
            return value
        return same[id(value)] if id(value) in same else NpuTensor(value)

    return tree_map(wrap, result)


def refuse_another_device(op: Any, values: list[Any]) -> None:
    """Raises: RuntimeError in torch's words for tensors of npu and CPU in one call."""
    name = op.name().partition("::")[2].partition(".")[0]
    others = [v for v in values if isinstance(v, torch.Tensor) and v.device.type != "npu" and v.dim()]
    if others and op.namespace == "aten" and name not in TAKE_OTHER_DEVICES:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {others[0].device} and"
            f" npu:0! (when checking arguments of {name})"
        )


def refuse_what_an_ascend_lacks(op: Any, values: list[Any], kwargs: dict[str, Any]) -> None:
    """Raises: RuntimeError in the words of torch_npu and CANN."""
    name = op.name().removeprefix("aten::").partition(".")[0]
    if kwargs.get("memory_format") in CHANNELS_LAST.values():
        raise RuntimeError(f"{name}: NPU contiguous operator only supported contiguous memory format.")
    for tensor in values:
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.layout != torch.strided:
            backend = "SparsePrivateUse1" if tensor.layout == torch.sparse_coo else "SparseCsrPrivateUse1"
            raise NotImplementedError(f"Could not run 'aten::{name}' with arguments from the '{backend}' backend.")
        denied = "DT_DOUBLE" if tensor.dtype == torch.float64 else "DT_COMPLEX" if tensor.is_complex() else None
        if denied and name not in CARRY_NUMBERS:
            raise RuntimeError(
                f"call aclnn {name} failed, detail:EZ1001: Tensor not implemented for {denied}, "
                "should be in dtype support list [DT_FLOAT,DT_FLOAT16,DT_BFLOAT16]."
            )


def install() -> None:
    """Make the device "npu". Call it before anything asks for one; a second call does nothing."""
    if isinstance(getattr(torch, "npu", None), NpuModule):
        return

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return True

        def is_built(self) -> bool:
            return True

        def has_primary_context(self, index: int) -> bool:
            return True

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self) -> Any:
            return torch._C._autograd.DeviceType.PrivateUse1

    module = NpuModule("torch.npu")
    _setup_privateuseone_for_python_backend("npu", module, Hooks(), Guard())
    sys.modules["torch.npu"] = torch.npu = module

    torch.accelerator.current_stream = module.current_stream  # type: ignore[assignment]

    _KEEP.extend([Hooks, Guard])  # torch holds no reference of its own
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(lambda op, *args, **kwargs: run_on_cpu(op, args, kwargs), "PrivateUse1")
    no_cast = torch.library.Library("_", "IMPL")
    no_cast.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    casts = torch.library.Library("aten", "IMPL")
    for name in CAST_TO_HALF:
        casts.impl(name, _autocast(name, None), "AutocastPrivateUse1")
    for name in CAST_TO_FLOAT:
        casts.impl(name, _autocast(name, torch.float32), "AutocastPrivateUse1")
    factories = torch.library.Library("aten", "IMPL")
    for name in FILL_AN_EMPTY_TENSOR:
        factories.impl(name, _runs_whole(name), "PrivateUse1")
    _KEEP.extend([everything, no_cast, casts, factories])
    _KEEP.extend(npu_ops.register())
    for name in ("tensor", "as_tensor"):  # in C++ they refuse a device that Python made
        setattr(torch, name, _made_on_cpu(getattr(torch, name)))
    _register_hccl()


def apply_patches() -> None:
    """Change torch and diffusers as `import lightning_aigc` does on a machine where torch_npu is installed."""
    for name in (*Z_IMAGE, QWEN_IMAGE):
        use_real_rotary(name)
    with mock.patch("importlib.util.find_spec"):
        expand_masks()


def pin_everything() -> None:
    """Let ordinary CPU memory pass for pinned; for the rest of the process."""
    library = torch.library.Library("aten", "IMPL")
    for name in ("empty.memory_format", "empty_strided"):
        plain = torch.library.get_kernel(f"aten::{name}", "CPU")

        def make(keys: Any, *args: Any, _plain: Any = plain, pin_memory: bool | None = None, **kwargs: Any) -> Any:
            return _plain.call_boxed(keys, *args, pin_memory=False, **kwargs)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it replaces a kernel, which is its purpose
            library.impl(name, make, "CPU", with_keyset=True)
    library.impl("is_pinned", lambda tensor, device=None: True, "CPU")
    _KEEP.append(library)


def keep_gathered_weights() -> None:
    """Let `fully_shard` keep what it gathers, for the rest of the process: an NpuTensor has no storage to empty."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    for name in ("alloc_storage", "free_storage"):
        stock = getattr(_fsdp_param, name)

        def resize(tensor: torch.Tensor, _stock: Any = stock) -> None:
            if not isinstance(tensor, NpuTensor):
                _stock(tensor)

        setattr(_fsdp_param, name, resize)


_KEEP: list[Any] = []


def _without_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    is_last = any(tensor.dim() == dims and tensor.is_contiguous(memory_format=f) for dims, f in CHANNELS_LAST.items())
    return tensor.contiguous() if is_last and not tensor.is_contiguous() else tensor


def _to_cpu(value: Any) -> Any:
    if isinstance(value, NpuTensor):
        return value.inside
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "npu" else value


def _runs_whole(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return lambda *args, **kwargs: run_on_cpu(op, args, kwargs)


def _autocast(name: str, dtype: torch.dtype | None) -> Callable[..., Any]:
    """The operator on inputs cast to `dtype`, or to autocast's own."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        wanted = dtype or torch.get_autocast_dtype("npu")

        def cast(value: Any) -> Any:
            is_npu_float = isinstance(value, torch.Tensor) and value.device.type == "npu" and value.is_floating_point()
            return value.to(wanted) if is_npu_float and value.dtype != torch.float64 else value

        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run


def _made_on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Any:
        tensor = data if isinstance(data, NpuTensor) else make(data, *args, **kwargs)
        tensor = tensor.to(torch.empty(0).device if device is None else device)  # `with torch.device(...)`
        return tensor.detach().requires_grad_() if requires_grad else tensor

    return made


def _register_hccl() -> None:
    """Process groups named hccl, which are Gloo's: their collectives unwrap an NpuTensor like any operator."""
    import torch.distributed as dist

    if hasattr(dist.Backend, "HCCL"):
        return

    def make(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    dist.Backend.register_backend("hccl", make, devices=["npu", "cpu"])
