"""A pretrained model in a GGUF file, converted to a folder for `model.path`.

python -m training.modeling.from_gguf --gguf FILE --to FOLDER [--pad-token TOKEN]
"""

import argparse
import logging
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from config.errors import ModelError, ParamsError
from training.process.artifacts import replacing
from training.process.command import run_command


def convert(gguf: Path, target: Path, pad_token: str | None) -> None:
    """Write the model and tokenizer of a GGUF file to `target` as float32 safetensors; written atomically.

    Raises ModelError for a file that cannot be read, ParamsError for a pad token that is not in the vocabulary or is
    an EOS token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{gguf} cannot be read: {reason}.") from error
    if pad_token is not None:
        number = tokenizer.get_vocab().get(pad_token)
        if number is None or number == tokenizer.eos_token_id:
            raise ParamsError(
                f"pad token {pad_token} is "
                f"{'the end-of-sequence token' if number is not None else 'not in the vocabulary'} of {gguf}. "
                "Name another one."
            )
        tokenizer.pad_token = pad_token
    # a model from a GGUF file is marked as quantised, and refuses to be cast or trained
    config = quantised.config
    del config.quantization_config
    config.pad_token_id = tokenizer.pad_token_id
    with torch.device("meta"):
        model = type(quantised)(config)
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.tie_weights()
    with replacing(target) as out:
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def main() -> None:
    """Entry point of the conversion."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--pad-token")
    options = parser.parse_args()
    convert(options.gguf, options.to, options.pad_token)


if __name__ == "__main__":
    sys.exit(run_command(main, "fetch", logging.WARNING))
