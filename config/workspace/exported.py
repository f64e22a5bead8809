"""export.json: what `rlhf export` says about an export, and `rlhf serve` has to know of it."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from config.errors import ModelError
from config.workspace.quantised import QuantisedFile

FILE = "export.json"
GGUF = "gguf"
"""Folder of the GGUF files within an export."""


class Exported(BaseModel):
    """An export; facts of its run are further fields."""

    model_config = ConfigDict(frozen=True, extra="allow")

    context_length: int
    control_tokens: tuple[str, ...]
    """Special tokens of the tokenizer, as they are spelt."""
    single_prompts: bool = False
    """Whether the model was trained on single prompts: it refuses conversations."""
    differs: tuple[str, ...] = ()
    """Differences between llama.cpp and training, one line each. With any, it must not serve the model."""
    quantised: tuple[QuantisedFile, ...] = ()


def read_exported(folder: Path) -> Exported:
    """Raises ModelError if `folder` is not a complete export."""
    try:
        return Exported.model_validate_json((folder / FILE).read_bytes())
    except (OSError, ValidationError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{folder} is not a complete export: {reason}. Remove it, and write it again with rlhf export."
        ) from error


def keep_exported(folder: Path, content: Exported) -> None:
    """Write the record of an export, its last file."""
    (folder / FILE).write_text(content.model_dump_json(indent=1) + "\n", encoding="utf-8")


def gguf_path(folder: Path, kind: str) -> Path:
    """Path of a GGUF file within an export."""
    return folder / GGUF / f"model-{kind}.gguf"
