"""Input of the formulas: how a model is held and trained (Levers), how much work there is (Workload), on which device
(Setting).

A Setting needs no params.yaml, so a published measurement can be planned as it was printed; `costs.planning.settings`
makes them from Params.
"""

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from config.errors import CostError
from costs.tables.catalogue import Hardware
from costs.tables.engines import Engine
from costs.tables.losses import Loss, loss
from costs.tables.rates import EFFICIENCY, Efficiency
from costs.tables.shapes import ModelShape

Tuning = Literal["full", "lora", "frozen"]
Parallel = Literal["ddp", "zero1", "zero2", "zero3", "fsdp"]
Optimizer = Literal["adamw", "adamw8bit"]
Checkpointing = Literal["none", "full"]
Attention = Literal["flash", "sdpa", "eager"]

TRAINER_STAGES = ("sft", "pretrain", "reward", "dpo", "kto")
"""Stages that use TRL's trainers, whose imports take more time and memory."""
EVALUATED = 3
"""Models that an evaluation asks: base, SFT and aligned; a student is one more."""
DTYPE_BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0}
QUANT_BYTES = {"int8": 1.0, "nf4": 0.5 + 4 / 64, "nf4-dq": 0.5 + 1 / 64 + 4 / (64 * 256), "int4": 0.5 + 4 / 32}
"""Bytes per weight with their scales: NF4 has one fp32 scale in 64 weights, double quantisation an 8-bit one and one
fp32 in 256 of those (arXiv 2305.14314 section 3); int8 has one per row; int4 a 16-bit scale and zero in 32 weights
(gpt-fast's default).
"""


@dataclass(frozen=True)
class Levers:
    """How one trained model is held: every setting that makes a run fit or cheaper."""

    tuning: Tuning = "full"
    lora_rank: int = 8
    lora_modules: tuple[str, ...] = ("q", "v")
    lora_dropout: bool = False
    quantisation: str | None = None
    """Storage of frozen weights: nf4, nf4-dq, int8, int4; None keeps them in `dtype`."""
    dtype: str = "bf16"
    """Compute type."""
    weights_fp32: bool = False
    """Trained weights are fp32 and cast for computing (mixed precision); else they are in `dtype`, and so is the
    optimizer state.
    """
    wide_unquantised: bool = False
    """Beside quantised matrices, embedding, head and norms are fp32 (PEFT's preparation for k-bit training)."""
    master_fp32: bool = False
    """Weights and gradients are in `dtype`, and the optimizer keeps fp32 weights beside fp32 moments (DeepSpeed,
    Megatron).
    """
    optimizer: Optimizer = "adamw"
    micro_batch: int = 1
    """Sequences per forward pass on one device."""
    accumulation: int = 1
    checkpointing: Checkpointing = "none"
    attention: Attention = "sdpa"
    loss: str | None = None
    """None takes the engine's own."""
    parallel: Parallel = "ddp"
    offload_optimizer: bool = False
    offload_weights: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (
            ("tuning", Tuning),
            ("parallel", Parallel),
            ("optimizer", Optimizer),
            ("checkpointing", Checkpointing),
            ("attention", Attention),
        ):
            value = getattr(self, name)
            if value not in get_args(allowed):
                raise CostError(
                    f"{name}={value!r} is not one of {', '.join(get_args(allowed))}. Change it in the setting."
                )
        if self.dtype not in DTYPE_BYTES:
            raise CostError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}. Change model.dtype.")
        if self.quantisation is not None and self.quantisation not in QUANT_BYTES:
            raise CostError(
                f"quantisation={self.quantisation!r} is not one of {', '.join(QUANT_BYTES)}. Change it in the setting."
            )
        if min(self.micro_batch, self.accumulation, self.lora_rank) < 1:
            raise CostError(
                f"micro_batch={self.micro_batch}, accumulation={self.accumulation}, "
                f"lora_rank={self.lora_rank} must all be at least 1."
            )

    @property
    def dtype_bytes(self) -> float:
        return DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> float:
        """Bytes per weight that is not quantised."""
        return 4.0 if self.weights_fp32 else self.dtype_bytes

    @property
    def mixed(self) -> bool:
        return self.weights_fp32 and self.dtype_bytes < 4


