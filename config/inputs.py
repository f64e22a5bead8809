"""What params.yaml names outside of the project: content digests of local data files and of a local
base model, for DVC to depend on.

data/inputs/data.json    the files of data.source, data.sft_source and the other sources
data/inputs/model.json   the files of model.path

DVC can not depend on a path that stands in params.yaml and may not be there, so these two files
stand for them: they change when the content does. The DVC stage `inputs` writes them
(tasks/dvc/inputs_stage.py), and `rlhf run` does the same in process.
"""

import hashlib
import json
from pathlib import Path

from config.atomic_file import write_atomically
from config.schema import Params

DATA_DIGESTS = Path("data/inputs/data.json")
MODEL_DIGESTS = Path("data/inputs/model.json")


def write_digests(root: Path, params: Params) -> None:
    """Bring both files up to date. A file that is not there has no digest: the stage that needs it
    says so in its own words.
    """
    for target, text in digest_files(root, params).items():
        if not _says(root / target, text):
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(root / target, text)


def outdated_digests(root: Path, params: Params) -> list[Path]:
    """Which of the two files do not say what they would with `params`; nothing is written."""
    return [
        target
        for target, text in digest_files(root, params).items()
        if not _says(root / target, text)
    ]


def named_paths(root: Path, params: Params) -> list[str]:
    """The files and the folder that params name outside of the project, as they name them; a file
    may be missing yet, a model that is no folder here comes from a hub.
    """
    files = sorted(set(params.data.local_paths().values()))
    model = params.model.path
    return [*files, *([model] if model and (root / model).is_dir() else [])]


def expected_files(root: Path, params: Params) -> dict[str, str]:
    """The same data files by the parameter that names each. Votes are left out while nobody has
    voted: a file that is not there adds none.
    """
    return {
        f"data.{section}.path": path
        for section, path in params.data.local_paths().items()
        if section != "vote_source" or (root / path).exists()
    }


def digest_files(root: Path, params: Params) -> dict[Path, str]:
    """What the two files are to hold, by their place in the project."""
    data = {path: _digest(root / path) for path in sorted(set(params.data.local_paths().values()))}
    model = _folder_digests(root, params.model.path) if params.model.path else {}
    return {
        path: json.dumps(digests, indent=1) + "\n"
        for path, digests in ((DATA_DIGESTS, data), (MODEL_DIGESTS, model))
    }


def _folder_digests(root: Path, named: str) -> dict[str, str | None]:
    """Every file of a local model folder; nothing for a hub model, whose revision is in the
    params.
    """
    folder = root / named
    return {
        str(Path(named) / path.relative_to(folder)): _digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _digest(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _says(target: Path, text: str) -> bool:
    return target.exists() and target.read_text(encoding="utf-8") == text
