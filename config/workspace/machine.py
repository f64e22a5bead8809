"""What `rlhf calibrate` found out about a machine: training/calibrate/machine.py measures and
writes it, costs/tables/measured.py makes a plan of it.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

MACHINE_FILE = Path(".rlhf/hardware.yaml")
"""Below the project; the planner takes it for the device of a plan that names none."""
SERVING_FILE = Path(".rlhf/serving.yaml")
"""What `rlhf serve` does on this machine, written with it."""


BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
"""Flags of /proc/cpuinfo, the faster first; without one, products in bf16 are emulated."""


def bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The flag of this processor's fastest instructions for bf16, None without any."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return next((flag for flag in BF16_INSTRUCTIONS if flag in flags), None)


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Product(Part):
    """A matrix product [rows, width] x [width, width]."""

    dtype: str
    rows: int
    width: int
    flops_per_second: float


class Stream(Part):
    """An addition of two tensors into a new one: three times `bytes` are moved."""

    bytes: int
    """Of one tensor."""
    bytes_per_second: float


class Attention(Part):
    """Causal scaled dot-product attention over sequences of `tokens`, the masked half of the square
    not counted.
    """

    tokens: int
    head_dim: int
    forward_flops_per_second: float
    training_flops_per_second: float
    """Forward and backward pass, at 3.5 times the forward's FLOPs."""


class Trunk(Part):
    """Sizes of a Llama's layers, all heads with keys of their own."""

    width: int
    layers: int
    heads: int
    mlp_width: int


class Passes(Trunk):
    """A whole Llama trunk: what is left of its time beside matrix products and attention are
    streams and launches.
    """

    sequences: int
    tokens: int
    forward_seconds: float
    """Without gradients."""
    training_seconds: float
    """Forward and backward pass."""


class Vocabulary(Part):
    """Log-probabilities of `tokens` tokens over `vocab` entries from hidden states of `width`."""

    tokens: int
    vocab: int
    width: int
    forward_seconds: float
    training_seconds: float


class Sampling(Part):
    """A token for each of `rows` sequences, from hidden states of `width` and a vocabulary of
    `vocab` entries.
    """

    rows: int
    vocab: int
    width: int
    product_seconds: float
    """Of the logits."""
    draw_seconds: float
    """Of what makes tokens of them."""


class Generation(Trunk):
    """Sampling `new_tokens` for each of `sequences` prompts of `prompt_tokens`, none of which ends
    early.
    """

    vocab: int
    sequences: int
    prompt_tokens: int
    new_tokens: int
    seconds: float


class AdamStep(Part):
    """A fused AdamW step over fp32 weights."""

    parameters: int
    seconds: float


class StageProcess(Part):
    """A stage process on two handfuls of rows and a model of no size: what every stage pays
    whatever its model.
    """

    imports_seconds: float
    start_seconds: float
    """Imports, reading, loading, up to the first step."""
    step_seconds: float
    """Of one optimizer step (update, for ppo) of a model of no size."""
    after_imports_bytes: int
    """Resident set."""


class Loop(Trunk):
    """Updates of our PPO as the stage runs them, on a model that is quick and yet computes: CPU
    seconds of one update.
    """

    vocab: int
    sequences: int
    """Responses of an update, sampled side by side."""
    prompt_tokens: float
    """Mean of a prompt."""
    response_tokens: int
    """Of every response: none ends early."""
    micro_batch_tokens: int
    epochs: int
    mini_batches: int
    rollout_seconds: float
    scoring_seconds: float
    """Of the reward model's, the reference's and the value model's passes together."""
    update_seconds: float
    trunks: tuple[Passes, ...]
    """Some of the machine's `passes`, measured right after in the same process: how fast the
    machine was then.
    """


class Machine(Part):
    """One machine as it was measured on `date`. Rates are of one process with `threads` threads."""

    name: str
    """`cpu`, or the accelerator's name."""
    processor: str
    threads: int
    memory_bytes: int
    usable_bytes: int
    torch: str
    date: str
    products: tuple[Product, ...]
    streams: tuple[Stream, ...]
    attention: tuple[Attention, ...]
    passes: tuple[Passes, ...]
    autocast: tuple[Passes, ...] = ()
    """Some of the same with fp32 weights under bf16 autocast; empty where products in bf16 are
    emulated, and in files of earlier versions.
    """
    vocabulary: tuple[Vocabulary, ...]
    sampling: tuple[Sampling, ...]
    generation: tuple[Generation, ...]
    optimizer: tuple[AdamStep, ...]
    decode_step_seconds: float
    """One token for one sequence of a two-layer trunk of width 32 with a cache: launches alone."""
    stages: dict[str, StageProcess]
    """`sft` stands for the stages on a Trainer, `ppo` for the others."""
    loop: Loop
    """How far a real stage is from the best that its parts can do."""
    seconds: float
    """That the measurement took."""


class ServedPoint(Part):
    """One load on a server of a model with random weights: a constant number of concurrent
    requests.
    """

    weights: str
    """f32, q8_0 or q4_0."""
    parameters: int
    """Of the matrices that a token passes through, output head included."""
    layers: int
    concurrency: int
    input_tokens: float
    """Of a request, on average."""
    output_tokens: float
    seconds_per_reply: float
    """Of the server, which answers several at once: 1 / (replies a second)."""
    ttft_seconds: float
    """Median."""


class ServingRates(Part):
    """How front and llama.cpp serve on this machine. Times are at its pace then."""

    pace_seconds: float
    """Of a fixed piece of work (serving/bench/pace.py): the mean between the loads. Each load's
    times are put to it.
    """
    processor: str
    date: str
    small: tuple[ServedPoint, ...]
    """Of a model that is hardly there: what every request and token costs whatever the model. The
    same concurrencies for each length of replies.
    """
    deep: tuple[ServedPoint, ...]
    """Of one with many layers and few parameters, at the same concurrencies."""
    large: tuple[ServedPoint, ...]
    """Of one whose weights exceed the caches. By weights: the same concurrencies, and one load with
    long prompts and a concurrency of 1.
    """
    process_bytes: int
    """Resident memory of both processes beside weights and cache."""
    seconds: float
    """That the measurement took."""
