"""Sampling responses: the `static` engine, a KV cache over a batch that shrinks as responses end.

Shapes: B responses, P prompt tokens, T response tokens, S columns of the cache, D model width, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from config.work import PREFILL_TOKENS
from training.modeling.adapters import AdapterView
from training.modeling.batching import pad_right
from training.modeling.logprobs import output_weight, product_dtype
from training.rollout.engine import Limits, Rollout, draw
from training.rollout.kv_cache import DecodingCache

BUCKET_PADDING = 0.1
"""Prompts are prefilled together while the shortest is at most this share shorter than the longest: a pass costs as
much as some padding.
"""

TOKENS_PER_LOOK = 8
"""Tokens after which the host asks an accelerator which responses have ended; until then those that have are
continued, and cut afterwards. A CPU is asked after every token, as it costs nothing.
"""
FEWER_ROWS = 3 / 4
"""An accelerator goes on with fewer rows once at most this share of them is running, as another shape costs it another
graph.
"""


@torch.no_grad()
def generate(
    model: PreTrainedModel | AdapterView,
    prompts: Sequence[Sequence[int]],
    noise_BT: Tensor | None,
    temperature: float,
    limits: Limits,
    batch_size: int,
    value_head: nn.Linear | None = None,
) -> Rollout:
    """The static engine (training.rollout.engine.Engine): prompts of similar length are batched, `batch_size` at a
    time.
    """
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), prompts[i]))
    responses: list[list[int]] = [[] for _ in prompts]
    logprobs: list[Tensor] = [torch.empty(0)] * len(prompts)
    values: list[Tensor] = [torch.empty(0)] * len(prompts)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        noise = None if noise_BT is None else noise_BT[rows]
        batch = _generate_batch(model, [prompts[i] for i in rows], noise, temperature, limits, value_head)
        for i, (ids, response_logprobs, response_values) in zip(rows, batch, strict=True):
            responses[i], logprobs[i], values[i] = ids.tolist(), response_logprobs, response_values
    return Rollout(responses, logprobs, values if value_head is not None else None)


def _generate_batch(
    model: PreTrainedModel | AdapterView,
    prompts: Sequence[Sequence[int]],
    noise_BT: Tensor | None,
    temperature: float,
    limits: Limits,
    value_head: nn.Linear | None,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Token ids, log-probabilities and values of each response, [its length] each."""
    hidden_BD, cache = _read_prompts(model, prompts, limits.pad)
    weight_DV = output_weight(model).to(product_dtype(hidden_BD)).T
    live = torch.arange(len(prompts), device=model.device)  # row of the cache -> row of the batch
    noise_BT = None if noise_BT is None else noise_BT.to(model.device, non_blocking=True)
    ended_B = torch.zeros_like(live, dtype=torch.bool)
    on_cpu = model.device.type == "cpu"
    looks = 1 if on_cpu else TOKENS_PER_LOOK
    step = _Step(model, cache)
    steps: list[tuple[Tensor, ...]] = []
    for t in range(limits.max_new_tokens):
        token_B, logprob_B = draw(hidden_BD @ weight_DV, None if noise_BT is None else noise_BT[live, t], temperature)
        value_B = value_head(hidden_BD).squeeze(-1).float() if value_head is not None else torch.zeros_like(logprob_B)
        steps.append((live, token_B, logprob_B, value_B))
        if t + 1 == limits.max_new_tokens:
            break
        ended_B = ended_B | (token_B == limits.eos)
        if (t + 1) % looks == 0:
            source_B = _compacted_rows((~ended_B).cpu())
            if not len(source_B):
                break
            if len(source_B) <= (len(live) - 1 if on_cpu else FEWER_ROWS * len(live)):
                cache.keep(source_B)
                source_B = source_B.to(model.device, non_blocking=True)
                live, token_B, ended_B = live[source_B], token_B[source_B], ended_B[source_B]
        cache.advance()
        hidden_BD = step(token_B, hidden_BD.dtype)
    return _by_row(steps, len(prompts), limits.eos)


