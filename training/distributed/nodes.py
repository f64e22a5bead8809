"""Files of processes on several machines that share no folder: those of a checkpoint are brought to rank 0, which sees
to it that they outlive the machine, and from it to the machines that read it.

Nothing is done where all processes see the folder of rank 0. The first process of each other machine sends and
receives for it, over the process group. Every process must come here.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from config.records import NODES_APART_VARIABLE
from training.distributed.collectives import rank, world_size

CHUNK_BYTES = 2**26
CPU = torch.device("cpu")


def leaders() -> list[int]:
    """The first rank of each machine but that of rank 0; [] where all share its folder."""
    if not os.environ.get(NODES_APART_VARIABLE):
        return []
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return list(range(local, world_size(), local))


def gather_files(folder: Path) -> None:
    """Copy what the other machines have in `folder` into that of rank 0."""
    for leader in leaders():
        if rank() == leader:
            _send(folder, 0)
        elif rank() == 0:
            _receive(folder, leader)


def bring_files(folder: Path, last: str) -> None:
    """Copy `folder` of rank 0 to each machine that has no complete one, which ends with the file `last`."""
    for leader in leaders():
        if rank() == leader:
            has = [(folder / last).exists()]
            dist.send_object_list(has, 0, device=CPU)
            if not has[0]:
                _receive(folder, 0)
        elif rank() == 0:
            has = [False]
            dist.recv_object_list(has, leader, device=CPU)
            if not has[0]:
                _send(folder, leader, last)
    if leaders():
        dist.barrier()


def _send(folder: Path, to: int, last: str = "") -> None:
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: (path.name == last, path))
    sizes = [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in files]
    dist.send_object_list([sizes], to, device=CPU)
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                dist.send(torch.frombuffer(bytearray(chunk), dtype=torch.uint8), to)


def _receive(folder: Path, sender: int) -> None:
    sizes: list[list[tuple[str, int]]] = [[]]
    dist.recv_object_list(sizes, sender, device=CPU)
    for name, size in sizes[0]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with (folder / name).open("wb") as file:
            for start in range(0, size, CHUNK_BYTES):
                chunk = torch.empty(min(CHUNK_BYTES, size - start), dtype=torch.uint8)
                dist.recv(chunk, sender)
                file.write(chunk.numpy().tobytes())
