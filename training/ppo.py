"""The loop of PPO and of every other method that samples: alignment of the SFT model against the reward model. Read
`ppo` from top to bottom; training/rl/minimal.py is the same on one page.

`python -m training.ppo [METHOD]`: data/prepared/prompts/train.arrow, models/sft, models/reward -> models/<method>,
metrics/<method>.json, plots/<method>.csv

A method (config/methods) defines its advantage estimator, step 5. One without a critic has no value model, no value
phase and no value loss; nothing else differs.

Shapes: B responses, P prompt tokens, T response tokens, L tokens of prompt and response, N response tokens one after
another, D model width. Padding is on the right of [B, T] tensors, and masks are True where the token counts.

Several processes share the costly work: `spread` divides the episodes of a phase over them and hands the results to
all; in the update each computes its share of every mini-batch, and the gradients are summed. Everything else is
computed in every process, with the same result.
"""

import logging
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from config.methods.method import Estimator
from config.methods.registry import RECORDS
from config.sections.online import ActorCritic, Online
from training.distributed.collectives import all_reduce_gradients, local_indices
from training.modeling.models import autocast
from training.modeling.tokenizer import load_tokenizer
from training.preparation.prompts import read_prompts
from training.process.artifacts import write_json
from training.process.curves import write_curves
from training.process.out_of_memory import OomBackoff
from training.process.run import run_stage
from training.process.stage import Stage
from training.rewards.episodes import episode_rewards
from training.rl.divergence import check_rollout, check_update
from training.rl.episodes import Episodes, MicroBatch, choose_prompts, joined, mini_batches, pad_responses, stream_seed
from training.rl.gain import has_stopped_paying
from training.rl.layouts import load_roles, save_policy
from training.rl.on_divergence import Batch, on_divergence
from training.rl.passes import per_token, scores
from training.rl.phases import in_phase
from training.rl.ppo_math import (
    PolicyLoss,
    adapted_kl_coef,
    kl_per_token,
    policy_loss,
    sequence_policy_loss,
    token_rewards,
    value_loss,
    weighted_policy_loss,
)
from training.rl.refill import Batches, Scored
from training.rl.report import UpdateStatistics, rollout_statistics
from training.rl.roles import Roles
from training.rl.rollout_phase import own_logprobs, roll_out
from training.rl.state import PpoState, load_state, save_state
from training.rollout.engine import Limits, sampling_noise
from training.rollout.samples import write_samples

logger = logging.getLogger(__name__)

SECTIONS = ("seed", "model")
"""Plus the section of the method."""
INPUTS = ("data/prepared/prompts/train.arrow", "data/tokenizer", "models/sft", "models/reward")
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


