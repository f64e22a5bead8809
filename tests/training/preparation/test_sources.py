import csv
import functools
import gzip
import http.server
import io
import json
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow  # type: ignore[import-untyped]
import pyarrow.parquet  # type: ignore[import-untyped]
import pytest

from config.errors import DataError, EnvironmentFault
from config.sections.data import FileSource, HubSource, PythonSource
from training.preparation import sources
from training.preparation.download import download
from training.preparation.sources import Table, read_file, read_hub, read_python

ROWS = [{"prompt": "line\u2028one", "chosen": "é"}, {"prompt": "two", "chosen": 'a "quoted"\nreply, with comma'}]


def read(path: Path | str, root: Path = Path()) -> Table:
    return read_file(FileSource(kind="file", path=str(path), format="pairs", columns={}), root, "data.source")


def refusal(path: Path | str) -> str:
    """The one-line message a broken file gives."""
    with pytest.raises(DataError) as failure:
        list(read(path).rows)
    assert "\n" not in str(failure.value)
    assert str(path) in str(failure.value)
    return str(failure.value)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def contents(table: Table) -> list[Any]:
    return [row.content for row in table.rows]


def numbers(table: Table) -> list[int]:
    return [row.number for row in table.rows]


def csv_text(rows: list[dict[str, str]]) -> str:
    import io

    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


# ---------------------------------------------------------------- whole files


def test_jsonl_keeps_line_numbers_over_empty_lines_and_odd_line_separators(tmp_path: Path) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    table = read(write(tmp_path / "a.jsonl", f"\ufeff\n{lines[0]}\r\n\n{lines[1]}"))
    assert contents(table) == ROWS
    assert (numbers(table), table.unit) == ([2, 4], "line")


def test_json_numbers_rows(tmp_path: Path) -> None:
    table = read(write(tmp_path / "a.json", json.dumps(ROWS, indent=1)))
    assert contents(table) == ROWS
    assert (numbers(table), table.unit) == ([1, 2], "row")


def test_csv_keeps_quoted_line_ends_and_names_the_first_line_of_a_row(tmp_path: Path) -> None:
    table = read(write(tmp_path / "a.csv", csv_text([*ROWS, {"prompt": "3", "chosen": "x"}])))
    assert contents(table) == [*ROWS, {"prompt": "3", "chosen": "x"}]
    assert numbers(table) == [2, 3, 5]


def test_a_csv_row_with_too_many_or_too_few_fields_is_marked(tmp_path: Path) -> None:
    rows = contents(read(write(tmp_path / "a.csv", "a,b\n1,2\n1,2,3\n1\n")))
    assert [None in row for row in rows] == [False, True, True]


def test_a_csv_field_may_be_longer_than_the_library_limit(tmp_path: Path) -> None:
    assert contents(read(write(tmp_path / "a.csv", "a\n" + "x" * 200_000)))[0]["a"] == "x" * 200_000