class _Step:
    """The forward pass for the newest token of every row. On a GPU it is captured as a CUDA graph the second time that
    it has the same shapes, and replayed from then on: launching the kernels of small products one by one takes longer
    than computing them.
    """

    def __init__(self, model: PreTrainedModel | AdapterView, cache: DecodingCache) -> None:
        self._model, self._cache = model, cache
        whole = model.model if isinstance(model, AdapterView) else model
        self._captures = model.device.type == "cuda" and not isinstance(whole, FSDPModule)
        self._shape: tuple[int, int] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._token_B, self._hidden_BD = torch.empty(0), torch.empty(0)

    def __call__(self, token_B: Tensor, dtype: torch.dtype) -> Tensor:
        """Hidden states [B, D], valid until the next call."""
        shape = (len(token_B), self._cache.room)
        if not self._captures or shape != self._shape:
            self._shape, self._graph = shape, None
            return self._forward(token_B, dtype)
        if self._graph is None:
            self._token_B = token_B.clone()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._hidden_BD = self._forward(self._token_B, dtype)
        self._token_B.copy_(token_B)
        self._graph.replay()
        return self._hidden_BD

    def _forward(self, token_B: Tensor, dtype: torch.dtype) -> Tensor:
        output: Tensor = self._model.base_model(
            input_ids=token_B[:, None],
            attention_mask=self._cache.mask(self._model.config._attn_implementation, dtype),
            position_ids=self._cache.position_B[:, None],
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state[:, -1]
        return output


def _read_prompts(
    model: PreTrainedModel | AdapterView, prompts: Sequence[Sequence[int]], pad: int
) -> tuple[Tensor, DecodingCache]:
    """Last hidden states [B, D] and the cache of sorted prompts; repeated prompts are computed once.

    Padding is on the right, where no real token attends to it, so prefill needs no mask.
    """
    unique: list[Sequence[int]] = []
    source = []  # of each row, in unique
    for i, prompt in enumerate(prompts):
        if not i or list(prompt) != list(prompts[i - 1]):
            unique.append(prompt)
        source.append(len(unique) - 1)
    cache = DecodingCache(model.config, [len(prompt) for prompt in prompts], model.device)
    parts = []
    for first, last in _buckets([len(prompt) for prompt in unique]):
        bucket_cache = cache.for_prompts(len(cache.layers))
        ids_BP = pad_right(unique[first:last], pad).to(model.device, non_blocking=True)
        hidden_BPD = model.base_model(input_ids=ids_BP, past_key_values=bucket_cache, use_cache=True).last_hidden_state
        kept_rows = [(i, place - first) for i, place in enumerate(source) if first <= place < last]
        rows, places = (
            torch.tensor(column).to(model.device, non_blocking=True) for column in zip(*kept_rows, strict=True)
        )
        cache.put(rows, bucket_cache, places)
        parts.append(hidden_BPD[places, cache.position_B[rows]])
    return torch.cat(parts), cache


def _buckets(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of ascending lengths that are prefilled together, of PREFILL_TOKENS at most."""
    starts = [0]
    for i, length in enumerate(lengths):
        first, tokens = starts[-1], (i + 1 - starts[-1]) * length
        longer = lengths[first] < length * (1 - BUCKET_PADDING)
        if longer or (tokens > PREFILL_TOKENS and i > first):
            starts.append(i)
    return list(zip(starts, [*starts[1:], len(lengths)], strict=True))


def _compacted_rows(running_B: Tensor) -> Tensor:
    """The running rows, so ordered that most of them stay where they are: those beyond the new number of rows fill the
    holes.
    """
    rows = int(running_B.sum())
    source_B = torch.arange(rows)
    source_B[~running_B[:rows]] = running_B[rows:].nonzero()[:, 0] + rows
    return source_B


def _by_row(steps: Sequence[tuple[Tensor, ...]], rows: int, eos: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The steps' tokens, log-probs and values, regrouped by sequence, each up to its first EOS."""
    row_N, *columns = (torch.cat(column).cpu() for column in zip(*steps, strict=True))
    order_N = row_N.argsort(stable=True)
    lengths = row_N.bincount(minlength=rows).tolist()
    responses = []
    for token, *others in zip(*(column[order_N].split(lengths) for column in columns), strict=True):
        ends = (token == eos).nonzero()
        length = int(ends[0]) + 1 if len(ends) else len(token)
        responses.append(tuple(part[:length].clone() for part in (token, *others)))
    return responses
