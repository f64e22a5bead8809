"""A published setting: its printed words -> `Printed`, in which every fact has a type and a unit.

Every key is used, known to have no effect (`costs/published/keys.py`), or refused; so is every
word of a text. `costs.published.settings` makes a Setting of it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from config.errors import CostError
from costs.published.keys import CANONICAL, NO_EFFECT, plain
from costs.published.phrases import (
    ATTENTION,
    CHECKPOINTING,
    COMMON,
    DTYPES,
    KERNELS,
    OFFLOAD,
    OPTIMIZERS,
    PARALLEL,
    PLACEMENT,
    QUANTS,
    TARGETS,
    TUNING,
    WITHIN_A_NAME,
    Facts,
    Phrase,
    scan,
)
from costs.published.words import Refused, count, nearest, not_stated, text_of, truth, whole
from costs.tables.catalogue import Hardware, device_of, shape
from costs.tables.engine_names import engine_named
from costs.tables.engines import ENGINES, Engine
from costs.tables.shapes import ModelShape, from_config

STAGES: dict[str, tuple[str, ...]] = {
    "sft": ("finetune", "fine-tuning", "finetuning", "fine-tune", "sft_step1", "training", "train",
            "instruction tuning", "supervised fine-tuning", "qlora", "lora",
            "lora fine-tuning", "full fine-tuning", "sft training", "step1"),
    "pretrain": ("pretraining", "sft/pretrain", "pretrain/sft", "pre-training", "pre-train", "cpt",
                 "continued pretraining",
                 "training from scratch"),
    "reward": ("rm", "rm_step2", "reward model", "reward_model", "rm training", "reward modeling",
               "reward modelling", "step2"),
    "dpo": ("dpo (step2_dpo_finetuning)", "dpo training", "preference"),
    "ppo": ("ppo_step3_rlhf", "rlhf", "ppo training", "step3", "rlhf ppo", "ppo step"),
    "grpo": ("grpo training", "rl grpo", "dapo", "drgrpo", "dr. grpo"),
    "rloo": ("reinforce", "reinforce++", "rloo training", "remax"),
    "serve": ("inference", "generation", "generate", "decode", "decoding", "inference serving",
              "serving", "offline inference", "inference throughput", "inference decode",
              "inference latency", "rollout", "batch inference", "inference generation",
              "text generation"),
    "prefill": ("inference prefill", "prefilling", "ttft", "first token"),
    "load": ("loading", "model loading", "weights"),
}  # fmt: skip
"""Stage -> the other names of it."""

TOKENS = (
    r"tokens?|toks?|seq(?:uence)?(?:s|_len| length)?|ctx|context|packed|pack|max(?:imum)?|up to|"
    r"length|len|~|<=|of|to|=|:"
)
SEQUENCES = (
    r"sequences?|seqs?|samples?|prompts?|per (?:gpu|device)|/ ?gpu|bs|mbs|x|requests?|responses?|"
    r"pairs?|=|:"
)
COUNTED = (
    r"gpus?|devices?|cards?|x|nodes?|steps?|tokens?|samples?|epochs?|layers?|params?|parameters?|"
    r"examples?|~|=|ways?"
)

LENGTHS = ("seq_len", "longest_seq", "mean_seq", "context_len", "prompt_len", "gen_len")
BATCHES = ("micro_batch", "train_batch_size", "batch_size", "pairs_per_gpu", "global_batch",
           "global_batch_pairs",
           "rollout_batch", "train_batch", "gen_micro_batch", "train_micro_batch",
           "prompts_per_step", "group_size", "max_global_batch_pairs")  # fmt: skip
COUNTS = ("gpus", "nodes", "gpus_per_node", "lora_rank", "grad_accum", "steps", "steps_per_epoch",
          "epochs", "samples", "data_parallel", "tensor_parallel", "pipeline_parallel",
          "virtual_pipeline", "context_parallel", "expert_parallel", "ppo_epochs", "d_model",
          "n_layers", "n_heads", "kv_heads", "d_ff", "vocab", "gpus_per_engine")  # fmt: skip
AMOUNTS = ("params", "trainable_params", "tokens", "global_batch_tokens")
FLAGS = ("lora_dropout", "compile", "cuda_graphs", "liger", "packed", "ddp", "sequence_parallel",
         "offload_optimizer", "offload_params", "offload_activations", "hybrid_engine", "ema",
         "load_in_4bit", "load_in_8bit", "cpu_and_activation_offload")  # fmt: skip
TEXTS: dict[str, tuple[Phrase, ...]] = {
    "dtype": (*DTYPES, *QUANTS),
    "tuning": (*TUNING, *COMMON),
    "details": (*TUNING, *COMMON),
    "lora_modules": TARGETS,
    "quant": (*QUANTS, *DTYPES),
    "optimizer": (*OPTIMIZERS, *COMMON),
    "parallelism": (*PARALLEL, *COMMON),
    "grad_checkpointing": CHECKPOINTING,
    "flash_attention": ATTENTION,
    "loss": KERNELS,
    "placement": PLACEMENT,
}


@dataclass(frozen=True)
class Printed:
    """What a source says of one run. None: it does not say."""

    stage: str
    model: ModelShape
    device: Hardware | None
    engine: Engine | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    dtype: str | None = None
    """bf16, fp16, fp32, tf32."""
    fp8: bool = False
    mixed: bool | None = None
    """Trained weights are fp32 and cast for computing; False: pure."""
    master: bool = False
    """Weights in `dtype`, with an fp32 copy in the optimizer."""
    tuning: str | None = None
    lora_rank: int | None = None
    lora_modules: tuple[str, ...] | None = None
    lora_dropout: bool | None = None
    quant: str | None = None
    kv_cache: str | None = None
    micro_batch: int | None = None
    """Sequences of one forward pass on one device; of generation, sequences side by side."""
    global_batch: float | None = None
    """Sequences between two optimizer steps, over all devices."""
    accumulation: int | None = None
    tokens: int | None = None
    """Longest sequence, in tokens."""
    longest: int | None = None
    mean_tokens: float | None = None
    prompt: int | None = None
    response: int | None = None
    packed: bool | None = None
    dataset: str | None = None
    month: str | None = None
    """When the software was current, `2023-12`, by a date or by the versions of its libraries."""
    checkpointing: str | None = None
    attention: str | None = None
    optimizer: str | None = None
    optimizer_in_backward: bool | None = None
    compiled: bool | None = None
    cuda_graphs: bool | None = None
    sequence_parallel: bool | None = None
    liger: bool = False
    loss: str | None = None
    zero: int | None = None
    shards: int | None = None
    """The number printed behind FSDP: ways of sharding, or its version."""
    fsdp: bool = False
    data_parallel: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    virtual_pipeline: int = 1
    context_parallel: int = 1
    layer_split: bool = False
    offload_optimizer: bool = False
    offload_weights: bool = False
    offload_activations: bool = False
    interconnect: str | None = None
    samples: float | None = None
    train_tokens: float | None = None
    steps: float | None = None
    epochs: float = 1.0
    largest_batch: bool = False
    """The batch is the largest that fits."""
    critic: ModelShape | None = None
    reward: ModelShape | None = None
    ref: bool = True
    rollout_batch: int | None = None
    prompts: int | None = None
    group_size: int | None = None
    train_batch: int | None = None
    ppo_epochs: int = 1
    ppo_epochs_stated: bool = False
    gen_micro_batch: int | None = None
    train_micro_batch: int | None = None
    max_global_batch: int | None = None
    hybrid_engine: bool | None = None
    ema: bool = False
    vllm: bool | None = None
    apart: bool | None = None
    placement: tuple[tuple[str, ...], tuple[int, ...]] | None = None
    lag: int = 0
    rungs: tuple[str, ...] = ()
    without_effect: tuple[str, ...] = ()
    """Keys that were read and decide nothing, with the reason."""
    remarks: tuple[str, ...] = field(default=())


class _Reader:
    """The keys that are left to read, the facts so far, and what was refused."""

    def __init__(self, setting: Mapping[str, Any]) -> None:
        self.left: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.facts: dict[str, Any] = {}
        self.said_by: dict[str, str] = {}
        self.refused: list[str] = []
        self.idle: list[str] = []
        self.engine_text = ""
        for key, value in setting.items():
            self._sort(str(key), value)

    def _sort(self, key: str, value: Any) -> None:
        name = plain(key)
        if name in NO_EFFECT:
            self.idle.append(f"{key}: {NO_EFFECT[name]}")
            return
        canonical = CANONICAL.get(name)
        if canonical is None:
            self.refused.append(
                f"key {key!r} is not understood{nearest(name, (*CANONICAL, *NO_EFFECT))}"
            )
        elif isinstance(value, Mapping):
            self.refused.append(f"{key} holds a mapping, not a value or a list")
        elif not_stated(value):
            return
        elif canonical in self.left and self.left[canonical] != value:
            self.refused.append(
                f"{self.names[canonical]}={self.left[canonical]!r} and {key}={value!r} say two "
                "things of one"
            )
        else:
            self.left[canonical], self.names[canonical] = value, key

    def take(self, key: str, parse: Callable[[str, Any], Any]) -> Any:
        """The parsed value of a key, None where it is not there or was refused."""
        if key not in self.left:
            return None
        value = self.left.pop(key)
        try:
            return parse(self.names[key], value)
        except Refused as error:
            self.refused.extend(error.words)
        except CostError as error:
            self.refused.append(str(error))
        return None

    def say(self, key: str, facts: Facts) -> None:
        """Add facts; two keys that differ contradict each other."""
        for name, value in facts.items():
            if name in self.facts and self.facts[name] != value:
                old = self.facts[name]
                self.refused.append(
                    f"{self.said_by[name]} says {name} {old!r}, {key} says {value!r}"
                )
            self.facts[name], self.said_by[name] = value, key

    def texts(self) -> None:
        for key, phrases in TEXTS.items():
            value = self.left.get(key)
            if key == "quant" and isinstance(value, int) and not isinstance(value, bool):
                self.left[key] = {4: "4-bit", 8: "8-bit", 16: "none", 32: "none"}.get(value, value)
            facts = self.take(key, _scanner(phrases))
            self.say(self.names.get(key, key), facts or {})


def _scanner(phrases: tuple[Phrase, ...]) -> Callable[[str, Any], Facts]:
    return lambda key, value: scan(key, text_of(value), phrases)


def _whole(words: str, binary: bool) -> Callable[[str, Any], int]:
    return lambda key, value: whole(key, value, words, binary)


def read(setting: Mapping[str, Any]) -> Printed:
    """The typed facts of a printed setting. Raises Refused with every word that was not
    understood.
    """
    if not isinstance(setting, Mapping):
        raise Refused([f"the setting is a {type(setting).__name__}, not a mapping of keys"])
    reader = _Reader(setting)
    known = _numbers(reader)
    reader.texts()
    _offload(reader)
    engine = _engine(reader)
    device, speed = _device(reader)
    known["sequences_named"] = "sequence" in reader.names.get("micro_batch", "")
    stage = reader.take("stage", _stage) or _stage_of(reader, known)
    model = _model(reader, known)
    roles = _roles(reader, model, stage)
    ladder = reader.take("cumulative_technique", _rung)
    facts = reader.facts
    for key in (
        "versions",
        "date",
        "torch",
        "transformers",
        "dataset",
        "interconnect",
        "phase",
        "zero",
        "kv_cache_quant",
    ):
        known[key] = reader.take(key, PARSERS[key])
    if known["phase"]:
        stage = known["phase"]
    if known["zero"]:
        reader.say("zero", known["zero"])
    reader.refused.extend(f"key {reader.names[key]!r} is not used here" for key in reader.left)
    _agree(reader, known, model, stage)
    if reader.refused:
        raise Refused(reader.refused)
    assert model is not None
    assert stage is not None
    return _printed(stage, model, device, engine, known, facts, roles, ladder, reader, speed)


def _numbers(reader: _Reader) -> dict[str, Any]:
    found: dict[str, Any] = {}
    batch = str(reader.left.get("batch_size", "")).lower()
    if ("largest" in batch and "oom" in batch) or batch in ("max", "maximum", "largest that fits"):
        reader.left.pop("batch_size")
        found["largest_batch"] = True
    elif batch.startswith("recipe default (") and batch.endswith(")"):
        reader.left["batch_size"] = batch[len("recipe default (") : -1]
    for keys, words, binary in (
        (LENGTHS, TOKENS, True),
        (BATCHES, SEQUENCES, False),
        (COUNTS, COUNTED, False),
    ):
        for key in keys:
            if key == "seq_len" and "pack" in str(reader.left.get(key, "")).lower():
                reader.say(key, {"packed": True})
            found[key] = reader.take(key, _whole(words, binary))
    for key in AMOUNTS:
        found[key] = reader.take(key, lambda name, value: count(name, value, COUNTED))
    dropout = reader.left.get("lora_dropout")
    if isinstance(dropout, float | int) and not isinstance(dropout, bool) and 0 <= dropout < 1:
        reader.left["lora_dropout"] = dropout > 0
    for key in FLAGS:
        found[key] = reader.take(key, truth)
    return found


def _offload(reader: _Reader) -> None:
    """`cpu_offload` is a flag, or says what is offloaded."""

    def parse(key: str, value: Any) -> Facts:
        try:
            return {"cpu_offload": truth(key, value)}
        except Refused:
            facts = scan(key, f"{text_of(value)}", (
                (r"(?:adam|optimi[sz]er)(?: states?)?", {"offload_optimizer": True}),
                (r"param(?:eter)?s?|weights?|model", {"offload_params": True}),
                (r"activations?", {"offload_activations": True}),
                (r"cpu|host|offload(?:ed|ing)?", {}),
            ))  # fmt: skip
            return facts or {"cpu_offload": True}

    reader.say("cpu_offload", reader.take("cpu_offload", parse) or {})


def _engine(reader: _Reader) -> Engine | None:
    def parse(key: str, value: Any) -> Engine:
        text = text_of(value)
        reader.engine_text = text
        found, rest = engine_named(text)
        if found is None:
            raise Refused(
                [f"{key}={text!r} is not a known engine{nearest(text, ENGINES)}. Known: "
                 f"{', '.join(ENGINES)}"]
            )  # fmt: skip
        reader.say(key, scan(key, rest, (*PLACEMENT, *COMMON, *WITHIN_A_NAME)))
        return found

    found: Engine | None = reader.take("engine", parse)
    return found


def _device(reader: _Reader) -> tuple[Hardware | None, None]:
    return reader.take("gpu", lambda key, value: device_of(text_of(value))), None


def _stage(key: str, value: Any) -> str:
    said = text_of(value).strip().lower()
    for name, others in STAGES.items():
        if said == name or said in others or said.replace("_", " ") in others:
            return name
    known = [name for each, others in STAGES.items() for name in (each, *others)]
    raise Refused([f"{key}={said!r} is not a known stage{nearest(said, known)}"])


def _stage_of(reader: _Reader, known: Mapping[str, Any]) -> str | None:
    """The stage of a setting that does not say it."""
    if "phase" in reader.left:
        return "load"
    if known.get("gen_len") and not reader.facts.get("tuning"):
        return "ppo" if known.get("rollout_batch") else "serve"
    if reader.facts.get("tuning") or known.get("seq_len"):
        return "sft"
    reader.refused.append(f"stage is not stated: it would need one of {', '.join(STAGES)}")
    return None


def _model(reader: _Reader, known: Mapping[str, Any]) -> ModelShape | None:
    sizes = {key: known[key] for key in ("d_model", "n_layers", "n_heads", "vocab")}
    name = text_of(reader.left.get("model", "model"))
    head, _, rest = name.partition(",")
    if rest:
        reader.say("model", _scanned(reader, "model", rest))
    if all(sizes.values()):
        reader.left.pop("model", None)
        family = "llama" if known["d_ff"] and known["kv_heads"] else "mpt"
        return from_config(
            {
                "model_type": family,
                "d_model": sizes["d_model"],
                "n_layers": sizes["n_layers"],
                "n_heads": sizes["n_heads"],
                "vocab_size": sizes["vocab"],
                "intermediate_size": known["d_ff"],
                "num_key_value_heads": known["kv_heads"],
            },
            name,
        )
    if "model" not in reader.left:
        reader.refused.append("model is not stated: memory and time depend on it")
        return None
    found: ModelShape | None = reader.take("model", lambda key, value: shape(head))
    for key, attribute in (("d_model", "width"), ("n_layers", "layers"), ("n_heads", "heads"),
                           ("kv_heads", "kv_heads"), ("d_ff", "mlp_width")):  # fmt: skip
        if found is not None and known[key] and known[key] != getattr(found, attribute):
            reader.refused.append(
                f"{key}={known[key]} does not go with {found.name}, which has "
                f"{getattr(found, attribute)}"
            )
    return found


def _scanned(reader: _Reader, key: str, text: str) -> Facts:
    try:
        return scan(key, text, (*TUNING, *COMMON))
    except Refused as error:
        reader.refused.extend(error.words)
        return {}


def _roles(reader: _Reader, model: ModelShape | None, stage: str | None) -> dict[str, Any]:
    """Critic, reward and reference model of a loop."""

    def parse(key: str, value: Any) -> Any:
        if isinstance(value, bool):
            return model if value else None
        said = text_of(value).strip().lower()
        if said.startswith("same"):
            return model
        if said in ("none", "rule", "rules", "rule-based", "function", "verifier", "verifiable"):
            return "none"
        return shape(text_of(value))

    return {role: reader.take(role, parse) for role in ("critic", "reward", "ref")}


RUNGS = ("baseline", "+packed", "+compile", "+chunked_ce", "+act_ckpt", "+opt_in_bwd",
         "+act_offload", "+8bit_adamw", "lora", "qlora")  # fmt: skip


def _rung(key: str, value: Any) -> tuple[str, ...]:
    """The rungs of a cumulative table up to this one: each row has what the rows above it have."""
    if value not in RUNGS:
        raise Refused([f"{key}={value!r} is not understood{nearest(str(value), RUNGS)}"])
    return RUNGS[: RUNGS.index(value) + 1]


def _zero(key: str, value: Any) -> Facts:
    if isinstance(value, bool):
        return {"zero": 3 if value else 0}
    text = text_of(value).strip().lower()
    if text in ("0", "1", "2", "3"):
        return {"zero": int(text)}
    text = re.sub(r"[-_ ]?(?:config)?\.(?:json|ya?ml)$", "", text)
    return scan(key, re.sub(r"^(?:ds|deepspeed)[-_ ]", "", text), (*PARALLEL, *OFFLOAD))


def _kv(key: str, value: Any) -> str | None:
    if isinstance(value, bool):
        if value:
            raise Refused([f"{key}=true does not say the type of the cache: it would need int8 or "
                           "fp8"])  # fmt: skip
        return None
    text = text_of(value).strip().lower()
    for name, words in (("int8", ("int8", "8-bit", "8")), ("fp8", ("fp8", "fp8_e5m2", "fp8_e4m3")),
                        ("bf16", ("bf16", "fp16", "auto", "none", "false"))):  # fmt: skip
        if text in words:
            return None if name == "bf16" else name
    raise Refused([f"{key}={value!r} is not a known type{nearest(text, ('int8', 'fp8', 'bf16'))}"])


def _links(key: str, value: Any) -> str:
    """pcie, nvlink or nothing known of links between devices, and how nodes are joined."""
    if isinstance(value, bool):
        return "nvlink" if value else "pcie"
    facts = scan(key, text_of(value), (
        (r"pcie?(?: ?(?:gen)?[345](?:\.0)?)?(?: ?x?\d+)?,? ?(?:no|without) nvlink|no nvlink|"
         r"pcie?(?: ?(?:gen)?[345](?:\.0)?)?(?: ?x\d+)?", {"link": "pcie"}),
        (r"nvlink ?[2345]?(?:\.0)?|nvswitch|nvl\d*", {"link": "nvlink"}),
        (r"infiniband|\bib\b|hdr|ndr|roce(?: ?v?2)?|efa|ethernet|tcp|rdma|"
         r"\d+ ?(?:gbps|gb/s|gbit/s)", {}),
        (r"\(?\d+ ?w power limit\)?", {}),
        (r"intra-?node|inter-?node", {}),
    ))  # fmt: skip
    return str(facts.get("link", ""))


PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "versions": lambda key, value: text_of(value),
    "date": lambda key, value: _date(key, value),
    "torch": lambda key, value: f"torch {text_of(value)}",
    "transformers": lambda key, value: f"transformers {text_of(value)}",
    "dataset": lambda key, value: text_of(value),
    "interconnect": _links,
    "phase": _stage,
    "zero": _zero,
    "kv_cache_quant": _kv,
}


def _idle(known: Mapping[str, Any]) -> list[str]:
    """Keys that are read and decide nothing as they stand."""
    found = []
    if known["versions"] and _month(str(known["versions"])) is None:
        found.append("versions: no date is known of them, the newest are planned")
    if known["dataset"] and not known["longest_seq"] and not known["mean_seq"]:
        found.append("dataset: rows count as long as the sequence, where its lengths are not known")
    return found


def _micro(known: Mapping[str, Any], stage: str) -> int | None:
    """Sequences of a pass: of pairs both count."""
    if known["micro_batch"]:
        found = int(known["micro_batch"])
        return found if known["sequences_named"] or stage not in ("dpo", "reward") else 2 * found
    if known["pairs_per_gpu"]:
        return 2 * int(known["pairs_per_gpu"])
    alone = known["batch_size"]
    if alone is None and stage not in ("ppo", "grpo", "rloo"):
        alone = known["train_batch_size"]
    return alone and int(alone) * (2 if stage in ("dpo", "reward") else 1)


def _global(known: Mapping[str, Any], stage: str) -> float | None:
    """Sequences of an optimizer step: a batch that is named beside a micro-batch is of all."""
    two = 2 if stage in ("dpo", "reward") else 1
    if known["global_batch"]:
        return float(two * known["global_batch"])
    if known["global_batch_pairs"]:
        return float(2 * known["global_batch_pairs"])
    if stage in ("ppo", "grpo", "rloo", "serve", "prefill", "load"):
        return known["batch_size"] if known["micro_batch"] else None
    if known["global_batch_tokens"] and (known["seq_len"] or known["longest_seq"]):
        return float(known["global_batch_tokens"] / (known["seq_len"] or known["longest_seq"]))
    if known["micro_batch"] or known["pairs_per_gpu"]:
        both = known["batch_size"] or known["train_batch_size"]
        return both and float(two * both)
    return None


RELEASED = {
    "torch": {"1.13": "2022-10", "2.0": "2023-03", "2.1": "2023-10", "2.2": "2024-01",
              "2.3": "2024-04", "2.4": "2024-07", "2.5": "2024-10", "2.6": "2025-01",
              "2.7": "2025-04", "2.8": "2025-08"},
    "transformers": {"4.28": "2023-04", "4.31": "2023-07", "4.36": "2023-12", "4.40": "2024-04",
                     "4.44": "2024-08", "4.45": "2024-09", "4.48": "2025-01", "4.50": "2025-03"},
}  # fmt: skip
"""Library -> version -> month of its release; another version is that of the newest before it."""
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")


def _month(text: str) -> str | None:
    """The latest month that a date or the versions of libraries point to."""
    said = text.lower()
    found = [f"{year}-{month or '12'}" for year, month in
             re.findall(r"\b(20[12]\d)(?:-(\d\d))?\b", said)]  # fmt: skip
    for name, year in re.findall(r"\b([a-z]{3})[a-z]* (20[12]\d)\b", said):
        if name in MONTHS:
            found = [f"{year}-{MONTHS.index(name) + 1:02}"]
    for library, releases in RELEASED.items():
        for major, minor in re.findall(rf"\b{library}[ =:v]*(\d)\.(\d+)", said):
            before = [
                month
                for version, month in releases.items()
                if tuple(map(int, version.split("."))) <= (int(major), int(minor))
            ]
            found += before[-1:]
    return max(found, default=None)


def _date(key: str, value: Any) -> str:
    if _month(text_of(value)) is None:
        raise Refused([f"{key}={value!r} is not a date: it would need a year, or 2023-12"])
    return text_of(value)


def _agree(
    reader: _Reader, known: Mapping[str, Any], model: ModelShape | None, stage: str | None
) -> None:
    """Contradictions between what several keys say."""
    facts, refused = reader.facts, reader.refused
    if model is not None and known["params"] and not facts.get("quant"):
        printed = known["params"]
        if not 0.85 < printed / model.parameters < 1.18:
            refused.append(
                f"params={printed:.4g} does not go with {model.name}, which has "
                f"{model.parameters:.4g}"
            )
    if facts.get("tuning") == "full" and known["lora_rank"]:
        refused.append(f"lora_rank={known['lora_rank']} contradicts full fine-tuning")
    nodes, each, gpus = known["nodes"], known["gpus_per_node"], known["gpus"]
    if nodes and each and gpus and nodes * each != gpus:
        refused.append(f"nodes={nodes} x gpus_per_node={each} is not gpus={gpus}")
    pairs, sequences = known["pairs_per_gpu"], known["micro_batch"]
    if pairs and sequences and sequences != 2 * pairs:
        refused.append(f"{pairs} pairs a device are {2 * pairs} sequences, not {sequences}")
    if (known["expert_parallel"] or facts.get("ep") or 1) > 1:
        refused.append("expert_parallel: experts on devices of their own have no formula here")
    pipelined = (known["pipeline_parallel"] or facts.get("pp") or 1) > 1
    ringed = (known["context_parallel"] or facts.get("cp") or 1) > 1
    if stage in ("ppo", "grpo", "rloo", "serve", "prefill") and (pipelined or ringed):
        refused.append(f"pipeline_parallel and context_parallel of stage {stage} have no formula")
    if stage in ("ppo", "grpo", "rloo"):
        for name, given in (("fp8", facts.get("fp8")), ("kv_cache", known["kv_cache_quant"]),
                            ("gpus_per_engine", known["gpus_per_engine"])):  # fmt: skip
            if given:
                refused.append(f"{name} of stage {stage} has no formula here")
    elif known["gpus_per_engine"]:
        refused.append(f"gpus_per_engine belongs to a loop, not to stage {stage}")
    trained = known["trainable_params"]
    whole_model = model is not None and trained and facts.get("tuning") == "full"
    if model is not None and whole_model and not 0.85 < trained / model.parameters < 1.18:
        refused.append(f"trainable_params={trained:.4g} contradicts full fine-tuning")
    if facts.get("one_device") and (known["gpus"] or 1) > 1:
        refused.append(f"gpus={known['gpus']} contradicts a single device")
    if facts.get("fp8") and known.get("load_in_4bit"):
        refused.append("fp8 and load_in_4bit contradict each other")


def _printed(
    stage: str,
    model: ModelShape,
    device: Hardware | None,
    engine: Engine | None,
    known: Mapping[str, Any],
    facts: Mapping[str, Any],
    roles: Mapping[str, Any],
    ladder: tuple[str, ...] | None,
    reader: _Reader,
    _: None,
) -> Printed:
    named = {each.name for each in fields(Printed)}
    direct = {key: value for key, value in facts.items() if key in named}
    offload = bool(facts.get("cpu_offload"))
    gpus = known["gpus"]
    if gpus is None and known["nodes"]:
        gpus = known["nodes"] * (known["gpus_per_node"] or 8)
    quant = facts.get("quant")
    if facts.get("qlora") and quant in (None, "nf4"):
        quant = "nf4-dq"  # double quantisation is part of QLoRA (arXiv 2305.14314 section 3)
    if known["load_in_4bit"]:
        quant = quant or "nf4"
    if known["load_in_8bit"]:
        quant = quant or "bnb-int8"
    whole_ = known["cpu_and_activation_offload"]
    prompt = known["prompt_len"]
    if prompt is None and stage in ("serve", "prefill"):
        prompt = known["context_len"]
    tokens = known["seq_len"] or (None if stage in ("serve", "prefill") else known["context_len"])
    loop = stage in ("ppo", "grpo", "rloo")
    # veRL counts prompts there, others the responses between two optimizer steps
    prompts_named = engine is not None and engine.name == "verl"
    return Printed(
        **(
            direct
            | {
                "stage": stage,
                "model": model,
                "device": device,
                "engine": engine,
                "gpus": gpus,
                "gpus_per_node": known["gpus_per_node"],
                "lora_rank": known["lora_rank"] or facts.get("lora_rank"),
                "lora_dropout": known["lora_dropout"],
                "quant": quant,
                "kv_cache": known["kv_cache_quant"],
                "micro_batch": _micro(known, stage),
                "global_batch": _global(known, stage),
                "accumulation": known["grad_accum"],
                "tokens": tokens,
                "longest": known["longest_seq"],
                "mean_tokens": known["mean_seq"],
                "prompt": prompt,
                "response": known["gen_len"],
                "packed": known["packed"] if known["packed"] is not None else facts.get("packed"),
                "dataset": known["dataset"],
                "month": _month(
                    " ".join(
                        str(known[key])
                        for key in ("date", "versions", "torch", "transformers")
                        if known[key]
                    )
                    + f" {reader.engine_text}"
                ),
                "compiled": known["compile"]
                if known["compile"] is not None
                else facts.get("compile"),
                "cuda_graphs": known["cuda_graphs"] or facts.get("cuda_graphs"),
                "sequence_parallel": known["sequence_parallel"]
                if known["sequence_parallel"] is not None
                else facts.get("sp"),
                "liger": bool(known["liger"] or facts.get("liger")),
                "zero": facts.get("zero") if not known["ddp"] else 0,
                "data_parallel": known["data_parallel"] or facts.get("dp"),
                "tensor_parallel": known["tensor_parallel"] or facts.get("tp") or 1,
                "pipeline_parallel": known["pipeline_parallel"] or facts.get("pp") or 1,
                "virtual_pipeline": known["virtual_pipeline"] or facts.get("vp") or 1,
                "context_parallel": known["context_parallel"] or facts.get("cp") or 1,
                "offload_optimizer": bool(
                    offload or whole_ or known["offload_optimizer"]
                    or facts.get("offload_optimizer")
                ),
                "offload_weights": bool(
                    offload or whole_ or known["offload_params"] or facts.get("offload_params")
                ),
                "offload_activations": bool(
                    whole_ or known["offload_activations"] or facts.get("offload_activations")
                ),
                "interconnect": known["interconnect"],
                "samples": known["samples"],
                "train_tokens": known["tokens"],
                "steps": known["steps"] or known["steps_per_epoch"],
                "epochs": float(known["epochs"] or 1),
                "largest_batch": bool(known.get("largest_batch")),
                "critic": None if roles["critic"] == "none" else roles["critic"],
                "reward": None if roles["reward"] == "none" else roles["reward"],
                "ref": roles["ref"] != "none",
                "rollout_batch": known["rollout_batch"],
                "prompts": known["prompts_per_step"]
                or (known["train_batch_size"] if loop and prompts_named else None),
                "group_size": known["group_size"],
                "train_batch": known["train_batch"]
                or (known["train_batch_size"] if loop and not prompts_named else None),
                "ppo_epochs": known["ppo_epochs"] or 1,
                "ppo_epochs_stated": known["ppo_epochs"] is not None,
                "gen_micro_batch": known["gen_micro_batch"],
                "train_micro_batch": known["train_micro_batch"],
                "max_global_batch": known["max_global_batch_pairs"],
                "hybrid_engine": known["hybrid_engine"]
                if known["hybrid_engine"] is not None
                else facts.get("hybrid_engine"),
                "ema": bool(known["ema"]),
                "rungs": ladder or (),
                "without_effect": (*reader.idle, *_idle(known)),
            }
        )
    )  # fmt: skip
