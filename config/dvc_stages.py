"""What DVC calls our stages: those of all alignment methods are its one stage `align`, made for the method that
`align.method` names.

our stage     dvc.yaml                            dvc.lock
sft           sft                                 sft
ppo           align, with foreach: align.method   align@ppo
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from config.methods.registry import METHODS
from config.yaml_text import yaml_content

ALIGN = "align"


def dvc_name(stage: str) -> str:
    """The name of a stage for `dvc repro` and in dvc.lock."""
    return f"{ALIGN}@{stage}" if stage in METHODS else stage


def locked(lock: Mapping[str, Any], stage: str) -> dict[str, Any]:
    """The entry of a stage in the content of a dvc.lock, empty if it was never run.

    Older kept runs have an alignment stage under the method's name.
    """
    stages = lock.get("stages") or {}
    return stages.get(dvc_name(stage)) or stages.get(stage) or {}


def defined(root: Path) -> dict[str, dict[str, Any]]:
    """The stages of dvc.yaml by our names; `align` is expanded for each method."""
    stages: dict[str, dict[str, Any]] = yaml_content((root / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    align = stages.pop(ALIGN, None)
    if align is not None:
        template = yaml.safe_dump(align["do"])
        stages |= {method: yaml_content(template.replace("${item}", method)) for method in METHODS}
    return stages


def out_digest(lock: Path, stage: str, path: str) -> str | None:
    """DVC's digest of an output in a dvc.lock, None if it has none."""
    if not lock.exists():
        return None
    content: dict[str, Any] = yaml_content(lock.read_text(encoding="utf-8"))
    return next((out.get("md5") for out in locked(content, stage).get("outs", []) if out["path"] == path), None)
