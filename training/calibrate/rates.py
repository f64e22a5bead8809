"""The rates of this machine by size: matrix products, additions, attention, whole trunks,
log-probabilities, rollouts, AdamW steps.

Every rate is the best of several short repetitions in two rounds: other work on the machine only
ever makes them slower, and what slows down one round has often gone in the next. On a CPU a
repetition takes its wall or its CPU time, whichever is less, so that waiting for a core does not
count.

Shapes: B sequences, T tokens, N tokens one after another, D width, V vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, islice
from statistics import median

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)

from config.errors import EnvironmentFault
from config.workspace.machine import (
    AdamStep,
    Attention,
    Generation,
    Part,
    Passes,
    Product,
    Sampling,
    Stream,
    Vocabulary,
    bf16_instructions,
)
from training.modeling.logprobs import token_logprobs
from training.rollout.engine import Limits, draw, sampling_noise
from training.rollout.static import generate

Rates = Mapping[str, tuple[Part, ...]]
"""By field of config/workspace/machine.py."""

REPETITION_SECONDS = 0.06
"""Seconds per repetition: long against the clock's resolution, short enough that some repetition
has a core to itself.
"""
REPETITIONS = 2
PRODUCT_WIDTHS = (64, 128, 256, 512, 1024)
PRODUCT_ROWS = (1, 16, 128, 2048)
STREAM_BYTES = (2**14, 2**17, 2**20, 2**23, 2**24, 2**25, 2**26)
ATTENTION_TOKENS = (64, 256, 512)
TRUNKS = (
    # width, layers, heads, mlp_width, sequences, tokens: launches only, then tensors of 48 KiB to
    # 4 MiB
    (32, 2, 2, 64, 1, 8),
    (96, 2, 4, 256, 4, 32),
    (96, 2, 4, 256, 64, 32),
    (192, 2, 6, 512, 16, 128),
    (256, 2, 8, 768, 32, 128),
    (512, 2, 8, 1536, 4, 128),
)
SOME_TRUNKS = TRUNKS[1:4]
"""Enough to tell the machine's speed at a moment."""
VOCABULARIES = ((1024, 512, 128), (1024, 8192, 128))
"""Tokens, entries, width."""
SAMPLINGS = tuple((rows, vocab, 256) for rows in (8, 64) for vocab in (512, 32_000))
"""Rows, entries, width: heads within the caches and beyond."""
GENERATIONS = (
    # width, layers, heads, mlp_width, vocab, sequences, prompt_tokens, new_tokens
    (96, 2, 4, 256, 512, 128, 16, 12),
    (192, 2, 6, 512, 8192, 16, 64, 12),
    (256, 2, 8, 768, 512, 8, 192, 12),
)
AUTOCAST_TRUNKS = (*TRUNKS[:3], TRUNKS[5])
"""Launches only, small tensors, and a width at which bf16 pays."""
ADAM_PARAMETERS = (500_000, 16_000_000)
"""Within the caches, and far beyond."""


def best_seconds(
    work: Callable[[], object],
    repetition_seconds: float = REPETITION_SECONDS,
    repetitions: int = REPETITIONS,
) -> float:
    """Seconds of one call of `work`, mean of the best repetition, after one warm-up call."""
    work()
    _synchronise()
    best, calls = float("inf"), 1
    for _ in range(repetitions):
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            work()
        _synchronise()
        wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        best = min(best, (wall if torch.accelerator.is_available() else min(wall, cpu)) / calls)
        calls = max(1, round(repetition_seconds / best))
    return best


def _synchronise() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


# ---------------------------------------------------------------- rates


def products(device: str) -> Iterator[Product]:
    """Matrix products by size and dtype; without types that the CPU emulates."""
    on_cpu = ("fp32", *(("bf16",) if bf16_instructions() else ()))
    for dtype in on_cpu if device == "cpu" else ("fp32", "bf16", "fp16"):
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        for width in PRODUCT_WIDTHS if device == "cpu" else (*PRODUCT_WIDTHS, 4096):
            weight_DD = torch.randn(width, width, dtype=kind, device=device)
            for rows in PRODUCT_ROWS:
                x_ND = torch.randn(rows, width, dtype=kind, device=device)
                seconds = best_seconds(
                    partial(torch.matmul, x_ND, weight_DD), REPETITION_SECONDS / 4
                )
                yield Product(
                    dtype=dtype,
                    rows=rows,
                    width=width,
                    flops_per_second=2 * rows * width**2 / seconds,
                )


