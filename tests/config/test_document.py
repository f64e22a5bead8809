import re

from config.document import DOCUMENT, params_markdown
from config.methods.ppo import Ppo
from config.schema import Params
from config.sections.data import Data
from config.sections.model import RandomModel
from config.sections.offline import Optimisation
from config.sections.online import Kl
from tests.conftest import ROOT


def rows_of(heading: str) -> dict[str, tuple[str, str]]:
    """key -> (value, meaning) of the table under a heading; a long meaning is a paragraph below it."""
    section = params_markdown().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    long = dict(re.findall(r"^`(\w+)`: (.*)$", section, re.MULTILINE))
    return {
        key: (value, long.get(key, meaning))
        for key, value, meaning in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", section, re.MULTILINE)
    }


def test_the_page_in_docs_is_what_the_schema_says() -> None:
    assert (ROOT / DOCUMENT).read_text(encoding="utf-8") == params_markdown()


def test_every_field_of_every_section_has_a_row_with_its_description() -> None:
    for heading, section in (
        ("`model.random`", RandomModel),
        ("`sft`", Optimisation),
        ("`ppo`", Ppo),
        ("`ppo.kl`", Kl),
    ):
        rows = rows_of(heading)
        for name, field in section.model_fields.items():
            if name not in ("kl", "lora"):  # sections of their own
                assert rows[name][1] == field.description


def test_the_sources_are_shown_once_for_every_kind() -> None:
    for kind in ("helpdesk", "file", "hub"):
        assert "kind" in rows_of(f"`data.source` with `kind: {kind}`")
    assert rows_of("`data`")["sft_source"][0] == "as `data.source`, or null"
    assert set(rows_of("`data`")) == set(Data.model_fields) - {"source"}


def test_values_show_their_bounds_and_choices() -> None:
    assert rows_of("`ppo`")["updates"][0] == "whole number ≥ 1"
    assert rows_of("`ppo`")["score_clip"][0] == "number > 0, or null"
    assert rows_of("`ppo`")["layout"][0] == "`separate`, `shared_trunk`, `shared_base`"
    assert rows_of("`ppo.lora`")["modules"][0] == "list of text"
    assert rows_of("Top level")["seed"][0] == "whole number ≥ 0, < 2147483648"


def test_every_section_of_the_params_has_a_table() -> None:
    headings = set(re.findall(r"^## `([\w.]+)`", params_markdown(), re.MULTILINE))
    sections = {name for name, field in Params.model_fields.items() if name != "seed"}
    assert sections <= headings | {"data"}
