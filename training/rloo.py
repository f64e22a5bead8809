"""Stage `rloo`: REINFORCE leave-one-out of the SFT model against the reward model, PPO without a
critic.

data/prepared/prompts/train.jsonl, models/sft, models/reward -> models/rloo, metrics/rloo.json,
plots/rloo.csv

Loss, leave-one-out advantages and optimizer are TRL's; rollout, scores, reference log-probs and the
order of everything are ours, so that they are measured phase by phase, cost no padding, and are
functions of seed and update: nothing random has to be saved.

    reward_i    = score_i - missing_eos_penalty - beta * KL_i
    advantage_i = reward_i - mean of reward_j over the other responses j to the same prompt
Source: Ahmadian et al. 2024 (arXiv:2402.14740), the REINFORCE leave-one-out estimator.

Shapes: B responses of an update, T response tokens.
"""

import sys
from typing import Any, ClassVar, NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import RLOOConfig, RLOOTrainer

from config.sections.online import Rloo
from training.distributed import collectives
from training.hf.checkpoints import LearningCheckpoints
from training.hf.trainer import (
    OurNames,
    StageCallback,
    Tally,
    largest_divisor,
    train,
    trainer_arguments,
)
from training.modeling.adapter_lineage import named_base
from training.modeling.adapters import AdapterView, active, learn_adapter, save_adapter
from training.modeling.models import autocast, load_policy, load_reward_model
from training.modeling.scoring import score
from training.modeling.sequences import sequence_logprobs
from training.modeling.tokenizer import load_tokenizer
from training.preparation.prompts import read_prompts
from training.process.artifacts import replacing, write_json
from training.process.curves import write_curves
from training.process.stage import Stage, run_stage
from training.rl.divergence import check_rollout
from training.rl.rloo_rows import (
    PromptOrder,
    add_all,
    positions_from_mask,
    rollout_statistics,
    whole_rows,
)
from training.rollout.engine import Limits, sampling_noise
from training.rollout.samples import write_samples
from training.rollout.static import generate

SECTIONS = ("seed", "model", "rloo")
INPUTS = ("data/prepared/prompts/train.jsonl", "data/tokenizer", "models/sft", "models/reward")
CURVES = (
    "score",
    "kl",
    "entropy",
    "length",
    "eos_rate",
    "policy_loss",
    "clip_fraction",
    "grad_norm",
    "learning_rate",
)


def rloo(stage: Stage) -> None:
    params, settings = stage.params, stage.params.rloo
    tokenizer = load_tokenizer(stage.root / "data/tokenizer")
    prompts = read_prompts(stage, tokenizer)
    device = "cpu" if stage.device == "cpu" else "cuda"
    reward_model = (
        load_reward_model(stage.root / "models/reward", params.model, tokenizer)
        .requires_grad_(False)
        .to(device)
        .eval()
    )
    trainer = MeasuredRLOOTrainer(
        stage, tokenizer, prompts, load_policies(stage, tokenizer, device), reward_model
    )
    train(trainer, stage)
    updates = trainer.state.global_step // steps_per_update(settings)
    if stage.rank != 0:
        return
    stage.check_params()
    with stage.meter.phase("save", updates):
        with replacing(stage.root / "models/rloo") as folder:
            if settings.lora is None:
                trainer.model.save_pretrained(folder)
            else:
                save_adapter(
                    folder,
                    trainer.model,
                    "rloo",
                    named_base(stage.root / "models/sft", stage.root / "models/rloo"),
                    None,
                )
            tokenizer.save_pretrained(folder)
        last = write_curves(stage, "plots/rloo.csv", CURVES)[-5:]
        metrics = {
            name: sum(values[name] for values in last) / len(last)
            for name in CURVES
            if all(name in values for values in last)
        }
        metrics |= {
            "updates": updates,
            "episodes": updates * settings.batch_size,
            "parameters": trainer.model.num_parameters(),
            "learning_parameters": trainer.model.num_parameters(only_trainable=True),
        }
        write_json(stage.root / "metrics/rloo.json", metrics)
    stage.finish("models/rloo", "metrics/rloo.json", "plots/rloo.csv")


class Policies(NamedTuple):
    """The model that learns, and as whom it is asked."""

    model: PreTrainedModel
    policy: PreTrainedModel | AdapterView
    """`model`, or with rloo.lora the view of it with the adapter on."""
    ref_policy: PreTrainedModel | AdapterView | None
    """A model of its own, or with rloo.lora the view of `model` with the adapter off; None where
    rloo.beta is 0.
    """


