"""Reads rows from files, URLs and the hub one after another: every row with its position, every broken file as one
DataError.

Only the file format is checked here; rows are checked by training/preparation/formats.py. Of a .json file and of a
file read by a function of one's own, all rows may be in memory at once.
"""

import codecs
import csv
import errno
import io
import json
import os
import runpy
import shutil
import tempfile
import traceback
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from config.errors import DataError, EnvironmentFault
from config.inputs import data_files
from config.schema import Params
from config.sections.data import FileSource, HubSource, PythonSource
from config.terminal_text import shown
from training.modeling.duplicates import Reread
from training.preparation.download import CHUNK_BYTES, MAX_BYTES, download, no_room

LEFT_FREE_BYTES = 2**30
"""Bytes of the temporary disk that unpacking leaves to others."""
ROWS_AT_ONCE = 1000
"""Rows of a columnar file that are objects at once."""


class SourceRow(NamedTuple):
    """A row as in the source."""

    number: int
    """Line of a jsonl or csv file, otherwise the row's number; from 1."""
    content: Any
    """A dict of columns, or a bare string in json and jsonl. Not checked yet."""


class Table(NamedTuple):
    place: str
    """Path, URL or dataset id, for messages."""
    unit: str
    """Unit of `SourceRow.number`: `line` or `row`."""
    rows: Iterable[SourceRow]
    """Can be iterated several times. Raises DataError at the first broken row, and at the end if there was none."""

    def first(self, count: int) -> list[Any]:
        """The contents of the first rows."""
        return [row.content for row in islice(self.rows, count)]


def source_rows(read: Callable[[], Iterable[tuple[int, Any]]], empty: str) -> Iterable[SourceRow]:
    """Rows that `read` gives anew each time they are iterated; DataError says `empty` if there are none."""

    def rows() -> Iterator[SourceRow]:
        number = 0
        for number, content in read():
            yield SourceRow(number, content)
        if not number:
            raise DataError(empty)

    return Reread(rows)


def local_files(params: Params) -> list[str]:
    """Existing local files that the data section reads: part of the stage's fingerprint."""
    return sorted({str(Path(path)) for path in data_files(Path(), params) if Path(path).is_file()})


def read_file(source: FileSource, root: Path, setting: str) -> Table:
    """The rows of a local file (relative to `root`) or URL. `setting` names the source in messages, such as
    data.source.

    Raises DataError if the file is missing, empty, truncated, not UTF-8, or not of the type of its extension; of its
    rows, when they are read.
    """
    path = source.path
    if suffix_of(path) not in READERS:
        raise DataError(
            f"{setting}.path={path}: the name must end in {', '.join(READERS)}, or in one of them "
            f"with {' or '.join(COMPRESSIONS)}, which says how to read it. "
            "Rename or convert the file, or fix the path in params.yaml."
        )
    content = open_source(path, root, setting)
    if content.is_blank():
        raise DataError(
            f"{path} is empty: no rows to train on. Fetch the file again, or fix {setting}.path in params.yaml."
        )
    unit, reader = READERS[suffix_of(path)]

    def read() -> Iterator[tuple[int, Any]]:
        with content.opened() as file:
            yield from reader(file, path)

    empty = f"{path} has no rows. Fetch the file again, or fix {setting}.path in params.yaml."
    return Table(path, unit, source_rows(read, empty))


def rows_in(path: Path) -> Iterator[Any]:
    """The rows of a local file of a known kind, for a reader of one's own.

    Raises DataError as `read_file` does.
    """
    source = FileSource(kind="file", path=str(path), format="pairs", columns={})
    yield from (row.content for row in read_file(source, Path(), "data.source").rows)


def read_python(source: PythonSource, root: Path, setting: str) -> Table:
    """The rows that the user's function yields.

    Raises DataError with the function's own words and line if it cannot be run.
    """
    script, _, name = source.path.rpartition(":")
    open_source(script, root, setting)

    def read() -> Iterator[tuple[int, Any]]:
        with _faults_of(root / script, f"{setting}: {script}"):
            function = runpy.run_path(str(root / script)).get(name)
            if not callable(function):
                raise DataError(f"{setting}.path={source.path}: {script} has no function {name}.")
            rows = iter(function(*(root / path for path in source.files)))
        number = 0
        while True:
            with _faults_of(root / script, f"{setting}: {script}"):
                try:
                    row = next(rows)
                except StopIteration:
                    return
            yield (number := number + 1), row

    empty = f"{setting}.path={source.path}: {name} yields no rows. Fix the reader."
    return Table(source.path, "row", source_rows(read, empty))


