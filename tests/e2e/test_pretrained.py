"""The recipe for SmolLM2, on a cut of it: its tokenizer, chat template and shape, two layers."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]
LAYERS = 2
SMALL = (
    "model.path=models/base/cut",
    "model.dtype=fp32",  # bf16 is emulated on processors without its instructions
    "sft.max_steps=2",
    "reward.max_steps=2",
    "data.test_fraction=0.1",
    "ppo.updates=2",
    "ppo.batch_size=8",
    "ppo.rollout_batch_size=8",
    "ppo.max_new_tokens=12",
    "evaluate.prompts=6",
    "evaluate.batch_size=6",
    "evaluate.max_new_tokens=12",
    "evaluate.samples=4",
)


def rlhf(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "cli.main", *words], cwd=root, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def cut(whole: Path, target: Path) -> None:
    """The first layers of a model, with its embeddings and tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(whole)
    model.config.num_hidden_layers = LAYERS
    small = LlamaForCausalLM(model.config)
    names = small.state_dict().keys()
    small.load_state_dict({k: v for k, v in model.state_dict().items() if k in names})
    small.save_pretrained(target)
    AutoTokenizer.from_pretrained(whole).save_pretrained(target)


def test_the_recipe_for_a_pretrained_model_runs_from_fetch_to_report(new_checkout: Callable[[], Path]) -> None:
    root = new_checkout()
    rlhf(root, "fetch", "smollm2")
    cut(root / "models/base/smollm2", root / "models/base/cut")
    sets = [word for assignment in SMALL for word in ("--set", assignment)]
    done = rlhf(root, "run", "--recipe", "recipes/smollm-cpu.yaml", *sets, "--json")
    stages = json.loads(done.stdout)["stages"]
    assert [stage["stage"] for stage in stages] == ["data", "sft", "reward", "ppo", "evaluate"]

    # prompts are rendered by the model's own chat template, with one beginning of a sequence
    tokenizer = AutoTokenizer.from_pretrained(root / "data/tokenizer")
    row = json.loads((root / "data/prepared/prompts/test.jsonl").read_text().split("\n")[0])
    ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids).startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert tokenizer.pad_token_id not in (tokenizer.eos_token_id, tokenizer.bos_token_id)

    # adapters learnt, and the embeddings of their base are those fetched
    assert (root / "models/ppo/adapter_config.json").is_file()
    base = AutoModelForCausalLM.from_pretrained(root / "models/base/cut")
    whole = AutoModelForCausalLM.from_pretrained(root / "models/base/smollm2")
    assert torch.equal(base.get_input_embeddings().weight, whole.get_input_embeddings().weight)

    # the report shows a conversation turn by turn
    samples = (root / "evaluation/samples.jsonl").read_text().split("\n")[:-1]
    messages = [json.loads(line)["messages"] for line in samples]
    assert all(turns[-1]["role"] == "user" for turns in messages)
    page = (root / "report/report.html").read_text()
    assert page.count('class="speaker"') == sum(map(len, messages))
    assert "user: " not in page
