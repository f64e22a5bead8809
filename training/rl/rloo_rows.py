"""The rows of an RLOO update: in which order prompts come, what all processes have of them, and how
TRL's trainer reads them.

Shapes: B responses of an update, L tokens of prompt and response.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from config.sections.online import Rloo
from training.distributed import collectives
from training.process.usage import Work


class PromptOrder(Sampler[int]):
    """Indices of the prompts of every update: a pass over all in random order, then another; a
    function of the seed alone.

    A prompt comes once for each response to it, and the rows of an update once for each micro-batch
    of all its passes, as TRL wants them.
    """

    def __init__(self, prompts: int, settings: Rloo, micro_batches: int, seed: int) -> None:
        self._prompts, self._settings, self._repeats, self._seed = (
            prompts,
            settings,
            micro_batches,
            seed,
        )

    def __len__(self) -> int:
        return self._settings.updates * self._settings.batch_size * self._repeats

    def __iter__(self) -> Iterator[int]:
        each = self._settings.responses_per_prompt
        order = self._endless()
        for _ in range(self._settings.updates):
            chosen = [next(order) for _ in range(self._settings.batch_size // each)]
            rows = [i for i in chosen for _ in range(each)]
            for _ in range(self._repeats):
                yield from rows

    def _endless(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003)
        while True:
            yield from torch.randperm(self._prompts, generator=generator).tolist()


def add_all(work: Work, rows: Sequence[Sequence[int]], sequences: int) -> None:
    """Account the tokens of `rows`, and of those of the other processes."""
    tokens, count = collectives.all_reduce_sum([sum(map(len, rows)), sequences])
    work.add(tokens=int(tokens), sequences=int(count))


def whole_rows(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rows of all processes, in their order: prompts padded on the left to the longest of all,
    responses on the right, as TRL does.
    """
    found = collectives.all_gather({name: value.cpu() for name, value in rows.items()})
    whole = {}
    for name in rows:
        parts = [of_process[name] for of_process in found]
        if parts[0].dim() == 2:
            longest = max(part.shape[1] for part in parts)
            left = name.startswith("prompt")
            parts = [
                torch.nn.functional.pad(part, (missing, 0) if left else (0, missing))
                for part in parts
                for missing in [longest - part.shape[1]]
            ]
        whole[name] = torch.cat(parts)
    return whole


def positions_from_mask(
    module: torch.nn.Module, arguments: tuple, keywords: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Count positions from the first real token: TRL pads prompts on the left, which absolute
    positions would notice.
    """
    mask_BL = keywords.get("attention_mask")
    if mask_BL is not None and keywords.get("position_ids") is None:
        keywords = {**keywords, "position_ids": (mask_BL.long().cumsum(dim=1) - 1).clamp(min=0)}
    return arguments, keywords


def rollout_statistics(
    score_B: Tensor, ended_B: Tensor, logprobs: list[Tensor], ref_logprobs: list[Tensor] | None
) -> dict[str, float]:
    """Means over the responses of a rollout; `kl` is in nats per response (k1), `kl_error` its
    standard error.
    """
    statistics = {
        "score": float(score_B.mean()),
        "score_std": float(score_B.std()),
        "length": sum(map(len, logprobs)) / len(logprobs),
        "eos_rate": float(ended_B.float().mean()),
    }
    if ref_logprobs is not None:
        kl_B = torch.stack(
            [(own - ref).sum() for own, ref in zip(logprobs, ref_logprobs, strict=True)]
        )
        statistics |= {"kl": float(kl_B.mean()), "kl_error": float(kl_B.std()) / len(kl_B) ** 0.5}
    return statistics
