"""Rollouts on a pretended accelerator."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

PROGRAM = """
import json, sys
import torch
from tests.pretend.accelerator import SYNCS
from tests.training.support.tiny import policy, prompts
from training.rollout import static
from training.rollout.engine import Limits, sampling_noise

steps, looks, eos = 24, int(sys.argv[1]), int(sys.argv[2])
static.TOKENS_PER_LOOK = looks
asked, noise = prompts(12), sampling_noise(12, steps, 5)
drawn = []
for device in ("cpu", "sim"):
    model = policy().to(device)
    SYNCS.clear()
    found = static.generate(model, asked, noise, 1.0, Limits(steps, eos, 0), 6)
    drawn.append([found.responses, [row.tolist() for row in found.logprobs]])
print(json.dumps({"drawn": drawn, "syncs": SYNCS}))
"""


def rollout(looks: int, eos: int) -> tuple[list[list[int]], dict[str, int]]:
    """Responses, which are those of the CPU, and where the host waited."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(looks), str(eos)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    on_cpu, on_device = content["drawn"]
    assert on_device[0] == on_cpu[0]
    for ours, theirs in zip(on_device[1], on_cpu[1], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    return on_device[0], content["syncs"]


@pytest.mark.integration
def test_the_host_waits_for_no_token() -> None:
    responses, syncs = rollout(looks=8, eos=-1)
    assert [len(response) for response in responses] == [24] * 12
    # two batches of 24 tokens: two looks each, and the four columns of results at the end
    assert sum(syncs.values()) <= 2 * (2 + 4), syncs


@pytest.mark.integration
def test_responses_end_where_they_do_on_a_cpu() -> None:
    for looks in (1, 8):
        responses, _ = rollout(looks, eos=79)
        assert len({len(response) for response in responses}) > 2
