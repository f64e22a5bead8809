"""Reads the runs to compare, each with the parameters that were kept with it."""

from collections.abc import Sequence
from pathlib import Path

from config.errors import UserError
from config.records import kept_folder
from config.workspace.kept import kept_params
from reporting.compared.side_by_side import Side, SideBySide, side_by_side
from reporting.inputs import read_findings
from reporting.row_digests import data_version, read_row_digests, reward_version


def read_side_by_side(root: Path, run_ids: Sequence[str]) -> SideBySide:
    """Read the runs `run_ids` below `root`; the others are compared with the first.

    Raises UserError if a run does not exist, or if its params.yaml is missing or does not match
    this version of the schema.
    """
    return side_by_side([_side(root, run_id) for run_id in run_ids])


def _side(root: Path, run_id: str) -> Side:
    kept = kept_folder(root, run_id) / "params.yaml"
    if not kept.exists():
        raise UserError(
            f"run {run_id} cannot be compared: its parameters are not in {kept} any more. Put "
            "that file back, or name other runs."
        )
    findings = read_findings(root, kept_params(root, run_id), run_id)
    version = data_version(root, run_id)
    return Side(findings, version, read_row_digests(root, version), reward_version(root, run_id))
