"""Record what TRL 1.12.0's own PPO computes on a tiny batch, for tests/training/test_trl_parity.py. Runs in the bench
venv:

    python -m benchmarks.trl_comparison.trl_venv      # once: makes .bench/trl-1.12.0
    .bench/trl-1.12.0/bin/python benchmarks/record_trl_fixture.py

It drives the unmodified PPOTrainer for one update and reads the local variables of its `train` each time that calls
`backward`, so every number comes from TRL's code. Two cases: `ragged`, responses that end at EOS, and `full`, all of
them as long as allowed.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl.experimental.ppo import PPOConfig, PPOTrainer

TARGET = Path(__file__).parent.parent / "tests" / "fixtures" / "trl_ppo_loss.safetensors"
PAD, EOS, FIRST_WORD, VOCAB = 0, 1, 2, 24
BATCH, PROMPT_TOKENS = 8, 6
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "initializer_range": 0.25,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}
SETTINGS: dict[str, Any] = {
    "num_ppo_epochs": 2,
    "num_mini_batches": 2,
    "temperature": 0.9,
    "kl_coef": 0.3,
    "kl_estimator": "k1",
    "gamma": 0.98,
    "lam": 0.9,
    "cliprange": 0.1,
    "cliprange_value": 0.1,
    "vf_coef": 0.3,
    "learning_rate": 2e-2,
    "whiten_rewards": False,
    "response_length": 12,
}
CASES: dict[str, dict[str, Any]] = {
    "ragged": {"stop_token": "eos", "missing_eos_penalty": 1.5},
    "full": {"missing_eos_penalty": None},
}
ROLLOUT = (
    "queries",
    "responses",
    "sequence_lengths",
    "scores",
    "logprobs",
    "ref_logprobs",
    "values",
    "rewards",
    "advantages",
    "returns",
)
LOSSES = ("loss", "pg_loss", "vf_loss")


def main() -> None:
    torch.manual_seed(0)
    sft = trained_policy()
    reward, value = (LlamaForSequenceClassification(LlamaConfig(**SHAPE, num_labels=1)) for _ in range(2))
    policy = LlamaForCausalLM(LlamaConfig(**SHAPE))
    policy.load_state_dict(sft.state_dict())
    with torch.no_grad():  # away from the reference, so that the KL penalty is not zero
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    tensors: dict[str, torch.Tensor] = {}
    for role, model in {"policy": policy, "ref_policy": sft, "reward_model": reward, "value_model": value}.items():
        tensors |= weights(f"initial/{role}", model)
    for case, settings in CASES.items():
        tensors |= {f"{case}/{name}": tensor for name, tensor in record(settings, policy, sft, reward, value).items()}
    metadata = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    metadata |= {"shape": json.dumps(SHAPE), "settings": json.dumps(SETTINGS), "cases": json.dumps(CASES)}
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, TARGET, metadata)
    print(f"{TARGET}: {TARGET.stat().st_size / 1024:.0f} KiB, {len(tensors)} tensors")


def trained_policy() -> LlamaForCausalLM:
    """A model that ends after some sixteen tokens and never says the pad token, as a trained one: TRL cuts a response
    at a sampled pad.
    """
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        ids = torch.randint(FIRST_WORD, VOCAB, (32, 20))
        ids[torch.rand(ids.shape) < 1 / 16] = EOS
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def record(
    settings: dict[str, Any],
    policy: LlamaForCausalLM,
    sft: LlamaForCausalLM,
    reward: LlamaForSequenceClassification,
    value: LlamaForSequenceClassification,
) -> dict[str, torch.Tensor]:
    """One update of the trainer: its rollout, the losses of every step, weights and gradients of the last one."""
    learning = {"policy": LlamaForCausalLM(policy.config), "value_model": LlamaForSequenceClassification(value.config)}
    for name, original in {"policy": policy, "value_model": value}.items():
        learning[name].load_state_dict(original.state_dict())
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(FIRST_WORD, VOCAB, (int(length),), generator=generator).tolist()
        for length in torch.randint(2, PROMPT_TOKENS + 1, (BATCH,), generator=generator)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = PPOTrainer(
            args=PPOConfig(
                output_dir=folder,
                per_device_train_batch_size=BATCH,
                gradient_accumulation_steps=1,
                total_episodes=BATCH,
                local_rollout_forward_batch_size=BATCH,
                num_sample_generations=0,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                seed=3,
                weight_decay=0.0,
                **{**SETTINGS, **settings},
            ),
            processing_class=tokenizer(),
            model=learning["policy"],
            ref_model=sft,
            reward_model=reward,
            value_model=learning["value_model"],
            train_dataset=Dataset.from_dict({"input_ids": prompts}),
        )
        steps: list[dict[str, torch.Tensor]] = []
        backward = trainer.accelerator.backward

        def recording_backward(loss: torch.Tensor, **kwargs: Any) -> None:
            seen = sys._getframe(1).f_locals
            step = {name: seen[name].detach().clone() for name in (*ROLLOUT, *LOSSES)}
            step["rows"] = torch.from_numpy(seen["micro_batch_inds"].copy())
            for role, model in learning.items():
                step |= weights(f"weights/{role}", model)
            backward(loss, **kwargs)
            for role, model in learning.items():
                step |= {f"gradients/{role}/{name}": p.grad.clone() for name, p in model.named_parameters()}
            steps.append(step)

        trainer.accelerator.backward = recording_backward
        trainer.train()
    check(steps, ended="stop_token" in settings)
    last = steps[-1]
    losses = {name: torch.stack([step[name] for step in steps]) for name in LOSSES}
    return {**last, **losses, "rows": torch.stack([step["rows"] for step in steps])}


def check(steps: list[dict[str, torch.Tensor]], ended: bool) -> None:
    """The batch must show what it is recorded for."""
    lengths, total = steps[0]["sequence_lengths"] + 1, SETTINGS["response_length"]
    assert len(steps) == SETTINGS["num_ppo_epochs"] * SETTINGS["num_mini_batches"]
    for length, response in zip(lengths.tolist(), steps[0]["responses"], strict=True):
        assert length == total or response[length - 1] == EOS, "a pad token was sampled: take another seed"
    if ended:
        assert 3 <= int((lengths < total).sum()) < BATCH, (
            f"no mix of ended and unended responses, {lengths}: take another seed"
        )
    else:
        assert bool((lengths == total).all())


def tokenizer() -> PreTrainedTokenizerFast:
    """One word a token; the trainer asks it only for its special tokens and for padding on the left."""
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(FIRST_WORD, VOCAB)}
    result = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    result.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=result, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def weights(prefix: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {f"{prefix}/{name}": parameter.detach().clone() for name, parameter in model.named_parameters()}


if __name__ == "__main__":
    main()
