"""The champion: the run whose model is in use, the one before it, and every decision about it.

champions/record.json     the record: runs in the order of their promotion, and every promotion and
                          rollback with its reason
champions/<run_id>/       the run's data, tokenizer, models, metrics and params.yaml, laid out as in
                          the project

The record is one file, replaced whole, so champion and previous cannot come apart. It may be committed; the folders
are not in git.
"""

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from config.atomic_file import write_atomically
from config.errors import EnvironmentFault
from config.names import inner_name
from config.records import Record

CHAMPIONS = Path("champions")
RECORD = CHAMPIONS / "record.json"
FILES = "files.json"
"""In a champion's folder: path of each file -> its MD5, as DVC computes it."""


class Champion(Record):
    """A run whose model is, or was, in use."""

    run_id: str
    method: str
    """Alignment method: the name of its folder under models/."""
    model_digest: str
    """DVC's digest of the aligned model."""
    data_version: str
    """DVC's digest of the data it was trained on."""
    data_key: str
    """Digest of the data's inputs: see tasks/dvc/data_key.py."""


class Event(Record):
    """A decision about the champion."""

    time: float
    """Seconds since the epoch."""
    event: Literal["promoted", "rolled_back"]
    champion: str
    """Run id of the new champion."""
    before: str | None
    """Run id of the previous one."""
    by: str
    why: str


class ChampionRecord(Record):
    lineage: tuple[Champion, ...] = ()
    """Oldest first: the last is the champion, the one before it `previous`."""
    events: tuple[Event, ...] = ()

    @property
    def champion(self) -> Champion | None:
        return self.lineage[-1] if self.lineage else None

    @property
    def previous(self) -> Champion | None:
        return self.lineage[-2] if len(self.lineage) > 1 else None


def read_record(root: Path) -> ChampionRecord:
    """The record of the project at `root`, empty if there is none. Raises EnvironmentFault if it cannot be read."""
    path = root / RECORD
    try:
        return ChampionRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return ChampionRecord()
    except (OSError, ValidationError) as error:
        reason = (
            error.strerror
            if isinstance(error, OSError)
            else f"{error.error_count()} faults, the first: {error.errors()[0]['msg']}"
        )
        raise EnvironmentFault(
            f"{path} cannot be read ({reason}), so the champion is unknown. Bring it back from git or a backup, "
            "or move it away and name the champion again: rlhf promote RUN."
        ) from None


def write_record(root: Path, record: ChampionRecord) -> None:
    """Replace the record atomically."""
    (root / CHAMPIONS).mkdir(exist_ok=True)
    write_atomically(root / RECORD, record.model_dump_json(indent=1) + "\n")


def champion_folder(root: Path, run_id: str) -> Path:
    return root / CHAMPIONS / inner_name(run_id, "run id")
