"""Reads rows from files, URLs and the hub: every row with its position, every broken file as one
DataError.

Only the file format is checked here; rows are checked by training/preparation/formats.py.
"""

import codecs
import csv
import hashlib
import io
import json
import logging
import runpy
import traceback
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from config.errors import DataError, EnvironmentFault
from config.schema import Params
from config.sections.data import FileSource, HubSource, PythonSource
from training.preparation.download import download

logger = logging.getLogger(__name__)


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
    rows: list[SourceRow]


def local_files(params: Params) -> list[str]:
    """Existing local files that the data section reads: part of the stage's fingerprint."""
    return sorted(
        {str(Path(path)) for path in params.data.local_paths().values() if Path(path).is_file()}
    )


def read_file(source: FileSource, root: Path, setting: str) -> Table:
    """The rows of a local file (relative to `root`) or URL. `setting` names the source in messages,
    such as data.source.

    Raises DataError if the file is missing, empty, truncated, not UTF-8, or not of the type of its
    extension.
    """
    path = source.path
    if suffix_of(path) not in READERS:
        raise DataError(
            f"{setting}.path={path}: the name must end in {', '.join(READERS)}, or in one of them "
            f"with {' or '.join(COMPRESSIONS)}, which says how to read it. "
            "Rename or convert the file, or fix the path in params.yaml."
        )
    content = unpacked(read_bytes(path, root, setting), path)
    if not content.strip():
        raise DataError(
            f"{source.path} is empty: no rows to train on. Fetch the file again, or fix "
            f"{setting}.path in params.yaml."
        )
    logger.info(
        "%s: %d bytes, sha256 %s", source.path, len(content), hashlib.sha256(content).hexdigest()
    )
    unit, reader = READERS[suffix_of(path)]
    table = Table(path, unit, list(reader(content, path)))
    if not table.rows:
        raise DataError(
            f"{source.path} has no rows. Fetch the file again, or fix {setting}.path in "
            "params.yaml."
        )
    return table


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
    read_bytes(script, root, setting)
    try:
        function = runpy.run_path(str(root / script)).get(name)
        if not callable(function):
            raise DataError(f"{setting}.path={source.path}: {script} has no function {name}.")
        made = list(function(*(root / path for path in source.files)))
    except DataError:
        raise
    except BaseException as error:
        line = next((frame.lineno for frame in reversed(traceback.extract_tb(error.__traceback__))
                     if frame.filename == str(root / script)), None)  # fmt: skip
        raise DataError(
            f"{setting}: {script}{f' line {line}' if line else ''} raised "
            f"{type(error).__name__}: {one_line(error)}. Fix the reader."
        ) from error
    if not made:
        raise DataError(f"{setting}.path={source.path}: {name} yields no rows. Fix the reader.")
    return Table(source.path, "row", [SourceRow(i, row) for i, row in enumerate(made, start=1)])


def read_hub(source: HubSource, setting: str) -> Table:
    """The rows of a Hugging Face dataset, or of a local dataset folder; code of a dataset is never
    run.

    Raises DataError if it cannot be loaded.
    """
    import datasets  # a second to import, which other sources should not pay

    try:
        loaded = datasets.load_dataset(
            source.path, name=source.config, revision=source.revision, split=source.split
        )
        rows = loaded.to_list()
    except Exception as error:  # the library and the network raise almost any exception
        raise DataError(
            f"{setting}: dataset {source.path} (config={source.config}, "
            f"revision={source.revision}, split={source.split}) "
            f"cannot be loaded: {one_line(error)}. Fix {setting} in params.yaml."
        ) from error
    if not rows:
        raise DataError(
            f"{setting}: split {source.split} of dataset {source.path} has no rows. Name another "
            "split in params.yaml."
        )
    return Table(
        f"{source.path}@{source.revision}/{source.split}",
        "row",
        [SourceRow(i, row) for i, row in enumerate(rows, start=1)],
    )


# ---------------------------------------------------------------- bytes


def read_bytes(path: str, root: Path, setting: str) -> bytes:
    """The content of a local file (relative to `root`) or URL. Raises DataError or EnvironmentFault
    if it cannot be read.
    """
    return download(path, setting) if "://" in path else _local(root / path, setting)


def _local(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist. Put the file there, or fix {setting}.path in params.yaml."
        ) from None
    except IsADirectoryError:
        raise DataError(
            f"{path} is a folder, a file is needed. Fix {setting}.path in params.yaml."
        ) from None
    except PermissionError:
        raise EnvironmentFault(
            f"{path} may not be read by this user. Give it read permission, or fix {setting}.path "
            "in params.yaml."
        ) from None


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


COMPRESSIONS = (".gz", ".zst")


