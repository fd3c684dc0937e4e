"""One S3 server for the tests here. It costs a sixth of a core, idle or not."""

from typing import Any

import pytest

from tests.s3.server import running


@pytest.fixture(scope="package")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A real S3 server with buckets `prompts` and `outputs`, as S3Server."""
    with running(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server