def ppo(stage: Stage) -> None:
    """The loop of every method that samples; step 5 is the method's."""
    settings: Online = stage.params.section(stage.name)
    critic = isinstance(settings, ActorCritic)
    seed = stage.params.seed
    tokenizer = load_tokenizer(stage.root / "data/tokenizer")
    prompts = read_prompts(stage)
    limits = Limits(settings.max_new_tokens, tokenizer.eos_token_id, tokenizer.pad_token_id)
    roles = load_roles(stage, tokenizer)
    reward_function = episode_rewards(stage, tokenizer, prompts)
    state = load_state(stage, roles, PpoState(0, 0, settings.kl.coef))
    if settings.on_divergence == "roll_back" and state.update == state.rolled_back == 0:
        with stage.meter.phase("save", 0):
            save_state(stage, roles, state)
    oom_rollout = OomBackoff(stage, f"{stage.name}.rollout_batch_size", settings.rollout_batch_size)
    oom = OomBackoff(stage, f"{stage.name}.micro_batch_tokens", settings.micro_batch_tokens)

    while state.update < settings.updates and not state.ended:
        update, began = state.update + 1, time.monotonic()
        phase = partial(in_phase, stage, update)
        backoff = partial(oom.run, step=update)

        batches, resting = Batches(settings), {prompt for prompt, _ in state.resting}
        while batches.wants():
            # 1. roll out
            number = batches.number
            places = choose_prompts(range(len(prompts)), settings, seed, update, number, resting)
            batch = [prompts[place] for place in places]
            own_seed = stream_seed(seed, f"sampling {number}" if number else "sampling", update)
            noise_BT = sampling_noise(len(batch), limits.max_new_tokens, own_seed)
            with phase("rollout", roles.policy, roles.trunk_value_head) as work:
                rollout = roll_out(
                    partial(oom_rollout.run, step=update),
                    roles.policy,
                    batch,
                    noise_BT,
                    settings,
                    limits,
                    roles.trunk_value_head,
                )
                sequences, _ = joined(batch, rollout.responses)
                tokens = sum(map(len, sequences))
                work.add(tokens, len(batch))

            # 2. score
            with phase("score", roles.reward_model) as work:
                if reward_function is not None:
                    score_B = reward_function.scores(places, rollout.responses)
                    work.add(sequences=len(batch))
                else:
                    score_B = scores(backoff, roles.reward_model, sequences)
                    work.add(tokens, len(batch))
            shaped_B = score_B - settings.missing_eos_penalty * ~has_ended(rollout.responses, limits)
            if settings.score_clip is not None:
                shaped_B = shaped_B.clamp(-settings.score_clip, settings.score_clip)
            batches.add(Scored(places, rollout, score_B, shaped_B))
        (places, rollout, score_B, shaped_B), equal = batches.chosen()
        ended_B = has_ended(rollout.responses, limits)
        batch = [prompts[place] for place in places]
        sequences, starts = joined(batch, rollout.responses)
        tokens = sum(map(len, sequences))

        # 3. log-probs of the policy and its reference, and values of a critic
        with phase("logprobs", roles.policy) as work:
            logprobs, weights, gap = own_logprobs(backoff, roles, rollout.logprobs, sequences, starts, work)
        with phase("reference", roles.ref_policy) as work:
            ref_logprobs = per_token(backoff, roles.ref_logprobs, sequences, starts)
            work.add(tokens, len(batch))
        values = rollout.values
        if roles.value_model is not None:
            with phase("value", roles.value_model) as work:
                values = per_token(backoff, roles.values, sequences, starts)
                work.add(tokens, len(batch))
        logprobs_BT, mask_BT = pad_responses(logprobs)
        ref_logprobs_BT, _ = pad_responses(ref_logprobs)
        values_BT = pad_responses(values)[0] if values is not None else None
        weights_BT = pad_responses(weights)[0] if weights is not None else None

        with phase("advantage"):
            # 4. rewards
            kl_BT = kl_per_token(logprobs_BT, ref_logprobs_BT)
            reward_BT = token_rewards(kl_BT, shaped_B, mask_BT, state.kl_coef)
            # 5. advantages
            targets = advantages(stage.name)(reward_BT, shaped_B, values_BT, mask_BT, settings)
            episodes = Episodes(sequences, starts, mask_BT, logprobs_BT, values_BT, *targets, weights_BT)
            row = gap | rollout_statistics(episodes, ref_logprobs_BT, score_B, ended_B, state.kl_coef)
            if not critic:
                row |= equal
        rolled_out = Batch(tokenizer, batch, rollout.responses, score_B, episodes)
        diverging = partial(on_divergence, stage, roles, state, rolled_out)
        with diverging(row):
            check_rollout(row, settings, reward_function is not None)

        # 6. update
        statistics = UpdateStatistics(critic)
        with phase("update") as work:
            roles.set_learning_rates(state.update / settings.updates, state.rate_factor)
            for rows in mini_batches(len(batch), settings, seed, update):
                if settings.target_kl is not None and statistics.approx_kl() > settings.target_kl:
                    break
                accumulate = partial(accumulate_gradients, stage, roles, episodes.of(rows), statistics)
                backoff(accumulate, lockstep=roles.lockstep)
                all_reduce_gradients(roles.trainable().values())
                statistics.step(roles.step(settings.max_grad_norm))
                work.add(sum(len(sequences[i]) for i in rows), len(rows))
                with diverging():
                    check_update(statistics, update, stage.name)

        # 7. report
        state.update, state.episodes = update, state.episodes + len(batch)
        rate, seconds = roles.optimizer.param_groups[0]["lr"], time.monotonic() - began
        row |= statistics.summary()
        row |= {"learning_rate": rate, "episodes": state.episodes, "seconds": seconds}
        stage.log(update, row)
        if update % settings.sample_every_updates == 0:
            write_samples(stage, update, tokenizer, batch, rollout.responses, score_B)
        state.kl_coef = next_kl_coef(state.kl_coef, row["kl"], settings)
        state.history.append((*batches.score, seconds))
        state.resting = batches.resting(state.resting, update)
        gain = has_stopped_paying(stage, state)
        state.ended = gain is not None or (settings.max_kl is not None and row["kl"] > settings.max_kl)
        if gain is not None:
            logger.info("%s ends at update %d: a dollar gains %.3g points of score, at most %.3g",
                        stage.name, update, *gain)  # fmt: skip
        log_progress(update, settings, row)
        if stage.synchronise_stop() or update % settings.checkpoint_every_updates == 0:
            with phase("save"):
                save_state(stage, roles, state)
        if stage.stopping:
            raise stage.stopped()

    with stage.meter.phase("save", state.update):
        write_outputs(stage, roles, state, tokenizer)
    stage.finish(f"models/{stage.name}", f"metrics/{stage.name}.json", f"plots/{stage.name}.csv")


