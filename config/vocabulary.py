"""Equality of two tokenizers' vocabularies. A teacher and its student need it: their probabilities are compared token
by token.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from config.errors import ModelError
from config.inputs import student_path
from config.schema import Params


def vocabulary_digest(vocabulary: Mapping[str, int]) -> str:
    """Digest of tokens and ids."""
    listed = json.dumps(sorted(vocabulary.items(), key=lambda item: item[1])).encode()
    return hashlib.sha256(listed).hexdigest()


def stored_vocabulary(folder: Path) -> dict[str, int] | None:
    """Tokens and ids from a folder's tokenizer.json, added tokens included; None if it is missing or unreadable."""
    try:
        content: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: [token, score] by id
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {**vocabulary, **added}


def require_students_vocabulary(root: Path, params: Params) -> None:
    """Raise ModelError if the student's folder and the base model's (or data/tokenizer, for a model built here) have
    different vocabularies. Hub models and missing folders are compared when the stage starts.
    """
    named = student_path(params)
    if named is None:
        return
    base = root / params.model.path if params.model.path is not None else root / "data/tokenizer"
    student, teacher = stored_vocabulary(root / named), stored_vocabulary(base)
    if student is not None and teacher is not None:
        require_same_vocabulary(student, teacher, f"distill.student.path={named}")


def require_same_vocabulary(student: Mapping[str, int], teacher: Mapping[str, int], named: str) -> None:
    """Raise ModelError unless both vocabularies are equal; `named` is the student's setting."""
    if vocabulary_digest(student) == vocabulary_digest(teacher):
        return
    other = sum(student.get(token) != number for token, number in teacher.items())
    raise ModelError(
        f"{named} has a vocabulary of {len(student)}, the teacher one of {len(teacher)}, and "
        f"{other or len(student) - len(teacher)} tokens differ: a student learns from the "
        "teacher's probabilities token by token. Name a student with the teacher's tokenizer, or "
        "set distill.student.random in params.yaml."
    )
