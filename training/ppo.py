"""Stage `ppo`: proximal policy optimisation of the SFT model against the reward model. Read `ppo`
from top to bottom.

data/prepared/prompts/train.jsonl, models/sft, models/reward -> models/ppo, metrics/ppo.json,
plots/ppo.csv

RLOO and GRPO (training/rloo.py, training/grpo.py) are the same loop with another estimator of
advantages and no critic: no value model is loaded, there is no value phase and no value loss, and
nothing else differs.

Shapes: B responses, P prompt tokens, T response tokens, L tokens of prompt and response, N response
tokens one after another, D model width. Padding is on the right of [B, T] tensors, and masks are
True where the token counts.

Several processes share the costly work: `spread` divides the episodes of a phase over them and
hands the results to all, in the update each does its share of every mini-batch and the gradients
are summed. All else every process computes for itself, with the same result.
"""

import logging
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from config.errors import TrainingDiverged
from config.sections.online import Online, Ppo
from training.distributed.collectives import (
    all_reduce_gradients,
    local_indices,
    lockstep,
    map_across_ranks,
)
from training.modeling.batching import token_budget_batches
from training.modeling.models import autocast
from training.modeling.scoring import score
from training.modeling.tokenizer import load_tokenizer
from training.preparation.prompts import read_prompts
from training.process.artifacts import write_json
from training.process.curves import write_curves
from training.process.out_of_memory import OomBackoff
from training.process.stage import Stage, run_stage
from training.rl.advantages import Estimator, equal_groups, ppo_advantages
from training.rl.divergence import check_rollout, check_update
from training.rl.layouts import load_roles, save_policy
from training.rl.phases import in_phase
from training.rl.ppo_math import (
    adapted_kl_coef,
    kl_per_token,
    policy_loss,
    token_rewards,
    value_loss,
)
from training.rl.report import UpdateStatistics, rollout_statistics
from training.rl.roles import Roles, in_pieces
from training.rl.rollout_phase import own_logprobs, roll_out
from training.rl.state import PpoState, load_state, save_state
from training.rollout.engine import Limits, sampling_noise
from training.rollout.samples import write_samples

logger = logging.getLogger(__name__)

SECTIONS = ("seed", "model", "ppo")
INPUTS = ("data/prepared/prompts/train.jsonl", "data/tokenizer", "models/sft", "models/reward")
CURVES = (
    "score",
    "kl",
    "entropy",
    "length",
    "eos_rate",
    "policy_loss",
    "value_loss",
    "explained_variance",
    "clip_fraction",
    "kl_coef",
    "grad_norm",
    "learning_rate",
)
OF_A_CRITIC = ("value_loss", "explained_variance")


