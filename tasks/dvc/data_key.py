"""A digest of the inputs of a run's data: two runs with the same key have the same data, which need not be read to
tell.

sha256 of seed, section data, and the digests of the local files behind it (data/inputs/data.json, as dvc.lock
remembers it). Not the fingerprint of the data stage: that includes its code, and retraining asks whether there are new
rows, which a changed line of code does not bring.
"""

import hashlib
import json
from pathlib import Path

from config.inputs import DATA_DIGESTS, digest_files
from config.records import kept_folder
from config.schema import Params
from config.workspace.feedback import renew_snapshot
from config.yaml_text import yaml_content


def key_of_run(root: Path, run_id: str, params: Params) -> str:
    """The key of the data that a run with these params used."""
    lock = yaml_content((kept_folder(root, run_id) / "dvc.lock").read_text(encoding="utf-8"))
    deps = lock.get("stages", {}).get("data", {}).get("deps", [])
    return _key(params, next((str(dep.get("md5")) for dep in deps if dep["path"] == str(DATA_DIGESTS)), ""))


def key_now(root: Path, params: Params) -> str | None:
    """The key that a run would have now; None if the source must be read to tell: a URL, or a dataset of the hub."""
    if params.data.reads_elsewhere():
        return None
    if params.data.feedback_source is not None:
        renew_snapshot(root)
    text = digest_files(root, params)[DATA_DIGESTS]
    return _key(params, hashlib.md5(text.encode(), usedforsecurity=False).hexdigest())


def _key(params: Params, digests_md5: str) -> str:
    made_from = [params.seed, params.data.model_dump(mode="json"), digests_md5]
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
