"""Run TRL 1.12.0's PPO as a `job.json` says, in a process of its own and with the bench venv's Python: run.py
JOB_FOLDER.

Reads   job.json           see benchmarks/trl_comparison/runs.py, which writes it
Writes  updates.jsonl      one row per update: when it ended, its seconds, its seconds per phase,
        and what TRL logged
        responses.jsonl    one row per update: token ids of prompts and responses
        process.json       bytes held after the imports, peak bytes during training, device,
                           versions
        policy/            the final policy

The trainer is TRL's as it is; its module's functions are wrapped to tell the time. What is set otherwise than by TRL's
defaults is in `arguments`, and only what makes both sides do the same work.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
import trl.experimental.ppo.ppo_trainer as trl_ppo
from datasets import Dataset
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from trl.experimental.ppo import PPOConfig, PPOTrainer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class PhaseClock:
    """All time belongs to the phase entered last. Phases have the names of ours."""

    def __init__(self, accelerator: bool) -> None:
        self._accelerator = accelerator
        self.phase = "other"
        self._since = time.monotonic()
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str) -> None:
        if phase == self.phase:
            return
        if self._accelerator:
            torch.cuda.synchronize()
        now = time.monotonic()
        self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._since
        self.phase, self._since = phase, now

    def take(self) -> dict[str, float]:
        """Seconds per phase since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class TimedTrainer(PPOTrainer):
    """TRL's trainer, keeping what it logs at the end of every update."""

    clock: PhaseClock
    output: Path
    update = 0
    ended: float

    def log(self, logs: dict[str, float], *arguments: Any, **named: Any) -> None:
        self.clock.enter("other")
        now = time.time()
        self.update += 1
        row = {"update": self.update, "time": now, "seconds": now - self.ended, "phases": self.clock.take(), **logs}
        append(self.output / "updates.jsonl", row)
        self.ended = now


