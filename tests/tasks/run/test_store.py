import json
import os
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from config.errors import EnvironmentFault
from tasks.run.store import Store

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(params=["disk", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = str(tmp_path / "store") if request.param == "disk" else request.getfixturevalue("s3")
    return Store(f"{url}/{tmp_path.name}")


def test_what_is_uploaded_is_listed_and_removed(store: Store, tmp_path: Path) -> None:
    assert store.names("a") == []
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("1")
    for name in ("a/b", "a/c", "ab"):
        store.upload(tmp_path / "folder", name, last="file")
    assert store.names("a") == ["b/file", "c/file"]
    store.remove("a/b")
    store.remove("a/b")
    assert store.names("a") == ["c/file"]
    assert store.names("ab") == ["file"]


def test_a_folder_is_copied_with_its_manifest_last(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "step-3"
    (folder / "inner").mkdir(parents=True)
    (folder / "manifest.json").write_bytes(b"{}")
    (folder / "inner" / "weights").write_bytes(b"\0" * 70_000)
    store.upload(folder, "checkpoints/f/step-3", last="manifest.json")
    store.download("checkpoints/f/step-3", tmp_path / "copy")
    assert {
        path.relative_to(tmp_path / "copy").as_posix(): path.stat().st_size
        for path in (tmp_path / "copy").rglob("*")
        if path.is_file()
    } == {"manifest.json": 2, "inner/weights": 70_000}


def test_an_upload_that_fails_half_way_leaves_no_manifest(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "step-4"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(b"{}")
    (folder / "weights").write_bytes(b"1")
    (folder / "zzz").mkdir()
    (folder / "zzz" / "last").write_bytes(b"2")
    original = store._files.put_file

    def put_file(source: str, target: str) -> None:
        if source.endswith("last"):
            raise OSError(5, "input/output error")
        original(source, target)

    store._files.put_file = put_file  # type: ignore[method-assign]
    with pytest.raises(EnvironmentFault, match="cannot be reached"):
        store.upload(folder, "step-4", last="manifest.json")
    del store._files.put_file
    assert "manifest.json" not in store.names("step-4")


def test_a_missing_bucket_and_an_absent_store_are_one_line_without_secrets(
    s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store(s3).require()
    for ask in (
        lambda: Store("s3://nowhere/dvc").upload(Path(__file__).parent, "x", ""),
        Store("s3://nowhere/dvc").require,
    ):
        with pytest.raises(
            EnvironmentFault, match="the bucket nowhere of the DVC remote s3://nowhere/dvc does not exist"
        ) as missing:
            ask()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(EnvironmentFault, match=r"s3://store/dvc cannot be reached .*AWS_ENDPOINT_URL") as absent:
        Store("s3://store/dvc").names("x")
    for fault in (missing, absent):
        assert "\n" not in str(fault.value)
        assert "very-secret" not in str(fault.value)


@pytest.mark.parametrize(
    ("who", "reason"), [("nobody", "Access Key Id you provided does not exist"), ("", "Unable to locate credentials")]
)
def test_wrong_credentials_are_one_line_that_does_not_hold_them(
    s3: str, monkeypatch: pytest.MonkeyPatch, who: str, reason: str
) -> None:
    with strict_store(os.environ["AWS_ENDPOINT_URL"]):
        if who:
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", who)
        else:
            monkeypatch.delenv("AWS_ACCESS_KEY_ID")
            monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for ask in (
            lambda: Store(s3).require(),
            lambda: Store(s3).upload(Path(__file__).parent, "x", ""),
            lambda: Store(s3).names("x"),
        ):
            with pytest.raises(
                EnvironmentFault, match="s3://store/dvc refuses the credentials that were found"
            ) as fault:
                ask()
            said = str(fault.value)
            assert reason in said or "(Forbidden)" in said, "the answer to HEAD has no words"
            assert "AWS_SHARED_CREDENTIALS_FILE" in said
            assert "very-secret" not in said
            assert "\n" not in said


@contextmanager
def strict_store(url: str) -> Iterator[None]:
    """The store lets nobody in meanwhile that it does not know, and it knows nobody."""

    def unchecked_requests(count: bytes) -> None:
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/moto-api/reset-auth", count, {"Content-Type": "text/plain"})
        ) as answer:
            assert json.load(answer)["status"] == "ok"

    unchecked_requests(b"0")
    try:
        yield
    finally:
        unchecked_requests(b"inf")


def test_what_a_store_lists_can_be_written_only_inside_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path / "store"))
    # S3 takes such a key
    monkeypatch.setattr(Store, "names", lambda self, folder: ["../../outside"])
    with pytest.raises(EnvironmentFault, match="outside of the project"):
        store.download("a", tmp_path / "here" / "inner")
    assert not (tmp_path / "outside").exists()
