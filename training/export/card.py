"""The model card of an export: model, data, scores, cost and limits of use."""

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from config.workspace.quantised import QuantisedFile

NO_LICENCE = "other"
"""Hugging Face's name for a licence that is not in its list."""


def model_card(facts: Mapping[str, Any], table: Sequence[QuantisedFile]) -> str:
    """The text of README.md. `facts`: run_id, method, is_student, base, card (pairs of name and words), metrics (name
    -> text), licence, summary.
    """
    data = ModelCardData(
        license=str(facts.get("licence") or NO_LICENCE),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["rlhf", str(facts["method"])],
    )
    metrics = "\n".join(f"| {name} | {value} |" for name, value in facts["metrics"].items())
    card = "\n".join(f"| {name} | {words} |" for name, words in facts["card"])
    distilled = ", then distilled into this student" if facts.get("is_student") else ""
    body = f"""
# {facts["name"]}

{facts["summary"]}

| | |
|---|---|
| run | `{facts["run_id"]}` |
| starts from | {facts["base"]} |
| aligned with | {facts["method"]}{distilled} |
{card}

## Evaluation

On held-out prompts, sampled as in training:

| metric | value |
|---|---|
{metrics}

## Files

Merged weights in safetensors; the tokenizer's chat template renders prompts as training did.
{_gguf_files(table) if table else ""}
## Intended use and limits

Made for replies to prompts like those of its data. It was not tested on anything else, and not for
safety. The scores above are of one seed, and their intervals do not cover other data.
"""
    return f"{ModelCard(f'---{chr(10)}{data.to_yaml()}{chr(10)}---{chr(10)}{body}')}"


def _gguf_files(table: Sequence[QuantisedFile]) -> str:
    rows = "\n".join(
        f"| `gguf/model-{row.kind}.gguf` | {row.bytes / 2**20:.2f} MiB | {row.flips} of {row.prompts} | "
        f"{gain.mean:+.4f} ({gain.low:+.4f} to {gain.high:+.4f}) |"
        for row in table
        for gain in [row.difference]
    )
    return f"""
GGUF files for llama.cpp, compared with the trained model by greedy replies to held-out prompts:

| file | size | replies that differ | {table[0].judge}, difference (interval) |
|---|---|---|---|
{rows}
"""
