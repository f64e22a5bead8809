"""The DVC remote as a place for files of our own, on S3 or a shared disk: checkpoints of placed stages.

Addresses hold no credentials: those are found by the libraries themselves, in files and variables of the machine.
"""

import re
from errno import ENOSPC
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]

from config.errors import EnvironmentFault
from config.names import inside
from tasks.run.transient import fault, kind_of

PATIENT = {"connect_timeout": 10, "read_timeout": 60}


class Store:
    """A folder on S3 or on a disk that all nodes reach. Every method raises TransientFault if the store cannot be
    reached, and EnvironmentFault for what the user has to correct.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._on_s3 = on_s3 = self.url.startswith("s3://")
        # listings are asked anew each time: others write
        options = {"skip_instance_cache": True, "use_listings_cache": False, "config_kwargs": PATIENT} if on_s3 else {}
        self._files, self._root = fsspec.core.url_to_fs(self.url, **options)

    def require(self) -> None:
        """Raise EnvironmentFault unless the store answers, lets us in, and has the bucket: without it reads look like
        missing files.
        """
        if self._on_s3:
            with StoreFaults(self.url):
                self._files.ls(self._root.split("/")[0])

    def names(self, folder: str) -> list[str]:
        """All files below a folder, by their place in it."""
        with StoreFaults(self.url):
            path = f"{self._root}/{folder}"
            prefix = f"{path.strip('/')}/"
            paths = (str(path).strip("/") for path in self._files.find(path))
            return sorted(path.removeprefix(prefix) for path in paths if not Path(path).name.startswith("."))

    def upload(self, folder: Path, name: str, last: str) -> None:
        """Copy a folder here; the file `last` goes last, so that its presence says that all of it is there."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: path.name == last):
            with StoreFaults(self.url):
                target = f"{self._root}/{name}/{path.relative_to(folder)}"
                if not self._on_s3:  # there it would make a bucket that is missing
                    self._files.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
                self._files.put_file(str(path), target)

    def download(self, name: str, folder: Path) -> None:
        """Copy a folder from here."""
        with StoreFaults(self.url):
            for file in self.names(name):
                target = folder / inside(file, self.url)
                target.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{self._root}/{name}/{file}", str(target))

    def remove(self, name: str) -> None:
        """Remove a folder; that there is none is no fault."""
        with StoreFaults(self.url):
            path = f"{self._root}/{name}"
            if self._files.exists(path):
                self._files.rm(path, recursive=True)


class StoreFaults:
    """Faults of the store at an address in one line, without what the library was given to sign in with."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or isinstance(error, EnvironmentFault) or not isinstance(error, Exception):
            return
        if isinstance(error, OSError) and error.errno == ENOSPC and "://" in self._url:
            return  # the disk here
        raise fault(kind_of(error), store_fault(self._url, error)) from None


def store_fault(url: str, error: Exception) -> str:
    """One line on why a store cannot be used: which address, what is wrong, where to fix it."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    bucket = re.match(r"s3://([^/]+)", url)
    if bucket and isinstance(error, FileNotFoundError):
        return (
            f"the bucket {bucket[1]} of the DVC remote {url} does not exist. Make it, or name "
            "another: dvc remote modify --local."
        )
    if isinstance(error, PermissionError) or "NoCredentials" in name or "credentials" in text.lower():
        return (
            f"{url} refuses the credentials that were found ({text[:120] or name}). "
            "They are read from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the file that "
            "AWS_SHARED_CREDENTIALS_FILE names."
        )
    if isinstance(error, OSError) and error.errno == ENOSPC:
        return f"the disk of {url} is full. Free some space there: rlhf clean, dvc gc."
    return (
        f"{url} cannot be reached ({name}: {text[:160]}). Check that the store runs and that "
        "AWS_ENDPOINT_URL names it."
    )
