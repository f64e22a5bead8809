"""Data of an update: sampled prompts with responses, mini-batches and micro-batches.

Shapes: B episodes (a prompt and one response each), T response tokens, padded on the right, masks True where the token
counts; N response tokens of some episodes, one after another.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence, Set
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from config.sections.online import SamplingLoop
from training.distributed.collectives import counted_batches
from training.modeling.batching import token_budget_batches

T = TypeVar("T")


class MicroBatch(NamedTuple):
    """Episodes of one forward pass with gradient, with values from before the update at their response tokens, [N]
    each; [0] without a critic.
    """

    sequences: list[list[int]]
    prompt_lengths: list[int]
    logprobs: Tensor
    advantages: Tensor
    values: Tensor
    returns: Tensor
    weights: Tensor
    """Weights of the policy's loss; [0] if the policy itself sampled."""


class Episodes(NamedTuple):
    """B episodes, per-token tensors [B, T]."""

    sequences: list[list[int]]
    prompt_lengths: list[int]
    mask: Tensor
    logprobs: Tensor
    values: Tensor | None
    advantages: Tensor
    returns: Tensor | None
    weights: Tensor | None = None
    """Importance weights, where another program has sampled."""

    def lengths(self) -> list[int]:
        """Prompt and response tokens of each."""
        return [len(ids) for ids in self.sequences]

    def of(self, rows: Sequence[int]) -> "Episodes":
        """A selection of episodes."""
        columns: list[Any] = [[column[i] for i in rows] for column in (self.sequences, self.prompt_lengths)]
        columns += [x_BT[list(rows)] if x_BT is not None else None for x_BT in self[2:]]
        return Episodes(*columns)

    def micro_batches(
        self, budget_tokens: int, device: torch.device, in_lockstep: bool
    ) -> Iterator[tuple[MicroBatch, bool]]:
        """Batches of at most `budget_tokens` tokens (at least one episode), and whether each counts: `in_lockstep`, a
        process with fewer batches repeats its last.
        """
        batches = token_budget_batches(self.lengths(), budget_tokens)
        absent = torch.empty(0, device=device)
        for rows, counts in counted_batches(batches, in_lockstep):
            mini_batch = self.of(rows)
            at_tokens = [
                x_BT[mini_batch.mask].to(device, non_blocking=True) if x_BT is not None else absent
                for x_BT in (
                    mini_batch.logprobs,
                    mini_batch.advantages,
                    mini_batch.values,
                    mini_batch.returns,
                    mini_batch.weights,
                )
            ]
            yield MicroBatch(mini_batch.sequences, mini_batch.prompt_lengths, *at_tokens), counts


def stream_seed(seed: int, stream: str, number: int) -> int:
    """The seed of one random stream of a run (prompts, sampling, mini_batches) in the epoch or update `number`.
    Different streams have independent generators; consecutive seeds would overlap.
    """
    digest = hashlib.sha256(f"{seed}/{stream}/{number}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def choose_prompts(
    prompts: Sequence[T],
    settings: SamplingLoop,
    seed: int,
    update: int,
    further: int = 0,
    resting: Set[T] = frozenset(),
) -> list[T]:
    """The prompts of an update, each repeated responses_per_prompt times: in random order, without replacement until
    all were used. Every `further` batch of an update has an order of its own. In the place of a `resting` prompt is
    another, as long as there are any.

    A function of seed, update and what rests only, so that a resumed run continues with the right prompts.
    """
    seed = stream_seed(seed, "refill", further) if further else seed
    per_update = settings.batch_size // settings.responses_per_prompt
    chosen = []
    for position in range((update - 1) * per_update, update * per_update):
        epoch, place = divmod(position, len(prompts))
        chosen.append(prompts[_prompt_order(len(prompts), seed, epoch)[place]])
    if resting and not resting.isdisjoint(chosen):
        order = _prompt_order(len(prompts), stream_seed(seed, "revisit", update), 0)
        others = (prompts[place] for place in order if prompts[place] not in resting and prompts[place] not in chosen)
        chosen = [next(others, prompt) if prompt in resting else prompt for prompt in chosen]
    return [prompt for prompt in chosen for _ in range(settings.responses_per_prompt)]


@lru_cache(maxsize=2)
def _prompt_order(prompts: int, seed: int, epoch: int) -> Sequence[int]:
    """The order of one pass over all prompts; cached, as a permutation of 200,000 takes milliseconds."""
    generator = torch.Generator().manual_seed(stream_seed(seed, "prompts", epoch))
    return array("q", torch.randperm(prompts, generator=generator).tolist())


def joined(prompts: Sequence[list[int]], responses: Sequence[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Sequences of prompt and response, and the index where each response starts (the prompt's length)."""
    sequences = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    return sequences, [len(prompt) for prompt in prompts]


def pad_responses(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Per-token values of responses as [B, T], zero on the right, and the mask."""
    lengths_B = torch.tensor([len(row) for row in rows])
    padded_BT = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    return padded_BT, torch.arange(padded_BT.shape[1]) < lengths_B[:, None]


def mini_batches(episodes: int, settings: SamplingLoop, seed: int, update: int) -> list[list[int]]:
    """Episode indices of every optimizer step of an update; each pass has a new random order."""
    generator = torch.Generator().manual_seed(stream_seed(seed, "mini_batches", update))
    size = episodes // settings.num_mini_batches
    orders = [torch.randperm(episodes, generator=generator).tolist() for _ in range(settings.epochs)]
    return [order[start : start + size] for order in orders for start in range(0, episodes, size)]
