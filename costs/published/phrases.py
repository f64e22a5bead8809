"""The words inside of printed texts ("QLoRA r16, packed", "TP4 PP4 CP2") -> facts. A word that no
pattern takes is refused by name: nothing is skipped but grammar.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from costs.published.words import Refused, nearest

Facts = Mapping[str, Any]
Phrase = tuple[str, Facts | Callable[[re.Match[str]], Facts]]


def _number(field: str, group: int = 1) -> Callable[[re.Match[str]], Facts]:
    return lambda match: {field: int(match[group])}


def _unplanned(match: re.Match[str]) -> Facts:
    raise Refused([f"{match[0]!r} is known, but has no formula here"])


def _parts(match: re.Match[str]) -> Facts:
    found = re.split(r"[\s,;+&/]+(?:and\s+)?", match[0].strip())
    return {"lora_modules": tuple(dict.fromkeys(MODULES[each] for each in found if each))}


MODULES = {
    **{name: name for name in ("q", "k", "v", "o", "gate", "up", "down")},
    **{f"{name}_proj": name for name in ("q", "k", "v", "o", "gate", "up", "down")},
    **{f"w{name}": name for name in ("q", "k", "v", "o")},
    "query": "q", "key": "k", "value": "v", "output": "o", "output_proj": "o", "dense": "o",
    "w1": "gate", "w3": "up", "w2": "down", "fc1": "up", "fc2": "down", "out_proj": "o",
}  # fmt: skip
_MODULE = "(?:" + "|".join(sorted(map(re.escape, MODULES), key=len, reverse=True)) + ")"
ALL_LINEAR = ("q", "k", "v", "o", "gate", "up", "down")
PACKED_QKV = ("q", "k", "v")

TARGETS: tuple[Phrase, ...] = (
    (r"all[-_ ]?(?:linear(?:[-_ ]?layers?)?|modules|layers|matrices)|\ball\b",
     {"lora_modules": ALL_LINEAR}),
    (r"q,\s*v,\s*o\s*\+\s*mlp", {"lora_modules": ("q", "v", "o", "gate", "up", "down")}),
    (r"c_attn|query_key_value|qkv(?:_proj)?|w_pack|wqkv|linear_qkv",
     {"lora_modules": PACKED_QKV}),
    (r"attn|attention(?: (?:projections|layers|only))?|qkvo",
     {"lora_modules": ("q", "k", "v", "o")}),
    (r"\bmlp\b|feed[- ]?forward", {"lora_modules": ("gate", "up", "down")}),
    (rf"\b{_MODULE}\b(?:[\s,;+&/]+(?:and\s+)?{_MODULE}\b)*", _parts),
    (r"\(?default\)?", {}),
)  # fmt: skip

TUNING: tuple[Phrase, ...] = (
    (r"dora|ga-?lore[-_]?\d*|llama-?pro|lisa(?:_\d+)?|long-?lora|ia3|p-?tuning(?: v2)?|"
     r"prefix[- ]tuning|prompt[- ]tuning|bitfit|freeze(?:d|[-_ ]tuning)?|vera|oft|boft|loha|lokr|"
     r"rslora|loftq|pissa|badam|apollo|spectrum|reft|quarot", _unplanned),
    (r"qlora[-_]?offload", {"tuning": "lora", "qlora": True, "cpu_offload": True}),
    (r"q-?lora", {"tuning": "lora", "qlora": True}),
    (r"lora[-_]offload", {"tuning": "lora", "cpu_offload": True}),
    (r"lora(?: \(peft scheme of nemo\))?", {"tuning": "lora"}),
    (r"adapter[-_ ]?v2", {"tuning": "adapter_v2"}),
    (r"(?:llama-)?adapter(?:[-_ ]?v1)?", {"tuning": "adapter"}),
    (r"\(low memory\)", {"optimizer_in_backward": True, "optimizer": "paged_adamw8bit"}),
    (r"full[-_ ]?(?:fine-?tun(?:e|ing)|param(?:eter)?s?|ft|sft|weights?|model|finetuning)?"
     r"(?: fine-?tuning)?(?: \(?actor and critic\)?)?", {"tuning": "full"}),
    (r"(?:supervised )?fine-?tun(?:e|ing)|\bsft\b|pre-?train(?:ing)?|from scratch",
     {"tuning": "full"}),
    (r"\br(?:ank)?\s*[=:]?\s*(\d+)\b", _number("lora_rank")),
    (r"on decoder\.layers", {"lora_modules": ALL_LINEAR}),
    *TARGETS[:-1],
)  # fmt: skip

CHECKPOINTING: tuple[Phrase, ...] = (
    (r"recipe default \(on\)|default \(on\)", {"checkpointing": "full"}),
    (r"selective(?:[-_ ](?:op|ac|checkpointing|recomputation|2))?|\bop\b",
     {"checkpointing": "selective"}),
    (r"full(?:[-_ ](?:ac|checkpointing|recomputation|recompute|layer))?|\btrue\b|\byes\b|\bon\b|"
     r"enabled|uniform|block|every layer|unsloth|\blayers?\b|per[- ]layer",
     {"checkpointing": "full"}),
    (r"none|\bfalse\b|\bno\b|\boff\b|disabled|without", {"checkpointing": "none"}),
)  # fmt: skip

ATTENTION: tuple[Phrase, ...] = (
    (r"sdpa[ ,/(+]+(?:flash[-_ ]?attention[-_ ]?v?\d?|fa\d?)\)?", {"attention": "flash"}),
    (r"(?:flash|fa)[-_ ]?(?:att(?:ention|n)?)?[-_ ]?v?[1234]?(?:\.\d+)*|\bfa[234]\b|triton|"
     r"\btrue\b|\byes\b|\bon\b|x-?formers|memory[-_ ]efficient|cudnn|fused|flashinfer|te|"
     r"flex(?:[-_ ]attention)?", {"attention": "flash"}),
    (r"sdpa|torch|scaled[-_ ]dot[-_ ]product(?:[-_ ]attention)?|paged(?:[-_ ]attention)?",
     {"attention": "sdpa"}),
    (r"eager|\bfalse\b|\bno\b|\boff\b|none|naive|math|vanilla", {"attention": "eager"}),
)  # fmt: skip

OPTIMIZERS: tuple[Phrase, ...] = (
    (r"paged[-_ ]?adamw?[-_ ]?(?:32-?bit)?(?![-_ ]?8)(?: (?:bnb|\(bnb\)))?",
     {"optimizer": "paged_adamw"}),
    (r"paged[-_ ]?adamw?[-_ ]?8-?bit", {"optimizer": "paged_adamw8bit"}),
    (r"(?:bnb )?8-?bit[-_ ]?adamw?|adamw?[-_ ]?(?:bnb[-_ ]?)?8-?bit", {"optimizer": "adamw8bit"}),
    (r"(?:decoupled |distributed |torch |fused ?|cpu|deepspeed ?cpu|deepspeed )?adamw?"
     r"(?:[-_ ](?:torch|fused|hf|apex|bnb|mini))*(?: \(?(?:fused|32-?bit)\)?)?",
     {"optimizer": "adamw"}),
    (r"\bsgd\b", {"optimizer": "sgd"}),
    (r"adafactor", {"optimizer": "adafactor"}),
    (r"lion|muon|lamb|lomo|adalomo|came|sophia|shampoo|soap|schedule-?free", _unplanned),
    (r"fused optimizer", {}),
)  # fmt: skip

DTYPES: tuple[Phrase, ...] = (
    (r"b(?:f|float)16[-_ ]true", {"dtype": "bf16", "mixed": False}),
    (r"(?:fp|float)16[-_ ]true|16[-_ ]true", {"dtype": "fp16", "mixed": False}),
    (r"b(?:f|float)16", {"dtype": "bf16"}),
    (r"fp8(?:[-_ ]?(?:e4m3|e5m2|hybrid|delayed|rowwise|tensorwise|blockwise|cs|ds|mx))*|"
     r"float8(?:_e4m3fn)?|mxfp8", {"fp8": True}),
    (r"fp4|nvfp4|mxfp4", _unplanned),
    (r"tf32", {"dtype": "tf32"}),
    (r"\(?(?:with )?fp32 (?:master|optimizer)(?: (?:weights|states|adam|copy))*\)?|master weights",
     {"master": True}),
    (r"(?:fp|float)32(?:[-_ ]true)?|32[-_ ]true|full precision|\b32\b", {"dtype": "fp32"}),
    (r"(?:fp|float)16|\bhalf\b|\b16\b", {"dtype": "fp16"}),
    (r"mixed(?:[- ]precision)?|\bamp\b|autocast|\bo1\b", {"mixed": True}),
    (r"\(?pure\)?", {"mixed": False}),
    (r"w8a8|w4a8", _unplanned),
)  # fmt: skip

QUANTS: tuple[Phrase, ...] = (
    (r"(?:bnb[. ])?nf4[-_ ]?(?:dq|\+? ?double[- ]quant(?:ization)?)|double[- ]quant(?:ization)?",
     {"quant": "nf4-dq"}),
    (r"(?:bnb[. ])?nf4|(?:bnb|bitsandbytes)[. ](?:int4|4-?bit)|(?:bnb )?fp4", {"quant": "nf4"}),
    (r"(?:auto)?gptq(?:[-_ ](?:int)?4(?:-?bit)?)?(?![-_ ]?(?:int)?8)", {"quant": "gptq"}),
    (r"(?:auto)?gptq[-_ ](?:int)?8(?:-?bit)?", {"quant": "gptq-int8"}),
    (r"awq(?:[-_ ](?:int)?4(?:-?bit)?)?", {"quant": "awq"}),
    (r"(?:bnb|bitsandbytes)[. ](?:int8|8-?bit)|llm\.int8(?:\(\))?", {"quant": "bnb-int8"}),
    (r"\bint8(?:[-_ ]?(?:weight[-_ ]?only|wo))?|8-?bit|w8a16|w8", {"quant": "int8"}),
    (r"\bint4(?:[-_ ]?(?:weight[-_ ]?only|wo))?|4-?bit|w4a16|w4", {"quant": "int4"}),
    (r"\bnone\b|\bno\b|\bfalse\b|unquantized|unquantised", {"quant": None}),
    (r"gguf|ggml|q[2-8]_(?:k|0|1)(?:_[sml])?|exl2|hqq|aqlm|quip#?|marlin|fp6|squeezellm|"
     r"[23]-?bit|nf3", _unplanned),
)  # fmt: skip

PARALLEL: tuple[Phrase, ...] = (
    (r"(?:deepspeed )?(?:zero|ds|stage)[-_ ]?(?:stage)?[-_ ]?([0-3])[-_ +]?offload",
     lambda m: {"zero": int(m[1]), "cpu_offload": True}),
    (r"(?:deepspeed )?(?:zero|ds|stage|z)[-_ ]?(?:stage)?[-_ ]?([0-3])", _number("zero")),
    (r"zero\+\+|zero-?infinity", _unplanned),
    (r"(?:fsdp[-_ ]?)?(?:hsdp|hybrid[-_ ]shard)", _unplanned),
    (r"shard[-_ ]grad[-_ ]op", {"zero": 2}),
    (r"no[-_ ]shard", {"zero": 0}),
    (r"fsdp ?(\d+)", lambda m: {"zero": 3, "fsdp": True, "shards": int(m[1])}),
    (r"(?:fsdp|fully[- ]sharded(?: data parallel)?)(?: full[-_ ]shard)?|full[-_ ]shard",
     {"zero": 3, "fsdp": True}),
    (r"distributed[- ]optimi[sz]er", {"zero": 1}),
    (r"pure dp|\bddp\b|data[- ]parallel(?:ism)?|pure data parallel", {"zero": 0}),
    (r"(?:async[-_ ]?)tp", {}),
    (r"\btp\s*[-=]?\s*(\d+)|tensor[- ]parallel\s*[-=]?\s*(\d+)",
     lambda m: {"tp": int(m[1] or m[2])}),
    (r"\bpp\s*[-=]?\s*(\d+)|pipeline[- ]parallel\s*[-=]?\s*(\d+)",
     lambda m: {"pp": int(m[1] or m[2])}),
    (r"\bcp\s*[-=]?\s*(\d+)", _number("cp")),
    (r"\bvp\s*[-=]?\s*(\d+)", _number("vp")),
    (r"\bep\s*[-=]?\s*(\d+)", _number("ep")),
    (r"\bdp\s*[-=]?\s*(\d+)", _number("dp")),
    (r"\bsp\b|sequence[- ]parallel(?:ism)?", {"sp": True}),
    (r"device[_ ]map(?:[= ]auto)?|model[- ]parallel(?:ism)?|layer split|naive pp",
     {"layer_split": True}),
    (r"1f1b|interleaved", {}),
    (r"single[- ](?:gpu|device)|1 gpu", {"one_device": True}),
)  # fmt: skip

OFFLOAD: tuple[Phrase, ...] = (
    (r"(?:w/o|without|no) (?:cpu )?offload(?:ing)?", {"cpu_offload": False}),
    (r"(?:w/|with )?\s*(?:param(?:eter)?s?|weights?) and optimi[sz]er offload(?:ing)?",
     {"cpu_offload": True}),
    (r"(?:act(?:ivation)?s?)[-_ ](?:cpu[-_ ])?offload(?:ing)?", {"offload_activations": True}),
    (r"optimi[sz]er[-_ ](?:cpu[-_ ])?offload(?:ing)?", {"offload_optimizer": True}),
    (r"(?:w/|with )?\s*(?:cpu|host)?[-_ ]?offload(?:ing)?", {"cpu_offload": True}),
)  # fmt: skip

KERNELS: tuple[Phrase, ...] = (
    (r"selective[- ](?:activation[- ])?(?:recompute|recomputation|checkpointing|ac)",
     {"checkpointing": "selective"}),
    (r"full[- ](?:activation[- ])?(?:recompute|recomputation|checkpointing|ac)",
     {"checkpointing": "full"}),
    (r"(?:bnb[. ])?nf4 for q-?lora", {}),
    (r"torch[-_. ]?compile|compiled?|inductor", {"compile": True}),
    (r"opt(?:imi[sz]er)?[-_ ]in[-_ ](?:bwd|backward)(?: pass)?", {"optimizer_in_backward": True}),
    (r"cuda[-_ ]?graphs?", {"cuda_graphs": True}),
    (r"liger(?:[-_ ]kernels?)?|fused[-_ ]linear[-_ ](?:cross[-_ ]entropy|ce)|flce|\bcce\b",
     {"liger": True}),
    (r"chunked[-_ ](?:ce|cross[-_ ]entropy|loss)", {"loss": "chunked"}),
    (r"(?:sample|sequence)?[-_ ]?pack(?:ed|ing)", {"packed": True}),
    (r"unpacked|padded|no packing", {"packed": False}),
    (r"(?:activation|act|gradient|grad)[-_ ](?:ckpt|checkpointing|recomputation)|recomputation",
     {"checkpointing": "full"}),
    (r"no (?:recomputation|checkpointing)", {"checkpointing": "none"}),
    (r"flash[-_ ]?att(?:ention|n)(?:[-_ ]?[123])?|\(?\bfa[123]?\b\)?|flash_attn[-_ ]?[123]?",
     {"attention": "flash"}),
    (r"sdpa", {"attention": "sdpa"}),
    (r"\(?eager(?: attention)?\)?", {"compile": False}),
    (r"(?:w/o|without|no) (?:he|hybrid engine)\b", {"hybrid_engine": False}),
    (r"hybrid engine(?: \(deepspeed-he\))?|\bhe\b", {"hybrid_engine": True}),
    (r"continuous batching|in-?flight batching|paged[-_ ]?attention", {}),
    (r"fp16[-_ ]?kv", {}),
)  # fmt: skip

PLACEMENT: tuple[Phrase, ...] = (
    (r"(?:((?:ref|reward|rm|actor|critic|vllm|policy|value)(?::(?:ref|reward|rm|actor|critic|vllm|"
     r"policy|value))+)\s*)?\b(\d+(?::\d+){2,5})\b",
     lambda m: {"placement": (tuple((m[1] or "").split(":")) if m[1] else (),
                              tuple(int(n) for n in m[2].split(":")))}),
    (r"ray", {"apart": True}),
    (r"\(?colocated?,? no vllm\)?", {"apart": False, "vllm": False}),
    (r"(?:without|no|w/o) vllm", {"vllm": False}),
    (r"\+?\s*vllm", {"vllm": True}),
    (r"\(?co-?locat(?:ed?|ion)(?: all)?\)?|shared devices|"
     r"all roles (?:on|share) all (?:gpus|devices)",
     {"apart": False}),
    (r"(?:roles )?(?:apart|separate(?:d| devices)?|disaggregated)", {"apart": True}),
    (r"one[- ]step[- ]off(?:[- ]policy)?|async(?:hronous)?", {"lag": 1}),
    (r"sync(?:hronous)?|on-policy", {"lag": 0}),
    (r"same size as (?:the )?(?:actor|policy)|same as (?:actor|policy)|same size|same",
     {"same": True}),
)  # fmt: skip

WITHIN_A_NAME: tuple[Phrase, ...] = (
    (r"q-?lora", {"tuning": "lora", "qlora": True}),
    (r"\(?lora\)?", {"tuning": "lora"}),
)
"""Of an engine's name: `PEFT (LoRA)`."""

