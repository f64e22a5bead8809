"""One export behind the front, without a project; `rlhf calibrate` measures it.

python -m serving EXPORT --home FOLDER --port N --weights KIND --slots N
"""

import argparse
import os
from functools import partial
from pathlib import Path

from serving.account import Account, Price
from serving.run import serve
from serving.settings import Address, Settings


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("export", type=Path)
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--weights", required=True)
    for name in ("port", "slots"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    settings = Settings("llama_cpp", options.weights, options.slots, os.cpu_count() or 1)
    account = Account(Price(0.0, "calibration"))
    say = partial(print, flush=True)
    serve(options.home, Address(options.port), lambda: options.export, settings, account, say)


if __name__ == "__main__":
    main()
