"""Stage `ppo`: proximal policy optimisation of the SFT model against the reward model. Read `ppo`
from top to bottom; training/rl/minimal.py is the same on one page.

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
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from config.sections.online import Online, Ppo
from training.distributed.collectives import all_reduce_gradients, local_indices
from training.modeling.models import autocast
from training.modeling.tokenizer import load_tokenizer
from training.preparation.prompts import read_prompts
from training.process.artifacts import write_json
from training.process.curves import write_curves
from training.process.out_of_memory import OomBackoff
from training.process.stage import Stage, run_stage
from training.rl.advantages import Estimator, equal_groups, ppo_advantages
from training.rl.divergence import check_rollout, check_update
from training.rl.episodes import (
    Episodes,
    choose_prompts,
    joined,
    mini_batches,
    pad_responses,
    stream_seed,
)
from training.rl.layouts import load_roles, save_policy
from training.rl.on_divergence import Batch, on_divergence
from training.rl.passes import per_token, scores
from training.rl.phases import in_phase
from training.rl.ppo_math import (
    adapted_kl_coef,
    kl_per_token,
    policy_loss,
    token_rewards,
    value_loss,
)
from training.rl.report import UpdateStatistics, rollout_statistics
from training.rl.roles import Roles
from training.rl.rollout_phase import own_logprobs, roll_out
from training.rl.state import PpoState, load_state, save_state
from training.rollout.engine import Limits, sampling_noise
from training.rollout.samples import write_rollouts, write_samples

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
    seed = stage.params.seed
    tokenizer = load_tokenizer(stage.root / "data/tokenizer")
    prompts = read_prompts(stage, tokenizer)
    limits = Limits(settings.max_new_tokens, tokenizer.eos_token_id, tokenizer.pad_token_id)
    roles = load_roles(stage, tokenizer)
    device = roles.policy.device
    state = load_state(stage, roles, PpoState(0, 0, settings.kl.coef))
    if settings.on_divergence == "roll_back" and state.update == state.rolled_back == 0:
        with stage.meter.phase("save", 0):
            save_state(stage, roles, state)
    oom_rollout = OomBackoff(stage, f"{stage.name}.rollout_batch_size", settings.rollout_batch_size)
    oom = OomBackoff(stage, f"{stage.name}.micro_batch_tokens", settings.micro_batch_tokens)

    while state.update < settings.updates and not state.ended:
        update, began = state.update + 1, time.monotonic()
        phase = partial(in_phase, stage, roles, update)
        backoff = partial(oom.run, step=update)
        rollout_backoff = partial(oom_rollout.run, step=update)

        # 1. roll out
        batch = choose_prompts(prompts, settings, seed, update)
        own_seed = stream_seed(seed, "sampling", update)
        noise_BT = sampling_noise(len(batch), limits.max_new_tokens, own_seed)
        with phase("rollout") as work:
            rollout = roll_out(
                rollout_backoff,
                roles.policy,
                batch,
                noise_BT,
                settings,
                limits,
                roles.trunk_value_head,
            )
            sequences, starts = joined(batch, rollout.responses)
            tokens = sum(map(len, sequences))
            work.add(tokens, len(batch))
        with phase("logprobs") as work:
            logprobs, gap = own_logprobs(
                backoff, roles, rollout.logprobs, sequences, starts, settings, work
            )

        # 2. score
        with phase("score") as work:
            score_B = scores(backoff, roles.reward_model, sequences)
            work.add(tokens, len(batch))
        ended_B = torch.tensor([response[-1] == limits.eos for response in rollout.responses])
        shaped_B = score_B - settings.missing_eos_penalty * ~ended_B
        if settings.score_clip is not None:
            shaped_B = shaped_B.clamp(-settings.score_clip, settings.score_clip)

        # 3. reference log-probs, and values of a critic
        with phase("reference") as work:
            ref_logprobs = per_token(backoff, roles.ref_logprobs, sequences, starts, settings)
            work.add(tokens, len(batch))
        values = rollout.values
        if roles.value_model is not None:
            with phase("value") as work:
                values = per_token(backoff, roles.values, sequences, starts, settings)
                work.add(tokens, len(batch))
        logprobs_BT, mask_BT = pad_responses(logprobs)
        ref_logprobs_BT, _ = pad_responses(ref_logprobs)
        values_BT = pad_responses(values)[0] if values is not None else None

        with phase("advantage"):
            # 4. rewards
            kl_BT = kl_per_token(logprobs_BT, ref_logprobs_BT)
            reward_BT = token_rewards(kl_BT, shaped_B, mask_BT, state.kl_coef)
            # 5. advantages
            targets = estimate(reward_BT, shaped_B, values_BT, mask_BT, settings)
            episodes = Episodes(sequences, starts, mask_BT, logprobs_BT, values_BT, *targets)
            row = gap | rollout_statistics(
                episodes, ref_logprobs_BT, score_B, ended_B, state.kl_coef
            )
            if critic is None:
                row["equal_groups"] = equal_groups(shaped_B, settings.responses_per_prompt)
        rolled_out = Batch(tokenizer, batch, rollout.responses, score_B, episodes)
        diverging = partial(on_divergence, stage, roles, state, settings, rolled_out)
        with diverging(row):
            check_rollout(row, settings)

        # 6. update
        learnt = UpdateStatistics(critic is not None)
        with phase("update") as work:
            roles.set_learning_rates(settings, state.update / settings.updates, state.rate_factor)
            for rows in mini_batches(len(batch), settings, seed, update):
                if settings.target_kl is not None and learnt.approx_kl() > settings.target_kl:
                    break
                mini_batch = episodes.of(rows)
                mini_tokens = int(mini_batch.mask.sum())
                share = mini_batch.of(local_indices(mini_batch.lengths()))

                def accumulate_gradients(budget_tokens: int) -> None:
                    roles.optimizer.zero_grad(set_to_none=True)
                    learnt.begin()
                    for old, counts in share.micro_batches(budget_tokens, device, roles.lockstep):
                        with autocast(stage.params.model, device):
                            new = roles.forward(old.sequences, old.prompt_lengths, settings)
                        policy = policy_loss(
                            new.logprobs, old.logprobs, old.advantages, settings.cliprange
                        )
                        total, value = policy.losses.sum(), None
                        if critic is not None:
                            value = value_loss(
                                new.values, old.values, old.returns, critic.cliprange_value
                            )
                            total = total + critic.vf_coef * value.losses.sum()
                        loss = total / mini_tokens
                        roles.backward(loss if counts else 0 * loss)
                        if counts:
                            learnt.add(policy, value, new)

                # A function, as it runs again where memory does not suffice: what a failed run
                # holds goes with its frame.
                backoff(accumulate_gradients, lockstep=roles.lockstep)
                all_reduce_gradients(roles.trainable().values())
                learnt.step(roles.step(settings.max_grad_norm))
                work.add(sum(mini_batch.lengths()), len(rows))
                with diverging():
                    check_update(learnt, update, stage.name)

        # 7. report
        state.update, state.episodes = update, state.episodes + len(batch)
        rate, seconds = roles.optimizer.param_groups[0]["lr"], time.monotonic() - began
        row |= learnt.summary()
        row |= {"learning_rate": rate, "episodes": state.episodes, "seconds": seconds}
        stage.log(update, row)
        if update % settings.sample_every_updates == 0:
            write_samples(stage, update, tokenizer, batch, rollout.responses, score_B)
        write_rollouts(stage, update, tokenizer, batch, rollout.responses, score_B)
        state.kl_coef = next_kl_coef(state.kl_coef, row["kl"], settings)
        state.ended = settings.max_kl is not None and row["kl"] > settings.max_kl
        log_progress(update, settings, row)
        if stage.agree_to_stop() or update % settings.checkpoint_every_updates == 0:
            with phase("save"):
                save_state(stage, roles, state)
        if stage.stopping:
            raise stage.stopped()

    with stage.meter.phase("save", state.update):
        write_outputs(stage, roles, state, tokenizer)
    stage.finish(f"models/{stage.name}", f"metrics/{stage.name}.json", f"plots/{stage.name}.csv")


def next_kl_coef(kl_coef: float, kl: float, settings: Online) -> float:
    """The KL coefficient of the next update, after one whose mean KL was `kl` nats a response."""
    if settings.kl.controller != "adaptive":
        return kl_coef
    return adapted_kl_coef(
        kl_coef, kl, settings.kl.target, settings.kl.horizon, settings.batch_size
    )


def log_progress(update: int, settings: Online, row: dict[str, float]) -> None:
    """A line on how far training is, and one where it ends before its last update."""
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
            "%s.max_kl=%s is passed at update %d: training ends here",
            settings.method,
            settings.max_kl,
            update,
        )


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


if __name__ == "__main__":
    sys.exit(run_stage("ppo", SECTIONS, INPUTS, ppo))
