import hashlib
import json
from pathlib import Path

import pytest

from config.inputs import DATA_DIGESTS, MODEL_DIGESTS, REWARD_DIGESTS, write_digests
from config.load import load
from config.schema import Params
from tests.conftest import ROOT


def params(*overrides: str) -> Params:
    return load(ROOT / "recipes" / "demo.yaml", ["data.vote_source=null", *overrides])


VOTES = "data.source={kind: file, path: votes.json, format: votes, columns: {}}"


def digests(root: Path, path: Path) -> dict:
    return json.loads((root / path).read_text())


def test_a_data_file_enters_with_the_digest_of_its_content(tmp_path: Path) -> None:
    (tmp_path / "votes.json").write_bytes(b"[]")
    write_digests(tmp_path, params(VOTES))
    assert digests(tmp_path, DATA_DIGESTS) == {"votes.json": hashlib.sha256(b"[]").hexdigest()}
    (tmp_path / "votes.json").write_bytes(b"[1]")
    write_digests(tmp_path, params(VOTES))
    assert digests(tmp_path, DATA_DIGESTS) == {"votes.json": hashlib.sha256(b"[1]").hexdigest()}


def test_a_missing_file_and_a_url_do_not_fail_here(tmp_path: Path) -> None:
    write_digests(
        tmp_path,
        params(
            VOTES, "data.prompt_source={kind: file, path: 'http://localhost/p.json', format: prompts, columns: {}}"
        ),
    )
    assert digests(tmp_path, DATA_DIGESTS) == {"votes.json": None}


def test_votes_that_come_later_are_noticed(tmp_path: Path) -> None:
    later = params("data.vote_source={kind: file, path: votes.jsonl, format: votes, columns: {}}")
    write_digests(tmp_path, later)
    assert digests(tmp_path, DATA_DIGESTS) == {"votes.jsonl": None}
    (tmp_path / "votes.jsonl").write_bytes(b"{}")
    write_digests(tmp_path, later)
    assert digests(tmp_path, DATA_DIGESTS) == {"votes.jsonl": hashlib.sha256(b"{}").hexdigest()}


def test_a_local_base_model_enters_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    write_digests(tmp_path, params("model.path=base", "model.random=null"))
    assert digests(tmp_path, MODEL_DIGESTS) == {"base/config.json": hashlib.sha256(b"{}").hexdigest()}


def test_unchanged_digests_are_not_written_again(tmp_path: Path) -> None:
    write_digests(tmp_path, params())
    before = (tmp_path / DATA_DIGESTS).stat().st_mtime_ns
    write_digests(tmp_path, params())
    assert (tmp_path / DATA_DIGESTS).stat().st_mtime_ns == before
    assert digests(tmp_path, MODEL_DIGESTS) == {}
    assert sorted(path.name for path in (tmp_path / "data" / "inputs").iterdir()) == [
        "data.json",
        "judge.json",
        "model.json",
        "reward.json",
        "student.json",
    ]


@pytest.mark.parametrize("missing", [DATA_DIGESTS, MODEL_DIGESTS])
def test_the_data_stage_depends_on_them(missing: Path) -> None:
    import yaml

    pipeline = yaml.safe_load((ROOT / "dvc.yaml").read_text())
    assert str(missing) in pipeline["stages"]["data"]["deps"]


def test_modules_that_a_function_or_a_reader_imports_enter_too(tmp_path: Path) -> None:
    (tmp_path / "readers/deep").mkdir(parents=True)
    for name, text in {
        "readers/mine.py": "import json\nfrom readers import words\nfrom .deep.more import x\n",
        "readers/words.py": "import readers.mine, helper",
        "readers/deep/__init__.py": "",
        "readers/deep/more.py": "x = 1",
        "helper.py": "",
        "other.py": "",
    }.items():
        (tmp_path / name).write_text(text)
    function = params(
        "reward={kind: function, path: 'readers/mine.py:score', timeout_seconds: 5}", "align.method=rloo"
    )
    write_digests(tmp_path, function)
    imported = {"helper.py", "readers/deep/__init__.py", "readers/deep/more.py", "readers/mine.py", "readers/words.py"}
    assert set(digests(tmp_path, REWARD_DIGESTS)) == imported
    write_digests(tmp_path, params("data.source={kind: python, path: 'readers/mine.py:read', files: []}"))
    assert set(digests(tmp_path, DATA_DIGESTS)) == imported
