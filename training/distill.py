"""Stage `distill`: a small student learns to answer as its teacher, the aligned model. Read `distill` from top to
bottom.

data/prepared/prompts/train.arrow, models/<align.method> -> models/distill, metrics/distill.json, plots/distill.csv

Shapes: B responses, T response tokens, N response tokens one after another, D width of the student, E width of the
teacher, V vocabulary.

Source: Agarwal et al. 2024 (arXiv:2306.13649), algorithm 1, with the teacher's responses as its fixed data.
"""

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from config.schema import Params
from config.sections.distillation import Distill
from config.student import write_no_student
from training.distillation.divergence import divergence
from training.distillation.signs import check_responses, check_step
from training.distillation.student import Pair, load_pair, save_student
from training.distributed.collectives import (
    all_reduce_gradients,
    counted_batches,
    local_indices,
    map_across_ranks,
    sum_of_all,
)
from training.modeling.batching import token_budget_batches
from training.modeling.logprobs import output_weight, token_logprobs
from training.modeling.models import autocast
from training.modeling.sequences import per_response, response_hidden, response_targets
from training.modeling.tokenizer import load_tokenizer
from training.preparation.prompts import read_prompts
from training.process.artifacts import write_json
from training.process.curves import write_curves
from training.process.out_of_memory import OomBackoff
from training.process.run import run_stage
from training.process.stage import Stage
from training.rl.episodes import choose_prompts, joined, mini_batches, stream_seed
from training.rl.phases import in_phase
from training.rl.rollout_phase import roll_out
from training.rl.state import LoopState, load_state, save_state
from training.rollout.engine import Limits, sampling_noise
from training.rollout.samples import write_samples

logger = logging.getLogger(__name__)

SECTIONS = ("seed", "model", "align", "distill")
CURVES = (
    "loss",
    "agreement",
    "length",
    "eos_rate",
    "student_length",
    "student_eos_rate",
    "grad_norm",
    "learning_rate",
)


@dataclass
class DistillState(LoopState):
    """State of the loop besides the weights: statistics from which divergence is detected."""

    lengths: list[float] = field(default_factory=list)
    """Mean response length of the student in each update in which it sampled."""
    eos_rates: list[float] = field(default_factory=list)
    """Share of those responses that ended with EOS."""
    teacher_tokens: int = 0
    teacher_responses: int = 0

    @property
    def teacher_length(self) -> float | None:
        """Mean tokens of all the teacher's responses so far."""
        return self.teacher_tokens / self.teacher_responses if self.teacher_responses else None


def inputs(params: Params) -> tuple[str, ...]:
    if params.distill is None:
        return ()
    return ("data/prepared/prompts/train.arrow", "data/tokenizer", f"models/{params.align.method}")


INPUTS = inputs


