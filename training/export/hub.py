"""Upload of an export to the Hugging Face hub, into a private repository, created if needed.

python -m training.export.hub --to ORG/NAME [--folder FOLDER]
"""

import argparse
import logging
import sys
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils.tqdm import disable_progress_bars

from config.errors import EnvironmentFault, ParamsError
from training.process.command import run_command

logger = logging.getLogger(__name__)


def upload(name: str, folder: Path | None) -> str:
    """Make the repository if it is not there, and upload the files of an export as one commit; returns the address.
    Without a folder it only creates the repository.

    Raises ParamsError for an invalid name, EnvironmentFault if there is no token or the hub refuses it.
    """
    if get_token() is None:
        raise EnvironmentFault(
            "there is no Hugging Face token. Make one that may write, then hf auth login, or set HF_TOKEN."
        )
    disable_progress_bars()
    api = HfApi()
    try:
        address = str(api.create_repo(name, private=True, exist_ok=True))
        if folder is not None:
            message = f"Export of run {folder.name}"
            api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except HFValidationError as error:
        raise ParamsError(f"--to hub:{name}: {' '.join(str(error).split())}") from None
    except HfHubHTTPError as error:
        reason = " ".join(str(error.server_message or error).split())[:200]
        raise EnvironmentFault(
            f"the hub refuses {name}: {reason}. Check the name, and that the token may write there."
        ) from None
    except httpx2.HTTPError as error:
        raise EnvironmentFault(f"{api.endpoint} does not answer ({type(error).__name__}). Try again later.") from None
    return address


def main() -> None:
    """Entry point of the upload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", required=True)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    address = upload(options.to, options.folder)
    if options.folder is not None:
        logger.warning("Uploaded to %s", address)


if __name__ == "__main__":
    sys.exit(run_command(main, "export", logging.WARNING))