@contextmanager
def _faults_of(script: Path, place: str) -> Iterator[None]:
    """Turn an exception of the user's function into a DataError with the line of the script."""
    try:
        yield
    except DataError:
        raise
    except BaseException as error:
        line = next((frame.lineno for frame in reversed(traceback.extract_tb(error.__traceback__))
                     if frame.filename == str(script)), None)  # fmt: skip
        raise DataError(
            f"{place}{f' line {line}' if line else ''} raised {type(error).__name__}: "
            f"{one_line(error)}. Fix the reader."
        ) from error


def read_hub(source: HubSource, setting: str) -> Table:
    """The rows of a Hugging Face dataset, or of a local dataset folder; code of a dataset is never run.

    Raises DataError if it cannot be loaded.
    """
    import datasets  # a second to import, which other sources should not pay

    try:
        loaded = datasets.load_dataset(
            source.path, name=source.config, revision=source.revision, split=source.split
        ).with_format("arrow")
    except Exception as error:  # the library and the network raise almost any exception
        raise DataError(
            f"{setting}: dataset {source.path} (config={source.config}, revision={source.revision}, "
            f"split={source.split}) cannot be loaded: {one_line(error)}. Fix {setting} in params.yaml."
        ) from error
    empty = f"{setting}: split {source.split} of dataset {source.path} has no rows. Name another split in params.yaml."
    place = f"{source.path}@{source.revision}/{source.split}"
    return Table(place, "row", source_rows(lambda: _objects(loaded.iter(ROWS_AT_ONCE)), empty))


def _objects(batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """The rows of Arrow tables, numbered."""
    yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)


# ---------------------------------------------------------------- bytes


class Content:
    """The bytes of a source: a local file, or an unnamed temporary one, which is gone with the process. One reader at
    a time.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.file = path.open("rb") if path else tempfile.TemporaryFile()  # noqa: SIM115

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.file.close()

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """The file from its start."""
        self.file.flush()
        with os.fdopen(os.dup(self.file.fileno()), "rb") as file:
            file.seek(0)
            yield file

    def is_blank(self) -> bool:
        with self.opened() as file:
            return not any(part.strip() for part in iter(lambda: file.read(2**20), b""))


def open_source(path: str, root: Path, setting: str) -> Content:
    """The content of a local file (relative to `root`) or URL, decompressed. Raises DataError or EnvironmentFault if
    it cannot be read.
    """
    content = _downloaded(path, setting) if "://" in path else _local(root / path, setting)
    kind = next((kind for kind in COMPRESSIONS if path.lower().endswith(kind)), None)
    return content if kind is None else _unpacked(content, kind, path)


def _downloaded(url: str, setting: str) -> Content:
    content = Content()
    download(url, setting, content.file)
    return content


def _local(path: Path, setting: str) -> Content:
    try:
        return Content(path)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist. Put the file there, or fix {setting}.path in params.yaml.") from None
    except IsADirectoryError:
        raise DataError(f"{path} is a folder, a file is needed. Fix {setting}.path in params.yaml.") from None
    except PermissionError:
        raise EnvironmentFault(
            f"{path} may not be read by this user. Give it read permission, or fix {setting}.path in params.yaml."
        ) from None


def _unpacked(content: Content, kind: str, path: str) -> Content:
    """A decompressed copy. Raises DataError if the file is cut or damaged."""
    import pyarrow  # type: ignore[import-untyped]

    whole = Content()
    try:
        with content.opened() as file:
            codec = {".gz": "gzip", ".zst": "zstd"}[kind]
            _copy_bounded(pyarrow.CompressedInputStream(file, codec), whole.file, path)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise no_room(path) from error
        if error.errno is not None:  # of the disk
            raise
        raise DataError(f"{path} is not a complete {kind} file ({one_line(error)}). Fetch it again.") from None
    return whole


def _copy_bounded(file: IO[bytes], target: IO[bytes], path: str) -> None:
    """Copy what is unpacked: of a URL at most what may be downloaded, of a file as much as the temporary disk has."""
    free = shutil.disk_usage(tempfile.gettempdir()).free - LEFT_FREE_BYTES
    most, size = min(MAX_BYTES, free) if "://" in path else free, 0
    while chunk := file.read(CHUNK_BYTES):
        size += len(chunk)
        if size > most == free:
            raise no_room(path)
        if size > most:
            raise DataError(
                f"{path} unpacks to more than {MAX_BYTES} bytes, the most that is read from a URL (MAX_BYTES in "
                "training/preparation/download.py). Fetch it, look at it, and name the local file."
            )
        target.write(chunk)


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


COMPRESSIONS = (".gz", ".zst")


def suffix_of(path: str) -> str:
    """The ending of a path or URL that tells its kind, without that of a compression."""
    name = Path(urllib.parse.urlparse(path).path if "://" in path else path)
    name = name.with_suffix("") if name.suffix.lower() in COMPRESSIONS else name
    return name.suffix.lower()


def _refuse_bytes(file: IO[bytes], place: str) -> NoReturn:
    """Raise DataError for the first line that is not UTF-8."""
    file.seek(0)
    for number, line in enumerate(file, start=1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{place} line {number}: byte 0x{line[error.start]:02x} is not UTF-8. Convert the "
                "file, for example with iconv -t UTF-8."
            ) from None
    raise AssertionError(f"{place} is UTF-8")


# ---------------------------------------------------------------- readers


def parse_json(text: str) -> Any:
    """`json.loads`; nesting too deep for Python's parser, some 990 levels (490 replies of a tree), is a
    json.JSONDecodeError too.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("it nests too deeply, 990 levels at most", text, 0) from None


