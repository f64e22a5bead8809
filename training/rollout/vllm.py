"""Sampling responses: the `vllm` engine, a vLLM server beside this process, on the same device.

It runs in an environment of its own, which RLHF_VLLM names (its command `vllm`), and answers on a socket in a folder
that only this user enters. Before each rollout it reads the policy's weights from a file; then training and vLLM score
the same prompts, and where vLLM has fallen behind the rollout is refused.

Its numbers are not those of training, so training scores the responses again (recompute_logprobs) and weighs each
token (training/rl/ppo_math.py, importance_weights).

Shapes: B responses, T response tokens.
"""

import atexit
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from config.child import BOUND, vllm_command
from config.errors import EnvironmentFault
from training.modeling.adapters import AdapterView
from training.modeling.logprobs import output_weight, product_dtype
from training.modeling.sequences import sequence_logprobs
from training.rollout.engine import Limits, Rollout

ARGUMENTS_VARIABLE = "RLHF_VLLM_ARGUMENTS"
"""Further arguments of `vllm serve`, such as `--gpu-memory-utilization 0.4`."""
PROGRAM = Path(__file__).with_name("vllm_server.py")
START_SECONDS = 900.0
ANSWER_SECONDS = 3600.0
COMPARED = 8
"""Prompts that training and vLLM both score after the weights were sent."""
GAP_GROWTH = 3.0
GAP_NATS = 1e-3
"""The mean difference of their log-probabilities may be this many times that at the start, and this much more. Old
weights of one layer or of a tied head are far beyond it.
"""


@torch.no_grad()
def generate(
    model: PreTrainedModel | AdapterView,
    prompts: Sequence[Sequence[int]],
    noise_BT: Tensor | None,
    temperature: float,
    limits: Limits,
    batch_size: int,
    value_head: nn.Linear | None = None,
) -> Rollout:
    """The vllm engine (training.rollout.engine.Engine): a response's seed is its first random number.

    Raises EnvironmentFault for adapters and a `value_head`, where vLLM does not start or answer, and where it has
    other weights than the policy.
    """
    if value_head is not None or isinstance(model, AdapterView):
        raise EnvironmentFault(
            "The vllm rollout engine samples whole models without a value head. Set "
            "rollout_engine: static in params.yaml."
        )
    global _server  # one per process
    if _server is None:
        _server = Server(model, batch_size, limits)
    _server.send(model)
    _server.compare(model, prompts)
    sampling: dict[str, Any] = {
        "max_tokens": limits.max_new_tokens, "top_p": 1.0, "top_k": -1, "logprobs": 0,
        "stop_token_ids": [limits.eos], "temperature": temperature if noise_BT is not None else 0.0,
    }  # fmt: skip
    seeds = [0] * len(prompts) if noise_BT is None else (noise_BT[:, 0] * 2**24).long().tolist()
    answers = _server.ask(
        [(list(prompt), {**sampling, "seed": seed}) for prompt, seed in zip(prompts, seeds, strict=True)]
    )
    choices = [answer["choices"][0] for answer in answers]
    logprobs = [torch.tensor([token["logprob"] for token in choice["logprobs"]["content"]]) for choice in choices]
    return Rollout([choice["token_ids"] for choice in choices], logprobs, None)