def suffix_of(path: str) -> str:
    """The ending of a path or URL that tells its kind, without that of a compression."""
    name = Path(urllib.parse.urlparse(path).path if "://" in path else path)
    name = name.with_suffix("") if name.suffix.lower() in COMPRESSIONS else name
    return name.suffix.lower()


def unpacked(content: bytes, path: str) -> bytes:
    """The content of a file, decompressed if its name ends so. Raises DataError if it is cut or
    damaged.
    """
    kind = next((kind for kind in COMPRESSIONS if path.lower().endswith(kind)), None)
    if kind is None:
        return content
    import pyarrow  # type: ignore[import-untyped]

    try:
        return bytes(pyarrow.CompressedInputStream(
            pyarrow.BufferReader(content), {".gz": "gzip", ".zst": "zstd"}[kind]
        ).read())  # fmt: skip
    except OSError as error:
        raise DataError(
            f"{path} is not a complete {kind} file ({one_line(error)}). Fetch it again."
        ) from None


def _text(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{place} line {line}: byte 0x{content[error.start]:02x} is not UTF-8. Convert the "
            "file, for example with iconv -t UTF-8."
        ) from None


# ---------------------------------------------------------------- readers


def parse_json(text: str) -> Any:
    """`json.loads`; nesting too deep for Python's parser, some 990 levels (490 replies of a tree),
    is a json.JSONDecodeError too.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError("it nests too deeply, 990 levels at most", text, 0) from None


def _jsonl(content: bytes, place: str) -> Iterator[SourceRow]:
    stream = io.BytesIO(content.removeprefix(codecs.BOM_UTF8))  # parted by line feeds alone
    for number, line in enumerate(stream, start=1):
        if not line.strip():
            continue
        try:
            yield SourceRow(number, parse_json(line.decode()))
        except UnicodeDecodeError:
            _text(content, place)  # raises, with the byte
        except ValueError as error:
            cut = (
                "it is the last, so the file looks cut: fetch it again"
                if number > 1 and not stream.read().strip()
                else "each line must be one JSON value: fix it"
            )
            raise DataError(
                f"{place} line {number} is not JSON ({_json_fault(error)}); {cut}, or give the "
                "file the ending of its real kind."
            ) from None


def _json(content: bytes, place: str) -> Iterator[SourceRow]:
    text = _text(content, place)
    try:
        rows = parse_json(text)
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        if str(error).startswith("Extra data"):
            advice = "one JSON value a line is JSON lines: let the name end in .jsonl"
        elif getattr(error, "pos", 0) >= len(text.rstrip()) - 1 or str(error).startswith(
            "Unterminated string"
        ):
            advice = "the file looks cut there: fetch it again"
        else:
            advice = "fix the file, or give it the ending of its real kind"
        raise DataError(
            f"{place} line {line} is not JSON ({_json_fault(error)}); {advice}."
        ) from None
    if not isinstance(rows, list):
        raise DataError(
            f"{place} holds one {type(rows).__name__}, a list of rows is needed. Convert the file "
            "to a list, or to JSON lines (.jsonl)."
        )
    yield from (SourceRow(number, row) for number, row in enumerate(rows, start=1))


def _json_fault(error: ValueError) -> str:
    return f"{getattr(error, 'msg', error)} at column {getattr(error, 'colno', 1)}"


def csv_delimiter(text: str) -> str:
    """The field separator: a comma, unless the header has none but a semicolon, tab or bar."""
    header = next((line for line in text.splitlines() if line.strip()), "")
    return next((mark for mark in ",;\t|" if mark in header), ",")


def _csv(content: bytes, place: str) -> Iterator[SourceRow]:
    csv.field_size_limit(2**31 - 1)  # long replies are valid
    text = _text(content, place)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=csv_delimiter(text), strict=True)
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
                yield SourceRow(begin, row)
            begin = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{place} line {begin} is not CSV ({error}); a quote that never closes or a cut file "
            "does this: "
            "fix the line, or fetch the file again."
        ) from None


def _csv_header(fields: list[str], place: str) -> list[str]:
    header = [field.strip() for field in fields]
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataError(
            f"{place} line 1: column {twice[0]!r} appears twice in the header. Rename one of them."
        )
    return header


def _parquet(content: bytes, place: str) -> Iterator[SourceRow]:
    import pyarrow
    import pyarrow.parquet  # type: ignore[import-untyped]

    try:
        rows = pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{place} is not a complete Parquet file ({one_line(error)}). Fetch it again, or give "
            "it the ending of its real kind."
        ) from error
    yield from (SourceRow(number, row) for number, row in enumerate(rows, start=1))


READERS: dict[str, tuple[str, Callable[[bytes, str], Iterator[SourceRow]]]] = {
    ".jsonl": ("line", _jsonl),
    ".json": ("row", _json),
    ".csv": ("line", _csv),
    ".parquet": ("row", _parquet),
}