def ppo(stage: Stage, estimate: Estimator = ppo_advantages) -> None:
    """The loop of PPO, RLOO and GRPO; `estimate` is the method's step 5."""
    settings: Online = stage.params.section(stage.name)
    critic = settings if isinstance(settings, Ppo) else None
    tokenizer = load_tokenizer(stage.root / "data/tokenizer")
    prompts = read_prompts(stage, tokenizer)
    limits = Limits(settings.max_new_tokens, tokenizer.eos_token_id, tokenizer.pad_token_id)
    roles = load_roles(stage, tokenizer)
    state = load_state(stage, roles)
    oom_rollout = OomBackoff(stage, f"{stage.name}.rollout_batch_size", settings.rollout_batch_size)
    oom = OomBackoff(stage, f"{stage.name}.micro_batch_tokens", settings.micro_batch_tokens)

    while state.update < settings.updates and not state.ended:
        update = state.update + 1
        began = time.monotonic()
        phase = partial(in_phase, stage, roles, update)
        backoff, rollout_backoff = (
            partial(oom.run, step=update),
            partial(oom_rollout.run, step=update),
        )

        # 1. roll out
        batch = choose_prompts(prompts, settings, stage.params.seed, update)
        noise_BT = sampling_noise(
            len(batch), settings.max_new_tokens, seed=stage.params.seed * 1_000_003 + update
        )
        with phase("rollout") as work:
            rollout = roll_out(rollout_backoff, roles, batch, noise_BT, settings, limits)
            work.add(
                tokens=sum(map(len, batch)) + sum(map(len, rollout.responses)), sequences=len(batch)
            )
        prompt_lengths = [len(prompt) for prompt in batch]
        sequences = [
            [*prompt, *response] for prompt, response in zip(batch, rollout.responses, strict=True)
        ]
        lengths = [len(ids) for ids in sequences]
        tokens = sum(lengths)
        with phase("logprobs"):
            logprobs, gap = own_logprobs(
                backoff, roles, rollout.logprobs, sequences, prompt_lengths, settings
            )

        # 2. score
        with phase("score") as work:
            score_B = torch.tensor(
                map_across_ranks(
                    backoff,
                    lambda size, own: score(roles.reward_model, own, size).tolist(),
                    sequences,
                )
            )
            work.add(tokens, len(batch))
        ended_B = torch.tensor([response[-1] == limits.eos for response in rollout.responses])
        shaped_score_B = score_B - settings.missing_eos_penalty * ~ended_B
        if settings.score_clip is not None:
            shaped_score_B = shaped_score_B.clamp(-settings.score_clip, settings.score_clip)

        # 3. reference log-probs, and values of a critic
        with phase("reference") as work:
            ref_logprobs = map_across_ranks(
                backoff,
                lambda size, own, starts: roles.ref_logprobs(
                    own, starts, in_pieces(settings, size)
                ),
                sequences,
                prompt_lengths,
            )
            work.add(tokens, len(batch))
        values = rollout.values
        if roles.value_model is not None:
            with phase("value") as work:
                values = map_across_ranks(
                    backoff,
                    lambda size, own, starts: roles.values(own, starts, in_pieces(settings, size)),
                    sequences,
                    prompt_lengths,
                )
                work.add(tokens, len(batch))
        logprobs_BT, mask_BT = pad_responses(logprobs)
        ref_logprobs_BT = pad_responses(ref_logprobs)[0]
        values_BT = pad_responses(values)[0] if values is not None else None

        with phase("advantage"):
            # 4. rewards
            kl_BT = kl_per_token(logprobs_BT, ref_logprobs_BT, settings.kl.estimator)
            reward_BT = token_rewards(kl_BT, shaped_score_B, mask_BT, state.kl_coef)
            # 5. advantages
            advantages_BT, returns_BT = estimate(reward_BT, values_BT, mask_BT, settings)
            statistics = rollout_statistics(
                logprobs_BT,
                ref_logprobs_BT,
                values_BT,
                returns_BT,
                mask_BT,
                score_B,
                ended_B,
                state.kl_coef,
            )
            if critic is None:
                statistics["equal_groups"] = equal_groups(
                    shaped_score_B, settings.responses_per_prompt
                )
        try:
            check_rollout(statistics, settings)
        except TrainingDiverged:
            save_state(stage, roles, state)
            stage.log(update, statistics)  # what it is that went wrong
            raise

        # 6. update
        update_statistics = UpdateStatistics(critic is not None)
        episodes = Episodes(
            sequences, prompt_lengths, mask_BT, logprobs_BT, values_BT, advantages_BT, returns_BT
        )
        with phase("update") as work:
            roles.set_learning_rates(settings, progress=state.update / settings.updates)
            for mini_batch in mini_batches(len(batch), settings, stage.params.seed, update):
                if (
                    settings.target_kl is not None
                    and update_statistics.approx_kl() > settings.target_kl
                ):
                    break
                own = [mini_batch[i] for i in local_indices([lengths[i] for i in mini_batch])]
                mini_tokens = int(mask_BT[mini_batch].sum())
                gradients = partial(
                    add_gradients,
                    roles,
                    episodes.of(own),
                    mini_tokens,
                    settings,
                    autocast(stage.params.model, roles.policy.device),
                    update_statistics,
                )
                backoff(gradients, lockstep=roles.lockstep)
                all_reduce_gradients(roles.trainable().values())
                update_statistics.step(roles.step(settings.max_grad_norm))
                work.add(sum(lengths[i] for i in mini_batch), len(mini_batch))
                check_update(update_statistics, update, stage.name)

        # 7. report
        state.update, state.episodes = update, state.episodes + len(batch)
        values_now = {
            **statistics,
            **gap,
            **update_statistics.summary(),
            "learning_rate": roles.optimizer.param_groups[0]["lr"],
            "episodes": state.episodes,
            "seconds": time.monotonic() - began,
        }
        stage.log(update, values_now)
        if settings.kl.controller == "adaptive":
            state.kl_coef = adapted_kl_coef(
                state.kl_coef, statistics["kl"], settings.kl.target, settings.kl.horizon, len(batch)
            )
        if update % settings.sample_every_updates == 0:
            write_samples(stage, update, tokenizer, batch, rollout.responses, score_B)
        logger.info(
            "update %d/%d  score %.3f  kl %.2f  length %.1f  entropy %.2f  eta %.0f s",
            update,
            settings.updates,
            statistics["score"],
            statistics["kl"],
            statistics["length"],
            values_now["entropy"],
            values_now["seconds"] * (settings.updates - update),
        )
        state.ended = settings.max_kl is not None and statistics["kl"] > settings.max_kl
        if stage.agreed_to_stop() or update % settings.checkpoint_every_updates == 0:
            with phase("save"):
                save_state(stage, roles, state)
        if stage.stopping:
            raise stage.stopped()
        if state.ended:
            logger.info(
                "%s.max_kl=%s is passed at update %d: training ends here",
                stage.name,
                settings.max_kl,
                update,
            )

    with stage.meter.phase("save", state.update):
        write_outputs(stage, roles, state, tokenizer)
    stage.finish(f"models/{stage.name}", f"metrics/{stage.name}.json", f"plots/{stage.name}.csv")


