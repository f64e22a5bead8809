"""Collectives: how processes share work, results and gradients.

With one process the functions change nothing, to the bit. Every process knows the whole batch; the costly work on it
is divided, and its results, a few numbers per token, are handed to all. What is computed from them (advantages,
statistics, decisions) is computed by everybody and comes out the same everywhere.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from config.errors import EnvironmentFault, ParamsError
from config.records import FAULT_SUFFIX, FAULTS_VARIABLE, RENDEZVOUS_VARIABLE
from config.work import BUCKET_ELEMENTS

T = TypeVar("T")
Backoff = Callable[[Callable[[int], Any]], Any]
"""Runs work with a micro-batch size that fits in memory, the same in all processes: OomBackoff.run of
training/process/out_of_memory.py.
"""

LONGEST_WAIT = timedelta(hours=2)
"""How long the other processes wait while rank 0 writes a checkpoint or a model. A process that is lost ends all of
them at once: training/process/launch.py.
"""


def join(stage: str, device: torch.device) -> None:
    """Join the process group of this stage, if it has several processes: gloo on CPU, on an accelerator what torch has
    for it (NCCL on NVIDIA and AMD GPUs).

    Raises EnvironmentFault if there are more processes than accelerators on this machine.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes == 1:
        return
    backends = "cpu:gloo"
    if device.type != "cpu":
        local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.accelerator.device_count()
        if local >= devices:
            raise EnvironmentFault(
                f"where.{stage}.processes={processes} needs a GPU for each process, this machine has {devices}. "
                f"Change where.{stage}.processes in params.yaml."
            )
        torch.accelerator.set_device_index(local)
        backends += f",{device.type}:{dist.Backend.default_device_backend_map[device.type]}"
    meeting = os.environ.get(RENDEZVOUS_VARIABLE)
    dist.init_process_group(
        backends,
        init_method=f"file://{meeting}" if meeting else "env://",
        rank=int(os.environ["RANK"]),
        world_size=processes,
        timeout=LONGEST_WAIT,
    )


def leave() -> None:
    """Leave the process group at the end of all work."""
    if dist.is_initialized():
        dist.destroy_process_group()


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def balanced_partition(costs: Sequence[int], parts: int) -> list[list[int]]:
    """Split the indices of `costs` into `parts` of similar total: largest first, each to the part with the smallest
    total so far; ascending within each part.
    """
    totals = [0] * parts
    result: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = totals.index(min(totals))
        totals[least] += costs[index]
        result[least].append(index)
    return [sorted(part) for part in result]


def local_indices(costs: Sequence[int]) -> list[int]:
    """The indices of `costs` assigned to this process."""
    return balanced_partition(costs, world_size())[rank()]


def map_across_ranks(backoff: Backoff, work: Callable[..., Sequence[T]], *columns: Sequence[Any]) -> list[T]:
    """Results for all rows of `columns`, in order: each process computes its share and gathers the others'.

    `work` gets a micro-batch size from `backoff`, then the columns of a share, and returns a result per row. Shares
    have similar total lengths of the first column.
    """
    mine = local_indices([len(item) for item in columns[0]])
    share = [[column[i] for i in mine] for column in columns]
    local_results: list[T] = backoff(lambda size: list(work(size, *share)) if mine else [])
    if world_size() == 1:
        return local_results
    gathered: list[Any] = [None] * world_size()
    # a view would be sent together with its whole storage
    sent = tree_map_only(Tensor, torch.clone, local_results)
    dist.all_gather_object(gathered, dict(zip(mine, sent, strict=True)))
    by_index = {i: result for part in gathered for i, result in part.items()}
    return [by_index[i] for i in range(len(by_index))]


def counted_batches(batches: Sequence[T], lockstep: bool) -> list[tuple[T, bool]]:
    """`batches`, and whether each counts: in `lockstep` a process with fewer than another repeats its last, so that
    all have the same number.

    In lockstep every process must have at least one batch.
    """
    if not lockstep:
        return [(batch, True) for batch in batches]
    if not batches:
        raise ParamsError(
            "a process of the stage has no row of a batch that all share. Start fewer processes, "
            "or raise its batch_size in params.yaml."
        )
    missing = int(all_reduce_max(len(batches))) - len(batches)
    return [*((batch, True) for batch in batches), *[(batches[-1], False)] * missing]


def all_reduce_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its sum over the processes; a process that had nothing to do counts as zero."""
    if world_size() == 1:
        return
    from torch.distributed.tensor import DTensor  # half a second, which a single process does without

    bucket: list[Tensor] = []
    for parameter in parameters:
        if not parameter.requires_grad or isinstance(parameter, DTensor):
            continue  # a sharded gradient was summed in the backward pass
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        bucket.append(parameter.grad)
        if sum(gradient.numel() for gradient in bucket) >= BUCKET_ELEMENTS:
            _sum_in_place(bucket)
            bucket = []
    if bucket:
        _sum_in_place(bucket)


def _sum_in_place(tensors: Sequence[Tensor]) -> None:
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


def broadcast_from_rank0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 only and broadcast its result. It must not raise: the other ranks would wait."""
    if world_size() == 1:
        return work()
    objects = [work() if rank() == 0 else None]
    dist.broadcast_object_list(objects)
    return objects[0]  # type: ignore[return-value] # what the first process sent


def all_reduce_sum(values: Sequence[float]) -> list[float]:
    """Each of `values` summed over the processes."""
    if world_size() == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return [float(value) for value in total]


def sum_of_all(rows: Sequence[Tensor], width: int) -> list[float]:
    """The sum of this process's `rows`, [width] each on its device, and of all other processes'.

    An accelerator is waited for once, so collect rows without reading them.
    """
    total = [0.0] * width
    for row in torch.stack(list(rows)).tolist() if rows else []:
        total = [old + new for old, new in zip(total, row, strict=True)]
    return all_reduce_sum(total)


def all_reduce_max(value: float) -> float:
    """The maximum over processes."""
    if world_size() == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def report_fault(line: str) -> None:
    """Report why this process ends: through training.process.launch, which prints the same line of several processes
    once, or directly without a launcher.
    """
    folder, rank = os.environ.get(FAULTS_VARIABLE), os.environ.get("RANK", "0")
    if folder is None or os.environ.get("WORLD_SIZE", "1") == "1":
        sys.stderr.write(f"{line}\n" if rank == "0" else f"process {rank}: {line}\n")
        return
    unfinished = Path(folder) / f"{rank}.writing"
    unfinished.write_text(f"{line}\n", encoding="utf-8")
    unfinished.rename(Path(folder) / f"{rank}{FAULT_SUFFIX}")


def fault_of_peer() -> str | None:
    """The error line that another process of the stage left before it ended, if any."""
    folder = os.environ.get(FAULTS_VARIABLE)
    file_name = f"{os.environ.get('RANK', '0')}{FAULT_SUFFIX}"
    peer_faults = (
        [path for path in sorted(Path(folder).glob(f"*{FAULT_SUFFIX}")) if path.name != file_name] if folder else []
    )
    return peer_faults[0].read_text(encoding="utf-8").rstrip("\n") if peer_faults else None


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception means that another process is gone."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "gloo")
    return world_size() > 1 and isinstance(error, RuntimeError) and any(word in str(error) for word in words)
