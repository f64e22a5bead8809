"""Compares the planner with published measurements.

    python -m benchmarks.published_costs TABLE.yaml --json   # every row planned or refused
    python -m benchmarks.published_costs [--out docs/published-costs.md]

The second form writes the page from the rows in benchmarks/published/rows, and the errors that the intervals of plans
rest on (costs/tables/checked.yaml). docs/planning.md describes a row.
"""

import argparse
import json
import sys
from pathlib import Path

import yaml

from benchmarks.published import checked, page
from benchmarks.published.errors import compare
from benchmarks.published.table import ROWS, estimates, published, read_table
from config.errors import CostError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="*", metavar="TABLE.yaml")
    parser.add_argument("--json", action="store_true", help="print every row planned or refused")
    parser.add_argument("--out", type=Path, default=Path("docs/published-costs.md"))
    options = parser.parse_args()
    if options.json:
        return _print_estimates(options.tables or sorted(ROWS.glob("*.yaml")))
    if options.tables:
        parser.error("TABLE.yaml goes with --json; the page is of benchmarks/published/rows.")
    result, refused = compare(published())
    if refused:
        raise CostError(f"row {refused[0][0]}: {refused[0][1]}")
    held_out = checked.held_out(published())
    checked.write(held_out)
    options.out.write_text(page.document(result, held_out), "utf-8")
    print(options.out)
    return 0


def _print_estimates(tables: list[Path]) -> int:
    try:
        rows = [row for table in tables for row in read_table(table)]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        print(f"{' '.join(map(str, tables))}: {' '.join(str(error).split())}. Name a YAML table.", file=sys.stderr)
        return 2
    print(json.dumps({"rows": estimates(rows)}, indent=1, default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