def test_parquet_is_read(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    table = read(tmp_path / "a.parquet")
    assert contents(table) == ROWS
    assert numbers(table) == [1, 2]


@pytest.mark.parametrize(("ending", "codec"), [(".gz", "gzip"), (".zst", "zstd")])
def test_a_compressed_file_is_read_by_the_ending_below(tmp_path: Path, ending: str, codec: str) -> None:
    text = b'{"a": 1}\n{"a": 2}\n'
    zstd = pyarrow.compress(text, "zstd", asbytes=True)
    packed = zstd if codec == "zstd" else gzip.compress(text)
    path = tmp_path / f"rows.jsonl{ending}"
    path.write_bytes(packed)
    assert [(row.number, row.content) for row in read(path).rows] == [(1, {"a": 1}), (2, {"a": 2})]
    path.write_bytes(packed[:-9])
    with pytest.raises(DataError, match=f"is not a complete {ending} file"):
        read(path)


def python_source(root: Path, text: str, *files: str) -> PythonSource:
    (root / "readers").mkdir(exist_ok=True)
    (root / "readers/mine.py").write_text(text)
    return PythonSource(kind="python", path="readers/mine.py:read", files=list(files))


def test_a_reader_of_ones_own_gives_rows_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("ask,left,right\nHello?,Hi there.,What.\n")
    source = python_source(
        tmp_path,
        "from training.preparation.sources import rows_in\n"
        "def read(path):\n"
        "    for row in rows_in(path):\n"
        "        yield {'prompt': row['ask'], 'chosen': row['left'], 'rejected': row['right']}\n",
        "rows.csv",
    )
    table = read_python(source, tmp_path, "data.source")
    assert [(row.number, row.content) for row in table.rows] == [
        (1, {"prompt": "Hello?", "chosen": "Hi there.", "rejected": "What."})
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def read():\n    yield {'prompt': 1 / 0}\n", "line 2 raised ZeroDivisionError: division"),
        ("def other():\n    pass\n", "has no function read"),
        ("def read():\n    return []\n", "yields no rows"),
        ("def read(:\n", "raised SyntaxError"),
        ("import nothing_of_that_name\n", "line 1 raised ModuleNotFoundError"),
        ("def read(path):\n    yield {}\n", "raised TypeError"),
        ("raise SystemExit(3)\n", "line 1 raised SystemExit: 3"),
    ],
)
def test_a_reader_that_fails_is_one_line_with_its_own(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(DataError) as refused:
        list(read_python(python_source(tmp_path, text), tmp_path, "data.source").rows)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_relative_path_starts_at_the_project(tmp_path: Path) -> None:
    write(tmp_path / "a.json", json.dumps(ROWS))
    assert contents(read("a.json", tmp_path)) == ROWS


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_rows_nested_deeper_than_the_parser_goes_are_one_line(tmp_path: Path, name: str) -> None:
    for depth, read_whole in ((400, True), (5000, False)):
        nested = '{"a":' * depth + "1" + "}" * depth
        path = write(tmp_path / name, f"[{nested}]" if name == "a.json" else nested)
        if read_whole:
            assert len(contents(read(path))) == 1
            continue
        with pytest.raises(DataError, match=r"line 1 is not JSON \(it nests too deeply, 990 levels"):
            list(read(path).rows)


# ---------------------------------------------------------------- broken files


def test_a_missing_file_a_folder_and_an_unknown_ending_are_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    assert "folder" in refusal(tmp_path / "folder.jsonl")
    assert ".jsonl, .json, .csv, .parquet" in refusal(write(tmp_path / "rows.txt", "a"))


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet"])
def test_an_empty_file_is_refused(tmp_path: Path, ending: str) -> None:
    assert "empty" in refusal(write(tmp_path / f"a.{ending}", " \n"))


@pytest.mark.parametrize(("ending", "content"), [("json", "[]"), ("csv", "prompt,chosen\n")])
def test_a_file_without_rows_is_refused(tmp_path: Path, ending: str, content: str) -> None:
    assert "no rows" in refusal(write(tmp_path / f"a.{ending}", content))


def test_a_cut_jsonl_is_refused_with_its_last_line(tmp_path: Path) -> None:
    whole = "\n".join(json.dumps(row) for row in ROWS)
    message = refusal(write(tmp_path / "a.jsonl", whole[:-9]))
    assert "line 2" in message
    assert "cut" in message


def test_a_broken_line_within_a_jsonl_is_refused_with_its_number(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "a.jsonl", '{"a": 1}\n{"a": }\n{"a": 3}\n'))
    assert "line 2" in message
    assert "cut" not in message


@pytest.mark.parametrize("missing", [1, 3, 20, 40])
def test_a_cut_json_is_refused_as_cut(tmp_path: Path, missing: int) -> None:
    assert "cut" in refusal(write(tmp_path / "a.json", json.dumps(ROWS)[:-missing]))


def test_a_cut_csv_is_refused_with_the_line_of_the_open_quote(tmp_path: Path) -> None:
    assert "line 3" in refusal(write(tmp_path / "a.csv", 'a,b\n1,2\n3,"cut in the\nmiddle'))


def test_a_cut_parquet_is_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "whole.parquet")
    refusal(write(tmp_path / "a.parquet", (tmp_path / "whole.parquet").read_bytes()[:-20]))


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv"])
def test_bytes_that_are_not_utf8_are_refused_with_their_line(tmp_path: Path, ending: str) -> None:
    message = refusal(write(tmp_path / f"a.{ending}", b'{"a": 1}\n{"a": "caf\xe9"}\n'))
    assert "line 2" in message
    assert "0xe9" in message


