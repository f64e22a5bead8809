"""What a judge needs, checked before anything is trained."""

import os
from pathlib import Path

from config.errors import EnvironmentFault, ParamsError
from config.schema import Params
from config.sections.judge import (
    EmbeddingJudgeSettings,
    EndpointJudgeSettings,
    RewardModelJudgeSettings,
)


def require_judge(root: Path, params: Params) -> None:
    """Check the encoder's folder, the pairs it learns from, and the key of an endpoint. Raises
    ParamsError or EnvironmentFault.
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
            f"evaluate.judge.path={encoder} has no sentence encoder: rlhf fetch minilm, or name "
            "another folder."
        )
    if isinstance(judge, EndpointJudgeSettings) and judge.key_variable is not None:
        require_key(judge.key_variable)


def require_key(variable: str) -> str:
    """The key in an environment variable. Raises EnvironmentFault if it is not set."""
    key = os.environ.get(variable)
    if not key:
        raise EnvironmentFault(
            f"evaluate.judge.key_variable={variable} is not set in the environment: export it, or "
            "set key_variable to null for a server without keys."
        )
    return key
