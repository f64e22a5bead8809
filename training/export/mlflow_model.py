"""The aligned model of a run as an MLflow model: `mlflow.transformers.load_model` loads it as a chat pipeline.

python -m training.export.mlflow_model --folder RUN --to FOLDER

The one module that may import mlflow and transformers together, in a process of its own.
"""

import argparse
import logging
import os
import sys
from importlib.metadata import version
from pathlib import Path

from training.export.aligned import as_messages, load_aligned
from training.process.artifacts import replacing
from training.process.command import run_command

PACKAGES = ("torch", "transformers", "accelerate")
"""Packages needed to load it."""


def write_mlflow_model(folder: Path, target: Path) -> None:
    """Write the aligned model of the run in `folder` to `target`, which appears whole or not at all: merged weights in
    float32, tokenizer, signature of a chat, a held-out prompt as the input example, and the versions of the packages
    that it takes.

    Raises ModelError for a model that is missing or damaged.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # mlflow would look up a licence online
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    import mlflow.transformers
    from transformers import pipeline

    aligned = load_aligned(folder)
    generator = pipeline("text-generation", model=aligned.policy, tokenizer=aligned.tokenizer, device="cpu")
    with replacing(target) as out:
        mlflow.transformers.save_model(
            generator,
            str(out),
            task="llm/v1/chat",
            input_example={"messages": as_messages(aligned.prompts[0])},
            pip_requirements=[f"{name}=={version(name).split('+')[0]}" for name in PACKAGES],
        )


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    write_mlflow_model(options.folder, options.to)


if __name__ == "__main__":
    sys.exit(run_command(main, "MLflow model", logging.WARNING))