class Episodes(NamedTuple):
    """What an update learns from: B episodes, per-token tensors [B, T]."""

    sequences: list[list[int]]
    prompt_lengths: list[int]
    mask: Tensor
    logprobs: Tensor
    values: Tensor | None
    advantages: Tensor
    returns: Tensor | None

    def of(self, rows: Sequence[int]) -> "Episodes":
        """Some of them."""
        columns: list[Any] = [
            [column[i] for i in rows] for column in (self.sequences, self.prompt_lengths)
        ]
        columns += [x_BT[list(rows)] if x_BT is not None else None for x_BT in self[2:]]
        return Episodes(*columns)


def add_gradients(
    roles: Roles,
    episodes: Episodes,
    mini_tokens: int,
    settings: Online,
    precision: torch.autocast,
    statistics: UpdateStatistics,
    micro_batch_tokens: int,
) -> None:
    """Gradients of this process's share of a mini-batch that has `mini_tokens` response tokens in
    all, afresh, in micro-batches.
    """
    roles.optimizer.zero_grad(set_to_none=True)
    statistics.begin()
    batches = token_budget_batches([len(ids) for ids in episodes.sequences], micro_batch_tokens)
    for rows, counts in lockstep(batches) if roles.lockstep else [(rows, True) for rows in batches]:
        own = episodes.of(rows)
        with precision:
            new = roles.forward(own.sequences, own.prompt_lengths, settings)
        old_logprobs_N, advantages_N = (
            x_BT[own.mask].to(new.logprobs.device) for x_BT in (own.logprobs, own.advantages)
        )
        policy = policy_loss(new.logprobs, old_logprobs_N, advantages_N, settings.cliprange)
        total, value = policy.losses.sum(), None
        if isinstance(settings, Ppo):
            assert new.values is not None
            assert own.values is not None
            assert own.returns is not None
            old_values_N, returns_N = (
                x_BT[own.mask].to(new.values.device) for x_BT in (own.values, own.returns)
            )
            value = value_loss(new.values, old_values_N, returns_N, settings.cliprange_value)
            total = total + settings.vf_coef * value.losses.sum()
        loss = total / mini_tokens
        roles.backward(loss if counts else 0 * loss)
        if counts:
            statistics.add(policy, value, new)


def write_outputs(
    stage: Stage, roles: Roles, state: PpoState, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Put model, plots/<method>.csv and metrics/<method>.json in place; the metrics are means over
    the last five updates.
    """
    stage.check_params()
    save_policy(stage, roles, tokenizer)
    if stage.rank != 0:
        return
    curves = [name for name in CURVES if name not in OF_A_CRITIC or stage.name == "ppo"]
    history = write_curves(stage, f"plots/{stage.name}.csv", curves)
    last = history[-5:]
    metrics = {name: sum(values[name] for values in last) / len(last) for name in curves}
    write_json(
        stage.root / f"metrics/{stage.name}.json",
        {**metrics, "updates": state.update, "episodes": state.episodes},
    )


def choose_prompts(
    prompts: Sequence[list[int]], settings: Online, seed: int, update: int
) -> list[list[int]]:
    """The prompts of an update, each repeated responses_per_prompt times: a pass over all in random
    order, then another.

    A function of seed and update alone, so that a resumed run goes on with the prompts that were
    due.
    """
    per_update = settings.batch_size // settings.responses_per_prompt
    chosen = []
    for position in range((update - 1) * per_update, update * per_update):
        epoch, place = divmod(position, len(prompts))
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        chosen.append(prompts[int(torch.randperm(len(prompts), generator=generator)[place])])
    return [prompt for prompt in chosen for _ in range(settings.responses_per_prompt)]


def mini_batches(episodes: int, settings: Online, seed: int, update: int) -> list[list[int]]:
    """Episode indices of every optimizer step of an update, a new random order for each pass."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + update)
    size = episodes // settings.num_mini_batches
    orders = [
        torch.randperm(episodes, generator=generator).tolist() for _ in range(settings.epochs)
    ]
    return [order[start : start + size] for order in orders for start in range(0, episodes, size)]


def pad_responses(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Per-token values of responses as [B, T], zero on the right, and the mask."""
    lengths_B = torch.tensor([len(row) for row in rows])
    padded_BT = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return padded_BT, torch.arange(padded_BT.shape[1]) < lengths_B[:, None]


if __name__ == "__main__":
    sys.exit(run_stage("ppo", SECTIONS, INPUTS, ppo))
