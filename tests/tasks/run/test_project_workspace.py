"""The workspace that remembers: its code follows the image, what it holds stays."""

from pathlib import Path

from tasks.run.workspace import HOME, PROJECT, bring_code, code_digest

REMOTE = {"name": "store", "url": "s3://rlhf/dvc"}


def test_new_code_replaces_the_old_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / PROJECT
    bring_code(root, REMOTE)
    assert code_digest(root) == code_digest(HOME)
    kept_files = [root / name for name in ("champions/record.json", "data/labels/votes.jsonl", "dvc.lock")]
    for path in kept_files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    (root / "tasks" / "gone.py").write_text("OLD = 1\n")
    (root / "config" / "load.py").unlink()
    bring_code(root, REMOTE)
    assert code_digest(root) == code_digest(HOME)
    assert not (root / "tasks" / "gone.py").exists()
    assert [path.read_text() for path in kept_files] == [path.name for path in kept_files]
    assert [path.name for path in tmp_path.iterdir()] == [PROJECT]


def test_the_same_code_is_left_alone_and_the_store_may_move(tmp_path: Path) -> None:
    root = tmp_path / PROJECT
    bring_code(root, REMOTE)
    before = (root / "tasks").stat().st_ino
    bring_code(root, {**REMOTE, "url": "s3://elsewhere/dvc"})
    assert (root / "tasks").stat().st_ino == before
    assert "s3://elsewhere/dvc" in (root / ".dvc" / "config.local").read_text()
