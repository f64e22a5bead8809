"""DVC's table of who reads and writes which files, .dvc/tmp/rwlock.

DVC takes a dead process out of it only where another one wants to write what that one read, and
goes by process ids, which are used again. It writes the table in place: a process that is killed,
or meets a full disk, leaves half of it, which no later command reads.
"""

import json
from pathlib import Path
from typing import Any

import psutil

from config.alive import created, is_alive

NAME = "rwlock"


def release_dead(repo: Any) -> None:
    """Remove the locks of processes that are gone from the table of `repo`, DVC's Repo; a table
    that cannot be read is removed. Raises dvc's LockError where others keep it busy.
    """
    from dvc.lock import make_lock

    path = Path(repo.tmp_dir) / NAME
    if not path.exists() or _living(content := _read(path)) == content:
        return
    guard = make_lock(
        f"{path}.lock",
        tmp_dir=repo.tmp_dir,
        hardlink_lock=repo.config["core"].get("hardlink_lock", False),
    )
    with guard:  # nobody writes the table now: what is not readable stays so
        content = _read(path)
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(json.dumps(_living(content)), encoding="utf-8")


def _read(path: Path) -> dict[str, Any] | None:
    """The table, None if it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _living(content: dict[str, Any] | None) -> dict[str, Any]:
    """The table without processes that are gone."""
    found = content or {}
    writers = {path: who for path, who in found.get("write", {}).items() if _is_there(who)}
    readers = {
        path: [who for who in those if _is_there(who)]
        for path, those in found.get("read", {}).items()
    }
    return {"write": writers, "read": {path: those for path, those in readers.items() if those}}


def _is_there(who: dict[str, Any]) -> bool:
    """Whether a process of the table still runs; zombies do not count."""
    try:
        return is_alive(int(who["pid"]), created(int(who["pid"])))
    except psutil.NoSuchProcess:
        return False
