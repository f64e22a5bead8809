"""Refuses options that the command, as typed, would not read."""

from collections.abc import Collection

import typer

from config.errors import UserError


def typed_options(context: typer.Context) -> dict[str, str]:
    """Parameter -> option (such as --max-usd) given on the command line."""
    return {
        option.name: max(reversed(option.opts), key=len)
        for option in context.command.params
        if option.name is not None
        and (source := context.get_parameter_source(option.name)) is not None
        and source.name == "COMMANDLINE"
    }


def refuse_ignored(context: typer.Context, read: Collection[str], needs: dict[str, str], instead: str) -> None:
    """Refuse options that are not among the parameters `read`.

    needs     parameter -> the option without which nothing reads it, where there is one
    instead   what reads none of the others, for the message, such as "--docker"

    Raises UserError.
    """
    for name, option in typed_options(context).items():
        if name in read:
            continue
        if name in needs:
            raise UserError(f"{option} does nothing without {needs[name]}. Add {needs[name]}, or leave it out.")
        raise UserError(f"{option} does nothing beside {instead}. Leave one of them out.")
