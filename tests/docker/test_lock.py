"""The locks: every package of constraints.txt, hashed, and no word of where files came from."""

import re

import pytest

from tests.conftest import ROOT

LINE = re.compile(r"([a-z0-9-]+)==([\w.]+)((?: --hash=sha256:[0-9a-f]{64})+)")
LOCKS = ("requirements.lock", "requirements-cuda.lock")


def packages(name: str) -> dict[str, tuple[str, int]]:
    """Name -> version, and how many hashes."""
    lines = (ROOT / name).read_text().splitlines()[1:]
    result = [LINE.fullmatch(line) for line in lines]
    assert all(result), [line for line, hit in zip(lines, result, strict=True) if not hit]
    return {hit[1]: (hit[2], hit[3].count("sha256:")) for hit in result if hit}


def test_the_lock_has_every_package_of_the_constraints_in_its_version() -> None:
    text = (ROOT / "constraints.txt").read_text()
    wanted = {
        re.sub(r"[-_.]+", "-", name).lower(): version
        for name, version in re.findall(r"^([\w.-]+)==([\w.]+)", text, re.MULTILINE)
    }
    locked = {name: version for name, (version, _) in packages(LOCKS[0]).items()}
    assert wanted.items() <= locked.items()
    assert locked.keys() - wanted.keys() == {"setuptools"}


def test_torch_has_the_files_for_cpus_and_for_gpus() -> None:
    assert packages(LOCKS[0])["torch"][1] == 2


def test_what_cuda_needs_is_apart() -> None:
    cuda = packages(LOCKS[1])
    assert {"triton", "cuda-toolkit", "nvidia-cublas"} <= set(cuda)
    assert set(cuda).isdisjoint(packages(LOCKS[0]))


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_no_host_and_no_path(name: str) -> None:
    assert not re.search(r"://|/[a-z]+/|index-url|find-links", (ROOT / name).read_text()[100:])
