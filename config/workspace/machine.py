"""A machine as `rlhf calibrate` measured it: written by training/calibrate/machine.py, planned with
by costs/tables/measured.py.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

MACHINE_FILE = Path(".rlhf/hardware.yaml")
"""Path in the project; the planner uses it if no device is named."""
SERVING_FILE = Path(".rlhf/serving.yaml")
"""Serving rates of this machine, written with it."""


BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")
"""Flags of /proc/cpuinfo, the faster first; without either, bf16 matrix products are emulated."""


def bf16_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """The processor's fastest bf16 instructions, None without any."""
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
    """An addition of two tensors into a new one, which moves three times `bytes`."""

    bytes: int
    """Size of one tensor."""
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
    """Shape of a Llama's layers, with as many key heads as query heads."""

    width: int
    layers: int
    heads: int
    mlp_width: int


class Passes(Trunk):
    """A whole Llama trunk. Its time beyond matrix products and attention is memory traffic and
    launches.
    """

    sequences: int
    tokens: int
    forward_seconds: float
    """Forward pass without gradients."""
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
    """Seconds for the logits."""
    draw_seconds: float
    """Seconds to sample tokens from them."""


class Generation(Trunk):
    """Sampling `new_tokens` for each of `sequences` prompts of `prompt_tokens`; none ends early."""

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
    """A stage process on a handful of rows and a negligible model: every stage's fixed cost."""

    imports_seconds: float
    start_seconds: float
    """Imports, reading and loading, up to the first step."""
    step_seconds: float
    """One optimizer step (for ppo one update) of a negligible model."""
    after_imports_bytes: int
    """Resident set size."""


class Loop(Trunk):
    """Updates of our PPO as the stage runs them, on a small but not negligible model: CPU seconds
    per update.
    """

    vocab: int
    sequences: int
    """Responses of an update, sampled in parallel."""
    prompt_tokens: float
    """Mean prompt length."""
    response_tokens: int
    """Length of every response: none ends early."""
    micro_batch_tokens: int
    epochs: int
    mini_batches: int
    rollout_seconds: float
    scoring_seconds: float
    """Passes of the reward model, the reference and the value model together."""
    update_seconds: float
    trunks: tuple[Passes, ...]
    """Some of the machine's `passes`, measured right afterwards in the same process: the machine's
    speed at that time.
    """


class Machine(Part):
    """One machine as measured on `date`, with one process of `threads` threads."""

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
    """Some of `passes` with fp32 weights under bf16 autocast; empty if bf16 is emulated, and in
    files of earlier versions.
    """
    vocabulary: tuple[Vocabulary, ...]
    sampling: tuple[Sampling, ...]
    generation: tuple[Generation, ...]
    optimizer: tuple[AdamStep, ...]
    decode_step_seconds: float
    """One token for one sequence of a two-layer trunk of width 32 with a cache: launches only."""
    stages: dict[str, StageProcess]
    """`sft` stands for the stages on a Trainer, `ppo` for the others."""
    loop: Loop
    """Ratio of a real stage's time to the best its parts can reach."""
    seconds: float
    """Duration of the measurement."""


class ServedPoint(Part):
    """One load on a server of a model with random weights: a constant number of concurrent
    requests.
    """

    weights: str
    """f32, q8_0 or q4_0."""
    parameters: int
    """Parameters of the matrices that a token passes through, output head included."""
    layers: int
    concurrency: int
    input_tokens: float
    """Mean per request."""
    output_tokens: float
    seconds_per_reply: float
    """Seconds per reply of the server, which answers several at once: 1 / (replies per second)."""
    ttft_seconds: float
    """Median."""


class ServingRates(Part):
    """Speed of front and llama.cpp on this machine, at its pace at that time."""

    pace_seconds: float
    """Mean seconds of a fixed piece of work (serving/bench/pace.py) between the loads; each load's
    times are scaled to it.
    """
    processor: str
    date: str
    small: tuple[ServedPoint, ...]
    """A negligible model: the cost of every request and token whatever the model. The same
    concurrencies for each length of replies.
    """
    deep: tuple[ServedPoint, ...]
    """A model with many layers and few parameters, at the same concurrencies."""
    large: tuple[ServedPoint, ...]
    """A model whose weights exceed the caches. By weights: the same concurrencies, and one load
    with long prompts and a concurrency of 1.
    """
    process_bytes: int
    """Resident memory of both processes beyond weights and cache."""
    seconds: float
    """Duration of the measurement."""
