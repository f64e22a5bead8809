"""Memory of losses over the vocabulary, by software."""

from dataclasses import dataclass

from config.errors import CostError
from config.work import BYTES_PER_CHUNK_LOGIT, CHUNK_LOGITS


@dataclass(frozen=True)
class Loss:
    """Memory of the cross-entropy over the vocabulary, in bytes per logit of 16-bit models (fp32 models: see
    `bytes_per_logit`).
    """

    name: str
    kept: float
    """Bytes held for every token at once."""
    chunked: float = 0.0
    """Bytes held for one chunk of tokens at a time."""
    chunks: int = 1
    chunk_logits: int = 0
    """Logits of a chunk where its size is fixed, 0 where the tokens are cut into `chunks` parts."""
    chunk_per_byte: float = 0.0
    """Logits of a chunk for each byte of an accelerator's memory, where that is more."""
    host: float = 0.0
    """Held for each logit of a chunk on a CPU, where a fused kernel is written out in operations; 0 where it is the
    same.
    """
    recomputes: bool = False
    """The backward pass recomputes the logits."""

    def bytes_per_token(
        self, vocab: int, tokens: float, dtype_bytes: float, compiled: bool = False, accelerator_bytes: float = 0.0
    ) -> float:
        """Bytes per token at the peak of the loss, for `tokens` tokens at once, on an accelerator with this memory; 0
        is a CPU.

        A compiled chunk is never upcast in memory: it holds logits and their gradient.
        """
        share = self._share(vocab, tokens, accelerator_bytes)
        if not accelerator_bytes and self.host:
            return vocab * self.host * share
        if compiled and self.chunked:
            return vocab * (self.kept + 4 * share)
        # at fp32 the upcast copy and its gradient are the same tensors
        wide = 1.0 if dtype_bytes <= 2 else 12 / 14
        return vocab * wide * (self.kept + self.chunked * share)

    def _share(self, vocab: int, tokens: float, accelerator_bytes: float) -> float:
        if not self.chunk_logits or not tokens:
            return 1 / self.chunks
        logits = max(self.chunk_logits, self.chunk_per_byte * accelerator_bytes, vocab)
        return min(1.0, logits / (vocab * tokens))


LOSSES = {
    loss.name: loss
    for loss in (
        # logits 2, their fp32 copy 4, log-softmax 4, its gradient 4: transformers/loss/loss_utils.py ForCausalLMLoss
        Loss("dense", kept=14),
        # the same with a contiguous copy of the shifted fp32 logits and its gradient:
        # Transformers before 4.45, torchtune before October 2024
        Loss("shifted", kept=22),
        # logits 2, log-softmax 2, its gradient 2, the gradient of the logits 2: litgpt's cross-entropy stays in 16 bit
        Loss("half", kept=8),
        # logits 2, their fp32 copy 4, which becomes softmax and gradient in its own place, the gradient of the logits
        # 2: megatron/core/tensor_parallel/cross_entropy.py
        Loss("in-place", kept=8),
        # logits 2 and their gradient 2, in the compute type: one kernel goes over a row of logits with the sums of its
        # softmax in registers: flash-attn's losses/cross_entropy.py
        Loss("kernel", kept=4),
        # logits of all tokens 2, the rest of `dense` for one chunk of eight: torchtune CEWithChunkedOutputLoss
        Loss("chunked", kept=2, chunked=12, chunks=8),
        # hidden states meet the output head one chunk of logits at a time, and again in the backward pass:
        # training/modeling/logprobs.py
        Loss(
            "streamed",
            kept=0,
            chunked=14,
            chunk_logits=CHUNK_LOGITS,
            chunk_per_byte=1 / BYTES_PER_CHUNK_LOGIT,
            recomputes=True,
        ),
        # much the same in chunks of that size on any device: TRL's fused head, Liger
        Loss("liger", kept=0, chunked=14, chunk_logits=2**22, recomputes=True),
        # TRL 1.16's fused head, of SFT: tiles of 4,096 tokens by at most 32,768 entries in the compute type, which
        # training/sft.py narrows to the vocabulary. Without Triton the backward pass over a tile is written in torch:
        # tile, y, z, log p, p, gradient and two terms of it in fp32, and a mask: trl/kernels/chunked_logprob.py
        Loss("fused", kept=0, chunked=2, chunk_logits=4096 * 32768, host=33, recomputes=True),
    )
}


def loss(name: str) -> Loss:
    """The facts of a loss. Raises CostError if it is not known."""
    if name not in LOSSES:
        raise CostError(
            f"loss {name!r} is not known. Known: {', '.join(LOSSES)}. Add its facts to LOSSES in "
            "costs/tables/engines.py."
        )
    return LOSSES[name]
