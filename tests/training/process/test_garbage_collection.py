"""In processes of their own: what is frozen stays so."""

import subprocess
import sys

SHOW = """
import gc, sys
sys.argv[0] = {argv!r}
import training
while_importing = gc.get_threshold()
from training.process import garbage_collection
garbage_collection.begin_work()
print(while_importing, gc.get_threshold(), gc.get_freeze_count() > 1_000)
"""


def shown(argv: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", SHOW.format(argv=argv)], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_process_of_ours_seldom_collects_while_it_imports() -> None:
    assert shown("-m") == "(50000, 10, 10) (700, 10, 10) True"


def test_in_a_program_that_uses_us_the_collector_is_left_alone() -> None:
    assert shown("pytest") == "(700, 10, 10) (700, 10, 10) False"
