"""Exports of models with random weights, for `rlhf calibrate` to serve: a small one, a deep small one, and one whose
weights exceed the caches, in every weight type.

python -m training.calibrate.exports --to FOLDER
"""

import argparse
import logging
import sys
from pathlib import Path

from config.compose import compose
from config.load import read, validate
from config.sections.data import HelpdeskSource
from config.workspace.exported import GGUF, Exported, gguf_path, keep_exported
from training.export.aligned import with_prompts_of_training
from training.export.gguf_file import TYPES, write_gguf
from training.modeling.models import base_model
from training.modeling.tokenizer import special_tokens, trained_tokenizer
from training.preparation import helpdesk
from training.process.command import run_command

HOME = Path(__file__).parents[2]
VOCABULARY = 1024
CONTEXT = {"small": 96, "deep": 96, "large": 256}
SHAPES = {
    "small": {"width": 96, "layers": 3, "heads": 4, "mlp_width": 256, "vocab_size": VOCABULARY},
    "deep": {"width": 64, "layers": 16, "heads": 2, "mlp_width": 128, "vocab_size": VOCABULARY},
    "large": {"width": 512, "layers": 8, "heads": 8, "mlp_width": 1536, "vocab_size": 8192},
}
"""Shapes with 0.5, 0.7 and 34 million parameters."""


def write_exports(folder: Path) -> None:
    """Write an export of each shape below `folder`."""
    for name, shape in SHAPES.items():
        overrides = [f"model.random.{key}={value}" for key, value in shape.items()]
        overrides += [f"model.random.kv_heads={shape['heads']}", f"model.context_length={CONTEXT[name]}"]
        content = compose(read(HOME / "recipes" / "demo.yaml"), {}, overrides)
        params = validate(content, "the params of a calibration")
        assert isinstance(params.data.source, HelpdeskSource)
        source = params.data.source.model_copy(update={"sft_rows": 500, "preference_rows": 10})
        texts = [row["completion"] for row in helpdesk.demonstrations(source, params.seed)]
        tokenizer = trained_tokenizer(texts, VOCABULARY)
        model = base_model(params.model, tokenizer, params.seed)
        out = folder / name
        model.save_pretrained(out)
        with_prompts_of_training(tokenizer, is_plain=True).save_pretrained(out)
        (out / GGUF).mkdir()
        for kind in TYPES if name == "large" else ("f32",):
            write_gguf(model, tokenizer, kind, gguf_path(out, kind))
        context, special = CONTEXT[name], special_tokens(tokenizer)
        keep_exported(out, Exported(context_length=context, control_tokens=special))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True)
    write_exports(parser.parse_args().to)


if __name__ == "__main__":
    sys.exit(run_command(main, "calibrate", logging.WARNING))
