"""One S3 server for the tests here. It costs a sixth of a core, idle or not."""

from typing import Any

import pytest

from tests.s3.proxy import fault_proxy
from tests.s3.server import running


@pytest.fixture(scope="package")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A real S3 server with buckets `prompts` and `outputs`, as S3Server."""
    with running(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture
def proxy(s3_server: Any) -> Any:
    """A proxy in front of the server, without faults yet, as FaultProxy."""
    with fault_proxy(s3_server.port) as proxy:
        yield proxy