def load_policies(stage: Stage, tokenizer: PreTrainedTokenizerBase, device: str) -> Policies:
    """Policy and reference from models/sft.

    Raises ModelError if that is missing, damaged or of another vocabulary.
    """
    params, settings, sft = stage.params, stage.params.rloo, stage.root / "models/sft"
    if settings.lora is None:
        model = load_policy(sft, params.model, tokenizer, trainable=True).to(device)
        ref = (
            load_policy(sft, params.model, tokenizer).requires_grad_(False).to(device).eval()
            if settings.beta
            else None
        )
        return Policies(model, model, ref)
    model = load_policy(sft, params.model, tokenizer)
    beneath = active(model)
    learn_adapter(model, settings.lora, "rloo", params.seed)
    model = model.to(device)
    policy, ref = (
        AdapterView(model, adapters, autocast(params.model, model.device))
        for adapters in ((*beneath, "rloo"), beneath)
    )
    return Policies(model, policy, ref if settings.beta else None)


def steps_per_update(settings: Rloo) -> int:
    """Optimizer steps between two rollouts."""
    return settings.rloo_epochs * settings.num_mini_batches


def rloo_arguments(stage: Stage) -> dict[str, Any]:
    """RLOOConfig from the params: the names are translated here and nowhere else."""
    settings, steps = stage.params.rloo, steps_per_update(stage.params.rloo)
    own = settings.batch_size // settings.num_mini_batches // stage.world_size
    micro_batch_size = largest_divisor(own, settings.micro_batch_size)
    return {
        **trainer_arguments(stage, settings),
        "max_steps": settings.updates * steps,
        "per_device_train_batch_size": micro_batch_size,
        "gradient_accumulation_steps": own // micro_batch_size,
        "generation_batch_size": settings.batch_size,
        "num_generations": settings.responses_per_prompt,
        "num_iterations": settings.rloo_epochs,
        "max_completion_length": settings.max_new_tokens,
        "temperature": settings.temperature,
        "lr_scheduler_type": settings.schedule,
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "beta": 0.0,  # else TRL loads the reference once more, in fp32; see MeasuredRLOOTrainer
        "epsilon": settings.cliprange,
        "normalize_advantages": settings.normalise_advantages,
        "reward_clip_range": None
        if settings.score_clip is None
        else (-settings.score_clip, settings.score_clip),
        "save_steps": settings.checkpoint_every_updates
        * steps,  # between two rollouts, where no rollout has to be kept
        "logging_steps": steps,
    }


