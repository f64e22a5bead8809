"""The MLflow model of a run, loaded as others do: by MLflow alone, in a process of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from training.inference.trained_models import TrainedModels
from training.modeling.tokenizer import decode_response, encode_prompts

pytestmark = pytest.mark.integration

LOAD = """
import json, sys
import mlflow
folder, prompts = sys.argv[1], json.loads(sys.argv[2])
generator = mlflow.transformers.load_model(folder)
chat = mlflow.pyfunc.load_model(folder)
found = {"replies": [], "tokens": []}
for prompt in prompts:
    messages = [{"role": "user", "content": prompt}]
    [made] = generator(messages, do_sample=False, max_new_tokens=12, return_full_text=False)
    found["replies"].append(made["generated_text"])
answer = chat.predict({"messages": messages, "max_tokens": 12, "temperature": 1e-4})
found["chat"] = answer[0]["choices"][0]["message"]["content"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def model(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("mlflow") / "model"
    command = [sys.executable, "-m", "training.export.mlflow_model"]
    command += ["--folder", str(finished), "--to", str(target)]
    subprocess.run(command, check=True, timeout=240)
    return target


def test_loaded_by_mlflow_it_answers_chats_as_the_run_does(finished: Path, model: Path) -> None:
    lines = (finished / "data/prepared/prompts/test.jsonl").read_text().split("\n")[:5]
    prompts = [json.loads(line)["prompt"] for line in lines]
    command = [sys.executable, "-c", LOAD, str(model), json.dumps(prompts)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, cwd=model.parent, stdout=subprocess.PIPE, check=True, timeout=240)
    content = json.loads(done.stdout)
    models = TrainedModels(finished)
    expected = []
    for prompt in encode_prompts(models.tokenizer, prompts):
        ids = models.policy.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)
        expected.append(decode_response(models.tokenizer, ids[0, len(prompt) :].tolist()))
    assert [reply.strip() for reply in content["replies"]] == expected
    assert content["chat"].strip() == expected[-1]


def test_it_names_its_signature_an_example_and_exact_packages(model: Path) -> None:
    content = yaml.safe_load((model / "MLmodel").read_text())
    assert "messages" in content["signature"]["inputs"]
    example = json.loads((model / "input_example.json").read_text())
    assert example["messages"][0]["role"] == "user"
    needed = (model / "requirements.txt").read_text().split()
    assert "torch==2.13.0" in needed