class Server:
    """A vLLM process with the policy's weights. It ends with this process."""

    def __init__(self, model: PreTrainedModel, batch_size: int, limits: Limits) -> None:
        vllm = vllm_command("rollout_engine: vllm")
        self._folder = Path(tempfile.mkdtemp(prefix="rlhf-vllm-"))
        self._parallel = batch_size
        self._compared: list[list[int]] = []
        self._first_gap: float | None = None
        dtype = product_dtype(output_weight(model))
        model.config.save_pretrained(self._folder)
        self._write(model, self._folder / "model.safetensors")
        self._socket = self._folder / "socket"
        environment = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
        command = [
            *BOUND, str(Path(vllm).resolve().with_name("python")), str(PROGRAM), "serve",
            str(self._folder), "--uds", str(self._socket),
            "--served-model-name", "policy", "--dtype", str(dtype).removeprefix("torch."),
            "--skip-tokenizer-init", "--enable-scale-out", "--max-num-seqs", str(batch_size),
            "--max-model-len", str(model.config.max_position_embeddings),
            "--logprobs-mode", "processed_logprobs",
            "--weight-transfer-config", json.dumps({"backend": "file"}),
            *shlex.split(os.environ.get(ARGUMENTS_VARIABLE, "")),
        ]  # fmt: skip
        self._log = self._folder / "log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, env={**os.environ, **environment},
            )  # fmt: skip
        atexit.register(self.close)
        self._wait()
        self._post("/init_weight_transfer_engine", {"init_info": {}})

    def _wait(self) -> None:
        began = time.monotonic()
        while time.monotonic() - began < START_SECONDS and self._process.poll() is None:
            try:
                self._request("GET", "/health", {})
            except OSError:
                time.sleep(0.1)
            else:
                return
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = next((line for line in reversed(lines) if "Error" in line), "it said nothing")
        raise EnvironmentFault(
            f"vLLM did not start for rollouts: {reason.strip()[-200:]} Set rollout_engine: static in "
            f"params.yaml, or {ARGUMENTS_VARIABLE}."
        )

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, model: PreTrainedModel) -> None:
        """Give vLLM the weights of `model`."""
        file = self._folder / "sent.safetensors"
        self._write(model, file)
        self._post("/start_weight_update", {})
        self._post("/update_weights", {"update_info": {"path": str(file)}})
        self._post("/finish_weight_update", {})
        file.unlink()

    def _write(self, model: PreTrainedModel, file: Path) -> None:
        """Every weight under every name: vLLM keeps the old one of a tied head that is not sent."""
        dtype = product_dtype(output_weight(model))
        save_file(
            {name: weight.to("cpu", dtype, copy=True).contiguous() for name, weight in model.state_dict().items()},
            file,
            {"format": "pt"},
        )

    def compare(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> None:
        """Raise EnvironmentFault if vLLM's log-probabilities of the first prompts are further from those of `model`
        than when it started.
        """
        if not self._compared:
            self._compared = [list(prompt) for prompt in prompts[:COMPARED] if len(prompt) > 1]
        ones = [1] * len(self._compared)
        ours = sequence_logprobs(model, self._compared, ones, 1.0, max(map(len, self._compared)))
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        theirs = [
            [candidates[str(token)]["logprob"] for token, candidates in
             zip(prompt[1:], answer["prompt_logprobs"][1:], strict=True)]
            for prompt, answer in zip(
                self._compared, self.ask([(prompt, sampling) for prompt in self._compared]),
                strict=True,
            )
        ]  # fmt: skip
        gap = float(torch.cat([(x - torch.tensor(y)).abs() for x, y in zip(ours, theirs, strict=True)]).mean())
        if self._first_gap is None:
            self._first_gap = gap
        if gap > GAP_GROWTH * self._first_gap + GAP_NATS:
            raise EnvironmentFault(
                "after the policy's weights were sent, vLLM's log-probabilities differ from "
                f"training's by {gap:.2g} nats per token, at the start by {self._first_gap:.2g}: "
                "it has other weights. Set rollout_engine: static in params.yaml."
            )

    def ask(self, requests: Sequence[tuple[list[int], Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """vLLM's answers to token ids with sampling parameters."""

        def answer(request: tuple[list[int], Mapping[str, Any]]) -> dict[str, Any]:
            ids, sampling = request
            return self._post(
                "/inference/v1/generate", {"model": "policy", "token_ids": ids, "sampling_params": dict(sampling)}
            )

        with ThreadPoolExecutor(self._parallel) as pool:
            return list(pool.map(answer, requests))

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        try:
            status, content = self._request("POST", path, body)
        except OSError as error:
            raise EnvironmentFault(f"vLLM ended during a rollout: {error}") from error
        if status != http.HTTPStatus.OK:
            raise EnvironmentFault(f"vLLM refuses {path}: {content.decode(errors='replace')[:200]}")
        answer: dict[str, Any] = json.loads(content)
        return answer

    def _request(self, method: str, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("localhost", timeout=ANSWER_SECONDS)
        with socket.socket(socket.AF_UNIX) as connection.sock:
            connection.sock.connect(str(self._socket))
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()


_server: Server | None = None
