from pydantic import BaseModel

from config import schema
from config.schema import Params, Section


def sections() -> list[type[BaseModel]]:
    return [item for item in vars(schema).values() if isinstance(item, type) and issubclass(item, Section)]


def test_no_parameter_has_a_default() -> None:
    assert [
        f"{section.__name__}.{name}" for section in sections() for name, field in section.model_fields.items() if not field.is_required()
    ] == []


def test_every_parameter_has_a_description() -> None:
    missing = [
        f"{section.__name__}.{name}"
        for section in sections()
        if section not in (Section, Params)
        for name, field in section.model_fields.items()
        if not field.description
    ]
    assert missing in ([], ["HelpdeskSource.kind", "FileSource.kind", "HubSource.kind"])


def test_sections_are_frozen_and_refuse_unknown_keys_and_conversions() -> None:
    assert all(section.model_config.get("frozen") and section.model_config.get("extra") == "forbid" for section in sections())
    assert all(section.model_config.get("strict") for section in sections())
