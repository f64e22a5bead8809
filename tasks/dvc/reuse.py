"""Whether a stage has to run: dvc.lock and the records of earlier runs (tasks/dvc/origins.py) are asked for an entry
with the same command, parameters, inputs and code. All of it is compared by digest, wherever the files are.

The plan asks for every stage ahead, from what the chosen entries say the stages before it make; a run asks for one
stage, just before it would start its process, and takes the outputs from DVC's cache or remote.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from config.differences import value_at
from config.dvc_stages import defined, dvc_name, locked
from config.inputs import digest_files
from config.schema import Params
from config.student import NO_STUDENT
from config.workspace.kept import file_digest
from tasks.dvc.lock_digests import dvc_stages, is_copy, json_by_digest, lock_content, locked_digest, outs_by_path
from tasks.dvc.origins import Origin, cached_files, exchange_records, find_origin, origins_of, unknown
from tasks.dvc.recording import put_entry
from tasks.dvc.status import is_unchanged, remove_from_lock, repo_about
from tasks.dvc.transfers import check_out, default_remote, quiet

Say = Callable[[str], object]
REMOTE_PATIENCE_SECONDS = 20.0
"""A store that is away would else hold up each plan for as long as its library tries."""


def reusable(root: Path, params: Params, stages: Sequence[str], say: Say = lambda _: None) -> dict[str, Origin]:
    """Which of `stages`, in their order, need no process for `params`, and who made each; nothing is written.

    A stage that reads outputs of one that has to run has to run itself, though they may turn out the same. `say` gets
    a line for outputs that are lost. Raises EnvironmentFault if DVC cannot tell.
    """
    definitions = defined(root)
    with repo_about(root, ", ".join(stages)) as repo, quiet():
        search = _Search(repo, root, params, definitions)
        outcomes = {stage: search.take(stage, say) for stage in stages if stage in definitions}
    return {stage: origin for stage, origin in outcomes.items() if origin is not None}


def reuse(root: Path, params: Params, stage: str, say: Say, *, placed: bool = False) -> bool:
    """Take what an earlier run has made of `stage`: its entry for dvc.lock, and the outputs themselves, unless the
    stages are `placed` on other machines. Returns whether there was any.

    Raises EnvironmentFault if DVC cannot tell.
    """
    origin = reusable(root, params, [stage], say).get(stage)
    if origin is None:
        return False
    put_entry(root / "dvc.lock", {dvc_name(stage): origin.entry})
    if placed:
        return True
    _remove_damaged(root, origin)
    if not check_out(root, [dvc_name(stage)]) and is_unchanged(root, stage):
        return True
    say(_lost(stage, origin))
    remove_from_lock(root, stage)
    return False


def fetch_records(root: Path) -> None:
    """Learn what other checkouts have made. A remote that cannot be asked, or does not answer for a while, is no
    fault: the stages then run.
    """
    if default_remote(root) is not None:
        asking = threading.Thread(target=_fetch_records, args=(root,), daemon=True)
        asking.start()
        asking.join(REMOTE_PATIENCE_SECONDS)


def _fetch_records(root: Path) -> None:
    with suppress(Exception), quiet(), repo_about(root, "data") as repo:  # whatever the remote's file system raises
        exchange_records(repo, root)


class _Search:
    """The stages of dvc.yaml for some params, with the digests of the outputs that are chosen so far."""

    def __init__(self, repo: Any, root: Path, params: Params, definitions: Mapping[str, Any]) -> None:
        self._repo, self._root, self._params, self._definitions = repo, root, params, definitions
        self._stages = dvc_stages(repo, root, params.align.method)
        self._outs = outs_by_path(self._stages.values())
        self._lock = lock_content(root)
        self._wanted = params.model_dump(mode="json")
        self._outside = {str(path): _md5(text) for path, text in digest_files(root, params).items()}
        if params.distill is None and "distill" in definitions:
            self._assume_no_student()

    def _assume_no_student(self) -> None:
        """What `distill` makes is known without running it: see config/student.py."""
        from dvc_data.hashfile.hash_info import HashInfo
        from dvc_data.hashfile.tree import Tree

        for out, (name, text) in zip(self._stages["distill"].outs, NO_STUDENT.items(), strict=True):
            digest, path = _md5(text), Path(name)
            out.hash_info, out.obj = HashInfo("md5", digest), None
            if out.def_path != name:
                out.obj = Tree.from_list([{"md5": digest, "relpath": path.name}], hash_name="md5")
                out.obj.digest()
                out.hash_info = out.obj.hash_info

    def take(self, stage: str, say: Say) -> Origin | None:
        """The newest entry that is valid and has its outputs; what the stage makes is known from then on."""
        from dvc.stage.loader import StageLoader
        from dvc_data.hashfile.hash_info import HashInfo

        item = self._stages[dvc_name(stage)]
        inputs, figures = self._inputs(item), self._figures(stage)
        lost = None
        for origin in self._candidates(stage):
            if self._is_valid(stage, origin.entry, inputs, figures):
                StageLoader.fill_from_lock(item, origin.entry)
                for out in item.outs:
                    out.obj = None
                if self._has_outputs(item):
                    return origin
                lost = lost or origin
        if lost is not None:
            say(_lost(stage, lost))
        for out in item.outs:
            out.hash_info, out.obj = HashInfo(), None
        return None

    def _candidates(self, stage: str) -> Iterator[Origin]:
        """The entry of dvc.lock, then those that earlier runs made. Data that are read elsewhere may have changed
        since, which only reading tells.
        """
        if entry := locked(self._lock, stage):
            yield find_origin(self._root, stage, entry) or unknown(entry)
        if stage != "data" or not self._params.data.reads_elsewhere():
            yield from origins_of(self._root, stage)

    def _is_valid(
        self, stage: str, entry: Mapping[str, Any], inputs: Mapping[str, str | None], figures: dict[str, Any]
    ) -> bool:
        deps = {item["path"]: item.get("md5") for item in entry.get("deps", [])}
        named = [key for key in self._definitions[stage].get("params", []) if isinstance(key, str)]
        wanted = {"params.yaml": {key: value_at(self._wanted, key) for key in named}} if named else {}
        return (
            entry.get("cmd") == self._stages[dvc_name(stage)].cmd
            and entry.get("params", {}) == wanted | figures
            and deps.keys() == inputs.keys()
            and all(digest is not None and deps[path] == digest for path, digest in inputs.items())
        )

    def _inputs(self, item: Any) -> dict[str, str | None]:
        """Path of each input -> its digest, None if it is not known before a stage has run."""
        from dvc.dependency.param import ParamsDependency

        digests = dict[str, str | None]()
        for dep in (dep for dep in item.deps if not isinstance(dep, ParamsDependency)):
            path = Path(dep.fs_path).relative_to(self._root.resolve()).as_posix()
            if path in self._outside:
                digests[path] = self._outside[path]
            elif is_copy(self._outs, dep):
                digests[path] = locked_digest(self._outs, dep.fs_path)
            else:
                digests[path] = dep.get_hash().value if dep.exists else None
        return digests

    def _figures(self, stage: str) -> dict[str, Any]:
        """Values that the stage reads of other stages' metrics, by file."""
        figures = dict[str, Any]()
        for named in self._definitions[stage].get("params", []):
            for file, keys in named.items() if isinstance(named, dict) else ():
                out = self._outs.get(str(self._root.resolve() / file))
                content = json_by_digest(self._repo, out) if out is not None else {}
                figures[file] = {key: value_at(content, key) for key in keys}
        return figures

    def _has_outputs(self, item: Any) -> bool:
        """Whether DVC's cache has them all, or else its remote."""
        if item.outs_cached():
            return True
        if default_remote(self._root) is None:
            return False
        try:
            objects = [info for infos in item.get_used_objs().values() for info in infos]
            return not self._repo.cloud.status(objects).missing
        except Exception:  # noqa: BLE001 -- whatever the file system of a remote raises
            return False


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _lost(stage: str, origin: Origin) -> str:
    return f"{stage} was {origin.words()}, but its outputs are damaged or in no cache and no remote: it is made again."


def _remove_damaged(root: Path, origin: Origin) -> None:
    """Remove files from DVC's cache whose content is not what their name says: DVC trusts what is write-protected."""
    for path in list(cached_files(root, origin.entry)):
        if file_digest(path) != f"{path.parent.name}{path.name}".removesuffix(".dir"):
            path.unlink()