def distill(stage: Stage) -> None:
    if stage.params.distill is None:
        stage.check_params()
        write_no_student(stage.root)
        return
    settings = stage.params.distill
    seed = stage.params.seed
    tokenizer = load_tokenizer(stage.root / "data/tokenizer")
    prompts = read_prompts(stage)
    limits = Limits(settings.max_new_tokens, tokenizer.eos_token_id, tokenizer.pad_token_id)
    pair = load_pair(stage, tokenizer)
    state = load_state(stage, pair, DistillState(0, 0))
    oom_rollout = OomBackoff(stage, "distill.rollout_batch_size", settings.rollout_batch_size)
    oom = OomBackoff(stage, "distill.micro_batch_tokens", settings.micro_batch_tokens)

    while state.update < settings.updates:
        update, began = state.update + 1, time.monotonic()
        phase = partial(in_phase, stage, update)
        backoff = partial(oom.run, step=update)
        rollout_backoff = partial(oom_rollout.run, step=update)

        # 1. responses: the student answers the first prompts, the teacher the others
        batch = choose_prompts(prompts, settings, seed, update)
        noise_BT = sampling_noise(len(batch), limits.max_new_tokens, stream_seed(seed, "distill", update))
        by_student = student_responses(settings, update)
        responses: list[list[int]] = []
        for name, model, part in (
            ("student_rollout", pair.student, slice(0, by_student)),
            ("teacher_rollout", pair.teacher, slice(by_student, len(batch))),
        ):
            if not batch[part]:
                continue
            with phase(name, model) as work:
                part_responses = roll_out(
                    rollout_backoff, model, batch[part], noise_BT[part], settings, limits
                ).responses
                responses += part_responses
                work.add(sum(map(len, batch[part])) + sum(map(len, part_responses)), len(part_responses))
        sequences, starts = joined(batch, responses)
        row = response_statistics(responses, by_student, limits.eos)
        remember(state, responses, by_student, row)
        check_responses(state.lengths, state.eos_rates, state.teacher_length)

        # 2. the teacher's last hidden states at every response token, from which the
        # divergence computes its log-probs over the vocabulary chunk by chunk
        supervised = update <= settings.sft_updates
        teacher: list[Tensor] = []
        if not supervised:
            with phase("teacher_logprobs", pair.teacher) as work:
                teacher = map_across_ranks(backoff, partial(teacher_hidden, pair), sequences, starts)
                work.add(sum(map(len, sequences)), len(sequences))

        # 3. update
        statistics = Sums()
        with phase("update") as work:
            pair.set_learning_rates(state.update / settings.updates)
            for rows in mini_batches(len(batch), settings, seed, update):
                tokens = sum(len(responses[i]) for i in rows)
                share = [rows[i] for i in local_indices([len(sequences[i]) for i in rows])]

                accumulate = partial(
                    accumulate_gradients, stage, pair, statistics, share, tokens, sequences, starts, teacher
                )
                backoff(accumulate, lockstep=pair.lockstep)
                all_reduce_gradients(pair.trainable().values())
                statistics.step(pair.step(settings.max_grad_norm))
                work.add(sum(len(sequences[i]) for i in rows), len(rows))
                check_step(statistics.losses[-1], statistics.grad_norms[-1], update)

        # 4. report
        state.update, state.episodes = update, state.episodes + len(batch)
        row |= statistics.summary()
        if supervised:
            del row["agreement"]
        row["learning_rate"] = pair.optimizer.param_groups[0]["lr"]
        row |= {"responses": state.episodes, "seconds": time.monotonic() - began}
        stage.log(update, row)
        if update % settings.sample_every_updates == 0:
            write_samples(stage, update, tokenizer, batch, responses)
        log_progress(update, settings, row)
        if stage.synchronise_stop() or update % settings.checkpoint_every_updates == 0:
            with phase("save"):
                save_state(stage, pair, state)
        if stage.stopping:
            raise stage.stopped()

    with stage.meter.phase("save", state.update):
        write_outputs(stage, pair, state, tokenizer)
    stage.finish("models/distill", "metrics/distill.json", "plots/distill.csv")


def accumulate_gradients(
    stage: Stage,
    pair: Pair,
    statistics: "Sums",
    share: Sequence[int],
    tokens: int,
    sequences: Sequence[list[int]],
    starts: Sequence[int],
    teacher: Sequence[Tensor],
    budget_tokens: int,
) -> None:
    """The gradient of this process's `share` of a mini-batch of `tokens` response tokens, in micro-batches of at most
    `budget_tokens`.

    Called again with smaller ones after running out of memory.
    """
    settings = stage.params.section("distill")
    pair.optimizer.zero_grad(set_to_none=True)
    statistics.begin(tokens)
    batches = token_budget_batches([len(sequences[i]) for i in share], budget_tokens)
    for micro, counts in counted_batches(batches, pair.lockstep):
        chosen = [share[i] for i in micro]
        loss_of = partial(
            student_loss,
            pair,
            [sequences[i] for i in chosen],
            [starts[i] for i in chosen],
            [teacher[i] for i in chosen] if teacher else None,
            settings,
        )
        with autocast(stage.params.model, stage.torch_device):
            total, agreed = pair.with_gradient(loss_of)
        loss = total / tokens
        pair.backward(loss if counts else 0 * loss)
        if counts:
            statistics.add(total.detach(), agreed)


def student_responses(settings: Distill, update: int) -> int:
    """How many responses of an update the student samples: those to a share lmbda of the prompts, and none in the
    first sft_updates.
    """
    if update <= settings.sft_updates:
        return 0
    prompts = settings.batch_size // settings.responses_per_prompt
    return round(settings.lmbda * prompts) * settings.responses_per_prompt


def response_statistics(responses: Sequence[list[int]], student_count: int, eos: int) -> dict[str, float]:
    """Mean length, and share that ended with EOS, of all responses and of the first `student_count`, the student's."""

    def of(rows: Sequence[list[int]], prefix: str) -> dict[str, float]:
        return {
            f"{prefix}length": sum(map(len, rows)) / len(rows),
            f"{prefix}eos_rate": sum(row[-1] == eos for row in rows) / len(rows),
        }

    return of(responses, "") | (of(responses[:student_count], "student_") if student_count else {})


