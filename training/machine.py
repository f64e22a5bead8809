"""Measures this machine for the planner: `python -m training.machine` writes config/machine.py's Machine as YAML.

Every rate is the best of several short repetitions: other work on the machine only ever makes them slower. On a CPU a repetition takes
its wall or its CPU time, whichever is less, so that waiting for a core does not count; the start of a stage process is CPU time too.

Shapes: B sequences, T tokens, N tokens one after another, D width, V vocabulary.
"""

import argparse
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import psutil
import torch
import transformers
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from config.errors import EXIT_DONE, RlhfError
from config.machine import MACHINE_FILE, AdamStep, Attention, Generation, Machine, Passes, Product, Stream, Vocabulary
from training import heap
from training.artifacts import replacing
from training.logprobs import token_logprobs
from training.machine_stages import stage_processes
from training.rollout import Limits, sampling_noise
from training.rollout_static import generate

logger = logging.getLogger(__name__)

REPETITION_SECONDS = 0.1
"""Of one repetition: long against the clock's grain, short enough that some repetition has a core to itself."""
REPETITIONS = 3
PRODUCT_WIDTHS = (64, 128, 256, 512, 1024)
PRODUCT_ROWS = (1, 16, 128, 2048)
STREAM_BYTES = (2**14, 2**17, 2**20, 2**23, 2**24, 2**25, 2**26)
ATTENTION_TOKENS = (64, 256, 512)
TRUNKS = (
    # width, layers, heads, mlp_width, sequences, tokens: launches alone, then tensors of 48 KiB to 4 MiB
    (32, 2, 2, 64, 1, 8),
    (96, 2, 4, 256, 4, 32),
    (96, 2, 4, 256, 64, 32),
    (192, 2, 6, 512, 16, 128),
    (256, 2, 8, 768, 32, 128),
    (512, 2, 8, 1536, 4, 128),
)
VOCABULARIES = ((1024, 512, 128), (1024, 8192, 128))
"""Tokens, entries, width."""
GENERATIONS = (
    # width, layers, heads, mlp_width, vocab, sequences, prompt_tokens, new_tokens
    (96, 2, 4, 256, 512, 128, 16, 12),
    (192, 2, 6, 512, 8192, 16, 64, 12),
    (256, 2, 8, 768, 512, 8, 192, 12),
)
ADAM_PARAMETERS = (500_000, 16_000_000)
"""Within the caches, and far beyond them."""


def best_seconds(work: Callable[[], object], repetition_seconds: float = REPETITION_SECONDS, repetitions: int = REPETITIONS) -> float:
    """Seconds of one call of `work`, the mean of the best repetition; one call is made first to warm up."""
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
    """Matrix products by size and dtype. On a CPU only fp32: 16-bit products are emulated on most."""
    for dtype in ("fp32",) if device == "cpu" else ("fp32", "bf16", "fp16"):
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        for width in PRODUCT_WIDTHS if device == "cpu" else (*PRODUCT_WIDTHS, 4096):
            weight_DD = torch.randn(width, width, dtype=kind, device=device)
            for rows in PRODUCT_ROWS:
                x_ND = torch.randn(rows, width, dtype=kind, device=device)
                seconds = best_seconds(partial(torch.matmul, x_ND, weight_DD), REPETITION_SECONDS / 4)
                yield Product(dtype=dtype, rows=rows, width=width, flops_per_second=2 * rows * width**2 / seconds)


def streams(device: str) -> Iterator[Stream]:
    """Additions of two tensors into a third, which is allocated: as eager programs do."""
    for size in STREAM_BYTES:
        a, b = torch.ones(size // 4, device=device), torch.ones(size // 4, device=device)
        seconds = best_seconds(partial(torch.add, a, b), REPETITION_SECONDS / 4)
        yield Stream(bytes=size, bytes_per_second=3 * size / seconds)


def attention(device: str) -> Iterator[Attention]:
    """Causal attention of four heads of 32 features."""
    for tokens in ATTENTION_TOKENS:
        query, key, value = (torch.randn(8, 4, tokens, 32, device=device, requires_grad=True) for _ in range(3))
        flops = 8 * 4 * 2 * 32 * tokens**2

        def forward(q: Tensor = query, k: Tensor = key, v: Tensor = value) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        def train(run: Callable[[], Tensor] = forward) -> None:
            run().sum().backward()

        with torch.no_grad():
            first = best_seconds(forward, REPETITION_SECONDS / 2)
        both = best_seconds(train, REPETITION_SECONDS / 2)
        yield Attention(
            tokens=tokens, head_dim=32, forward_flops_per_second=flops / first, training_flops_per_second=3.5 * flops / both
        )  # fmt: skip


def trunk(width: int, layers: int, heads: int, mlp_width: int) -> PreTrainedModel:
    """A Llama trunk with random weights and a vocabulary of no size."""
    config = AutoConfig.for_model(
        "llama", hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        intermediate_size=mlp_width, vocab_size=64, max_position_embeddings=1024,
    )  # fmt: skip
    return AutoModel.from_config(config, attn_implementation="sdpa").eval()


def passes(device: str, trunks: Sequence[tuple[int, ...]] = TRUNKS) -> Iterator[Passes]:
    """Whole trunks, without gradients and with them."""
    for width, layers, heads, mlp_width, sequences, tokens in trunks:
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
            width=width, layers=layers, heads=heads, mlp_width=mlp_width, sequences=sequences, tokens=tokens, forward_seconds=first,
            training_seconds=best_seconds(train),
        )  # fmt: skip


