"""Which setting makes a stage fit that does not."""

from costs.formulas.memory import device_bytes, peak
from costs.formulas.setting import Setting
from costs.planning.moments import moments

FITTING_LEVERS: tuple[tuple[str, dict[str, object]], ...] = (
    ("activation_checkpointing: true", {"checkpointing": "full"}),
    ("micro_batch_size: 1", {"micro_batch": 1}),
    (
        "micro_batch_size: 1 and activation_checkpointing: true",
        {"micro_batch": 1, "checkpointing": "full"},
    ),
    ("an 8-bit optimizer", {"optimizer": "adamw8bit", "checkpointing": "full"}),
    ("FSDP over the devices", {"parallel": "fsdp", "checkpointing": "full"}),
    ("LoRA", {"tuning": "lora", "weights_fp32": False, "checkpointing": "full"}),
    (
        "LoRA with micro_batch_size: 1",
        {"tuning": "lora", "weights_fp32": False, "checkpointing": "full", "micro_batch": 1},
    ),
    (
        "QLoRA with micro_batch_size: 1",
        {
            "tuning": "lora",
            "weights_fp32": False,
            "quantisation": "nf4-dq",
            "checkpointing": "full",
            "micro_batch": 1,
        },
    ),
    (
        "QLoRA over FSDP",
        {
            "tuning": "lora",
            "weights_fp32": False,
            "quantisation": "nf4-dq",
            "checkpointing": "full",
            "micro_batch": 1,
            "parallel": "fsdp",
        },
    ),
)
"""Tried in this order: what costs least time and changes the training least comes first."""


def closing_lever(setting: Setting) -> str:
    """The first lever that makes the stage fit, or how much the stage needs at least."""
    smallest = float("inf")
    for name, changes in FITTING_LEVERS:
        if changes.get("parallel") == "fsdp" and setting.gpus == 1:
            continue
        micro = changes.get("micro_batch", setting.levers.micro_batch)
        accumulation = setting.levers.accumulation * setting.levers.micro_batch // int(str(micro))
        needed = device_bytes(
            setting,
            peak(moments(setting.with_levers(**changes, accumulation=max(1, accumulation)))).total,
        )
        if needed <= setting.hardware.usable_bytes:
            return name
        smallest = min(smallest, needed)
    return (
        f"nothing tried fits: it needs at least {smallest / 2**30:.1f} GiB a device; take a larger "
        "device or more of them"
    )