COMMON = (*OFFLOAD, *KERNELS, *PARALLEL, *OPTIMIZERS, *DTYPES, *QUANTS)
GRAMMAR = re.compile(
    r"\b(?:with|and|of|on|the|a|in|for|at|per|by|its|is|are|as|to|using|use|used|via|plus|each|"
    r"gpu|gpus|devices?|default|inferred|stated|weights?|kernels?|backend|training|train|model|"
    r"method|only|mode|style|own|all|rows?|data|recipe|hf|huggingface|single|precision|native|repo|"
    r"v?\d+(?:\.\d+)+(?:[a-z]+\d*)?)\b|w/"
)
"""What a text may have beside its facts: articles, prepositions, and the version of a software."""


def scan(key: str, text: str, phrases: tuple[Phrase, ...], known: tuple[str, ...] = ()) -> Facts:
    """The facts in `text`; the first pattern that fits takes its words. Raises Refused with each
    word that is left, and where two phrases contradict each other.
    """
    rest = f" {text.lower()} "
    found: dict[str, Any] = {}
    for pattern, facts in phrases:
        match = re.search(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])", rest)
        while match is not None and match[0].strip():
            said = facts(match) if callable(facts) else facts
            for name, value in said.items():
                if name == "lora_modules" and name in found:
                    value = tuple(dict.fromkeys((*found[name], *value)))
                elif name in found and found[name] != value:
                    raise Refused([f"{key}={text!r} contradicts itself: {name} is "
                                   f"{found[name]!r} and {value!r}"])  # fmt: skip
                found[name] = value
            rest = rest[: match.start()] + " ; " + rest[match.end() :]
            match = re.search(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])", rest)
    left = re.findall(r"[a-z0-9_.%#]+(?:[-'][a-z0-9_.%#]+)*", GRAMMAR.sub(" ", rest))
    left = [word for word in left if re.search(r"[a-z0-9]", word)]
    if left:
        raise Refused(f"{key}: {word!r} is not understood{nearest(word, known)}" for word in left)
    return found