def remember(state: DistillState, responses: Sequence[list[int]], student_count: int, row: dict[str, float]) -> None:
    """Add an update's responses to the statistics that detect divergence."""
    if student_count:
        state.lengths.append(row["student_length"])
        state.eos_rates.append(row["student_eos_rate"])
    state.teacher_tokens += sum(map(len, responses[student_count:]))
    state.teacher_responses += len(responses) - student_count


@torch.no_grad()
def teacher_hidden(
    pair: Pair, budget_tokens: int, sequences: Sequence[list[int]], starts: Sequence[int]
) -> list[Tensor]:
    """The teacher's hidden states [response tokens, E] at each response, in order, in host memory."""
    return per_response(partial(response_hidden, pair.teacher), sequences, starts, budget_tokens)


def student_loss(
    pair: Pair,
    sequences: Sequence[list[int]],
    starts: Sequence[int],
    teacher: Sequence[Tensor] | None,
    settings: Distill,
) -> tuple[Tensor, Tensor]:
    """Loss summed over the response tokens of a micro-batch, and at how many of them teacher and student have the same
    most likely token.

    With the teacher's hidden states the loss is the divergence; without them the cross-entropy of the responses, and
    no tokens are counted.
    """
    hidden_ND = response_hidden(pair.student, sequences, starts)
    weight_VD = output_weight(pair.student)
    if teacher is None:
        targets_N = response_targets(sequences, starts).to(hidden_ND.device, non_blocking=True)
        losses = token_logprobs(hidden_ND, weight_VD, targets_N, settings.temperature)
        return -losses.logprobs.sum(), losses.entropy.new_zeros(())
    teacher_NE = torch.cat(list(teacher)).to(hidden_ND.device, non_blocking=True)
    total, agreed_N = divergence(
        hidden_ND, weight_VD, teacher_NE, pair.teacher_head_VE, settings.beta, settings.temperature
    )
    return total, agreed_N.sum()


class Sums:
    """Loss and agreement over the response tokens of an update; summed over processes at each optimizer step."""

    def __init__(self) -> None:
        self._open: list[Tensor] = []
        self._tokens = 0
        self._total = [0.0, 0.0, 0.0]
        self.losses: list[float] = []
        """Mean per token of each mini-batch."""
        self.grad_norms: list[float] = []

    def begin(self, tokens: int) -> None:
        """Start a mini-batch with this many response tokens, discarding sums of an unfinished one."""
        self._open, self._tokens = [], tokens

    def add(self, loss: Tensor, agreed: Tensor) -> None:
        """Add a micro-batch."""
        self._open.append(torch.stack([loss, agreed.to(loss.dtype)]))

    def step(self, grad_norm: float) -> None:
        """Finish a mini-batch."""
        loss, agreed = sum_of_all(self._open, 2)
        tokens = self._tokens
        self._total = [old + new for old, new in zip(self._total, (loss, agreed, tokens), strict=True)]
        self.losses.append(loss / tokens)
        self.grad_norms.append(grad_norm)

    def summary(self) -> dict[str, float]:
        """Means per token over the update, and the mean gradient norm."""
        loss, agreed, tokens = self._total
        return {
            "loss": loss / tokens,
            "agreement": agreed / tokens,
            "grad_norm": sum(self.grad_norms) / len(self.grad_norms),
        }


def log_progress(update: int, settings: Distill, row: dict[str, float]) -> None:
    logger.info(
        "update %d/%d  loss %.4f  length %.1f  eta %.0f s",
        update,
        settings.updates,
        row["loss"],
        row["length"],
        row["seconds"] * (settings.updates - update),
    )


def write_outputs(stage: Stage, pair: Pair, state: DistillState, tokenizer: PreTrainedTokenizerBase) -> None:
    """Put model, curves and metrics in place; metrics are means over the last five updates, and both models' sizes."""
    stage.check_params()
    save_student(stage, pair.student, tokenizer)
    if stage.rank != 0:
        return
    last = write_curves(stage, "plots/distill.csv", CURVES)[-5:]
    metrics: dict[str, float | None] = {}
    for name in CURVES:
        values = [values[name] for values in last if name in values]
        metrics[name] = sum(values) / len(values) if values else None
    for role, sizes in pair.sizes.items():
        metrics |= {f"{key}_{role}": value for key, value in sizes.items()}
    write_json(stage.root / "metrics/distill.json", {**metrics, "updates": state.update, "responses": state.episodes})


if __name__ == "__main__":
    sys.exit(run_stage("distill", SECTIONS, INPUTS, distill))