def test_a_file_of_another_kind_than_its_name_says_is_refused(tmp_path: Path) -> None:
    assert "line 1" in refusal(write(tmp_path / "csv.json", "prompt,chosen\na,b\n"))
    assert "line 1" in refusal(write(tmp_path / "csv.jsonl", "prompt,chosen\na,b\n"))
    assert ".jsonl" in refusal(write(tmp_path / "lines.json", '{"a": 1}\n{"a": 2}\n'))
    assert "list" in refusal(write(tmp_path / "object.json", '{"a": 1}'))
    assert "Parquet" in refusal(write(tmp_path / "json.parquet", json.dumps(ROWS)))


def test_a_column_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    assert "'a'" in refusal(write(tmp_path / "a.csv", "a,b,a\n1,2,3\n"))


# ---------------------------------------------------------------- from afar


class _Server(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        name, _, query = self.path.partition("?")
        if name == "/to.jsonl":
            self.send_response(302)
            self.send_header("Location", query)
            self.end_headers()
        elif name == "/secret.jsonl" and query != "sig=hunter2":
            self.send_error(403, f"not with {query}")
        elif name == "/secret.jsonl":
            self.path = "/a.jsonl"
            super().do_GET()
        elif name == "/endless.jsonl":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"1\n" * 10_000)
        elif name == "/cut.jsonl":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"a": 1}\n')
        else:
            super().do_GET()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """The address of a server for the files in tmp_path."""
    handler = functools.partial(_Server, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_url_is_read_by_the_ending_of_its_path(tmp_path: Path, site: str) -> None:
    write(tmp_path / "a.jsonl", json.dumps(ROWS[0]))
    assert contents(read(f"{site}/a.jsonl?download=true")) == ROWS[:1]


def test_a_url_names_no_file_of_this_machine_and_no_chain(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", json.dumps(ROWS[0]))
    for url in (
        f"file://{tmp_path}/a.jsonl",
        f"local://{tmp_path}/a.jsonl",
        f"FILE://{tmp_path}/a.jsonl",
        f"simplecache::file://{tmp_path}/a.jsonl",
        f"dir://a.jsonl::file://{tmp_path}",
        "memory://a.jsonl",
        "reference://a.jsonl",
    ):
        assert "data.source.path" in refusal(url)


@pytest.mark.parametrize(
    "host",
    [
        "169.254.169.254",
        "2852039166",
        "0xa9fea9fe",
        "169.254.170.2",
        "[::ffff:169.254.169.254]",
        "[64:ff9b::a9fe:a9fe]",
        "[fd00:ec2::254]",
        "[fe80::1]",
        "100.100.100.200",
        "168.63.129.16",
    ],
)
def test_the_address_of_a_clouds_credentials_is_not_asked(host: str) -> None:
    assert "tell a machine its credentials" in refusal(f"http://{host}/latest/meta-data/x.json")


def test_a_name_that_resolves_to_such_an_address_is_not_asked(monkeypatch: pytest.MonkeyPatch, site: str) -> None:
    real, looked_up = socket.getaddrinfo, []

    def resolve(host: str, *arguments: Any, **options: Any) -> Any:
        looked_up.append(host)
        # as a name server of an attacker: another answer when it is asked again
        named = {
            "rows.example": "169.254.169.254",
            "twice.example": "127.0.0.1" if looked_up.count(host) == 1 else "169.254.169.254",
        }
        return real(named.get(host, host), *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    port = site.rsplit(":", 1)[1]
    for name in ("rows.example", "twice.example"):
        assert "tell a machine its credentials" in refusal(f"http://{name}:{port}/a.jsonl")


def test_a_redirect_is_checked_as_the_request_was(tmp_path: Path, site: str) -> None:
    write(tmp_path / "a.jsonl", json.dumps(ROWS[0]))
    assert contents(read(f"{site}/to.jsonl?{site}/a.jsonl")) == ROWS[:1]
    assert "tell a machine its credentials" in refusal(f"{site}/to.jsonl?http://169.254.169.254/a.jsonl")
    for target in (
        f"file://{tmp_path}/a.jsonl",
        "ftp://127.0.0.1/a.jsonl?sig=hunter2",
        "gopher://127.0.0.1/a?sig=hunter2",
    ):
        assert (
            "hunter2"
            not in refusal(f"{site}/to.jsonl?{target}").split("to.jsonl?")[1].partition(":")[2].partition(" ")[2]
        )


def test_a_source_larger_than_allowed_is_refused_told_so_or_not(
    tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.jsonl", json.dumps(ROWS[0]))
    size = (tmp_path / "a.jsonl").stat().st_size
    content = io.BytesIO()
    download(f"{site}/a.jsonl", "data.source", content, size)
    assert content.getvalue() == (tmp_path / "a.jsonl").read_bytes()
    for name in ("a.jsonl", "endless.jsonl"):
        with pytest.raises(DataError, match=f"larger than {size - 1} bytes.*MAX_BYTES"):
            download(f"{site}/{name}", "data.source", io.BytesIO(), size - 1)


def test_a_secret_of_the_environment_is_sent_and_never_shown(
    tmp_path: Path, site: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "a.jsonl", json.dumps(ROWS[0]))
    url = f"{site}/secret.jsonl?sig=${{RLHF_DATA_SIGNATURE}}"
    with pytest.raises(EnvironmentFault, match="RLHF_DATA_SIGNATURE, which is not set"):
        read(url)
    monkeypatch.setenv("RLHF_DATA_SIGNATURE", "hunter2")
    with caplog.at_level("INFO"):
        table = read(url)
    assert contents(table) == ROWS[:1]
    assert (table.place, "hunter2" in caplog.text) == (url, False)
    monkeypatch.setenv("RLHF_DATA_SIGNATURE", "hunter3 hunter3")
    assert "hunter3" not in refusal(url), "the server's own words repeat it"


def test_an_address_that_answers_with_an_error_or_half_a_file_is_refused(site: str) -> None:
    assert "404" in refusal(f"{site}/nowhere.jsonl")
    refusal(f"{site}/cut.jsonl")
    refusal("http://127.0.0.1:9/a.jsonl")
    refusal("nothing://a.jsonl")


def hub(path: Path, split: str = "train") -> HubSource:
    return HubSource(kind="hub", path=str(path), revision="main", config=None, split=split, format="pairs", columns={})


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("own_cache")
def test_a_dataset_is_read_by_split(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for split, row in zip(("train", "test"), ROWS, strict=True):
        write(tmp_path / "set" / f"{split}.jsonl", json.dumps(row))
    assert contents(read_hub(hub(tmp_path / "set", "test"), "data.source")) == ROWS[1:]


@pytest.mark.usefixtures("own_cache")
def test_a_dataset_or_split_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", json.dumps(ROWS[0]))
    for source in (hub(tmp_path / "nowhere"), hub(tmp_path / "set", "validation")):
        with pytest.raises(DataError) as failure:
            read_hub(source, "data.sft_source")
        assert "\n" not in str(failure.value)
        assert "data.sft_source" in str(failure.value)


@pytest.mark.parametrize(
    ("limit", "fault", "words"),
    [
        ("LEFT_FREE_BYTES", EnvironmentFault, "is larger than what .* has to spare .*TMPDIR"),
        ("MAX_BYTES", DataError, "unpacks to more than 4096 bytes, the most that is read from a URL"),
    ],
)
def test_what_is_unpacked_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, fault: type[Exception], words: str
) -> None:
    """A megabyte of one letter is a kilobyte to download."""
    packed = gzip.compress(b"a" * 2**20)
    content = sources.Content()
    content.file.write(packed)
    local = limit == "LEFT_FREE_BYTES"
    free = shutil.disk_usage(tempfile.gettempdir()).free
    monkeypatch.setattr(sources, limit, free - 4096 if local else 4096)
    with pytest.raises(fault, match=words):
        sources._unpacked(content, ".gz", "rows.jsonl.gz" if local else "https://data.example/rows.jsonl.gz")


def test_a_full_temporary_disk_is_named(tmp_path: Path, site: str) -> None:
    write(tmp_path / "a.jsonl", b"1\n" * 2**12)
    with Path("/dev/full").open("wb") as full, pytest.raises(EnvironmentFault, match=re.escape(tempfile.gettempdir())):
        download(f"{site}/a.jsonl", "data.source", full)
