"""The rollout of an update: which engine samples, in which process, and which log-probs are used.

Shapes: B responses, T response tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from config.sections.online import SamplingLoop
from config.work import GAP_SAMPLE
from training.distributed.collectives import Backoff, map_across_ranks
from training.process.usage import Work
from training.rl.learner import Role
from training.rl.passes import per_token
from training.rl.ppo_math import MAX_IMPORTANCE, importance_weights
from training.rl.roles import Roles
from training.rollout import paged, static, vllm
from training.rollout.engine import Engine, Limits, Rollout

ENGINES: dict[str, Engine] = {"static": static.generate, "paged": paged.generate, "vllm": vllm.generate}
"""Engines by the value of rollout_engine."""


def roll_out(
    backoff: Backoff,
    model: Role,
    batch: Sequence[list[int]],
    noise_BT: Tensor,
    settings: SamplingLoop,
    limits: Limits,
    value_head: nn.Linear | None = None,
) -> Rollout:
    """Responses of `model` to the prompts of an update. Responses to the same prompt are sampled in the same process
    and share its cache.
    """
    width, engine = settings.responses_per_prompt, ENGINES[settings.rollout_engine]

    def generate_part(size: int, prompts: Sequence[list[int]], noise: Sequence[Tensor]) -> list[Rollout]:
        rows = [prompt for prompt in prompts for _ in range(width)]
        rollout = engine(model, rows, torch.cat(list(noise)), settings.temperature, limits, size, value_head)
        parts = [slice(start, start + width) for start in range(0, len(rows), width)]
        return [
            Rollout(rollout.responses[part], rollout.logprobs[part], rollout.values[part] if rollout.values else None)
            for part in parts
        ]

    rollouts = map_across_ranks(backoff, generate_part, batch[::width], noise_BT.split(width))
    return Rollout(
        responses=[row for part in rollouts for row in part.responses],
        logprobs=[row for part in rollouts for row in part.logprobs],
        values=None if rollouts[0].values is None else [row for part in rollouts for row in part.values or []],
    )


def own_logprobs(
    backoff: Backoff,
    roles: Roles,
    logprobs: Sequence[Tensor],
    sequences: Sequence[list[int]],
    prompt_lengths: Sequence[int],
    work: Work,
) -> tuple[list[Tensor], list[Tensor] | None, dict[str, float]]:
    """The old log-probs for the update; the weight of each token, where another program sampled it; and how far the
    log-probs of sampling are from the trainer's. `work` counts the recomputed tokens.

    With recompute_logprobs they are the trainer's; else they are those of sampling, and a sample of responses is
    compared.
    """
    settings = roles.settings
    every = 1 if settings.recompute_logprobs else max(1, len(sequences) // GAP_SAMPLE)
    compared = sequences[::every]
    recomputed = per_token(backoff, roles.logprobs, compared, prompt_lengths[::every])
    work.add(sum(map(len, compared)), len(compared))
    gap_N = torch.cat([(mine - sampled).abs() for mine, sampled in zip(recomputed, logprobs[::every], strict=True)])
    gap = {"rollout_logprob_gap": float(gap_N.mean()), "rollout_logprob_gap_max": float(gap_N.max())}
    if settings.rollout_engine != "vllm":
        return (recomputed if settings.recompute_logprobs else list(logprobs)), None, gap
    weights = [importance_weights(mine, sampled) for mine, sampled in zip(recomputed, logprobs, strict=True)]
    truncated = torch.cat(weights) == MAX_IMPORTANCE
    return recomputed, weights, gap | {"rollout_truncated_fraction": float(truncated.float().mean())}