def _jsonl(file: IO[bytes], place: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, start=1):  # parted by line feeds alone
        text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not text.strip():
            continue
        try:
            row = parse_json(text.decode())
        except UnicodeDecodeError:
            _refuse_bytes(file, place)
        except ValueError as error:
            cut = (
                "it is the last, so the file looks cut: fetch it again"
                if number > 1 and not any(rest.strip() for rest in file)
                else "each line must be one JSON value: fix it"
            )
            raise DataError(
                f"{place} line {number} is not JSON ({_json_fault(error)}); {cut}, or give the "
                "file the ending of its real kind."
            ) from None
        yield number, row


def _json(file: IO[bytes], place: str) -> Iterator[tuple[int, Any]]:
    try:
        text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError:
        _refuse_bytes(file, place)
    try:
        rows = parse_json(text)
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        if str(error).startswith("Extra data"):
            advice = "one JSON value a line is JSON lines: let the name end in .jsonl"
        elif getattr(error, "pos", 0) >= len(text.rstrip()) - 1 or str(error).startswith("Unterminated string"):
            advice = "the file looks cut there: fetch it again"
        else:
            advice = "fix the file, or give it the ending of its real kind"
        raise DataError(f"{place} line {line} is not JSON ({_json_fault(error)}); {advice}.") from None
    if not isinstance(rows, list):
        raise DataError(
            f"{place} holds one {type(rows).__name__}, a list of rows is needed. Convert the file "
            "to a list, or to JSON lines (.jsonl)."
        )
    yield from enumerate(rows, start=1)


def _json_fault(error: ValueError) -> str:
    return f"{getattr(error, 'msg', error)} at column {getattr(error, 'colno', 1)}"


def csv_delimiter(lines: Iterable[str]) -> str:
    """The field separator: a comma, unless the header has none but a semicolon, tab or bar."""
    header = next((line for line in lines if line.strip()), "")
    return next((mark for mark in ",;\t|" if mark in header), ",")


def _csv(file: IO[bytes], place: str) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(2**31 - 1)  # long replies are valid
    with io.TextIOWrapper(file, "utf-8-sig", newline="") as text:
        try:
            yield from _csv_rows(text, place)
        except UnicodeDecodeError:
            _refuse_bytes(file, place)


def _csv_rows(text: IO[str], place: str) -> Iterator[tuple[int, Any]]:
    delimiter = csv_delimiter(text)
    text.seek(0)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    header: list[str] = []
    begin = 1
    try:
        for fields in reader:
            if fields and not header:
                header = _csv_header(fields, place)
            elif fields:
                row: dict[str | None, Any] = dict(zip(header, fields, strict=False))
                if len(fields) != len(header):
                    row[None] = f"{len(fields)} fields under a header of {len(header)}"
                yield begin, row
            begin = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{place} line {begin} is not CSV ({error}); a quote that never closes or a cut file does this: "
            "fix the line, or fetch the file again."
        ) from None


def _csv_header(fields: list[str], place: str) -> list[str]:
    header = [field.strip() for field in fields]
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataError(f"{place} line 1: column {shown(twice[0])} appears twice in the header. Rename one of them.")
    return header


def _parquet(file: IO[bytes], place: str) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        batches = pyarrow.parquet.ParquetFile(file).iter_batches(ROWS_AT_ONCE)
        yield from _objects(batches)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{place} is not a complete Parquet file ({one_line(error)}). Fetch it again, or give "
            "it the ending of its real kind."
        ) from error


READERS: dict[str, tuple[str, Callable[[IO[bytes], str], Iterator[tuple[int, Any]]]]] = {
    ".jsonl": ("line", _jsonl),
    ".json": ("row", _json),
    ".csv": ("line", _csv),
    ".parquet": ("row", _parquet),
}
"""Ending -> the unit of its numbers, and its reader: a number and a content for each row."""