def streams(device: str) -> Iterator[Stream]:
    """Additions of two tensors into a third, which is allocated, as in eager execution."""
    for size in STREAM_BYTES:
        a, b = torch.ones(size // 4, device=device), torch.ones(size // 4, device=device)
        seconds = best_seconds(partial(torch.add, a, b), REPETITION_SECONDS / 4)
        yield Stream(bytes=size, bytes_per_second=3 * size / seconds)


def attention(device: str) -> Iterator[Attention]:
    """Causal attention of four heads of 32 features."""
    for tokens in ATTENTION_TOKENS:
        query, key, value = (
            torch.randn(8, 4, tokens, 32, device=device, requires_grad=True) for _ in range(3)
        )
        flops = 8 * 4 * 2 * 32 * tokens**2

        def forward(q: Tensor = query, k: Tensor = key, v: Tensor = value) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        def train(run: Callable[[], Tensor] = forward) -> None:
            run().sum().backward()

        with torch.no_grad():
            first = best_seconds(forward, REPETITION_SECONDS / 2)
        both = best_seconds(train, REPETITION_SECONDS / 2)
        yield Attention(
            tokens=tokens,
            head_dim=32,
            forward_flops_per_second=flops / first,
            training_flops_per_second=3.5 * flops / both,
        )


def trunk(width: int, layers: int, heads: int, mlp_width: int) -> PreTrainedModel:
    """A Llama trunk with random weights and a minimal vocabulary."""
    config = _llama(width, layers, heads, mlp_width, vocab_size=64)
    return AutoModel.from_config(config, attn_implementation="sdpa").eval()


def _llama(width: int, layers: int, heads: int, mlp_width: int, **tokens: int) -> PretrainedConfig:
    return AutoConfig.for_model(
        "llama",
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=mlp_width,
        max_position_embeddings=1024,
        **tokens,
    )


def autocast_passes(device: str) -> Iterator[Passes]:
    """Trunks with fp32 weights as a stage trains them with model.dtype bf16, where that is not
    emulated: each pass of a new shape, as packed batches are, for which oneDNN compiles a kernel
    per matrix.
    """
    if device == "cpu" and not bf16_instructions():
        return
    for width, layers, heads, mlp_width, sequences, tokens in AUTOCAST_TRUNKS:
        model = trunk(width, layers, heads, mlp_width).to(device)

        def forward(ids_BT: Tensor, model: PreTrainedModel = model) -> Tensor:
            with torch.autocast(device, torch.bfloat16):
                return model(input_ids=ids_BT, use_cache=False).last_hidden_state

        def train(ids_BT: Tensor, model: PreTrainedModel = model) -> None:
            forward(ids_BT, model).sum().backward()
            model.zero_grad(set_to_none=True)

        with torch.no_grad():
            first = new_shape_seconds(forward, sequences, tokens, device)
        yield Passes(
            width=width, layers=layers, heads=heads, mlp_width=mlp_width, sequences=sequences,
            tokens=tokens, forward_seconds=first,
            training_seconds=new_shape_seconds(train, sequences, tokens, device),
        )  # fmt: skip


SHAPES = count()
NEW_SHAPES = 10
SEEN = 2
"""Passes of one shape: policy and value model read the same batch."""


def new_shape_seconds(
    work: Callable[[Tensor], object], sequences: int, tokens: int, device: str
) -> float:
    """Seconds of `work` on ids [sequences, tokens], from batches that are a little smaller, each
    shape SEEN times and no more.
    """
    work(torch.randint(64, (sequences, tokens), device=device))
    _synchronise()
    total, began, began_cpu = 0, time.perf_counter(), time.process_time()
    for number in islice(SHAPES, NEW_SHAPES):
        rows = max(1, sequences - number // (tokens // 2) % sequences)
        columns = tokens - number % (tokens // 2)
        ids_BT = torch.randint(64, (rows, columns), device=device)
        for _ in range(SEEN):
            work(ids_BT)
        total += SEEN * rows * columns
    _synchronise()
    wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    seconds = wall if torch.accelerator.is_available() else min(wall, cpu)
    return seconds * sequences * tokens / total


def passes(device: str, trunks: Sequence[tuple[int, ...]] = ()) -> Iterator[Passes]:
    """Whole trunks, without gradients and with them."""
    for width, layers, heads, mlp_width, sequences, tokens in trunks or TRUNKS:
        model = trunk(width, layers, heads, mlp_width).to(device)
        ids_BT = torch.randint(64, (sequences, tokens), device=device)

        def forward(model: PreTrainedModel = model, ids_BT: Tensor = ids_BT) -> Tensor:
            return model(input_ids=ids_BT, use_cache=False).last_hidden_state

        def train(model: PreTrainedModel = model, run: Callable[[], Tensor] = forward) -> None:
            run().sum().backward()
            model.zero_grad(set_to_none=True)

        with torch.no_grad():
            first = best_seconds(forward)
        yield Passes(
            width=width,
            layers=layers,
            heads=heads,
            mlp_width=mlp_width,
            sequences=sequences,
            tokens=tokens,
            forward_seconds=first,
            training_seconds=best_seconds(train),
        )


def vocabulary(device: str) -> Iterator[Vocabulary]:
    """The log-probabilities of training/modeling/logprobs.py."""
    for tokens, vocab, width in VOCABULARIES:
        hidden_ND = torch.randn(tokens, width, device=device, requires_grad=True)
        weight_VD = torch.randn(vocab, width, device=device, requires_grad=True)
        targets_N = torch.randint(vocab, (tokens,), device=device)

        def forward(h: Tensor = hidden_ND, w: Tensor = weight_VD, t: Tensor = targets_N) -> Tensor:
            return token_logprobs(h, w, t, 1.0).logprobs

        def train(run: Callable[[], Tensor] = forward) -> None:
            run().sum().backward()

        with torch.no_grad():
            first = best_seconds(forward)
        yield Vocabulary(
            tokens=tokens,
            vocab=vocab,
            width=width,
            forward_seconds=first,
            training_seconds=best_seconds(train),
        )


def adam_steps(device: str) -> Iterator[AdamStep]:
    """Fused AdamW steps over one matrix."""
    for parameters in ADAM_PARAMETERS:
        weight = torch.nn.Parameter(torch.randn(parameters, device=device))
        weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.AdamW([weight], fused=True)
        yield AdamStep(parameters=parameters, seconds=best_seconds(optimizer.step))


@torch.no_grad()
def samplings(device: str) -> Iterator[Sampling]:
    """The output head in a decoding step, and sampling from its logits."""
    for rows, vocab, width in SAMPLINGS:
        hidden_BD, weight_VD = (
            torch.randn(rows, width, device=device),
            torch.randn(vocab, width, device=device),
        )
        logits_BV, uniform_B = hidden_BD @ weight_VD.T, torch.rand(rows, device=device)
        yield Sampling(
            rows=rows,
            vocab=vocab,
            width=width,
            product_seconds=best_seconds(
                partial(torch.matmul, hidden_BD, weight_VD.T), REPETITION_SECONDS / 4
            ),
            draw_seconds=best_seconds(
                partial(draw, logits_BV, uniform_B, 1.0), REPETITION_SECONDS / 4
            ),
        )


def generations(device: str) -> Iterator[Generation]:
    """Our own rollout, without end of sequence."""
    for width, layers, heads, mlp_width, vocab, sequences, prompt_tokens, new_tokens in GENERATIONS:
        tokens = {"vocab_size": vocab, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = _llama(width, layers, heads, mlp_width, **tokens)
        model = (
            AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device).eval()
        )
        prompts = [
            [3 + (i + j) % (vocab - 3) for j in range(prompt_tokens)] for i in range(sequences)
        ]
        noise_BT = sampling_noise(sequences, new_tokens, seed=1)

        def generate_all(
            model: PreTrainedModel = model,
            prompts: list[list[int]] = prompts,
            noise_BT: Tensor = noise_BT,
        ) -> None:
            generate(
                model,
                prompts,
                noise_BT,
                1.0,
                Limits(noise_BT.shape[1], eos=-1, pad=0),
                len(prompts),
            )

        yield Generation(
            width=width,
            layers=layers,
            heads=heads,
            mlp_width=mlp_width,
            vocab=vocab,
            sequences=sequences,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            seconds=best_seconds(generate_all),
        )


@torch.no_grad()
def decode_step_seconds(device: str) -> float:
    """One token for one sequence of the smallest trunk, its cache kept short."""
    width, layers, heads, mlp_width, _, _ = TRUNKS[0]
    model = trunk(width, layers, heads, mlp_width).to(device)
    ids_B1 = torch.ones(1, 1, dtype=torch.long, device=device)

    def ten_tokens() -> None:
        cache = DynamicCache(config=model.config)
        for _ in range(10):
            model(input_ids=ids_B1, past_key_values=cache, use_cache=True)

    return best_seconds(ten_tokens) / 10


# ---------------------------------------------------------------- rounds


def pace(device: str) -> list[dict[str, float]]:
    """Current times of some trunks, for JSON: the machine's speed now compared with its
    calibration.
    """
    with torch.enable_grad():
        return [each.model_dump() for each in passes(device, SOME_TRUNKS)]


def measured_round(device: str) -> Rates:
    """Every rate once."""
    return {
        "products": tuple(products(device)),
        "streams": tuple(streams(device)),
        "attention": tuple(attention(device)),
        "passes": tuple(passes(device)),
        "autocast": tuple(autocast_passes(device)),
        "vocabulary": tuple(vocabulary(device)),
        "sampling": tuple(samplings(device)),
        "generation": tuple(generations(device)),
        "optimizer": tuple(adam_steps(device)),
    }


def best_of(first: Rates, second: Rates) -> Rates:
    """The better of two rounds for every figure: most operations a second, fewest seconds."""
    return {
        name: tuple(_better(one, other) for one, other in zip(of_first, second[name], strict=True))
        for name, of_first in first.items()
    }


MOST_APART = 1.3
"""How many times slower the median figure of one round may be than the other round's.

With other programs on both of two cores, where waiting does not count but caches and clocks are
shared, five calibrations of one thread were 1.08 to 1.12 apart in the median, and a tenth of their
single figures 1.4 to 1.6: so the median is compared, and the bound is three times as far from 1.
"""


def agreed(first: Rates, second: Rates) -> Rates:
    """The better of two rounds that agree. Raises EnvironmentFault if they do not: other work
    slowed at least one of them.
    """
    apart = median(
        _times_apart(one, other)
        for name, of_first in first.items()
        for one, other in zip(of_first, second[name], strict=True)
    )
    if apart > MOST_APART:
        raise EnvironmentFault(
            f"two rounds of measurements are {apart:.2f} times apart in the median, {MOST_APART} "
            "is the most: the machine is busy, and plans from "
            "these rates would be wrong. Run rlhf calibrate again when nothing else is running."
        )
    return best_of(first, second)


def _times_apart(one: Part, other: Part) -> float:
    """The slower over the faster measurement of the same work, the largest of a part's figures."""
    then = other.model_dump()
    figures = [
        (value, then[name])
        for name, value in one.model_dump().items()
        if name.endswith(("_per_second", "seconds"))
    ]
    return max(max(pair) / min(pair) for pair in figures)


def _better(one: Part, other: Part) -> Part:
    """Of two measurements of the same work, the faster one of each figure."""
    then = other.model_dump()
    faster = {
        name: max(value, then[name]) if name.endswith("_per_second") else min(value, then[name])
        for name, value in one.model_dump().items()
        if name.endswith(("_per_second", "seconds"))
    }
    return one.model_copy(update=faster)
