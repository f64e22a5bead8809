"""llama.cpp's own server within this process, for a GGUF file that is to be measured."""

import json
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
import xllamacpp

from config.ports import free_port

SLOTS = 4
"""Replies that are generated side by side."""


@contextmanager
def serving(file: Path, context_length: int) -> Iterator[str]:
    """The address of a server of the model in `file`, each of its slots with the whole context."""
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_parallel, params.n_ctx = SLOTS, SLOTS * context_length
    params.hostnames, params.port = ["127.0.0.1"], free_port()
    params.cpuparams.n_threads = torch.get_num_threads()
    # In f16, and with flash attention, logits are off by up to 0.002: near ties fall the other
    # way now and then, and would count as flips.
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    flash = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = flash.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.verbosity = -1
    server = xllamacpp.Server(params)
    try:
        yield server.listening_address
    finally:
        del server


def greedy_replies(
    address: str, prompts: Sequence[list[int]], max_new_tokens: int, eos: int
) -> list[list[int]]:
    """The most likely reply to each prompt, as token ids that end with EOS where it ended."""

    def reply(prompt: list[int]) -> list[int]:
        request = {
            "prompt": prompt,
            "n_predict": max_new_tokens,
            "temperature": 0,
            "return_tokens": True,
        }
        with urllib.request.urlopen(
            urllib.request.Request(
                f"{address}/completion",
                json.dumps(request).encode(),
                {"Content-Type": "application/json"},
            ),
            timeout=600,
        ) as response:
            answer = json.load(response)
        tokens: list[int] = answer["tokens"]
        return [*tokens, eos] if answer["stop_type"] == "eos" and tokens[-1:] != [eos] else tokens

    with ThreadPoolExecutor(SLOTS) as threads:
        return list(threads.map(reply, prompts))
