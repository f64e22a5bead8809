from pathlib import Path

import pytest

from config.errors import EnvironmentFault, ParamsError
from config.load import load
from config.prerequisites import require_folders, require_reward_function
from tests.conftest import ROOT

CODE = "def score(prompt, response, row): return 1.0"


def test_a_folder_on_another_disk_may_be_a_link_that_leads_somewhere(tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(tmp_path / "big")
    with pytest.raises(EnvironmentFault, match=r"models is a link to .*/big, which does not exist. Mount that disk"):
        require_folders(tmp_path)
    (tmp_path / "big").mkdir()
    require_folders(tmp_path)


@pytest.mark.parametrize(
    ("path", "is_inside"), [("readers/mine.py", True), ("../mine.py", False), ("{}/mine.py", False)]
)
def test_a_function_is_inside_the_project_wherever_links_lead(tmp_path: Path, path: str, is_inside: bool) -> None:
    """The workspace of a study has links to the project's files."""
    root, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    for place in (elsewhere, tmp_path):
        (place / "mine.py").write_text(CODE)
    (root / "readers").symlink_to(elsewhere)
    named = path.format(elsewhere)
    function = f"reward={{kind: function, path: '{named}:score', timeout_seconds: 5}}"
    params = load(ROOT / "recipes/demo.yaml", [function, "align.method=rloo"])
    if is_inside:
        require_reward_function(root, params)
    else:
        with pytest.raises(ParamsError, match="is outside of the project"):
            require_reward_function(root, params)
