"""params.yaml as types. No field has a default: a default here would change results without DVC noticing.

Every description is shown in the Prefect form and in `docs/params.md`; units are part of the name or of the description.
"""

import difflib
from datetime import date
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from config.errors import ParamsError
from config.records import STAGES


class Section(BaseModel):
    """A frozen part of params.yaml: unknown keys and silent conversions are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, le=1)]


# ---------------------------------------------------------------- model


class RandomModel(Section):
    """A model built from its shape, for the embedded default and for benchmarks."""

    family: Literal["llama", "qwen2", "gpt2"] = Field(description="Architecture of the random-weight model.")
    width: Positive = Field(description="Model width d (hidden size).")
    layers: Positive = Field(description="Number of transformer layers.")
    heads: Positive = Field(description="Number of attention heads; must divide the width.")
    kv_heads: Positive = Field(description="Number of key and value heads; must divide the heads.")
    mlp_width: Positive = Field(description="Width of the feed-forward layer.")
    vocab_size: Annotated[int, Field(ge=300)] = Field(
        description="Entries of the byte-level BPE tokenizer trained on the data (256 bytes and 4 special tokens included)."
    )
    tie_embeddings: bool = Field(description="Share input and output embedding.")

    @model_validator(mode="after")
    def _heads_divide(self) -> "RandomModel":
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ParamsError(
                f"model.random.width={self.width} does not split into model.random.heads={self.heads} of even size. "
                "Change either in params.yaml."
            )
        if self.heads % self.kv_heads:
            raise ParamsError(
                f"model.random.kv_heads={self.kv_heads} does not divide model.random.heads={self.heads}. Change either in params.yaml."
            )
        return self


class Model(Section):
    """The base model every stage starts from."""

    path: str | None = Field(description="Local folder or Hugging Face model id of the base model; null builds model.random.")
    revision: str | None = Field(description="Revision of a hub model; null takes its main branch.")
    random: RandomModel | None = Field(description="Shape of a model built from scratch; null loads model.path.")
    pad_token: str | None = Field(
        description="Token of the vocabulary to pad with, never the end-of-sequence token; null takes the tokenizer's own."
    )
    context_length: Annotated[int, Field(ge=8)] = Field(description="Longest prompt plus response, in tokens.")
    dtype: Literal["fp32", "bf16", "fp16"] = Field(
        description="Compute type; weights that learn are kept in fp32, and fp16 scales the loss. "
        "fp32 on a CPU: bf16 is slower there without AVX512-BF16."
    )
    quantisation: Literal["nf4"] | None = Field(
        description="Storage of the weights that do not learn: nf4 is 4 bits each (QLoRA), null is the compute type. "
        "Embeddings, norms and heads are never quantised, nor a base built from model.random."
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = Field(description="Attention implementation.")

    @model_validator(mode="after")
    def _one_origin(self) -> "Model":
        if (self.path is None) == (self.random is None):
            raise ParamsError(
                f"model.path={self.path} and model.random={'a shape' if self.random else None}: exactly one of them must be set. "
                "Set the other to null in params.yaml."
            )
        return self


# ---------------------------------------------------------------- data


class HelpdeskSource(Section):
    """The embedded customer-support world: generated, seeded, any size, with a known gold score."""

    kind: Literal["helpdesk"]
    sft_rows: Positive = Field(description="Demonstrations to generate (mixed quality).")
    preference_rows: Positive = Field(description="Preference pairs to generate.")
    prompt_rows: Positive = Field(description="Further prompts for PPO and evaluation.")
    temperature: Annotated[float, Field(gt=0)] = Field(
        description="Bradley-Terry temperature of the labels, in units of gold score: P(a wins) = sigmoid((gold_a - gold_b) / temperature)."
    )
    quality: Fraction = Field(
        description="Probability that a demonstration gets each criterion right; sets the mean gold score of the SFT data."
    )


class FileSource(Section):
    """A local file or URL in one of the known formats."""

    kind: Literal["file"]
    path: str = Field(description="Local path or URL of a jsonl, json, csv or parquet file.")
    format: Literal["pairs", "votes", "trees", "instructions", "prompts"] = Field(
        description="pairs: prompt, chosen, rejected. votes: two responses and several annotators. trees: ranked replies. "
        "instructions: prompt, completion. prompts: prompt only."
    )
    columns: dict[str, str] = Field(
        description="Our column name -> the file's, where they differ. The votes format takes annotators as a comma-separated list of columns; "
        "one vote a line, as rlhf label writes them, needs none."
    )


class HubSource(Section):
    """A Hugging Face dataset."""

    kind: Literal["hub"]
    path: str = Field(description="Dataset id.")
    revision: str = Field(description="Revision (commit, tag or branch); pin a commit for repeatable data.")
    config: str | None = Field(description="Dataset configuration; null for the default.")
    split: str = Field(description="Split to read.")
    format: Literal["pairs", "votes", "trees", "instructions", "prompts"] = Field(description="As for a file source.")
    columns: dict[str, str] = Field(description="Our column name -> the dataset's, where they differ.")


Source = Annotated[HelpdeskSource | FileSource | HubSource, Field(discriminator="kind")]


class Data(Section):
    """Where rows come from and how they are cleaned and split."""

    source: Source = Field(description="Preference data; also the demonstrations and prompts where no other source is named.")
    sft_source: Source | None = Field(description="Demonstrations; null takes the preferred replies of data.source.")
    prompt_source: Source | None = Field(description="Prompts for PPO and evaluation; null takes those of data.source.")
    prompt_template: str = Field(description="How a plain prompt is put before the model; must contain {prompt}.")
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = Field(description="Share of prompts held out, by a stable hash of the prompt.")
    max_prompt_chars: Positive = Field(description="Longer prompts are quarantined.")
    max_response_chars: Positive = Field(description="Longer replies are quarantined.")
    max_quarantine_fraction: Fraction = Field(description="More refused rows than this fail the stage.")

    @model_validator(mode="after")
    def _template(self) -> "Data":
        if self.prompt_template.count("{prompt}") != 1:
            raise ParamsError(
                f"data.prompt_template={self.prompt_template!r} must contain {{prompt}} exactly once. Change it in params.yaml."
            )
        return self


# ---------------------------------------------------------------- training stages


class Lora(Section):
    """Low-rank adapters: the base is frozen, and two thin matrices beside each of the chosen ones learn."""

    rank: Positive = Field(description="Columns of the thin matrices: rank x (inputs + outputs) weights learn for each chosen matrix.")
    alpha: Annotated[float, Field(gt=0)] = Field(description="The adapter's output is scaled by alpha / rank.")
    modules: Annotated[list[str], Field(min_length=1)] = Field(
        description="Matrices of each layer to adapt: q, k, v, o (attention), gate, up, down (feed-forward), or the model's own names. "
        "Where a model keeps q, k and v in one matrix, any of them means all three."
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(description="Dropout before the adapter while training; 0 in ppo.")


OptimizerName = Literal["adamw", "adamw8bit"]
OPTIMIZER = "AdamW, or AdamW with 8-bit moments (bitsandbytes): 2 bytes a learning weight instead of 8."
LORA = "Train adapters on a frozen base; null trains all weights."


class Optimisation(Section):
    """What sft, reward and dpo have in common."""

    lora: Lora | None = Field(description=LORA)
    optimizer: OptimizerName = Field(description=OPTIMIZER)
    epochs: Annotated[float, Field(gt=0)] = Field(description="Passes over the training data.")
    max_steps: Positive | None = Field(description="Stop after this many optimizer steps; null trains all epochs.")
    batch_size: Positive = Field(description="Sequences (sft) or pairs (reward, dpo) per optimizer step, over all processes.")
    micro_batch_size: Positive = Field(
        description="Sequences or pairs per forward pass of a process, at most; the rest is gradient accumulation."
    )
    learning_rate: Rate = Field(description="Peak learning rate of AdamW.")
    warmup_fraction: Fraction = Field(description="Share of the steps over which the learning rate rises linearly.")
    schedule: Literal["constant", "linear", "cosine"] = Field(description="Learning rate after the warm-up.")
    weight_decay: Annotated[float, Field(ge=0)] = Field(description="AdamW weight decay.")
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = Field(
        description="AdamW decay of the squared gradient's mean; runs of a few hundred steps learn faster with 0.98 than with the usual 0.999."
    )
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(description="Gradient norm is clipped to this.")
    activation_checkpointing: bool = Field(description="Recompute activations in the backward pass: less memory, about a third more time.")
    checkpoint_every_steps: Positive = Field(description="Steps between checkpoints.")
    log_every_steps: Positive = Field(description="Steps between metric rows.")


def _splits(section: str, batch_name: str, batch: int, part_name: str, part: int) -> None:
    if batch % part:
        raise ParamsError(f"{section}.{batch_name}={batch} does not split into {section}.{part_name}={part}. Change either in params.yaml.")


class Sft(Optimisation):
    """Supervised fine-tuning on the demonstrations, loss on the completion only."""

    max_length: Positive = Field(description="Prompt plus completion, in tokens; longer rows are truncated at the end.")
    packing: bool = Field(description="Pack several rows into one sequence (needs flash_attention_2); false buckets rows by length.")

    @model_validator(mode="after")
    def _batches(self) -> "Sft":
        _splits("sft", "batch_size", self.batch_size, "micro_batch_size", self.micro_batch_size)
        return self


class Reward(Optimisation):
    """Reward model: Bradley-Terry on the preference pairs."""

    init: Literal["sft", "base"] = Field(description="Weights the reward model starts from.")
    max_length: Positive = Field(description="Prompt plus reply, in tokens; longer pairs are dropped and counted.")
    normalise: bool = Field(
        description="Store mean and standard deviation of the training scores and apply them wherever the model scores."
    )

    @model_validator(mode="after")
    def _batches(self) -> "Reward":
        _splits("reward", "batch_size", self.batch_size, "micro_batch_size", self.micro_batch_size)
        return self


class Align(Section):
    """Which method aligns the SFT model."""

    method: Literal["ppo", "dpo", "rloo"] = Field(
        description="Alignment method; names the stage that is run and whose model is evaluated. ppo: policy and critic. "
        "rloo: policy gradient without a critic. dpo: on the preference pairs alone, without sampling."
    )


class Kl(Section):
    """The penalty that keeps the policy near the SFT model."""

    controller: Literal["fixed", "adaptive"] = Field(
        description="fixed keeps the coefficient; adaptive moves it towards the target (Ziegler et al. 2019)."
    )
    coef: Annotated[float, Field(ge=0)] = Field(description="KL coefficient, or its initial value.")
    target: Annotated[float, Field(gt=0)] = Field(description="adaptive: KL per response, in nats, to steer to.")
    horizon: Positive = Field(description="adaptive: episodes over which the coefficient may change by a factor of about e^0.2.")
    estimator: Literal["k1", "k3"] = Field(
        description="Per-token estimate of the KL in the reward: k1 = log ratio, k3 = low variance, never negative."
    )


class Ppo(Section):
    """Proximal policy optimisation of the SFT model against the reward model."""

    layout: Literal["separate", "shared_trunk", "shared_base"] = Field(
        description="separate: policy and value model apart. shared_trunk: a value head on the policy's trunk, one forward for both. "
        "shared_base: one frozen base with adapters for policy, reward and value; the reference is the base without them."
    )
    value_init: Literal["reward", "sft"] = Field(description="Weights the value model starts from, its head included; not in shared_trunk.")
    lora: Lora | None = Field(
        description="Train adapters on the frozen SFT model, for policy and value model alike; null trains all weights."
    )
    optimizer: OptimizerName = Field(description=OPTIMIZER)
    activation_checkpointing: bool = Field(
        description="Recompute activations in the backward pass: less memory, about a third more time in the update."
    )
    updates: Positive = Field(description="Rollouts, each followed by ppo_epochs passes over it.")
    batch_size: Positive = Field(description="Episodes (one response each) per update, over all processes.")
    responses_per_prompt: Positive = Field(description="Responses drawn from each prompt; must divide the batch.")
    max_new_tokens: Positive = Field(description="Longest response, in tokens.")
    temperature: Annotated[float, Field(gt=0)] = Field(description="Sampling temperature, applied to log-probabilities alike.")
    rollout_batch_size: Positive = Field(description="Responses generated side by side in a process.")
    rollout_engine: Literal["static", "paged"] = Field(
        description="static: a batch that shrinks as responses end. paged: Transformers' continuous batching, for a GPU with model.attention "
        "flash_attention_2; on a CPU it is slower. Both sample the same responses; paged gives no values, so not in shared_trunk."
    )
    recompute_logprobs: bool = Field(
        description="Take the old log-probabilities from the trainer's own forward, not from sampling: right even where the engine's numbers "
        "differ (rollout_logprob_gap says how much), for one more forward pass over the rollout."
    )
    ppo_epochs: Positive = Field(description="Passes over each rollout.")
    num_mini_batches: Positive = Field(description="Optimizer steps per pass; must divide the batch.")
    micro_batch_tokens: Positive = Field(description="Token budget of one forward and backward pass.")
    learning_rate: Rate = Field(description="Adam learning rate of the policy.")
    value_learning_rate: Rate = Field(description="Adam learning rate of the value model (layout separate) or value head.")
    schedule: Literal["constant", "linear"] = Field(description="Learning rate over the updates.")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(description="Gradient norm is clipped to this.")
    kl: Kl = Field(description="KL penalty towards the SFT model.")
    gamma: Fraction = Field(description="Discount per token.")
    lam: Fraction = Field(description="GAE lambda.")
    cliprange: Annotated[float, Field(gt=0, lt=1)] = Field(description="Clip range of the policy ratio.")
    cliprange_value: Annotated[float, Field(gt=0)] = Field(description="Clip range of the value prediction around its old value.")
    vf_coef: Annotated[float, Field(ge=0)] = Field(description="Weight of the value loss.")
    whiten_rewards: bool = Field(description="Scale per-token rewards to unit variance before GAE.")
    missing_eos_penalty: Annotated[float, Field(ge=0)] = Field(
        description="Taken from the score of a response that has no end-of-sequence token."
    )
    score_clip: Annotated[float, Field(gt=0)] | None = Field(description="Clip scores to plus or minus this; null does not clip.")
    target_kl: Annotated[float, Field(gt=0)] | None = Field(
        description="Skip the rest of an update when the mean KL between old and new policy passes this; null never does."
    )
    max_kl: Annotated[float, Field(gt=0)] | None = Field(
        description="End training early when the KL to the SFT model, in nats per response, passes this: a guard against over-optimisation; null never does."
    )
    checkpoint_every_updates: Positive = Field(description="Updates between checkpoints.")
    sample_every_updates: Positive = Field(description="Updates between rows of sample responses.")

    @model_validator(mode="after")
    def _batches(self) -> "Ppo":
        _splits("ppo", "batch_size", self.batch_size, "num_mini_batches", self.num_mini_batches)
        _splits("ppo", "batch_size", self.batch_size, "responses_per_prompt", self.responses_per_prompt)
        return self

    @model_validator(mode="after")
    def _adapters(self) -> "Ppo":
        if self.lora is not None and self.lora.dropout:
            raise ParamsError(
                f"ppo.lora.dropout={self.lora.dropout}: with dropout the policy that learns is not the one that sampled. "
                "Set ppo.lora.dropout: 0.0 in params.yaml."
            )
        if self.layout == "shared_base" and self.lora is None:
            raise ParamsError(
                "ppo.layout=shared_base shares one frozen base between adapters, and ppo.lora is null. "
                "Set ppo.lora, or layout: separate in params.yaml."
            )
        return self

    @model_validator(mode="after")
    def _engine(self) -> "Ppo":
        if self.layout == "shared_trunk" and self.rollout_engine == "paged":
            raise ParamsError(
                "ppo.rollout_engine=paged gives no values, and ppo.layout=shared_trunk takes them from the rollout. "
                "Set rollout_engine: static or layout: separate in params.yaml."
            )
        return self


class Dpo(Optimisation):
    """Direct preference optimisation of the SFT model on the preference pairs; neither reward model nor sampling."""

    beta: Annotated[float, Field(gt=0)] = Field(
        description="Strength of the pull towards the SFT model: a pair's margin is beta times the change of its log-odds, in nats."
    )
    loss: Literal["sigmoid", "robust", "ipo"] = Field(
        description="sigmoid: as published (Rafailov et al. 2023). robust: unbiased when labels are flipped with probability "
        "label_smoothing. ipo: squared distance of the mean log-ratio per token from 1 / (2 beta)."
    )
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        description="Probability that a pair's label is wrong; for loss robust, 0 with the others."
    )
    max_length: Positive = Field(description="Prompt plus reply, in tokens; longer pairs are dropped and counted.")

    @model_validator(mode="after")
    def _batches(self) -> "Dpo":
        _splits("dpo", "batch_size", self.batch_size, "micro_batch_size", self.micro_batch_size)
        if self.label_smoothing and self.loss != "robust":
            raise ParamsError(
                f"dpo.label_smoothing={self.label_smoothing} has no effect with dpo.loss={self.loss}. "
                "Set dpo.loss: robust or dpo.label_smoothing: 0.0 in params.yaml."
            )
        return self


class Rloo(Section):
    """REINFORCE leave-one-out of the SFT model against the reward model: the other responses to a prompt are the baseline."""

    lora: Lora | None = Field(description=LORA)
    optimizer: OptimizerName = Field(description=OPTIMIZER)
    updates: Positive = Field(description="Rollouts, each followed by rloo_epochs passes over it.")
    batch_size: Positive = Field(description="Episodes (one response each) per update, over all processes.")
    responses_per_prompt: Annotated[int, Field(ge=2)] = Field(
        description="Responses drawn from each prompt, each the baseline of the others; must divide the batch."
    )
    max_new_tokens: Positive = Field(description="Longest response, in tokens.")
    temperature: Annotated[float, Field(gt=0)] = Field(description="Sampling temperature, applied to log-probabilities alike.")
    rollout_batch_size: Positive = Field(description="Responses generated side by side.")
    rloo_epochs: Positive = Field(description="Passes over each rollout.")
    num_mini_batches: Positive = Field(description="Optimizer steps per pass; must divide the batch.")
    micro_batch_size: Positive = Field(description="Responses per forward and backward pass; must divide a mini-batch.")
    learning_rate: Rate = Field(description="Peak learning rate of AdamW.")
    schedule: Literal["constant", "linear"] = Field(description="Learning rate over the updates.")
    adam_beta2: Annotated[float, Field(gt=0, lt=1)] = Field(description="AdamW decay of the squared gradient's mean.")
    max_grad_norm: Annotated[float, Field(gt=0)] = Field(description="Gradient norm is clipped to this.")
    activation_checkpointing: bool = Field(description="Recompute activations in the backward pass: less memory, about a third more time.")
    beta: Annotated[float, Field(ge=0)] = Field(
        description="KL coefficient: nats of KL to the SFT model per response are taken from its score, times this; 0 needs no reference."
    )
    cliprange: Annotated[float, Field(gt=0, lt=1)] = Field(description="Clip range of a response's probability ratio, new over old policy.")
    normalise_advantages: bool = Field(description="Scale the advantages of an update to mean 0 and standard deviation 1.")
    missing_eos_penalty: Annotated[float, Field(ge=0)] = Field(
        description="Taken from the score of a response that has no end-of-sequence token."
    )
    score_clip: Annotated[float, Field(gt=0)] | None = Field(description="Clip scores to plus or minus this; null does not clip.")
    checkpoint_every_updates: Positive = Field(description="Updates between checkpoints.")
    sample_every_updates: Positive = Field(description="Updates between rows of sample responses.")

    @model_validator(mode="after")
    def _batches(self) -> "Rloo":
        _splits("rloo", "batch_size", self.batch_size, "num_mini_batches", self.num_mini_batches)
        _splits("rloo", "batch_size", self.batch_size, "responses_per_prompt", self.responses_per_prompt)
        mini_batch = self.batch_size // self.num_mini_batches
        if mini_batch % self.micro_batch_size:
            raise ParamsError(
                f"rloo.micro_batch_size={self.micro_batch_size} does not divide a mini-batch of {mini_batch} "
                f"(rloo.batch_size={self.batch_size} / rloo.num_mini_batches={self.num_mini_batches}). Change one of them in params.yaml."
            )
        if self.lora is not None and self.lora.dropout:
            raise ParamsError(
                f"rloo.lora.dropout={self.lora.dropout}: with dropout the policy that learns is not the one that sampled. "
                "Set rloo.lora.dropout: 0.0 in params.yaml."
            )
        return self


class Evaluate(Section):
    """Base, SFT and aligned model compared on held-out prompts."""

    prompts: Positive = Field(description="Held-out prompts to answer.")
    max_new_tokens: Positive = Field(description="Longest response, in tokens.")
    temperature: Annotated[float, Field(ge=0)] = Field(description="Sampling temperature; 0 is greedy.")
    batch_size: Positive = Field(description="Responses generated side by side.")
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = Field(description="Level of every interval.")
    samples: Positive = Field(description="Replies shown side by side in the report.")


# ---------------------------------------------------------------- processes


class Processes(Section):
    """How many processes share a stage's work: the same batches and steps, the same result to rounding. Changing it retrains nothing."""

    sft: Positive = Field(description="Processes of stage sft: one per GPU, or several on a CPU. Must divide sft.batch_size.")
    reward: Positive = Field(description="Processes of stage reward. Must divide reward.batch_size.")
    ppo: Positive = Field(description="Processes of stage ppo: rollouts and mini-batches are divided by tokens.")


