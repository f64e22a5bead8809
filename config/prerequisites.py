"""What a judge and a reward function need, checked before anything is trained."""

import ast
import os
from pathlib import Path

from config.errors import EnvironmentFault, ParamsError
from config.schema import Params
from config.sections.judge import EmbeddingJudgeSettings, EndpointJudgeSettings, RewardModelJudgeSettings
from config.sections.offline import RewardFunction

KEPT_ELSEWHERE = ("data", "models", "checkpoints", "runs", "mlartifacts")
"""Large folders, which may be links to a larger disk."""


def require_folders(root: Path) -> None:
    """Check that folders of the project that link to another disk lead somewhere. Raises EnvironmentFault."""
    for path in (root / name for name in KEPT_ELSEWHERE):
        if path.is_symlink() and not path.exists():
            raise EnvironmentFault(
                f"{path} is a link to {path.readlink()}, which does not exist. Mount that disk, make the folder, or "
                "remove the link."
            )


def require_judge(root: Path, params: Params) -> None:
    """Check the encoder's folder, the pairs it learns from, and the key of an endpoint. Raises ParamsError or
    EnvironmentFault.
    """
    judge = params.evaluate.judge
    if judge is None:
        return
    embeds = isinstance(judge, EmbeddingJudgeSettings)
    trains_its_own = isinstance(judge, RewardModelJudgeSettings) and judge.path is None
    if (embeds or trains_its_own) and not params.data.judge_fraction:
        raise ParamsError(
            f"evaluate.judge.kind={judge.kind} learns from preferences that nothing else reads, "
            "and data.judge_fraction=0 leaves it none: set it, such as 0.2."
        )
    encoder = judge.path if isinstance(judge, EmbeddingJudgeSettings) else None
    if encoder is not None and not (root / encoder / "config.json").exists():
        raise ParamsError(
            f"evaluate.judge.path={encoder} has no sentence encoder: rlhf fetch minilm, or name another folder."
        )
    if isinstance(judge, EndpointJudgeSettings) and judge.key_variable is not None:
        require_key(judge.key_variable)


def require_reward_function(root: Path, params: Params) -> None:
    """Check that the file of reward.path is in the project and defines its function. Its code is not run. Raises
    ParamsError.
    """
    if not isinstance(params.reward, RewardFunction):
        return
    path, script = params.reward.path, params.reward.script
    name = path.rpartition(":")[2]
    if os.path.relpath(root / script, root).startswith(os.pardir):  # where it is written, wherever links lead
        raise ParamsError(
            f"reward.path={path} is outside of the project: a run keeps the function with its "
            "models. Copy the file into the project."
        )
    try:
        tree = ast.parse((root / script).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ParamsError(
            f"reward.path={path}: {script} does not exist. Put the file there, or fix the path in params.yaml."
        ) from None
    except (OSError, ValueError, SyntaxError) as error:
        line = f" line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ParamsError(
            f"reward.path={path}: {script}{line} cannot be read: {getattr(error, 'msg', error)}."
        ) from None
    names = [
        *(node.name for node in tree.body if isinstance(node, ast.FunctionDef)),
        *(alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom)
          for alias in node.names),
        *(target.id for node in tree.body if isinstance(node, ast.Assign)
          for target in node.targets if isinstance(target, ast.Name)),
    ]  # fmt: skip
    if name not in names:
        raise ParamsError(f"reward.path={path}: {script} has no function {name}.")


def require_key(variable: str) -> str:
    """The key in an environment variable. Raises EnvironmentFault if it is not set."""
    key = os.environ.get(variable)
    if not key:
        raise EnvironmentFault(
            f"evaluate.judge.key_variable={variable} is not set in the environment: export it, or "
            "set key_variable to null for a server without keys."
        )
    return key
