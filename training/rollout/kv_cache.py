"""Keys and values of responses of unequal length, for decoding: it grows with the responses and shrinks with their
number.

Rows are aligned left, so that position and column are the same, and a new token is written at the end of its row.
Transformers' own cache pads on the left and is copied at every step.

On a CPU attention reads the columns in use. On an accelerator it reads all that are allocated, with the unused ones
masked, so that shapes stay the same for many tokens and a step can be captured as a graph
(training/rollout/static.py).

Shapes: B responses, H heads of keys and values, S columns, D width of a head.
"""

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, get_layer_types_and_kwargs

from config.errors import ModelError
from config.work import SPARE_COLUMNS
from training.modeling.logprobs import product_dtype

ATTENTION_LAYERS = {"full_attention", "sliding_attention"}


class DecodingCache(Cache):
    """Cache for `rows` responses: `put` adds their prompts, then each forward pass after `advance` adds one token to
    each.
    """

    def __init__(self, config: PreTrainedConfig, prompt_lengths: Sequence[int], device: torch.device) -> None:
        """Lengths are known on the host as well as on `device`, so that no step has to ask it.

        Raises ModelError if the model's cache has more than keys and values.
        """
        decoder = config.get_text_config(decoder=True)
        self.layer_types = get_layer_types_and_kwargs(decoder)[0]
        if unknown := set(self.layer_types) - ATTENTION_LAYERS:
            raise ModelError(
                f"{config.model_type}: its layers keep {', '.join(sorted(unknown))} states, which "
                "rollouts do not decode with."
            )
        self.sliding_window: int | None = decoder.sliding_window if "sliding_attention" in self.layer_types else None
        self._length_B = torch.tensor(prompt_lengths)  # on the host
        self.position_B = (self._length_B - 1).to(device, non_blocking=True)
        """Position of the newest token of each row."""
        self._all_columns = device.type != "cpu"
        self.room = max(prompt_lengths) + SPARE_COLUMNS
        """Columns allocated."""
        self.columns = self.room if self._all_columns else max(prompt_lengths)
        """Columns that attention reads."""
        super().__init__(layers=[_Layer(self) for _ in self.layer_types])

    @staticmethod
    def for_prompts(layers: int) -> Cache:
        """A cache that keeps all keys and values of some prompts, padded on the right, for `put`."""
        return Cache(layers=[DynamicLayer() for _ in range(layers)])

    def put(self, rows: Tensor, prompts: Cache, source: Tensor) -> None:
        """Copy keys and values of the prompts at `source` to the first columns of `rows`."""
        for mine, theirs in zip(self.layers, prompts.layers, strict=True):
            mine.put(rows, theirs.keys[source], theirs.values[source])

    def advance(self) -> None:
        """Free some space for one more token per row."""
        self.position_B += 1  # in place, as a graph reads it there
        self._length_B += 1
        longest = int(self._length_B.max())
        if longest > self.room:
            self.room = longest + max(SPARE_COLUMNS, longest // 4)
        self.columns = self.room if self._all_columns else longest

    def keep(self, source_B: Tensor) -> None:
        """Keep the rows at `source_B`, on the host, in that order: most of them where they are."""
        moved = source_B != torch.arange(len(source_B))
        holes, fillers, kept_B = (
            rows.to(self.position_B.device, non_blocking=True)
            for rows in (moved.nonzero()[:, 0], source_B[moved], source_B)
        )
        self._length_B = self._length_B[source_B]
        self.position_B = self.position_B[kept_B]
        for layer in self.layers:
            layer.keys[holes], layer.values[holes] = layer.keys[fillers], layer.values[fillers]

    def mask(self, attention: str | None, dtype: torch.dtype) -> Tensor | dict[str, Tensor] | None:
        """The attention mask of the newest tokens in the form of `attention`: added to the scores, [B, 1, 1, S], or
        True where attended, [B, S].

        None if all rows have the same length.
        """
        column_S = torch.arange(self.columns, device=self.position_B.device)
        seen_BS = column_S <= self.position_B[:, None]
        windowed = self.sliding_window is not None and self.columns > self.sliding_window
        if not windowed and bool((self._length_B == self.columns).all()):
            return None
        if attention not in ("sdpa", "eager"):
            return seen_BS
        masks = {"full_attention": _additive(seen_BS, dtype)}
        if windowed and self.sliding_window is not None:
            near_BS = column_S > self.position_B[:, None] - self.sliding_window
            masks["sliding_attention"] = _additive(seen_BS & near_BS, dtype)
        wanted = {name: masks.get(name, masks["full_attention"]) for name in set(self.layer_types)}
        return wanted if len(wanted) > 1 and windowed else wanted[self.layer_types[0]]


class _Layer(CacheLayerMixin):
    """Keys and values of one layer: [rows at the start, H, columns allocated, D], of which the cache's rows and
    columns are in use.
    """

    is_sliding = False

    def __init__(self, cache: DecodingCache) -> None:
        super().__init__()
        # a reference cycle would keep keys and values until the garbage collector runs
        self._cache = cast(DecodingCache, weakref.proxy(cache))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Room for every row, in the type that attention computes in. Zeros, as masked values must be finite."""
        rows, columns = len(self._cache.position_B), self._cache.room
        self.keys, self.values = (
            x.new_zeros(rows, x.shape[1], columns, x.shape[3], dtype=product_dtype(x))
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    def put(self, rows: Tensor, keys: Tensor, values: Tensor) -> None:
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.keys[rows, :, : keys.shape[2]] = keys.to(self.keys.dtype)
        self.values[rows, :, : values.shape[2]] = values.to(self.values.dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write the newest token [B, H, 1, D] of every row; keys and values of all of them so far, [B, H, S, D]."""
        rows, columns, room = len(key_states), self._cache.columns, self._cache.room
        if room > self.keys.shape[2]:
            self.keys, self.values = (
                torch.cat([x[:rows], x.new_zeros(rows, x.shape[1], room - x.shape[2], x.shape[3])], dim=2)
                for x in (self.keys, self.values)
            )
        row_B = torch.arange(rows, device=key_states.device)
        self.keys[row_B, :, self._cache.position_B] = key_states[:, :, 0].to(self.keys.dtype)
        self.values[row_B, :, self._cache.position_B] = value_states[:, :, 0].to(self.values.dtype)
        return self.keys[:rows, :, :columns], self.values[:rows, :, :columns]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.columns, 0

    def get_seq_length(self) -> int:
        return self._cache.columns - 1

    def get_max_length(self) -> int:
        return -1


def _additive(seen_BS: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(seen_BS, 0.0, torch.finfo(dtype).min).to(dtype)[:, None, None, :]
