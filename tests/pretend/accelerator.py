"""A pretended accelerator: tensors that say they lie on `sim:0`, their data in host memory.

Operations on tensors of both devices raise, as on a GPU, and whenever the host waits for the device the line of the
product that made it wait is counted. The arithmetic is the CPU's, to the bit.

Importing this registers the device for the rest of the process, through PyTorch's backend for PrivateUse1 in Python;
so tests use it in a process of its own.
"""

import collections
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

SYNCS: collections.Counter[str] = collections.Counter()
"""Line of the product -> how often the host waited there for the device."""
WAITING = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.masked_select")
INDEXING = ("aten.index", "aten._index_put")
"""Operations that take indices from the host."""


class _Backend(_DummyBackendModule):
    __name__ = "torch.sim"

    def get_device_name(self) -> str:
        return "a pretended accelerator"

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = 0) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = 0) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass


class Memory:
    """Bytes of the device that are held by tensors."""

    total = 2**40
    live = peak = 0
    owners: collections.Counter[int] = collections.Counter()
    """Address of a storage -> how many tensors share it."""


class _Held:
    """A tensor's part in its storage, until the tensor is freed."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.address, self.size = storage.data_ptr(), storage.nbytes()
        if not Memory.owners[self.address]:
            if Memory.live + self.size > Memory.total:
                self.size = 0
                raise torch.OutOfMemoryError(f"pretended to be out of memory at {_line()}")
            Memory.live += self.size
            Memory.peak = max(Memory.peak, Memory.live)
        Memory.owners[self.address] += 1

    def __del__(self) -> None:
        if self.size and Memory is not None:  # at the end of the process it is
            Memory.owners[self.address] -= 1
            if not Memory.owners[self.address]:
                Memory.live -= self.size


class Sim(Tensor):
    """Wraps a tensor in host memory."""

    host: Tensor
    held: _Held

    @staticmethod
    def __new__(cls, host: Tensor, requires_grad: bool = False) -> "Sim":
        result: Sim = Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(),
            dtype=host.dtype, layout=host.layout, device=torch.device("sim:0"),
            requires_grad=requires_grad,
        )  # fmt: skip
        result.host, result.held = host, _Held(host.untyped_storage())
        return result

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.host.untyped_storage()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        SYNCS[_line()] += 1
        return self.host.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _line() -> str:
    """The innermost line of the product on the stack."""
    places = [
        f"{frame.filename.rpartition('/')[2]}:{frame.name}"
        for frame in traceback.extract_stack()
        if "/training/" in frame.filename and "/tests/" not in frame.filename
    ]
    return places[-1] if places else "?"


def _host(value: Any) -> Any:
    return value.host if isinstance(value, Sim) else value


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    name = str(func)
    tensors = [tree_leave for tree_leave in tree_leaves((args, kwargs)) if isinstance(tree_leave, Tensor)]
    on_device, device = any(isinstance(tensor, Sim) for tensor in tensors), kwargs.get("device")
    to_device = device is not None and torch.device(device).type == "sim"
    if name.startswith("aten.copy_"):
        crosses = isinstance(args[1], Sim) != isinstance(args[0], Sim)
        if crosses and args[1].numel() and args[2:] != (True,):
            SYNCS[_line()] += 1
        func(_host(args[0]), _host(args[1]), *args[2:])
        return args[0]
    if name.startswith("aten._to_copy"):
        to_device = to_device or (device is None and on_device)
        if on_device != to_device and args[0].numel() and not kwargs.get("non_blocking"):
            SYNCS[_line()] += 1
        copied = func(_host(args[0]), *args[1:], **{**kwargs, "device": "cpu"})
        return Sim(copied) if to_device else copied
    if on_device and name.startswith(WAITING):
        SYNCS[_line()] += 1
    if on_device and not name.startswith(INDEXING):
        for tensor in tensors:
            if not isinstance(tensor, Sim) and tensor.dim() > 0:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found sim:0 and cpu: {name} at {_line()}"
                )
    settings = dict(tree_map(_host, kwargs))
    if to_device:
        settings["device"] = torch.device("cpu")
    result = func(*tree_map(_host, args), **settings)
    if not (on_device or to_device):
        return result
    in_place = {id(tensor.host): tensor for tensor in tensors if isinstance(tensor, Sim)}

    def wrapped(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        return in_place[id(each)] if id(each) in in_place else Sim(each)

    return tree_map(wrapped, result)


def _fallback(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _run(func, args, kwargs)


_setup_privateuseone_for_python_backend("sim", backend_module=_Backend())  # type: ignore[no-untyped-call]
_LIBRARY = torch.library.Library("_", "IMPL")
_LIBRARY.fallback(_fallback, "PrivateUse1")
_device_constructors()  # remembers torch.tensor, which `with torch.device(...)` then knows
_tensor = torch.tensor


def _from_list(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    result = _tensor(data, *args, **kwargs)
    return result if device is None else result.to(device)


torch.tensor = _from_list  # a list goes to the device through the host


_attention = torch.nn.functional.scaled_dot_product_attention


class _Attention(torch.autograd.Function):
    """The CPU's fused attention. PyTorch would take the one that is written out, which keeps the scores."""

    @staticmethod
    def forward(
        ctx: Any, query: Sim, key: Sim, value: Sim, mask: Tensor | None, causal: bool, scale: float | None
    ) -> Tensor:
        ctx.options = {"attn_mask": mask, "scale": scale}, causal
        result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(_host, (query, key, value)), 0.0, causal, attn_mask=mask, scale=scale
        )
        out, sums = map(Sim, result)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Sim) -> tuple[Tensor | None, ...]:
        options, causal = ctx.options
        result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.host, *map(_host, ctx.saved_tensors), 0.0, causal, **options
        )
        return (*map(Sim, result), None, None, None)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if not isinstance(query, Sim):
        return _attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    if enable_gqa:
        key, value = (item.repeat_interleave(query.shape[1] // key.shape[1], 1) for item in (key, value))
    result: Tensor = _Attention.apply(query, key, value, _host(attn_mask), is_causal, scale)
    return result


torch.nn.functional.scaled_dot_product_attention = _attend


def _reset_peak() -> None:
    Memory.peak = Memory.live


torch.accelerator.max_memory_allocated = lambda: Memory.peak
torch.accelerator.reset_peak_memory_stats = _reset_peak
torch.accelerator.empty_cache = torch.accelerator.synchronize = lambda *_: None
torch.accelerator.device_count = lambda: 2
torch.accelerator.set_device_index = lambda _: None
torch.distributed.Backend.default_device_backend_map["sim"] = "gloo"
torch.accelerator.get_memory_info = lambda: (Memory.total - Memory.live, Memory.total)
Tensor.pin_memory = lambda self, *_: self
torch.__future__.set_swap_module_params_on_conversion(True)  # as on CUDA, tied weights stay tied
torch.autograd.set_multithreading_enabled(False)  # so that backward passes raise out of memory too
os.environ["ACCELERATE_TORCH_DEVICE"] = "sim"  # where Transformers' trainers work