def has_ended(responses: Sequence[list[int]], limits: Limits) -> Tensor:
    """Whether each response has an end-of-sequence token, [B]."""
    return torch.tensor([response[-1] == limits.eos for response in responses])


def advantages(method: str) -> Estimator:
    """The advantage estimator of a method that samples."""
    estimator = RECORDS[method].advantages
    assert estimator is not None
    return estimator


def accumulate_gradients(
    stage: Stage, roles: Roles, mini_batch: Episodes, statistics: UpdateStatistics, budget_tokens: int
) -> None:
    """The gradient of the mean loss per token of a mini-batch: this process's share of it, in micro-batches of at most
    `budget_tokens`.

    Called again with smaller ones after running out of memory.
    """
    settings, device = roles.settings, roles.policy.device
    critic = settings if isinstance(settings, ActorCritic) else None
    mini_tokens = int(mini_batch.mask.sum())
    share = mini_batch.of(local_indices(mini_batch.lengths()))
    roles.optimizer.zero_grad(set_to_none=True)
    statistics.begin()
    for old, counts in share.micro_batches(budget_tokens, device, roles.lockstep):
        with autocast(stage.params.model, device):
            new = roles.forward(old.sequences, old.prompt_lengths)
        policy = surrogate(settings, new.logprobs, old)
        weighted = policy.losses if mini_batch.weights is None else old.weights * policy.losses
        total, value = weighted.sum(), None
        if critic is not None:
            value = value_loss(new.values, old.values, old.returns, critic.cliprange_value)
            total = total + critic.vf_coef * value.losses.sum()
        loss = total / mini_tokens
        roles.backward(loss if counts else 0 * loss)
        if counts:
            statistics.add(policy, value, new)


def surrogate(settings: Online, logprobs_N: Tensor, old: MicroBatch) -> PolicyLoss:
    """The policy's loss at every response token of a micro-batch."""
    low, high = settings.cliprange, settings.cliprange_high
    match settings.policy_loss:
        case "gspo":
            lengths = [len(ids) - start for ids, start in zip(old.sequences, old.prompt_lengths, strict=True)]
            return sequence_policy_loss(logprobs_N, old.logprobs, old.advantages, low, high, lengths)
        case "cispo":
            return weighted_policy_loss(logprobs_N, old.logprobs, old.advantages, high or low)
        case _:
            return policy_loss(logprobs_N, old.logprobs, old.advantages, low, high)


def next_kl_coef(kl_coef: float, kl: float, settings: Online) -> float:
    """The KL coefficient for the next update, after one with a mean KL of `kl` nats per response."""
    if settings.kl.controller != "adaptive":
        return kl_coef
    return adapted_kl_coef(kl_coef, kl, settings.kl.target, settings.kl.horizon, settings.batch_size)


def log_progress(update: int, settings: Online, row: dict[str, float]) -> None:
    """Log the progress of training, and its early end."""
    logger.info(
        "update %d/%d  score %.3f  kl %.2f  length %.1f  entropy %.2f  eta %.0f s",
        update,
        settings.updates,
        row["score"],
        row["kl"],
        row["length"],
        row["entropy"],
        row["seconds"] * (settings.updates - update),
    )
    if settings.max_kl is not None and row["kl"] > settings.max_kl:
        logger.info(
            "%s.max_kl=%s is passed at update %d: training ends here", settings.method, settings.max_kl, update
        )


def write_outputs(stage: Stage, roles: Roles, state: PpoState, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write model, plots/<method>.csv and metrics/<method>.json; metrics are means over the last five updates."""
    stage.check_params()
    save_policy(stage, roles, tokenizer)
    if stage.rank != 0:
        return
    critic = RECORDS[stage.name].has_critic
    curves = [name for name in CURVES if name not in OF_A_CRITIC or critic]
    history = write_curves(stage, f"plots/{stage.name}.csv", curves)
    last = history[-5:]
    metrics = {name: sum(values[name] for values in last) / len(last) for name in curves}
    write_json(
        stage.root / f"metrics/{stage.name}.json", {**metrics, "updates": state.update, "episodes": state.episodes}
    )


if __name__ == "__main__":
    METHOD = sys.argv[1] if len(sys.argv) > 1 else "ppo"
    sys.exit(run_stage(METHOD, (*SECTIONS, METHOD), INPUTS, ppo))
