"""The CUDA build of torch on a machine without a GPU: forward passes on fake tensors, which have shapes, types and
devices but no data.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen2Config

from training.modeling import logprobs
from training.modeling.packing import pack, pack_pairs, packed_hidden

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch is built for the CPU"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_pass_stays_on_the_gpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (2**36, 2**36))
    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, num_hidden_layers=2, num_attention_heads=14,
        num_key_value_heads=2, intermediate_size=4864, tie_word_embeddings=True,
    )  # fmt: skip
    rows = pack([[1, 2, 3, 4], [5, 6, 7]]), pack_pairs([([1, 2, 3, 4], [1, 2, 5])])[0]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for packed in rows:
            places = torch.arange(len(packed.ids_N))
            hidden_ND = packed_hidden(model, packed, places)
            result = logprobs.token_logprobs(hidden_ND, logprobs.output_weight(model), places.to("cuda"), 1.0)
            for item in (hidden_ND, *result):
                assert item.device.type == "cuda"
                assert len(item) == len(places)
