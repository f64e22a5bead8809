"""What several test files need: a checkout of the project in a temporary folder, and nothing of the user's own
state.
"""

import gc
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from benchmarks.projects.checkouts import checkout, point_remote

# A busy machine is not a failure; where a failure holds others up, the examples are the same every time. `make
# test-all` asks for the thorough ones.
for profile, examples in (("project", 30), ("thorough", 200)):
    settings.register_profile(profile, deadline=None, derandomize="CI" in os.environ, max_examples=examples)
settings.load_profile("project")

pytest_plugins = ["tests.support.order", "tests.support.stage_server"]
if "CI" in os.environ:
    pytest_plugins.append("tests.support.skips")

# As training/process/garbage_collection.py does for a stage: what was imported stays, and a look at all of it took
# half a second each time.
WORKING = gc.get_threshold()
gc.set_threshold(50_000, 10, 10)

ROOT = Path(__file__).parent.parent
TINY = ROOT / "tests" / "e2e" / "tiny.yaml"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("browser", "pages in a browser")
    group.addoption(
        "--screenshots", type=Path, metavar="FOLDER", help="keep pictures of the pages that tests/browser opens"
    )
    group.addoption(
        "--recipe",
        type=Path,
        default=TINY,
        metavar="FILE",
        help="what the runs on those pictures train; takes its time",
    )


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(*WORKING)


@pytest.fixture(autouse=True, scope="session")
def signals_reach_what_tests_start() -> None:
    """Also where the suite itself was started with nohup or in the background of a script, which ignore them, and what
    it starts would inherit that.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test reads or writes the user's Prefect, DVC or MLflow, and every process the tests start inherits that."""
    home = tmp_path_factory.mktemp("state")
    for name in (
        "PREFECT_API_URL",
        "PREFECT_API_KEY",
        "PREFECT_API_AUTH_STRING",
        "PREFECT_PROFILE",
        "MLFLOW_TRACKING_URI",
        "MLFLOW_RUN_ID",
    ):
        os.environ.pop(name, None)
    os.environ |= {
        "DVC_GLOBAL_CONFIG_DIR": str(home / "dvc-global"),
        "DVC_SYSTEM_CONFIG_DIR": str(home / "dvc-system"),
        "DVC_SITE_CACHE_DIR": str(home / "dvc-site"),
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # nothing is asked of a hub, which would be asked again and again
        # Models this small are slower on several threads; several give other sums, and the tests hold with any number.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="session")
def new_checkout(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes a git checkout of the working tree with a DVC remote of its own, outputs and history left behind."""

    def make() -> Path:
        folder = tmp_path_factory.mktemp("checkout")
        checkout(folder)
        point_remote(folder, tmp_path_factory.mktemp("remote"))
        return folder

    return make


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that MLflow has created: it takes seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path