# ---------------------------------------------------------------- money and tracking


def _iso(value: object) -> object:
    """YAML reads an unquoted day as a date; what is meant is its text."""
    return value.isoformat() if isinstance(value, date) else value


class Prices(Section):
    """What a device costs. Changing a price never retrains anything."""

    device: str | None = Field(
        description="Device that a run is planned for, a name of costs/hardware.yaml such as a100-80; null is this machine."
    )
    usd_per_device_hour: Annotated[float, Field(ge=0, le=1000)] = Field(
        description="Price of one device (GPU, or this machine's CPU) per hour, in US dollars; of own hardware what an hour of it is worth."
    )
    usd_per_kwh: Annotated[float, Field(ge=0, le=10)] | None = Field(
        description="Price of electricity, in US dollars per kWh, on top of the hourly price; null where that includes it."
    )
    watts: Annotated[float, Field(gt=0, le=100_000)] | None = Field(
        description="Power of one device at work, in watts; null takes that of the device in costs/hardware.yaml."
    )
    source: str = Field(description="Where the price was read.")
    date: Annotated[str, BeforeValidator(_iso)] = Field(pattern=r"^\d{4}-\d{2}-\d{2}$", description="Day it was read, YYYY-MM-DD.")

    @model_validator(mode="after")
    def _believable(self) -> "Prices":
        if self.usd_per_device_hour == 0 and not self.usd_per_kwh:
            raise ParamsError(
                "prices.usd_per_device_hour=0 with no prices.usd_per_kwh: an hour of a device costs something. Set either in params.yaml."
            )
        if not self.source.strip():
            raise ParamsError("prices.source is empty: say where the price was read. Set it in params.yaml.")
        try:
            date.fromisoformat(self.date)
        except ValueError:
            raise ParamsError(f"prices.date={self.date} is no day of the calendar. Set it to the day the price was read.") from None
        return self