@dataclass(frozen=True)
class Workload:
    """The amount of work."""

    max_tokens: int
    """Longest sequence in a batch, padding included: it decides memory."""
    mean_tokens: float
    """Mean tokens of a sequence, padding included: they decide time."""
    steps: float
    """Optimizer steps (or batches, where nothing is trained)."""
    prompt_tokens: int = 0
    """Longest prompt of a generating stage."""
    response_tokens: int = 0
    """Longest response of a generating stage."""
    mean_response_tokens: float = 0.0
    decoded_tokens: float = 0.0
    """Expected longest response in a batch of a generating stage, which ends the steps of the batch; 0 means the
    limit.
    """
    loss_tokens: float = 1.0
    """Share of the tokens that the loss looks at (completion-only loss: below 1)."""
    read_tokens: float = 1.0
    """Share of the tokens whose last hidden state is read, and at which alone the last layer's feed-forward part runs
    where the engine packs rows.
    """
    micro_batch_tokens: float | None = None
    """Tokens of a pass that is filled up with rows without padding; None: `micro_batch` sequences of `max_tokens`."""
    held_out: float = 0.0
    """Sequences that are evaluated once after training."""
    attention_places: float = 1.0
    """Places that attention has for each token that passes through the model: above 1 where the tokens that two
    sequences begin with pass once, as attention sees them in both.
    """
    masked: bool = False
    """Where sequences of a micro-batch differ in length, attention gets a mask of the
    padding.
    """
    reference_sequences: float | None = None
    """Sequences whose reference log-probs DPO computes once, with the weights that training starts from, so that it
    holds no reference. None: a reference beside the policy is used in every step.
    """

    @property
    def response_mean(self) -> float:
        """Mean tokens of a response; of the longest where the mean is not known."""
        return self.mean_response_tokens or float(self.response_tokens)


@dataclass(frozen=True)
class Rlhf:
    """Further roles of an alignment stage beside its policy, and the shape of its loop."""

    layout: Literal["separate", "shared_base", "shared_trunk"] = "separate"
    ref: bool = True
    reward: ModelShape | None = None
    """None where a function takes its place."""
    function_seconds: float = 0.0
    """Seconds of that function per response."""
    value: ModelShape | None = None
    value_levers: Levers | None = None
    """How the value model is trained; None as the policy."""
    reward_levers: Levers | None = None
    """How the reward model's adapter is shaped; None: it has none, or on a shared base one as the policy's."""
    ref_levers: Levers | None = None
    """How the SFT model's adapter is shaped, which the reference keeps; None: it has none."""
    teacher: ModelShape | None = None
    """Teacher of a distillation."""
    teacher_quantisation: str | None = None
    student_share: float = 0.0
    """Share of all responses that the student samples; the teacher samples the others."""
    taught_share: float = 1.0
    """Share of the updates that learn from the teacher's probabilities, not its responses alone."""
    batch: int = 1
    """Responses of one rollout, over all devices."""
    group: int = 1
    """Responses to the same prompt, which is read once for all of them."""
    rollout_batch: int = 1
    """Responses generated side by side on one device."""
    ppo_epochs: int = 1
    mini_batches: int = 1
    evaluated: int = EVALUATED
    """Models that an evaluation runs."""
    rescored: int = 0
    """Responses of a rollout whose log-probs the policy computes once more, over all devices; 0 where that is no
    phase.
    """


@dataclass(frozen=True)
class Setting:
    """One stage to plan."""

    stage: str
    model: ModelShape
    levers: Levers
    workload: Workload
    hardware: Hardware
    engine: Engine
    gpus: int = 1
    rented: int = 0
    """Devices that are paid for while the stage runs, those that wait included; 0: as many as it uses."""
    devices_per_node: int = 8
    rlhf: Rlhf | None = None
    efficiency: Efficiency = EFFICIENCY
    assumptions: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise CostError(f"gpus={self.gpus} must be at least 1. Change --gpus.")

    @property
    def devices(self) -> int:
        """Devices that work: one for each process, but a node's CPU is one for all."""
        return max(1, self.gpus // self.devices_per_node) if self.hardware.is_cpu else self.gpus

    @property
    def paid_gpus(self) -> int:
        """Devices that are paid for: those that work, and those that are rented with them."""
        return max(self.devices, self.rented)

    @property
    def accelerator_bytes(self) -> float:
        """Memory of one device, 0 on a CPU."""
        return 0.0 if self.hardware.is_cpu else self.hardware.memory_bytes

    def prompts_of(self, sequences: float) -> float:
        """Prompts that are read for so many responses side by side."""
        return max(1.0, sequences / self.rlhf.group) if self.rlhf is not None else sequences

    @property
    def loss(self) -> Loss:
        return loss(self.levers.loss or self.engine.loss)

    @property
    def micro_batch_tokens(self) -> float:
        """Most tokens of one forward pass on one device."""
        return self.workload.micro_batch_tokens or (1.0 * self.levers.micro_batch * self.workload.max_tokens)

    @property
    def mask_tensor(self) -> bool:
        """Whether `sdpa` gets its mask as a tensor [sequence, tokens, tokens]: each layer then keeps one for its
        backward pass, and computes the scores above the diagonal too. Transformers leaves the mask out where no token
        is padding, and `flash` needs none.
        """
        work, levers = self.workload, self.levers
        return (
            work.masked
            and work.mean_tokens < work.max_tokens
            and levers.attention == "sdpa"
            and levers.micro_batch > 1
        )

    def with_levers(self, **changes: object) -> "Setting":
        """The setting with other levers; a new micro-batch replaces a token budget."""
        workload = replace(self.workload, micro_batch_tokens=None) if "micro_batch" in changes else self.workload
        return replace(self, levers=replace(self.levers, **changes), workload=workload)  # type: ignore[arg-type]
