"""Sampling responses: the `paged` engine, Transformers' continuous batching. A finished response makes room for the
next prompt.

The library schedules, we draw: its one hook between logits and token takes the response's own random number, so what
is sampled does not depend on how requests happen to be batched, and a resumed run draws the same. It runs in a thread
of its own, where autocast is off: the model computes in the type of its weights.

Shapes: R rows of a forward pass that get a token, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.requests import FutureRequestState

from config.errors import EnvironmentFault
from training.modeling.adapters import AdapterView
from training.rollout.engine import Limits, Rollout, draw

PAGE_TOKENS = 32
"""Tokens per cache page: small, as the unused part of a response's last page is wasted."""
BATCH_TOKENS_PER_ROW = 16
"""Tokens per forward pass and parallel response: prompts that join are prefilled in the budget left by decoding."""


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
    """The paged engine (training.rollout.engine.Engine).

    Raises EnvironmentFault for a `value_head`, as it has no access to hidden states, and if the library fails.
    """
    if value_head is not None:
        raise EnvironmentFault(
            "The paged rollout engine computes no values. Set ppo.rollout_engine: static or "
            "ppo.layout: separate in params.yaml."
        )
    if isinstance(model, AdapterView):
        model.activate_adapter()
        model = model.model
    drawing = _Drawing([len(prompt) for prompt in prompts], noise_BT, temperature)
    responses = _run(model, prompts, limits, batch_size, drawing)
    return Rollout(responses, drawing.logprobs([len(response) for response in responses]), None)


def _manager(model: PreTrainedModel, prompts: Sequence[Sequence[int]], limits: Limits, batch_size: int) -> Any:
    """Transformers' continuous batching with memory for `batch_size` of the longest sequences."""
    longest = max(map(len, prompts)) + limits.max_new_tokens
    side_by_side = min(batch_size, len(prompts))
    settings = GenerationConfig(
        max_new_tokens=limits.max_new_tokens, do_sample=False, eos_token_id=limits.eos, pad_token_id=limits.pad
    )
    batching = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=side_by_side * (math.ceil(longest / PAGE_TOKENS) + 1),
        max_batch_tokens=side_by_side * BATCH_TOKENS_PER_ROW,
        max_requests_per_batch=side_by_side,
        auto_switch_to_flash=False,
        use_async_batching=False,
        use_cuda_graph=False,
    )
    return model.init_continuous_batching(settings, batching)


def _run(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], limits: Limits, batch_size: int, drawing: "_Drawing"
) -> list[list[int]]:
    """Responses in the order of `prompts`."""
    manager = _manager(model, prompts, limits, batch_size)
    manager.logit_processor = drawing.as_list()
    # Everything is queued before the loop starts: batches then depend on the prompts only, not
    # on the speed of two threads.
    for i, prompt in enumerate(prompts):
        manager.add_request(
            list(prompt), request_id=str(i), max_new_tokens=limits.max_new_tokens, eos_token_id=limits.eos
        )
    responses: dict[str, list[int]] = {}
    manager.start()
    try:
        while len(responses) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.error is None:
                responses[result.request_id] = result.generated_tokens
            elif result is not None or not manager.is_running():
                fatal = manager.background_thread_status.fatal_error
                if fatal is not None and "OutOfMemory" in type(fatal).__name__:
                    raise fatal  # the caller retries with fewer in parallel
                reason = result.error if result is not None else fatal
                raise EnvironmentFault(
                    f"Continuous batching failed: {reason}. Set rollout_engine: static in params.yaml."
                )
    finally:
        manager.stop(hard_stop=len(responses) < len(prompts))
        manager.destroy()
    return [responses[str(i)] for i in range(len(prompts))]


class _Drawing(ContinuousBatchingLogitsProcessor):
    """Draws the token of every row and masks all others; keeps the log-probs."""

    supported_kwargs: dict[str, type] = {}
    ignored_kwargs: tuple[str, ...] = ()

    def __init__(self, prompt_lengths: Sequence[int], noise_BT: Tensor | None, temperature: float) -> None:
        self._prompt_lengths = prompt_lengths
        self._noise_BT = noise_BT
        self._temperature = temperature
        self._rows: list[int] = []
        self._steps: list[tuple[list[int], Tensor]] = []

    def as_list(self) -> ContinuousBatchingLogitsProcessorList:
        processors = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([self]))
        processors.tensors_required = 1
        return processors

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[FutureRequestState]) -> Tensor:
        """The random numbers [R] for the rows of the next forward pass, fp32 viewed as int32, the type that the
        library passes on.
        """
        states = [request.state for request in requests_with_new_token]
        self._rows = [int(state.request_id) for state in states]
        if self._noise_BT is None:
            return torch.zeros(len(states), dtype=torch.int32)
        # A request preempted for lack of memory has its generated tokens among its initial
        # tokens.
        places = [
            len(state.initial_tokens) + len(state.generated_tokens) - self._prompt_lengths[int(state.request_id)]
            for state in states
        ]
        return self._noise_BT[self._rows, places].float().view(torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """`scores` [R, V] with all but the drawn token at minus infinity."""
        uniform_R = None if self._noise_BT is None else tensor_arg[: len(scores)].view(torch.float32)
        token_R, logprob_R = draw(scores, uniform_R, self._temperature)
        # Rows beyond ours belong to prompts that are still being prefilled; their tokens are ignored.
        self._steps.append((self._rows, logprob_R[: len(self._rows)].cpu()))
        return torch.full_like(scores, -torch.inf).scatter_(1, token_R[:, None], 0.0)

    def logprobs(self, lengths: Sequence[int]) -> list[Tensor]:
        """Log-probs of each response's tokens, given their lengths."""
        row_N = torch.tensor([row for rows, _ in self._steps for row in rows])
        logprob_N = torch.cat([logprob_R for _, logprob_R in self._steps])
        return [part.clone() for part in logprob_N[row_N.argsort(stable=True)].split(list(lengths))]
