"""How many one-line faults of wiring `make test` notices:

python -m benchmarks.wiring_mutations --seed 1 --mutants 30

Formulas are mutated by mutation_score.py; this draws faults of what connects them, from every package alike: two
arguments, cells or keywords in the wrong order, another attribute of the same object, a condition turned round, a call
or a refusal left out. Each is made in a copy of the checkout, in which first the tests of its package and tests/audit
run, then, unless --quick is given, the whole suite.
"""

import argparse
import ast
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.projects.checkouts import clone

PACKAGES = ("cli", "config", "costs", "flows", "labelling", "reporting", "serving", "tasks", "tracking", "training")
PURE = ("costs/formulas/", "costs/tables/", "training/rl/ppo_math.py", "docker/")
"""Files in which nothing is wired."""
WORDS = ("logger", "print", "warn", "echo", "say", "flush", "debug")
"""Calls whose absence changes nothing but what is said."""
MINUTES_OF_A_SUITE = 40


class Fault(NamedTuple):
    path: str
    line: int
    kind: str
    start: int
    """Offset into the file's text."""
    end: int
    text: str
    """What replaces it."""

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def faults(path: str, source: str) -> Iterator[Fault]:
    """Every fault that can be made in a file."""
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    encoded = source.splitlines()

    def place(line: int, column: int) -> int:
        return offsets[line - 1] + len(encoded[line - 1].encode()[:column].decode())

    def span(node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)

    def text(node: ast.AST) -> str:
        start, end = span(node)
        return source[start:end]

    def swaps(kind: str, nodes: Sequence[ast.expr]) -> Iterator[Fault]:
        for a, b in itertools.pairwise(nodes):
            plain = isinstance(a, ast.Starred | ast.Constant) or isinstance(b, ast.Starred | ast.Constant)
            if not plain and text(a) != text(b):
                (start, _), (_, end) = span(a), span(b)
                between = source[span(a)[1] : span(b)[0]]
                yield Fault(path, a.lineno, kind, start, end, text(b) + between + text(a))

    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        seen: dict[str, set[str]] = defaultdict(set)
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                seen[node.value.id].add(node.attr)
        keys = {id(node.slice) for node in ast.walk(function) if isinstance(node, ast.Subscript)}
        called = {id(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                yield from swaps("arguments", node.args)
                yield from swaps("keywords", [keyword.value for keyword in node.keywords])
            elif isinstance(node, ast.Tuple | ast.List) and isinstance(node.ctx, ast.Load):
                if id(node) not in keys:  # of a type, or a row and a column
                    yield from swaps("cells", node.elts)
            elif isinstance(node, ast.Dict):
                yield from swaps("values", node.values)
            elif isinstance(node, ast.If | ast.IfExp):
                yield Fault(path, node.test.lineno, "condition", *span(node.test), f"not ({text(node.test)})")
            elif isinstance(node, ast.Raise):
                yield Fault(path, node.lineno, "refusal", *span(node), "pass")
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                if not any(word in text(node.value.func) for word in WORDS):
                    yield Fault(path, node.lineno, "call", *span(node), "pass")
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and isinstance(node.ctx, ast.Load)
                and id(node) not in called
            ):
                for other in sorted(seen[node.value.id] - {node.attr}):
                    yield Fault(path, node.lineno, "attribute", *span(node), f"{node.value.id}.{other}")


def drawn(root: Path, number: int, seed: int) -> list[Fault]:
    """Faults from each package in turn, of each kind alike, at most one in a file."""
    rng = random.Random(seed)
    chosen: list[Fault] = []
    files: dict[str, list[str]] = {
        package: sorted(
            name
            for path in (root / package).rglob("*.py")
            if not (name := path.relative_to(root).as_posix()).startswith(PURE)
        )
        for package in PACKAGES
    }
    while len(chosen) < number:
        package = PACKAGES[len(chosen) % len(PACKAGES)]
        path = rng.choice(files[package])
        by_kind: dict[str, list[Fault]] = defaultdict(list)
        for fault in faults(path, (root / path).read_text(encoding="utf-8")):
            by_kind[fault.kind].append(fault)
        if by_kind and path not in {fault.path for fault in chosen}:
            chosen.append(rng.choice(by_kind[rng.choice(sorted(by_kind))]))
    return chosen


def tests_of(root: Path, path: str) -> list[str]:
    """The tests beside which the file's own are, and the audit."""
    folder = Path("tests") / Path(path).parent
    if len(folder.parts) == 2:
        stem = (root / folder / f"test_{Path(path).stem}.py").relative_to(root)
        folder = stem if (root / stem).exists() else folder
    while not (root / folder).exists():
        folder = folder.parent
    return ["tests/audit", folder.as_posix()]


def is_caught(root: Path, fault: Fault, quick: bool, processes: int) -> bool:
    """Whether a test fails, or cannot be collected, with the fault in place."""
    path = root / fault.path
    source = path.read_text(encoding="utf-8")
    runs = [tests_of(root, fault.path), *([] if quick else [["tests"]])]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["--numprocesses", str(processes), "--dist", "loadfile", "--no-loadscope-reorder"]
    try:
        path.write_text(fault.apply(source), encoding="utf-8")
        for tests in runs:
            try:
                done = subprocess.run(
                    [*command, *tests], cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
                    capture_output=True, text=True, timeout=60 * MINUTES_OF_A_SUITE, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return True
            if done.returncode:
                return True
        return False
    finally:
        path.write_text(source, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="draws other faults")
    parser.add_argument("--mutants", type=int, default=30)
    parser.add_argument("--first", type=int, default=1, help="number of the first one to try")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="the package's own tests alone")
    parser.add_argument("--list", action="store_true", help="print the faults, run nothing")
    options = parser.parse_args()
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        root = clone(Path(folder) / "checkout")
        numbered = enumerate(drawn(root, options.mutants, options.seed), start=1)
        chosen = list(numbered)[options.first - 1 :]
        for number, fault in chosen:
            source = (root / fault.path).read_text(encoding="utf-8")
            before = " ".join(source[fault.start : fault.end].split())
            began = time.monotonic()
            is_red = None
            if not options.list:
                is_red = is_caught(root, fault, options.quick, options.processes)
                caught += is_red
            row = {
                "number": number, "caught": is_red, "at": f"{fault.path}:{fault.line}",
                "kind": fault.kind, "before": before, "after": " ".join(fault.text.split()),
                "seconds": round(time.monotonic() - began),
            }  # fmt: skip
            print(json.dumps(row, ensure_ascii=False), flush=True)
    if not options.list:
        print(f"{caught} of {len(chosen)} faults were caught")


if __name__ == "__main__":
    main()
