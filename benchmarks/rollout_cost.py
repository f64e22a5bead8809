"""What a generated token costs, and that it does not depend on ppo.max_new_tokens: CPU seconds in paired runs, as
JSON.

    python benchmarks/rollout_cost.py [--sizes 2M 10M 40M] [--engines static paged] [--pairs 5] [--vocabulary 512]
    [--kv-heads N]

Models are random, so their responses would never end by themselves: the random number at which a response is to end is
0, which draws token 0, made the end of sequence, and no other number is small enough to. Natural lengths are thus
given, about 28 tokens, and the code under test is that of training. Each pair generates the same responses with the
limit at 60 and at 120 tokens, in turn.

Time is the CPU time of the process with one thread, which a busy machine disturbs less than wall time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.trl_comparison.workspaces import SIZES
from training.rl.rollout_phase import ENGINES
from training.rollout.engine import Limits

LIMIT, EOS, PAD = 60, 0, 1
NEVER_ENDS = 0.1
"""Random numbers below this could draw token 0 from a model that has learnt nothing."""


class Work(NamedTuple):
    prompts: list[list[int]]
    noise_BT: torch.Tensor
    """Of twice LIMIT numbers a response."""
    tokens: int
    """Of all responses."""


def model_of(name: str, vocabulary: int, kv_heads: int | None) -> PreTrainedModel:
    size = SIZES[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size.width,
        intermediate_size=size.mlp_width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=kv_heads or size.heads,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def work_of(rows: int, vocabulary: int, seed: int = 0) -> Work:
    """Prompts of 12 to 28 tokens, responses of 5 to LIMIT tokens, 28 on average."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(12, 29, (rows,), generator=generator).tolist()
    prompts = [torch.randint(2, vocabulary, (length,), generator=generator).tolist() for length in lengths]
    ends = (torch.randn(rows, generator=generator) * 8 + 28).round().clamp(5, LIMIT).long()
    noise_BT = NEVER_ENDS + (1 - NEVER_ENDS) * torch.rand(rows, 2 * LIMIT, generator=generator)
    noise_BT[torch.arange(rows), ends - 1] = 0.0
    return Work(prompts, noise_BT, int(ends.sum()))


def cpu_seconds(engine: str, model: PreTrainedModel, work: Work, limit: int) -> float:
    began = time.process_time()
    rollout = ENGINES[engine](
        model, work.prompts, work.noise_BT[:, :limit], 1.0, Limits(limit, EOS, PAD), len(work.prompts)
    )
    seconds = time.process_time() - began
    generated = sum(map(len, rollout.responses))
    if generated != work.tokens:
        raise SystemExit(
            f"{engine} generated {generated} tokens where {work.tokens} were to come: the lengths "
            "are not the given ones."
        )
    return seconds


def measure(name: str, engine: str, pairs: int, vocabulary: int, kv_heads: int | None) -> dict[str, object]:
    model, work = model_of(name, vocabulary, kv_heads), work_of(SIZES[name].batch_size, vocabulary)
    cpu_seconds(engine, model, work, LIMIT)
    short, long = [], []
    for _ in range(pairs):
        short.append(cpu_seconds(engine, model, work, LIMIT))
        long.append(cpu_seconds(engine, model, work, 2 * LIMIT))
    return {
        "size": name,
        "engine": engine,
        "vocabulary": vocabulary,
        "responses": len(work.prompts),
        "tokens": work.tokens,
        "microseconds_per_token": 1e6 * statistics.median(short) / work.tokens,
        "doubled_limit_ratio": statistics.median(after / before for before, after in zip(short, long, strict=True)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["static"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument(
        "--kv-heads", type=int, default=None, help="keys and values have as many heads as queries unless given"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = [
        measure(name, engine, options.pairs, options.vocabulary, options.kv_heads)
        for name in options.sizes
        for engine in options.engines
    ]
    print(json.dumps({"threads": 1, "limit": LIMIT, "runs": found}, indent=2))


if __name__ == "__main__":
    main()