Limit = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Budget(Section):
    """What a run may cost. Changing a budget never retrains anything; a run stopped at it goes on when it is raised."""

    max_usd: Limit | None = Field(
        description="Most that the run may cost in US dollars, failed attempts and the runs it goes on from included; null is no limit."
    )
    max_hours: Limit | None = Field(description="Longest that its stages may take together, in hours of wall time; null is no limit.")
    max_usd_by_stage: dict[str, Limit] = Field(description="Stage -> most that it may cost in US dollars; {} is no limit.")
    max_hours_by_stage: dict[str, Limit] = Field(description="Stage -> longest that it may take in hours; {} is no limit.")
    gate: Literal["refuse", "warn"] = Field(
        description="A run planned above the budget: refuse does not start it, warn starts it and stops it at the budget."
    )
    approval_usd: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        description="A run planned above this many US dollars waits until somebody approves of it; null never asks."
    )

    @model_validator(mode="after")
    def _stages(self) -> "Budget":
        for name, limits in (("max_usd_by_stage", self.max_usd_by_stage), ("max_hours_by_stage", self.max_hours_by_stage)):
            for stage in limits:
                if stage not in STAGES:
                    close = difflib.get_close_matches(stage, STAGES, n=1)
                    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(STAGES)}."
                    raise ParamsError(f"budget.{name} limits {stage}, which is no stage; {hint} Change it in params.yaml.")
        return self


