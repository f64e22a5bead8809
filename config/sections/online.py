"""Settings of the stages that train on responses they sample: what the methods of the loop in training/ppo.py share
(each method's own are in config/methods), and what distillation shares with them (config/sections/distillation.py).
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from config.errors import ParamsError
from config.sections.base import Positive, Rate, Section, splits
from config.sections.levers import LORA, OPTIMIZER, Lora, OptimizerName, without_dropout


class Kl(Section):
    """The penalty that keeps the policy close to the SFT model."""

    controller: Literal["fixed", "adaptive"] = Field(
        description="fixed keeps the coefficient; adaptive moves it towards the target (Ziegler et al. 2019)."
    )
    coef: Annotated[float, Field(ge=0)] = Field(description="KL coefficient, or its initial value.")
    target: Annotated[float, Field(gt=0)] = Field(description="adaptive: KL per response, in nats, to steer to.")
    horizon: Positive = Field(
        description="adaptive: episodes over which the coefficient may change by a factor of about e^0.2."
    )


class SamplingLoop(Section):
    """A loop of updates: sample responses, then take several optimizer steps on them."""

    method: ClassVar[str]
    """Name of the stage and of its section."""

    lora: Lora | None = Field(description=LORA)
    optimizer: OptimizerName = Field(description=OPTIMIZER)
    activation_checkpointing: bool = Field(
        description="Recompute activations in the backward pass: less memory, about a third more time in the update."
    )
    updates: Positive = Field(description="Rollouts, each followed by several passes over it.")
    batch_size: Positive = Field(description="Episodes (one response each) per update, over all processes.")
    responses_per_prompt: Positive = Field(description="Responses drawn from each prompt; must divide the batch.")
    max_new_tokens: Positive = Field(description="Longest response, in tokens.")
    temperature: Annotated[float, Field(gt=0)] = Field(
        description="Sampling temperature, applied to log-probabilities alike."
    )
    rollout_batch_size: Positive = Field(description="Responses generated side by side in a process.")
    rollout_engine: Literal["static", "paged", "vllm"] = Field(
        description="static: a batch that shrinks as responses end. paged: Transformers' "
        "continuous batching, for a GPU with model.attention "
        "flash_attention_2; on a CPU it is slower. Both sample the same responses. vllm: a vLLM "
        "server beside the stage, in the environment that RLHF_VLLM names, for whole models with "
        "recompute_logprobs. paged and vllm give no values, so not in shared_trunk."
    )
    num_mini_batches: Positive = Field(description="Optimizer steps per pass; must divide the batch.")
    micro_batch_tokens: Positive = Field(description="Token budget of one forward and backward pass.")
    learning_rate: Rate = Field(description="Adam learning rate of the model that is trained.")
    schedule: Literal["constant", "linear"] = Field(description="Learning rate over the updates.")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(description="Gradient norm is clipped to this.")
    checkpoint_every_updates: Positive = Field(description="Updates between checkpoints.")
    sample_every_updates: Positive = Field(description="Updates between rows of sample responses.")

    @property
    def epochs(self) -> int:
        """Passes over each rollout."""
        passes: int = getattr(self, f"{self.method}_epochs")
        return passes

    @model_validator(mode="after")
    def _batches(self) -> "SamplingLoop":
        for name in ("num_mini_batches", "responses_per_prompt"):
            splits(self.method, "batch_size", self.batch_size, name, getattr(self, name))
        without_dropout(self.method, self.lora)
        return self


class Online(SamplingLoop):
    """Settings shared by all methods of the RL loop."""

    recompute_logprobs: bool = Field(
        description="Take the old log-probabilities from the trainer's own forward, not from "
        "sampling: right even where the engine's numbers "
        "differ (rollout_logprob_gap says how much), for one more forward pass over the rollout."
    )
    kl: Kl = Field(description="KL penalty towards the SFT model.")
    policy_loss: Literal["clipped", "gspo", "cispo"] = Field(
        description="clipped: the ratio of each token, clipped (PPO). gspo: the ratio of the whole response, its "
        "length taken out, clipped. cispo: the log-probability of every token, weighted with its clipped ratio."
    )
    cliprange: Annotated[float, Field(gt=0, lt=1)] = Field(
        description="Clip range of the policy ratio, per token; gspo's, of whole responses, is a thousand times "
        "smaller. cispo has no bound below."
    )
    cliprange_high: Annotated[float, Field(gt=0)] | None = Field(
        description="Clip range above 1: a larger one lets unlikely tokens grow (clip-higher); null is cliprange."
    )
    missing_eos_penalty: Annotated[float, Field(ge=0)] = Field(
        description="Taken from the score of a response that has no end-of-sequence token."
    )
    score_clip: Annotated[float, Field(gt=0)] | None = Field(
        description="Clip scores to plus or minus this; null does not clip."
    )
    target_kl: Annotated[float, Field(gt=0)] | None = Field(
        description="Skip the rest of an update when the mean KL between old and new policy passes "
        "this; null never does."
    )
    max_kl: Annotated[float, Field(gt=0)] | None = Field(
        description="End training early when the KL to the SFT model, in nats per response, passes "
        "this: a guard against over-optimisation; null never does."
    )
    on_divergence: Literal["stop", "roll_back"] = Field(
        description="What follows on a NaN, a collapsed or a runaway policy, whose batch is kept "
        "in runs/<method>/diverged.jsonl. stop: the stage ends. roll_back: the first time it goes "
        "back to its last checkpoint with half the learning rates; the second time it ends."
    )

    @model_validator(mode="after")
    def _vllm(self) -> "Online":
        if self.rollout_engine == "vllm" and (self.lora is not None or not self.recompute_logprobs):
            raise ParamsError(
                f"{self.method}.rollout_engine=vllm samples whole models, with numbers that are "
                f"not training's. Set {self.method}.lora: null and {self.method}."
                "recompute_logprobs: true, or rollout_engine: static in params.yaml."
            )
        return self


class ActorCritic(Online):
    """Settings shared by methods with a critic."""

    lora: Lora | None = Field(
        description="Train adapters on the frozen SFT model or, where that has one itself, from "
        "copies of it; for policy and value model alike, but a value model that starts from a "
        "reward model's adapter keeps its shape. null trains all weights."
    )
    layout: Literal["separate", "shared_trunk", "shared_base"] = Field(
        description="separate: policy and value model apart. shared_trunk: a value head on the policy's trunk, "
        "one forward for both. shared_base: one frozen base with adapters for policy, reward and value; "
        "the reference is the SFT model's own adapter, or without one the base alone."
    )
    value_init: Literal["reward", "sft"] = Field(
        description="Weights the value model starts from, its head included; not in shared_trunk."
    )
    value_learning_rate: Rate = Field(
        description="Adam learning rate of the value model (layout separate) or value head."
    )
    cliprange_value: Annotated[float, Field(gt=0)] = Field(
        description="Clip range of the value prediction around its old value."
    )
    vf_coef: Annotated[float, Field(ge=0)] = Field(description="Weight of the value loss.")

    @model_validator(mode="after")
    def _shared_base_has_adapters(self) -> "ActorCritic":
        if self.layout == "shared_base" and self.lora is None:
            raise ParamsError(
                f"{self.method}.layout=shared_base shares one frozen base between adapters, "
                f"and {self.method}.lora is null. Set {self.method}.lora, or layout: separate in params.yaml."
            )
        return self

    @model_validator(mode="after")
    def _engine(self) -> "ActorCritic":
        if self.layout == "shared_trunk" and self.rollout_engine != "static":
            raise ParamsError(
                f"{self.method}.rollout_engine={self.rollout_engine} computes no values, and "
                f"{self.method}.layout=shared_trunk takes them from the rollout. "
                "Set rollout_engine: static or layout: separate in params.yaml."
            )
        return self


GroupSize = Annotated[int, Field(ge=2)]
"""Responses per prompt, which are compared with each other."""


class Refill(Section):
    """Further prompts in the place of those whose responses all scored alike."""

    most_batches: Annotated[int, Field(ge=2)] = Field(
        description="Batches that an update may sample until it has groups with a difference alone; each is paid for."
    )
    revisit: Positive | None = Field(
        default=None,
        description="Updates for which a prompt rests that was solved every time: its responses all scored alike, "
        "above the mean. Others take its place, and then it comes back. null: every prompt once a pass.",
    )


class Grouped(Online):
    """Settings shared by methods that compare the responses to a prompt."""

    refill: Refill | None = Field(
        description="Dynamic sampling: groups of responses that all scored alike are replaced by further prompts' "
        "before the update (DAPO); null learns from what was sampled."
    )
