"""One stack for all tests of the containers."""

from collections.abc import Iterator

import pytest

from tests.containers.stack import Stack, build_images, has_engine


@pytest.fixture(scope="session")
def images() -> dict[str, str]:
    if not has_engine():
        pytest.skip("no Docker engine answers: start one, or name it with DOCKER_HOST")
    return build_images()


@pytest.fixture(scope="session")
def stack(images: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    result = Stack(images, tmp_path_factory.mktemp("stack"))
    result.down()
    try:
        result.up()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLFLOW_TRACKING_USERNAME", "rlhf")
            patch.setenv("MLFLOW_TRACKING_PASSWORD", result.secrets["MLFLOW_PASSWORD"])
            yield result
    finally:
        result.down()