class Tracking(Section):
    """Where MLflow remembers the runs. Never part of a stage's validity."""

    uri: str = Field(description="MLflow tracking URI: a server's URL or a database such as sqlite:///mlflow.db.")
    experiment: str = Field(description="MLflow experiment.")
    registered_model: str = Field(description="Name under which the aligned model is registered.")


class Params(Section):
    """A whole run."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(description="Seeds data generation, initial weights, data order and sampling.")
    model: Model
    data: Data
    sft: Sft
    reward: Reward
    align: Align
    ppo: Ppo
    dpo: Dpo
    rloo: Rloo
    evaluate: Evaluate
    processes: Processes
    prices: Prices
    budget: Budget
    tracking: Tracking

    @model_validator(mode="after")
    def _lengths_fit(self) -> "Params":
        limit = self.model.context_length
        for name, length in (
            ("sft.max_length", self.sft.max_length),
            ("reward.max_length", self.reward.max_length),
            ("ppo.max_new_tokens", self.ppo.max_new_tokens + 1),
            ("dpo.max_length", self.dpo.max_length),
            ("rloo.max_new_tokens", self.rloo.max_new_tokens + 1),
            ("evaluate.max_new_tokens", self.evaluate.max_new_tokens + 1),
        ):
            if length > limit:
                raise ParamsError(f"{name}={length} does not fit in model.context_length={limit}. Change either in params.yaml.")
        for name, batch, processes in (
            ("sft", self.sft.batch_size, self.processes.sft),
            ("reward", self.reward.batch_size, self.processes.reward),
        ):
            if batch % processes:
                raise ParamsError(
                    f"{name}.batch_size={batch} does not split over processes.{name}={processes}. Change either in params.yaml."
                )
        if self.sft.packing and self.model.attention != "flash_attention_2":
            raise ParamsError(
                f"sft.packing=true mixes rows in one sequence unless model.attention is flash_attention_2, it is {self.model.attention}. "
                "Set sft.packing: false in params.yaml."
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_a_base(self) -> "Params":
        if self.model.random is not None:
            for section, stands in (("sft", self.sft.lora), ("reward", self.reward.lora if self.reward.init == "base" else None)):
                if stands is not None:
                    raise ParamsError(
                        f"{section}.lora adapts the weights of model.random, which have learnt nothing and are in no folder. "
                        f"Set {section}.lora: null, or model.path in params.yaml."
                    )
        if self.align.method != "ppo":
            return self
        if self.model.quantisation is not None and self.ppo.lora is None:
            raise ParamsError(
                f"model.quantisation={self.model.quantisation} with ppo.lora null: the policy would learn from other weights than its "
                "reference has. Set ppo.lora, or model.quantisation: null in params.yaml."
            )
        if self.ppo.layout == "shared_base" and (self.reward.lora is None or (self.reward.init == "base" and self.sft.lora is None)):
            raise ParamsError(
                f"ppo.layout=shared_base needs a reward model that is an adapter on the SFT model's base; reward.lora is "
                f"{'null' if self.reward.lora is None else 'set'}, reward.init is {self.reward.init}. "
                "Set reward.lora and reward.init: sft, or ppo.layout: separate in params.yaml."
            )
        return self