class MeasuredRLOOTrainer(LearningCheckpoints, OurNames, RLOOTrainer):
    """TRL's trainer with our rollout, scores and reference, each a phase of its own."""

    names: ClassVar[dict[str, str]] = {
        **{
            name: name
            for name in ("score", "score_std", "kl", "kl_error", "length", "eos_rate", "entropy")
        },
        "clip_ratio/region_mean": "clip_fraction",
        "frac_reward_zero_std": "equal_groups",
    }

    def __init__(
        self,
        stage: Stage,
        tokenizer: PreTrainedTokenizerBase,
        prompts: list[list[int]],
        policies: Policies,
        reward_model: PreTrainedModel,
    ) -> None:
        settings = stage.params.rloo
        self._stage, self._settings = stage, settings
        self._limits = Limits(
            settings.max_new_tokens, tokenizer.eos_token_id, tokenizer.pad_token_id
        )
        self._budget_tokens = settings.micro_batch_size * stage.params.model.context_length
        self._policies, self._reward_model = policies, reward_model
        self._trained = Tally()
        self._sampled: list[Tensor] | None = (
            None  # log-probs of the newest rollout, until TRL asked for them
        )
        self._ref_logprobs: list[Tensor] | None = None
        super().__init__(
            model=policies.model,
            reward_funcs=self._shaped_scores,
            args=RLOOConfig(**rloo_arguments(stage)),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer,
            callbacks=[StageCallback(stage, self._trained, "update", steps_per_update(settings))],
        )
        self.beta, self.ref_model = settings.beta, policies.ref_policy
        policies.model.register_forward_pre_hook(positions_from_mask, with_kwargs=True)

    @property
    def _update(self) -> int:
        """The update at work, from 1."""
        return 1 + self.state.global_step // steps_per_update(self._settings)

    def _get_train_sampler(self, dataset: Any = None) -> PromptOrder:
        return PromptOrder(
            len(self.train_dataset),
            self._settings,
            self._settings.rloo_epochs * self.args.steps_per_generation,
            self.args.seed,
        )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        statistics = rollout_statistics(*self._of_all_processes())
        check_rollout(statistics, self._settings, "rloo")
        for name, value in statistics.items():
            self._metrics["train"][name] = [value]
        if self._update % self._settings.sample_every_updates == 0:
            prompts = [row["prompt"] for row in inputs]
            write_samples(
                self._stage,
                self._update,
                self.processing_class,
                prompts,
                self._responses,
                self._score_B,
            )
        return self._dealt(batch)

    def _dealt(self, batch: dict[str, Any]) -> dict[str, Any]:
        """This process's rows of the mini-batches that one process would draw, so laid that TRL's
        shuffle puts them in their order.

        TRL draws from the global generator, and each process from its own rows: mini-batches would
        depend on the number of processes.
        """
        seed = self.args.seed * 1_000_003 + self._update
        if collectives.world_size() > 1:
            torch.manual_seed(seed)
            shares = torch.randperm(self._settings.batch_size).view(
                self._settings.num_mini_batches, collectives.world_size(), -1
            )
            mine = shares[:, collectives.rank()].flatten()
            torch.manual_seed(seed)
            laid = torch.empty_like(mine)
            laid[torch.randperm(len(mine))] = mine
            rows = {
                name: value
                for name, value in batch.items()
                if isinstance(value, Tensor) and value.dim()
            }
            batch = {
                **batch,
                **{
                    name: value[laid].to(self.accelerator.device)
                    for name, value in whole_rows(rows).items()
                },
            }
        torch.manual_seed(seed)
        return batch

    def _of_all_processes(self) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor] | None]:
        """Scores, whether they ended, log-probs and those of the reference, of the responses of
        all.
        """
        found = collectives.all_gather(
            (self._score_B, self._ended_B, self._logprobs, self._ref_logprobs)
        )
        logprobs = [row for _, _, rows, _ in found for row in rows]
        ref_logprobs = [row for _, _, _, rows in found for row in rows or []]
        return (
            torch.cat([score_B for score_B, *_ in found]),
            torch.cat([ended_B for _, ended_B, *_ in found]),
            logprobs,
            ref_logprobs or None,
        )

    def _tokenize_prompts(
        self, prompts: list[list[int]]
    ) -> tuple[list[list[int]], None, dict[str, Any]]:
        return prompts, None, {}

    def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any) -> list[list[int]]:
        model, policy = self._policies.model, self._policies.policy
        model.eval()  # activation checkpointing and a KV cache exclude each other
        settings, rows = self._settings, len(prompt_ids)
        noise_BT = sampling_noise(
            settings.batch_size, settings.max_new_tokens, self.args.seed * 1_000_003 + self._update
        )
        own = slice(
            self.accelerator.process_index * rows, (self.accelerator.process_index + 1) * rows
        )
        with (
            self._stage.meter.phase("rollout", self._update) as work,
            autocast(self._stage.params.model, model.device),
        ):
            rollout = generate(
                policy,
                prompt_ids,
                noise_BT[own],
                settings.temperature,
                self._limits,
                settings.rollout_batch_size,
            )
            add_all(work, [*prompt_ids, *rollout.responses], rows)
        model.train()
        self._responses, self._logprobs, self._sampled, self._ref_logprobs = (
            rollout.responses,
            rollout.logprobs,
            rollout.logprobs,
            None,
        )
        self._sequences = [
            [*prompt, *response]
            for prompt, response in zip(prompt_ids, rollout.responses, strict=True)
        ]
        self._prompt_lengths = [len(prompt) for prompt in prompt_ids]
        return rollout.responses

    def _get_per_token_logps_and_entropies(
        self, model: Any, *arguments: Any, **more: Any
    ) -> tuple[Tensor, Any, Any]:
        """Of the old policy: those from sampling. Of the reference: without padding. Of the policy:
        TRL's.
        """
        if torch.is_grad_enabled():
            if isinstance(self._policies.policy, AdapterView):
                self._policies.policy.switch_on()
            attention_mask = arguments[1]
            self._trained.work.add(tokens=int(attention_mask.sum()), sequences=len(attention_mask))
            result: tuple[Tensor, Any, Any] = super()._get_per_token_logps_and_entropies(
                model, *arguments, **more
            )
            return result
        if self._sampled is not None:
            logprobs, self._sampled = self._sampled, None
        else:
            logprobs = self._ref_logprobs = self._reference_logprobs()
        return (
            torch.nn.utils.rnn.pad_sequence(logprobs, batch_first=True).to(self.accelerator.device),
            None,
            None,
        )

    def _reference_logprobs(self) -> list[Tensor]:
        """Of each response."""
        ref_policy = self._policies.ref_policy
        assert ref_policy is not None
        with (
            self._stage.meter.phase("reference", self._update) as work,
            autocast(self._stage.params.model, ref_policy.device),
        ):
            add_all(work, self._sequences, len(self._sequences))
            return sequence_logprobs(
                ref_policy,
                self._sequences,
                self._prompt_lengths,
                self._settings.temperature,
                self._budget_tokens,
            )

    def _shaped_scores(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """What TRL takes for the reward: the normalised score, less the penalty where a response
        did not end.
        """
        with self._stage.meter.phase("score", self._update) as work:
            self._score_B = score(self._reward_model, self._sequences, self._budget_tokens)
            add_all(work, self._sequences, len(self._sequences))
        self._ended_B = torch.tensor(
            [response[-1] == self._limits.eos for response in completion_ids]
        )
        shaped_B: list[float] = (
            self._score_B - self._settings.missing_eos_penalty * ~self._ended_B
        ).tolist()
        return shaped_B

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            logs["policy_loss"] = logs["loss"]
        super().log(logs, start_time)


if __name__ == "__main__":
    sys.exit(run_stage("rloo", SECTIONS, INPUTS, rloo))
