"""A real S3 server for the tests: SeaweedFS on free loopback ports, with authentication on."""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import s3fs

from tests.ports import free_ports

WEED = Path(sys.executable).parent / "weed"
BUCKETS = ("prompts", "outputs")
# At random, so that these lines, which jobs carry along, are no find of a secret.
KEY, SECRET = "test-writer", secrets.token_hex(16)
READER_KEY, READER_SECRET = "test-reader", secrets.token_hex(16)
_IDENTITIES = {
    "identities": [
        {
            "name": "writer",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        },
        {
            "name": "reader",
            "credentials": [{"accessKey": READER_KEY, "secretKey": READER_SECRET}],
            "actions": ["Read", "List"],
        },
    ]
}


@dataclass(frozen=True)
class S3Server:
    """Where it listens, and how to speak with it."""

    port: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """Variables that point every client at the server, with the writer's credentials."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def options(self, endpoint: str | None = None, **credentials: str) -> dict[str, Any]:
        """fsspec options for the server, or for a proxy in front of it."""
        return {
            "key": KEY,
            "secret": SECRET,
            **credentials,
            "endpoint_url": endpoint or self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def client(self) -> s3fs.S3FileSystem:
        """A client apart from the product's, to look at what is there."""
        return s3fs.S3FileSystem(**self.options(), use_listings_cache=False)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[S3Server]:
    """Start a server with its data in `folder`; killed at the end, which its data would survive."""
    roles = ("s3", "master", "volume", "filer", "admin")
    numbers = free_ports(2 * len(roles))
    ports = [f"-{role}.port={numbers[2 * i]}" for i, role in enumerate(roles)]
    ports += [f"-{role}.port.grpc={numbers[2 * i + 1]}" for i, role in enumerate(roles)]
    (folder / "identities.json").write_text(json.dumps(_IDENTITIES))
    command = [
        *[WEED, f"-logdir={folder}", "mini", f"-dir={folder}", *ports],
        *["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-s3.config={folder / 'identities.json'}"],
        *["-master.telemetry=false", "-master.telemetry.url=", "-s3.autoCreateBucket=false"],
        *["-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"],
        f"-bucket={','.join(BUCKETS)}",
    ]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            command, env={**environment, "GOMEMLIMIT": "256MiB"}, stdout=log, stderr=log
        )
    try:
        server = S3Server(numbers[0])
        _wait(server, process, folder / "log")
        yield server
    finally:
        process.kill()
        process.wait()
        for role, port in zip(roles, numbers[::2], strict=True):
            Path(f"/tmp/seaweedfs-{role}-{port}.sock").unlink(missing_ok=True)


def _wait(server: S3Server, process: subprocess.Popen, log: Path) -> None:
    """Until a signed put into every bucket succeeds."""
    client, deadline = server.client(), time.monotonic() + 60
    for bucket in BUCKETS:
        while True:
            assert process.poll() is None, log.read_text()[-2000:]
            try:
                client.pipe_file(f"{bucket}/ready", b"1")
                break
            except OSError as error:
                assert time.monotonic() < deadline, error
                time.sleep(0.1)
        client.rm_file(f"{bucket}/ready")