def main(folder: Path) -> None:
    accelerator = torch.cuda.is_available()
    after_imports = status_bytes("VmRSS")
    reset_peak(accelerator)
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    trainer = build_trainer(job, folder, accelerator)
    watch(trainer, folder, accelerator)
    trainer.ended = time.time()
    trainer.train()
    process = {
        "after_imports_bytes": 0 if accelerator else after_imports,
        "peak_bytes": torch.cuda.max_memory_allocated() if accelerator else status_bytes("VmHWM"),
        "device": torch.cuda.get_device_name() if accelerator else "cpu",
        "threads": torch.get_num_threads(),
        "trl": trl.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    (folder / "process.json").write_text(json.dumps(process, indent=1) + "\n", encoding="utf-8")
    policy = trainer.policy_model
    if trainer.is_peft_model:
        policy = policy.merge_and_unload()
    policy.save_pretrained(folder / "policy")


def build_trainer(job: dict[str, Any], folder: Path, accelerator: bool) -> TimedTrainer:
    """The four models of the job and TRL's trainer on them."""
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"], padding_side="left")
    loading = {"dtype": DTYPES[job["dtype"]], "attn_implementation": job["attention"], "use_safetensors": True}
    lora = lora_config(job["lora"])
    policy = AutoModelForCausalLM.from_pretrained(job["sft"], **loading)
    ref_policy = None if lora else AutoModelForCausalLM.from_pretrained(job["sft"], **loading)
    reward_model = normalised(AutoModelForSequenceClassification.from_pretrained(job["reward"], **loading))
    value_model = normalised(AutoModelForSequenceClassification.from_pretrained(job["reward"], **loading))
    if lora is not None:
        inject_adapter_in_model(lora, value_model)
        value_model.score.requires_grad_(True)
    prompts = [json.loads(line)["input_ids"] for line in Path(job["prompts"]).read_text(encoding="utf-8").splitlines()]
    return TimedTrainer(
        args=PPOConfig(**arguments(job, folder, accelerator)),
        processing_class=tokenizer,
        model=policy,
        ref_model=ref_policy,
        reward_model=reward_model,
        value_model=value_model,
        train_dataset=Dataset.from_dict({"input_ids": prompts}),
        peft_config=lora,
    )


def arguments(job: dict[str, Any], folder: Path, accelerator: bool) -> dict[str, Any]:
    """PPOConfig's from our ppo section: the same hyper-parameters, no recomputed activations (ours has none), full
    precision.
    """
    ppo = job["ppo"]
    same = (
        "num_mini_batches",
        "gamma",
        "lam",
        "cliprange",
        "cliprange_value",
        "vf_coef",
        "whiten_rewards",
        "missing_eos_penalty",
    )
    return {
        **{name: ppo[name] for name in same},
        "output_dir": str(folder / "trainer"),
        "seed": job["seed"],
        "use_cpu": not accelerator,
        "per_device_train_batch_size": ppo["batch_size"] // job["accumulation"],
        "gradient_accumulation_steps": job["accumulation"],
        "total_episodes": ppo["updates"] * ppo["batch_size"],
        "num_ppo_epochs": ppo["ppo_epochs"],
        "local_rollout_forward_batch_size": min(ppo["rollout_batch_size"], ppo["batch_size"]),
        "response_length": ppo["max_new_tokens"],
        "stop_token": "eos",
        "temperature": ppo["temperature"],
        "learning_rate": ppo["learning_rate"],
        "lr_scheduler_type": ppo["schedule"],
        "weight_decay": 0.0,
        "kl_coef": ppo["kl"]["coef"],
        "kl_estimator": "k1",
        "bf16": False,
        "gradient_checkpointing": False,
        "num_sample_generations": 0,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": accelerator,
    }


def lora_config(lora: dict[str, Any] | None) -> LoraConfig | None:
    """LoRA as our params say, for policy and value model alike; TRL keeps no reference then, it turns the adapter
    off.
    """
    if lora is None:
        return None
    return LoraConfig(
        r=lora["rank"], lora_alpha=lora["alpha"], lora_dropout=lora["dropout"], target_modules=lora["targets"]
    )


def normalised(reward_model: PreTrainedModel) -> PreTrainedModel:
    """The reward model with the score normalisation of its config moved into its head: a weight over std, a bias of
    -mean / std.

    Ours applies it outside of the head. The bias makes both sides see the very same scores, not only up to a constant.
    """
    mean, std, head = (reward_model.config.score_mean, reward_model.config.score_std, reward_model.score)
    scaled = torch.nn.Linear(head.in_features, 1, dtype=head.weight.dtype)
    with torch.no_grad():
        scaled.weight.copy_(head.weight / std)
        scaled.bias.fill_(-mean / std)
    reward_model.score = scaled
    return reward_model


def watch(trainer: TimedTrainer, folder: Path, accelerator: bool) -> None:
    """Wrap the functions `train` calls, so that the clock knows the phase, and keep the responses."""
    clock = trainer.clock = PhaseClock(accelerator)
    trainer.output = folder
    pad, eos = trainer.processing_class.pad_token_id, trainer.processing_class.eos_token_id

    def entering(
        phase_of: Callable[..., str], function: Callable[..., Any], after: str | None = None
    ) -> Callable[..., Any]:
        @wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            clock.enter(phase_of(*arguments))
            result = function(*arguments, **named)
            if after is not None:
                clock.enter(after)
            return result

        return timed

    def keeping(model: PreTrainedModel, queries: torch.Tensor, *arguments: Any) -> Any:
        clock.enter("rollout")
        result = generation(model, queries, *arguments)
        responses = result[0][:, queries.shape[1] :].tolist()
        row = {"update": trainer.update + 1, "prompts": [[t for t in ids if t != pad] for ids in queries.tolist()]}
        append(folder / "responses.jsonl", {**row, "responses": [until_eos(ids, eos) for ids in responses]})
        return result

    generation = trl_ppo.batch_generation
    trl_ppo.batch_generation = keeping
    # With gradient it is the update; without, the reference (or the policy with its adapter off).
    trl_ppo.forward = entering(lambda *_: "update" if torch.is_grad_enabled() else "reference", trl_ppo.forward)
    # Between the last score and the first forward of the update are rewards and advantages.
    trl_ppo.get_reward = entering(
        lambda model, *_: "score" if model is trainer.reward_model else "value", trl_ppo.get_reward, after="advantage"
    )
    # A later chunk's log-probs of sampling come after an earlier chunk's score.
    trl_ppo.selective_log_softmax = entering(
        lambda *_: "rollout" if clock.phase == "advantage" else clock.phase, trl_ppo.selective_log_softmax
    )


def until_eos(ids: list[int], eos: int) -> list[int]:
    """A response with its EOS, without what pads it."""
    return ids[: ids.index(eos) + 1] if eos in ids else ids


def append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def status_bytes(key: str) -> int:
    """VmRSS or VmHWM of this process. Source: proc_pid_status(5)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}: memory can be measured on Linux only.")


def reset_peak(accelerator: bool) -> None:
    """Start a new peak: 5 written to clear_refs resets VmHWM, see proc_pid_clear_refs(5)."""
    if accelerator:
        torch.cuda.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
