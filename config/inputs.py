"""What params.yaml names outside of the project: content digests of local data files and of local models, for DVC to
depend on.

data/inputs/data.json     the files of data.source, data.sft_source and the other sources
data/inputs/model.json    the files of model.path
data/inputs/reward.json   the file of reward.path
data/inputs/student.json  the files of distill.student.path
data/inputs/judge.json    the files of evaluate.judge.path, and the votes on replies

DVC cannot depend on a path that stands in params.yaml and may not be there, so these files stand for them: they change
when the content does. The DVC stage `inputs` writes them (tasks/dvc/inputs_stage.py), and `rlhf run` does the same in
process.
"""

import ast
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from config.atomic_file import write_atomically
from config.schema import Params
from config.sections.offline import RewardFunction

DATA_DIGESTS = Path("data/inputs/data.json")
MODEL_DIGESTS = Path("data/inputs/model.json")
REWARD_DIGESTS = Path("data/inputs/reward.json")
STUDENT_DIGESTS = Path("data/inputs/student.json")
JUDGE_DIGESTS = Path("data/inputs/judge.json")
JUDGE_VOTES = Path("data/judge/votes.jsonl")
"""Where people's votes on the replies of an evaluation are, whoever else judges."""


def write_digests(root: Path, params: Params) -> None:
    """Update the files. A missing file has no digest: the stage that needs it reports it."""
    for target, text in digest_files(root, params).items():
        if not _says(root / target, text):
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(root / target, text)


def named_paths(root: Path, params: Params) -> list[str]:
    """The files and folders outside the project that params name, as they name them; they may be missing, and a model
    that is not a local folder comes from a hub.
    """
    files = sorted({*data_files(root, params), *reward_files(root, params)})
    models = {params.model.path, student_path(params), judge_path(params)}
    return [*files, *sorted(path for path in models if path and (root / path).is_dir())]


def data_files(root: Path, params: Params) -> list[str]:
    """The files that data names, and the modules of the project that readers among them import."""
    return with_imported(root, params.data.local_paths().values())


def reward_files(root: Path, params: Params) -> list[str]:
    """The file of the reward function, if there is one, and the modules of the project that it imports."""
    return with_imported(root, [params.reward.script] if isinstance(params.reward, RewardFunction) else [])


def with_imported(root: Path, files: Iterable[str]) -> list[str]:
    """The files, and of Python files among them all modules below `root` that they import, and these in turn: what is
    written as an import, not what code loads by name.
    """
    closure: set[str] = set()
    ahead = list(files)
    while ahead:
        file = ahead.pop()
        if file in closure:
            continue
        closure.add(file)
        if file.endswith(".py"):
            ahead += [path for path in _imports(root, file) if (root / path).is_file()]
    return sorted(closure)


def _imports(root: Path, file: str) -> Iterator[str]:
    """Paths where the modules that a file imports would be; none for a file that cannot be parsed."""
    try:
        nodes = list(ast.walk(ast.parse((root / file).read_text(encoding="utf-8"))))
    except (OSError, ValueError, SyntaxError):
        return
    package = Path(file).parent.parts
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
        for name in names:
            parts = name.split(".")
            for length in range(1, len(parts) + 1):
                module_path = "/".join(parts[:length])
                yield from (f"{module_path}.py", f"{module_path}/__init__.py")


def judge_path(params: Params) -> str | None:
    """The folder or hub model that judges, if any."""
    return getattr(params.evaluate.judge, "path", None)


def student_path(params: Params) -> str | None:
    """The folder or hub model that the student starts from, if any."""
    return params.distill.student.path if params.distill is not None else None


def expected_files(root: Path, params: Params) -> dict[str, str]:
    """Data files by the parameter that names each. A missing file of votes or feedback is left out: there is none
    yet.
    """
    return {
        setting: path
        for setting, path in params.data.local_paths().items()
        if setting not in ("data.vote_source.path", "data.feedback_source") or (root / path).exists()
    }


def digest_files(root: Path, params: Params) -> dict[Path, str]:
    """The expected content of the files, by path in the project."""
    data = {path: _digest(root / path) for path in data_files(root, params)}
    model, student = (
        _folder_digests(root, path) if path else {} for path in (params.model.path, student_path(params))
    )
    named = judge_path(params)
    judge = _folder_digests(root, named) if named else {}
    if params.evaluate.judge is not None:
        votes = {str(path) for path in (JUDGE_VOTES, named) if path}
        judge |= {path: _digest(root / path) for path in sorted(votes) if (root / path).is_file()}
    return {
        path: json.dumps(digests, indent=1) + "\n"
        for path, digests in (
            (DATA_DIGESTS, data),
            (MODEL_DIGESTS, model),
            (REWARD_DIGESTS, {path: _digest(root / path) for path in reward_files(root, params)}),
            (STUDENT_DIGESTS, student),
            (JUDGE_DIGESTS, judge),
        )
    }


def _folder_digests(root: Path, named: str) -> dict[str, str | None]:
    """Every file of a local model folder; empty for a hub model, which has its revision in the params."""
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
