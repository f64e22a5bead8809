"""What the runs of a project have made: one record per stage and run, beside DVC's cache, which studies share, and
below its remote, where other checkouts find it.

.dvc/cache/origins/<run_id>/<stage>.json    the stage's entry in dvc.lock, the run that paid for it, and how much

A record outlives the workspace of its run. It names outputs by digest: whether they still exist is another question.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from config.atomic_file import write_atomically
from config.dvc_stages import locked
from config.names import inner_name
from tasks.dvc.lock_digests import lock_content

FOLDER = "origins"


class Origin(NamedTuple):
    """A stage that a run made."""

    run_id: str
    """Empty if no record names it."""
    attempt: int | None
    """In the workspace of that run."""
    seconds: float
    usd: float
    """What the outputs cost, without waste, at that run's prices."""
    entry: dict[str, Any]
    """Of the stage in dvc.lock."""

    def words(self) -> str:
        return f"made by run {self.run_id}" if self.run_id else "made by a run without a record"


def unknown(entry: dict[str, Any]) -> Origin:
    """An entry whose maker is not recorded."""
    return Origin("", None, 0.0, 0.0, entry)


def record_origin(root: Path, stage: str, run_id: str, attempt: int | None, seconds: float, usd: float) -> None:
    """Record that the run made what dvc.lock has of `stage`."""
    folder = origins_folder(root) / run_id
    folder.mkdir(parents=True, exist_ok=True)
    origin = Origin(run_id, attempt, seconds, usd, locked(lock_content(root), stage))
    write_atomically(folder / f"{stage}.json", json.dumps(origin._asdict()))


def origins_of(root: Path, stage: str) -> Iterator[Origin]:
    """The records of a stage, newest run first. Files that are not records are skipped."""
    for path in sorted(origins_folder(root).glob(f"*/{stage}.json"), reverse=True):
        if (origin := read_origin(path)) is not None:
            yield origin


def read_origin(path: Path) -> Origin | None:
    """A record, None if the file is not one."""
    try:
        return Origin(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError):
        return None


def cached_files(root: Path, entry: dict[str, Any]) -> Iterator[Path]:
    """The files in DVC's cache that hold the outputs of an entry of dvc.lock, those that are there."""
    objects = origins_folder(root).parent / "files" / "md5"
    for out in entry.get("outs", []):
        digests = [str(out.get("md5", ""))]
        with suppress(OSError, ValueError):
            if digests[0].endswith(".dir"):
                digests += [item["md5"] for item in json.loads(_object(objects, digests[0]).read_text("utf-8"))]
        yield from (path for digest in digests if (path := _object(objects, digest)).is_file())


def _object(objects: Path, digest: str) -> Path:
    return objects / digest[:2] / digest[2:]


def find_origin(root: Path, stage: str, entry: dict[str, Any]) -> Origin | None:
    """Who made what this entry of dvc.lock says, None without a record."""
    return next((origin for origin in origins_of(root, stage) if origin.entry == entry), None)


def origins_folder(root: Path) -> Path:
    """The folder of the records: beside the objects of DVC's cache."""
    from dvc.config import Config

    cache = Config(str(root / ".dvc"))["cache"].get("dir")
    return (root / ".dvc" / str(cache) if cache else root / ".dvc" / "cache") / FOLDER


def exchange_records(repo: Any, root: Path, *, send: bool = False) -> None:
    """Copy the records of DVC's default remote that are missing here; `send`: those of here to the remote as well.

    Raises what the file system of the remote raises.
    """
    from dvc_objects.fs.generic import copy
    from dvc_objects.fs.local import LocalFileSystem

    remote, local, here = repo.cloud.get_remote(), LocalFileSystem(), origins_folder(root)
    there = remote.fs.join(remote.path, FOLDER)
    ours = {path.relative_to(here).as_posix() for path in here.glob("*/*.json")}
    theirs = set()
    for path in remote.fs.find(there) if remote.fs.exists(there) else ():
        if path.endswith(".json"):
            run_id, file = remote.fs.parts(path)[-2:]
            theirs.add(f"{inner_name(run_id, 'run id')}/{inner_name(file, 'record')}")
    for name in sorted(theirs - ours):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        copy(remote.fs, remote.fs.join(there, name), local, str(here / name))
    for name in sorted(ours - theirs) if send else ():
        copy(local, str(here / name), remote.fs, remote.fs.join(there, name))
