"""The words that people print for software, and what changed with its versions."""

import re
from dataclasses import replace

from costs.tables.engines import ENGINES, Engine

NAMES: tuple[tuple[str, str], ...] = (
    (r"deepspeed[- ]?chat|ds-?chat", "deepspeed-chat"),
    (r"open-?rlhf", "openrlhf"),
    (r"ve-?rl|hybridflow", "verl"),
    (r"fsdp[-_]qlora", "fsdp-qlora"),
    (r"torch-?titan", "torchtitan"),
    (r"torch-?tune", "torchtune"),
    (r"lit-?gpt(?: generate)?", "litgpt"),
    (r"lit-?llama", "litgpt"),
    (r"llm-?foundry(?: composer)?|(?:mosaicml )?composer|mosaicml(?: streaming)?", "llm-foundry"),
    (r"gpt-?fast", "gpt-fast"),
    (r"tensorrt[-_]?llm|trt-?llm|tensorrt", "tensorrt-llm"),
    (r"lm-?deploy(?: (?:turbomind|pytorch))?|turbomind|faster[-_ ]?transformer", "lmdeploy"),
    (
        r"deepspeed (?:autotp|inference|fastgen|mii)|deepspeed-(?:inference|fastgen|mii)",
        "deepspeed-inference",
    ),
    (r"sg-?lang", "vllm"),
    (r"(?:hf )?tgi|text[- ]generation[- ]inference", "vllm"),
    (r"gpt-?neox", "gpt-neox"),
    (
        r"nemo[- ]?(?:framework|megatron|aligner|rl|automodel)?(?:[- ]bridge)?"
        r"(?:/megatron(?:[- ]?(?:core|lm))?)?",
        "megatron",
    ),
    (r"megatron[- ]?(?:lm|core|bridge|deepspeed)?", "megatron"),
    (r"transformer[- ]engine", "megatron"),
    (r"nano-?gpt|nano-?chat", "nanogpt"),
    (r"unsloth(?: studio)?", "unsloth"),
    (r"ms-?swift|swift", "ms-swift"),
    (r"llama-?factory", "transformers"),
    (r"axolotl", "transformers"),
    (
        r"(?:hf |hugging ?face )?(?:transformers|trainer|accelerate|trl|peft)"
        r"(?:[ ,/+]+(?:hf )?(?:transformers|trainer|accelerate|trl|peft))*",
        "transformers",
    ),
    (r"(?:sft|dpo|ppo|grpo|reward|rloo)trainer", "transformers"),
    (
        r"alignment[- ]handbook|open-?r1|trlx|bitsandbytes|qlora repo|qlora\.py|lora repo|lmflow|"
        r"fastchat|"
        r"stanford alpaca|alpaca-lora|xtuner|lightning(?: fabric)?|pytorch lightning|"
        r"colossal-?(?:ai|chat)",
        "transformers",
    ),
    (r"vllm", "vllm"),
    (r"deep-?speed", "transformers"),
    (r"(?:plain |native |vanilla )?pytorch(?: fsdp)?|torch", "transformers"),
    (r"\bhf\b|hugging ?face|\(hf trainer\)", "transformers"),
    (r"\bours\b|rlhf[- ]ledger", "ours"),
)
"""(pattern, engine) in the order they are tried: the software that owns the loop before what it
rests on.
"""


SHIFTED_UNTIL = "2024-09"
"""Month of Transformers 4.45, whose loss no longer copies the shifted logits; torchtune's loss in
chunks came in the month after.
"""


def as_of(found: Engine, month: str) -> Engine:
    """The facts of an engine in a month, `2023-12`."""
    if month >= SHIFTED_UNTIL:
        return found
    if found.name == "torchtune":
        return ENGINES["torchtune-2024"]
    resting_on_transformers = ("transformers", "ms-swift", "openrlhf", "verl")
    return replace(found, loss="shifted") if found.name in resting_on_transformers else found


def engine_named(text: str) -> tuple[Engine | None, str]:
    """(engine, what is left of the text) of a printed name: `ms-swift (HF Trainer)`,
    `TensorRT-LLM 0.6.1`. None where no name in it is known. What is left has to be understood by
    others: flags, versions, placement.
    """
    # a remark that holds a version says which rows have it
    rest = re.sub(r"\([^)]*(?:v?\d+\.\d+|\b20\d\d\b)[^)]*\)", " ", text.lower())
    found: str | None = None
    for pattern, name in NAMES:
        match = re.search(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])", rest)
        if match is None:
            continue
        if found is not None and name == "vllm":
            continue  # generation inside of another loop: a fact of its placement
        found = found or name
        rest = rest[: match.start()] + " " + rest[match.end() :]
    return (None if found is None else ENGINES[found]), rest
