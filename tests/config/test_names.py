from pathlib import Path

import pytest

from config.errors import EnvironmentFault
from config.names import inner_name
from config.records import kept_folder
from config.workspace.champions import champion_folder

ELSEWHERE = ["", ".", "..", "../x", "x/../..", "/etc", "a/b", ".hidden", "-rf", "a\x00b", "a\n", "~", None, 1]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_name_that_leads_elsewhere_names_no_folder(name: str) -> None:
    for use in (
        lambda: inner_name(name, "id"),
        lambda: kept_folder(Path("p"), name),
        lambda: champion_folder(Path("p"), name),
    ):
        with pytest.raises(EnvironmentFault, match="cannot name a folder"):
            use()


@pytest.mark.parametrize(
    "name",
    [
        "r1",
        "20261121-120000-a1b2",
        "20261121-120000-größer-0.3",
        "sft-0a1b2c3d",
        "0f8fad5b-d9cb-469f-a165-70867728950e",
    ],
)
def test_the_names_that_are_made_here_do(name: str) -> None:
    assert inner_name(name, "id") == name
