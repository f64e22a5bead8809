"""The exchange between the pipeline and a stage in another container: a folder below the DVC remote, on S3 or a shared
disk.

exchange/<run>/<stage>-<n>/request.json     what to do, and the files to do it with (params.yaml,
                                            dvc.lock, ...)
exchange/<run>/<stage>-<n>/<file>.<offset>  what was appended to a file of runs/<stage>/, from that
                                            offset on
exchange/<run>/<stage>-<n>/stop             how often the pipeline has asked the stage to stop
exchange/<run>/<stage>-<n>/reply.json       how the stage ended, and the new dvc.lock

Only rows, parameters and locks pass here; data and models go to the DVC remote and come from there. Addresses hold no
credentials: those are found by the libraries themselves, in files and variables of the machine.
"""

import json
import re
from collections.abc import Sequence
from errno import ENOSPC
from itertools import groupby
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]

from config.atomic_file import write_atomically
from config.errors import EnvironmentFault
from tasks.run.transient import fault, kind_of

REQUEST, REPLY = "request.json", "reply.json"
PATIENT = {"connect_timeout": 10, "read_timeout": 60}


class Exchange:
    """A folder on S3 or on a disk that both sides reach. Every method raises TransientFault if the store cannot be
    reached, and EnvironmentFault for what the user has to correct.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        on_s3 = self.url.startswith("s3://")
        # listings are asked anew each time: the other side writes
        options = {"skip_instance_cache": True, "use_listings_cache": False, "config_kwargs": PATIENT} if on_s3 else {}
        self._files, self._root = fsspec.core.url_to_fs(self.url, **options)

    def below(self, name: str) -> "Exchange":
        return Exchange(f"{self.url}/{name}")

    def require(self) -> None:
        """Raise EnvironmentFault unless the store answers, lets us in, and has the bucket: without it reads look like
        missing files.
        """
        if self.url.startswith("s3://"):
            with StoreFaults(self.url):
                self._files.ls(self._root.split("/")[0])

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically."""
        with StoreFaults(self.url):
            path = f"{self._root}/{name}"
            if self.url.startswith("s3://"):
                self._files.pipe_file(path, content)  # objects appear atomically
                return
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(Path(path), content)

    def read(self, name: str) -> bytes | None:
        """The content of a file, None if there is none."""
        with StoreFaults(self.url):
            try:
                return bytes(self._files.cat_file(f"{self._root}/{name}"))
            except FileNotFoundError:
                return None

    def names(self) -> list[str]:
        """All files below, by their place seen from here."""
        with StoreFaults(self.url):
            prefix = f"{self._root.strip('/')}/"
            paths = (str(path).strip("/") for path in self._files.find(self._root))
            return sorted(path.removeprefix(prefix) for path in paths if not Path(path).name.startswith("."))

    def upload(self, folder: Path, name: str, last: str) -> None:
        """Copy a folder here; the file `last` goes last, so that its presence says that all of it is there."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: path.name == last):
            with StoreFaults(self.url):
                target = f"{self._root}/{name}/{path.relative_to(folder)}"
                self._files.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
                self._files.put_file(str(path), target)

    def download(self, name: str, folder: Path) -> None:
        """Copy a folder from here."""
        with StoreFaults(self.url):
            for file in self.below(name).names():
                target = folder / inside(file, self.url)
                target.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(f"{self._root}/{name}/{file}", str(target))

    def remove(self, name: str) -> None:
        """Remove a folder, or with an empty name all of this one; that there is none is no fault."""
        with StoreFaults(self.url):
            path = f"{self._root}/{name}".rstrip("/")
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


# ---------------------------------------------------------------- files that grow


class Sender:
    """Sends what is appended to files of a folder, in complete lines."""

    def __init__(self, folder: Path, exchange: Exchange, names: Sequence[str]) -> None:
        """Treat existing content as sent."""
        self._folder, self._exchange = folder, exchange
        self._sent = {name: _size(folder / name) for name in names}

    def send(self) -> None:
        for name, sent in self._sent.items():
            path = self._folder / name
            if _size(path) <= sent:
                continue
            with path.open("rb") as file:
                file.seek(sent)
                content = file.read()
            lines = content[: content.rfind(b"\n") + 1]
            if lines:
                self._exchange.write(f"{name}.{sent:012d}", lines)
                self._sent[name] = sent + len(lines)


class Receiver:
    """Appends received content to files of the same names."""

    def __init__(self, folder: Path, exchange: Exchange, again: bool = False) -> None:
        """`again`: another one, which was killed, has taken a part of it; rows hold their time, so the last one that
        it took is known.
        """
        self._folder, self._exchange, self._again = folder, exchange, again
        self._received: set[str] = set()

    def receive(self) -> bool:
        """Read the pieces that arrived; returns whether there were any."""
        # the offsets are in order
        sent = sorted(name for name in self._exchange.names() if re.search(r"\.\d{12}$", name))
        if self._again:
            self._received, self._again = self._received_before(sent), False
        new = [name for name in sent if name not in self._received]
        for name in new:
            content = self._exchange.read(name) or b""
            path = self._path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._received.add(name)
            with path.open("ab") as file:
                file.write(content)
                file.flush()
        return bool(new)

    def _received_before(self, sent: Sequence[str]) -> set[str]:
        """Names of `sent` that the files hold already, searched from the newest backwards because pieces arrive in
        order.
        """
        received: set[str] = set()
        for path, names in groupby(sent, self._path):
            held, pieces = path.read_bytes() if path.exists() else b"", list(names)
            last = (
                next((i for i in reversed(range(len(pieces))) if (self._exchange.read(pieces[i]) or b"") in held), -1)
                if held
                else -1
            )
            received.update(pieces[: last + 1])
        return received

    def _path(self, name: str) -> Path:
        return self._folder / name[: -len(".000000000000")]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


# ---------------------------------------------------------------- request and reply


def dump(record: dict[str, Any]) -> bytes:
    return json.dumps(record, indent=1).encode()


def files_of(root: Path, names: Sequence[str]) -> dict[str, str]:
    """Name -> text of those files that are there."""
    return {name: (root / name).read_text(encoding="utf-8") for name in names if (root / name).is_file()}


def put_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / inside(name, "a request")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def inside(name: str, who: str) -> str:
    """`name`, a path received from the other side. Raises EnvironmentFault if it leads out of the folder that it is
    for.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise EnvironmentFault(
            f"{who} names {name}, which is outside of the project: it was not made by this program."
        )
    return name
