"""Draws pairs of responses for people to compare: `python -m training.inference.pairs` appends to
data/labels/pairs.jsonl.

data/prepared/prompts, the served model, of the champion if there is one -> prompt, response1, response2, seed, model,
model_digest; one JSON object a line
"""

import argparse
import json
import logging
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from config import jsonl
from config.errors import DataError, ModelError, ParamsError
from config.load import load
from config.schema import Params
from config.workspace.champions import CHAMPIONS, champion_folder, read_record
from training.inference.trained_models import TrainedModels
from training.modeling.models import load_policy
from training.modeling.tokenizer import Prompt, decode_response, encode_prompts, load_tokenizer
from training.preparation.prompts import fitting_prompts, require_prompts
from training.preparation.splits import SPLITS
from training.process.artifacts import write_jsonl
from training.process.checkpoint import fingerprint
from training.process.command import run_command
from training.process.device import device
from training.rollout.engine import Limits, sampling_noise
from training.rollout.static import generate

logger = logging.getLogger("training.inference.pairs")

PAIRS_FILE = Path("data/labels/pairs.jsonl")


@torch.no_grad()
def draw_pairs(root: Path, params: Params, target: Path, count: int, temperature: float, seed: int | None) -> int:
    """Append `count` pairs of two different responses of the model that is served; returns the number found.

    Uses prompts of both splits, least used first; `seed` None picks one not used in the file. Raises DataError if
    there is no prompt, or two samples of a prompt never differ; ModelError for a missing or damaged model.
    """
    folder = f"models/{params.final_stage}"
    if not (root / folder).is_dir():
        raise ModelError(
            f"{folder} does not exist, and pairs are drawn from it. Run rlhf run first, or change "
            "align.method or tracking.model in params.yaml."
        )
    before = list(jsonl.plain(target)) if target.exists() else []
    seed = params.seed + len(before) if seed is None else seed
    tokenizer = load_tokenizer(root / "data/tokenizer")
    model = load_policy(root / folder, params.model, tokenizer).to(device()).eval()
    place = root / folder if root.parent.name == CHAMPIONS.name else folder
    origin = {"seed": seed, "model": str(place), "model_digest": fingerprint({}, [root / folder], root)}
    ordered = in_turn(prompts(root, params, tokenizer), (row["prompt"] for row in before), seed)

    def draw(chunk: list[Prompt], position: int) -> list[tuple[Prompt, str, str]]:
        return two_responses(model, tokenizer, params, chunk, temperature, seed + position)

    pairs, position = _new_pairs(ordered, {_key(row) for row in before}, count, draw)
    if not pairs:
        raise DataError(
            f"the two responses to each of {position} prompts were the same, empty, or there "
            f"already at --temperature {temperature}. Raise it."
        )
    write_jsonl(target, [*before, *({**row, **origin} for row in pairs)])
    logger.info("%d pairs of %s in %s; %d prompts gave none", len(pairs), folder, target, position - len(pairs))
    return len(pairs)


def _new_pairs(
    prompts_in_turn: list[Prompt],
    seen: set[str],
    count: int,
    draw: Callable[[list[Prompt], int], list[tuple[Prompt, str, str]]],
) -> tuple[list[dict[str, Any]], int]:
    """Up to `count` pairs of two different responses that are not in `seen`, and the number of prompts used."""
    pairs: list[dict[str, Any]] = []
    position = 0
    while len(pairs) < count and position < len(prompts_in_turn):
        chunk = prompts_in_turn[position : position + count - len(pairs)]
        for prompt, first, second in draw(chunk, position):
            row = {"prompt": prompt, "response1": first, "response2": second}
            if first != second and first and second and _key(row) not in seen:
                seen.add(_key(row))
                pairs.append(row)
        position += len(chunk)
    return pairs, position


def in_use(root: Path, params: Params) -> tuple[Path, Params]:
    """Folder and params of the model in use: the champion's, else the newest run's."""
    champion = read_record(root).champion
    if champion is None:
        return root, params
    its = TrainedModels(champion_folder(root, champion.run_id))
    kind = "student" if its.final_stage == "distill" else "aligned"
    return its.folder, params.model_copy(
        update={
            "model": its.model,
            "align": params.align.model_copy(update={"method": its.method}),
            "tracking": params.tracking.model_copy(update={"model": kind}),
        }
    )


def prompts(root: Path, params: Params, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The prepared prompts of both splits that leave room for a response: the data stage assigns votes to the split of
    their prompt.

    Raises DataError if there is none.
    """
    files = [root / f"data/prepared/prompts/{split}.jsonl" for split in SPLITS]
    missing = next((file for file in files if not file.exists()), None)
    if missing is not None:
        raise DataError(f"{missing} does not exist. Run rlhf run first: its data stage writes the prompts.")
    all_prompts = [row["prompt"] for file in files for row in jsonl.plain(file)]
    room = params.model.context_length - params.evaluate.max_new_tokens
    fitting = fitting_prompts(all_prompts, tokenizer, room)
    require_prompts(fitting, str(files[0].parent), room, "evaluate")
    return [encoded.prompt for encoded in fitting]


def in_turn(prompts: Sequence[Prompt], candidates: Iterable[Prompt], seed: int) -> list[Prompt]:
    """`prompts` in an order drawn from the seed, least used first."""
    times: dict[str, int] = {}
    for prompt in candidates:
        times[json.dumps(prompt)] = times.get(json.dumps(prompt), 0) + 1
    shuffled = random.Random(seed).sample(prompts, len(prompts))
    return sorted(shuffled, key=lambda prompt: times.get(json.dumps(prompt), 0))


def two_responses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    params: Params,
    chunk: Sequence[Prompt],
    temperature: float,
    seed: int,
) -> list[tuple[Prompt, str, str]]:
    """Two samples to each prompt, as text."""
    settings = params.evaluate
    encoded = [ids for ids in encode_prompts(tokenizer, chunk) for _ in range(2)]
    noise_BT = sampling_noise(len(encoded), settings.max_new_tokens, seed)
    limits = Limits(settings.max_new_tokens, tokenizer.eos_token_id, tokenizer.pad_token_id)
    responses = generate(model, encoded, noise_BT, temperature, limits, settings.batch_size).responses
    texts = [decode_response(tokenizer, ids) for ids in responses]
    return [(prompt, texts[2 * i], texts[2 * i + 1]) for i, prompt in enumerate(chunk)]


def _key(row: dict[str, Any]) -> str:
    return json.dumps([row["prompt"], row["response1"], row["response2"]])


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw pairs of responses of the aligned model for people to compare.")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, default=PAIRS_FILE)
    options = parser.parse_args()

    def draw() -> None:
        for name, value in (("count", options.count), ("temperature", options.temperature)):
            if not 0 < value < float("inf"):
                raise ParamsError(f"--{name} {value}: it must be above 0. Change it on the command line.")
        root, params = in_use(Path(), load(Path("params.yaml")))
        draw_pairs(root, params, options.out, options.count, options.temperature, options.seed)

    return run_command(draw, "pairs")


if __name__ == "__main__":
    sys.exit(main())
