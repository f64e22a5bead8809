"""A worker whose containers are processes of this machine, each with folders of its own: `python -m
benchmarks.fault_injection.worker POOL`. Prefect's own worker of processes, under a type that stages may be placed on.
"""

import asyncio
import sys

from prefect.workers.process import ProcessWorker

TYPE = "host"


class HostWorker(ProcessWorker):
    type = TYPE
    _description = "Containers that are processes of this machine."


def main(pool: str) -> None:
    asyncio.run(HostWorker(work_pool_name=pool, create_pool_if_not_found=False).start())


if __name__ == "__main__":
    main(sys.argv[1])
