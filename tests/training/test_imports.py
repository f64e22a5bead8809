"""What a stage's process imports before it works: seconds and memory that every start pays."""

import json
import subprocess
import sys

SHOW = """
import importlib, json, sys
loaded = {}
for modules in json.loads(sys.argv[1]):
    for module in modules.split():
        importlib.import_module(module)
    loaded[modules] = list(sys.modules)
print(json.dumps(loaded))
"""
UNNEEDED = {
    "training.data": {"peft", "trl", "datasets", "pandas"},
    "training.ppo training.evaluate": {"torch._inductor.compile_fx", "datasets", "pandas", "trl"},
    "training.sft": {"torch._inductor.compile_fx"},
}
"""Modules, imported one after the other -> what is not there afterwards. Each imports more than those before it, so
that one process shows what all of them do.
"""


def test_a_stage_imports_no_package_that_it_does_not_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOW, json.dumps(list(UNNEEDED))], capture_output=True, text=True, check=True
    )
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert loaded.keys() == UNNEEDED.keys()
    assert "torch" in loaded["training.data"]
    assert "trl" in loaded["training.sft"]
    assert {name: UNNEEDED[name] & set(item) for name, item in loaded.items()} == {name: set() for name in UNNEEDED}