def vocabulary(device: str) -> Iterator[Vocabulary]:
    """The log-probabilities of training/logprobs.py."""
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
        yield Vocabulary(tokens=tokens, vocab=vocab, width=width, forward_seconds=first, training_seconds=best_seconds(train))


def adam_steps(device: str) -> Iterator[AdamStep]:
    """Fused AdamW steps over one matrix."""
    for parameters in ADAM_PARAMETERS:
        weight = torch.nn.Parameter(torch.randn(parameters, device=device))
        weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.AdamW([weight], fused=True)
        yield AdamStep(parameters=parameters, seconds=best_seconds(optimizer.step))


def generations(device: str) -> Iterator[Generation]:
    """Our own rollout, with an end-of-sequence token that no model says."""
    for width, layers, heads, mlp_width, vocab, sequences, prompt_tokens, new_tokens in GENERATIONS:
        config = AutoConfig.for_model(
            "llama", hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
            intermediate_size=mlp_width, vocab_size=vocab, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device).eval()
        prompts = [[3 + (i + j) % (vocab - 3) for j in range(prompt_tokens)] for i in range(sequences)]
        noise_BT = sampling_noise(sequences, new_tokens, seed=1)

        def generate_all(model: PreTrainedModel = model, prompts: list[list[int]] = prompts, noise_BT: Tensor = noise_BT) -> None:
            generate(model, prompts, noise_BT, 1.0, Limits(noise_BT.shape[1], eos=-1, pad=0), len(prompts))

        yield Generation(
            width=width, layers=layers, heads=heads, mlp_width=mlp_width, vocab=vocab, sequences=sequences, prompt_tokens=prompt_tokens,
            new_tokens=new_tokens, seconds=best_seconds(generate_all),
        )  # fmt: skip


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


# ---------------------------------------------------------------- the whole


def measure() -> Machine:
    """Everything, with a line of progress for each part."""
    began = time.perf_counter()
    device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"  # type: ignore[union-attr]

    def tell(part: str) -> None:
        logger.info("%5.1f s  %s", time.perf_counter() - began, part)

    tell("starting a stage of each kind in a process of its own")
    with tempfile.TemporaryDirectory() as folder:
        stages = stage_processes(Path(folder))
    tell("matrix products by size")
    found_products = tuple(products(device))
    tell("memory bandwidth by size")
    found_streams = tuple(streams(device))
    tell("attention")
    found_attention = tuple(attention(device))
    tell("whole models")
    found_passes = tuple(passes(device))
    tell("log-probabilities, optimizer, decoding")
    found_vocabulary = tuple(vocabulary(device))
    found_generations, found_steps, decode = tuple(generations(device)), tuple(adam_steps(device)), decode_step_seconds(device)
    name, memory, usable = device_memory(device)
    seconds = time.perf_counter() - began
    tell("done")
    return Machine(
        name=name, processor=processor_name(), threads=torch.get_num_threads(), memory_bytes=memory, usable_bytes=usable,
        torch=torch.__version__, date=datetime.now(UTC).date().isoformat(), products=found_products, streams=found_streams,
        attention=found_attention, passes=found_passes, vocabulary=found_vocabulary, generation=found_generations, optimizer=found_steps,
        decode_step_seconds=decode, stages=stages, seconds=seconds,
    )  # fmt: skip


def device_memory(device: str) -> tuple[str, int, int]:
    """(name, bytes, bytes that programs can have) of the device stages run on; of a CPU within its control group."""
    if device != "cpu":
        free, total = torch.cuda.mem_get_info()
        return torch.cuda.get_device_name(), total, free
    memory = psutil.virtual_memory()
    limits = [memory.total]
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        text = path.read_text().strip() if path.exists() else ""
        limits += [int(text)] if text.isdigit() else []
    return "cpu", min(limits), min(limits)


def processor_name() -> str:
    """What the machine calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def write(machine: Machine, path: Path) -> None:
    """The file whole, or as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(
            "# Written by rlhf calibrate: this machine, for rlhf plan. Delete it to plan with costs/hardware.yaml again.\n"
            + yaml.safe_dump(machine.model_dump(mode="json"), sort_keys=False, default_flow_style=None, width=140),
            encoding="utf-8",
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure this machine for rlhf plan.")
    parser.add_argument("--out", type=Path, default=MACHINE_FILE)
    options = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    heap.settle()  # as a stage does
    try:
        write(measure(), options.out)
    except RlhfError as error:
        logger.error("calibrate: %s", error)
        return error.exit_code
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
