"""Migration of params of earlier versions: moved, removed and added parameters."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from config.records import STAGES
from config.sections.where import SHARED_STAGES

GONE = {
    "sft.packing": "rows of like length share a batch anyway, so that packing had nothing to save",
    **dict.fromkeys(
        ("ppo.kl.estimator", "rloo.kl.estimator", "grpo.kl.estimator"),
        "the penalty is the log ratio, k1; k3 as a reward pushes the policy from the SFT model",
    ),
}
"""Removed parameters, and why."""
LATER = ("distill",)
"""Stages added after the sections had moved."""
MOVED = {
    "processes": ("processes", tuple(stage for stage in SHARED_STAGES if stage not in LATER)),
    "sharding": ("sharding", tuple(stage for stage in SHARED_STAGES if stage not in LATER)),
    "placement": ("pool", tuple(stage for stage in STAGES if stage not in LATER)),
}
"""Earlier sections -> the key of `where` that replaces them, and the stages they had."""
ADDED: dict[str, Any] = {
    **{f"{method}.on_divergence": "stop" for method in ("ppo", "rloo", "grpo")},
    "model.random.rope_theta": 10000.0,
    "distill": None,
    "reward.layers": None,
    "tracking.model": "aligned",
}
"""Added parameters, each with the value that keeps the earlier behaviour."""


def moved(content: Mapping[str, Any], origin: str) -> list[str]:
    """One line per moved section: what to write now."""
    lines = []
    for section in MOVED:
        if section in content:
            where = _where({section: content[section]})
            now = " and ".join(
                f"where.{stage}.{key}: {str(value).lower() if isinstance(value, bool) else value}"
                for stage, place in where.items()
                for key, value in place.items()
            )
            lines.append(
                f"{section} in {origin} has moved to where: write {now or 'nothing'}, or let rlhf "
                "doctor --migrate write params.yaml."
            )
    return lines


def migrated(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` in the current schema; unchanged if it is current."""
    found = {key: value for key, value in content.items() if key not in MOVED}
    where = _where(content)
    if where:
        under = found.get("where") or {}
        found["where"] = {
            stage: {**where.get(stage, {}), **(under.get(stage) or {})}
            for stage in dict.fromkeys([*where, *under])
        }
    for place in GONE:
        found = _without(found, place.split("."))
    if "extends" not in found:  # otherwise the file it extends has them
        for place, value in ADDED.items():
            found = _with(found, place.split("."), value)
    return found


def _without(content: dict[str, Any], place: list[str]) -> dict[str, Any]:
    """`content` without the value at `place`."""
    name, *below = place
    if not below:
        return {key: value for key, value in content.items() if key != name}
    section = content.get(name)
    return content | {name: _without(section, below)} if isinstance(section, dict) else content


def _with(content: dict[str, Any], place: list[str], value: Any) -> dict[str, Any]:
    """`content` with `value` at `place`, unless there is one already or its section is missing."""
    name, *below = place
    if not below:
        return {name: value} | content
    section = content.get(name)
    return content | {name: _with(section, below, value)} if isinstance(section, dict) else content


def _where(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`where` from earlier sections: the most common value becomes the default if all stages have
    one.

    Single-process stages had neither processes nor sharding.
    """
    where: dict[str, dict[str, Any]] = {}
    for section, (name, stages) in MOVED.items():
        old = content.get(section)
        if not isinstance(old, Mapping):
            continue
        stated = {stage: old[stage] for stage in stages if stage in old}
        if name == "sharding":
            stated = {key: "zero2" if level == "zero1" else level for key, level in stated.items()}
        usual = None
        if len(stated) == len(stages):
            usual = Counter(map(str, stated.values())).most_common(1)[0][0]
            where.setdefault("default", {})[name] = next(
                value for value in stated.values() if str(value) == usual
            )
        for stage, value in stated.items():
            if str(value) != usual:
                where.setdefault(stage, {})[name] = value
        if section == "sharding" and "offload" in old:
            where.setdefault("default", {})["offload"] = old["offload"]
    return where
