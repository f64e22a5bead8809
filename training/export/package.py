"""Everything that `rlhf export` writes: merged weights, a tokenizer whose chat template renders prompts as training
did, GGUF files, what quantising costs in quality, and a model card.

python -m training.export.package --folder RUN --to FOLDER --facts facts.json
"""

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from config.errors import ModelError
from config.schema import Params
from config.workspace.exported import GGUF, Exported, gguf_path, keep_exported
from config.workspace.quantised import Difference, QuantisedFile
from training.evaluation.comparison import gain
from training.export.aligned import load_aligned, stop_tokens
from training.export.card import model_card
from training.export.gguf_file import TYPES, write_gguf
from training.export.llama_cpp import greedy_replies, serving
from training.export.parity import differences
from training.inference.trained_models import TrainedModels
from training.modeling.scoring import score
from training.modeling.tokenizer import Prompt, decode_response, encode_prompts, prompt_text, special_tokens
from training.process.artifacts import replacing
from training.process.command import run_command
from training.rewards.function import is_function
from training.rollout.engine import Limits
from training.rollout.static import generate
from training.worlds.helpdesk import gold_score, known_world

logger = logging.getLogger(__name__)

MOST_FLIPS = 0.02
"""Share of greedy replies that may differ in f32: between two tokens that are almost as likely, the order of a sum
decides.
"""


def export(folder: Path, target: Path, facts: Mapping[str, Any]) -> None:
    """Write the aligned model of the run in `folder` to `target` atomically. `facts` of the run go into the card. A
    model that cannot be written as GGUF is exported without it, and one that llama.cpp would prompt otherwise than
    training did is not served with it; a warning says so.

    Raises ModelError for a model that is missing or damaged.
    """
    params, models, policy, tokenizer, prompts = load_aligned(folder)
    policy.generation_config = GenerationConfig(
        eos_token_id=stop_tokens(tokenizer), pad_token_id=tokenizer.pad_token_id
    )
    table, differs = [], []
    with replacing(target) as out:
        tokenizer.save_pretrained(out)
        policy.save_pretrained(out)
        (out / GGUF).mkdir()
        try:
            for kind in TYPES:
                write_gguf(policy, tokenizer, kind, gguf_path(out, kind))
            with serving(gguf_path(out, "f32"), params.model.context_length) as server:
                differs = differences(server, tokenizer, prompts)
            table = compared(models, policy, params, out, prompts)
            differs += _reply_faults(table[0])
        except ModelError as error:
            logger.warning("no GGUF files: %s", error)
            shutil.rmtree(out / GGUF)
        for line in differs:
            logger.warning("llama.cpp must not serve this model: %s", line)
        (out / "README.md").write_text(model_card(facts, table), encoding="utf-8")
        record = Exported(
            context_length=params.model.context_length,
            control_tokens=special_tokens(tokenizer),
            single_prompts=isinstance(prompts[0], str),
            differs=tuple(differs),
            quantised=tuple(table),
            **facts,
        )
        keep_exported(out, record)


def _reply_faults(f32: QuantisedFile) -> list[str]:
    """A line if the exact file replies otherwise than the model itself, more often than near ties explain."""
    if f32.flips <= MOST_FLIPS * f32.prompts:
        return []
    return [f"{f32.flips} of {f32.prompts} greedy replies are not those of the trained model."]


def compared(
    models: TrainedModels, policy: PreTrainedModel, params: Params, folder: Path, prompts: Sequence[Prompt]
) -> list[QuantisedFile]:
    """Compare each GGUF file of an export with the trained model by greedy replies."""
    tokenizer, evaluate = models.tokenizer, params.evaluate
    encoded = encode_prompts(tokenizer, prompts)
    replies: dict[str, list[list[int]]] = {}
    for kind in TYPES:
        with serving(gguf_path(folder, kind), params.model.context_length) as server:
            replies[kind] = greedy_replies(server, encoded, evaluate.max_new_tokens, tokenizer.eos_token_id)
    world = known_world(params.data.source, map(prompt_text, prompts))

    def scores(responses: Sequence[list[int]]) -> list[float]:
        texts = [decode_response(tokenizer, ids) for ids in responses]
        if world is not None:
            pairs = zip(map(prompt_text, prompts), texts, strict=True)
            return [gold_score(prompt, text, world) for prompt, text in pairs]
        if is_function(models.folder / "models/reward"):
            return models.scores(prompts, texts)
        sequences = [[*prompt, *ids] for prompt, ids in zip(encoded, responses, strict=True)]
        budget_tokens = evaluate.batch_size * params.model.context_length
        with models.precision:
            values: list[float] = score(models.reward_model, sequences, budget_tokens).tolist()
        return values

    limits = Limits(evaluate.max_new_tokens, tokenizer.eos_token_id, tokenizer.pad_token_id)
    trained = generate(policy, encoded, None, 0.0, limits, evaluate.batch_size).responses
    exact = scores(trained)
    rows = []
    for kind, kind_replies in replies.items():
        mean, low, high, *_ = gain(scores(kind_replies), exact, evaluate.confidence)
        rows.append(
            QuantisedFile(
                kind=kind,
                bytes=gguf_path(folder, kind).stat().st_size,
                prompts=len(prompts),
                flips=sum(a != b for a, b in zip(kind_replies, trained, strict=True)),
                difference=Difference(mean=mean, low=low, high=high),
                judge="gold score" if world is not None else "score of the reward model",
            )
        )
    return rows


def main() -> None:
    """Entry point of `rlhf export`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--facts", type=Path, required=True, help="JSON: what the card says")
    options = parser.parse_args()
    export(options.folder, options.to, json.loads(options.facts.read_text(encoding="utf-8")))


if __name__ == "__main__":
    sys.exit(run_command(main, "export", logging.WARNING))
