"""Responses of a training policy, a few for people to read.

Shapes: B responses.
"""

import json
from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from training.modeling.tokenizer import decode_response
from training.process.stage import Stage

KEPT = 4
"""Responses per update in samples.jsonl."""


def write_samples(
    stage: Stage,
    update: int,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    responses: Sequence[list[int]],
    score_B: Tensor | None = None,
) -> None:
    """Append a few responses to runs/<stage>/samples.jsonl. Rank 0 writes."""
    if stage.rank != 0:
        return
    with (stage.root / "runs" / stage.name / "samples.jsonl").open("a", encoding="utf-8") as file:
        for i, (prompt, response) in enumerate(zip(prompts[:KEPT], responses[:KEPT], strict=True)):
            row = {
                "run_id": stage.run_id,
                "attempt": stage.attempt,
                "step": update,
                "index": i,
                **({"score": score_B[i].item()} if score_B is not None else {}),
                "prompt": tokenizer.decode(prompt, skip_special_tokens=True).strip(),
                "response": decode_response(tokenizer, response),
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
