"""`ray job submit` with input and output on S3: as in production, and without telling a secret."""

import shutil
import tempfile
import urllib.request
import uuid
from pathlib import Path

import pyarrow.dataset
import pytest

from tests.s3.secrets import CommandLines, finds, texts_below
from tests.s3.server import SECRET
from tests.test_submit import head_node, submit

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cluster(tmp_path, s3_server):
    """A head node with the credentials of the S3 server in its environment, as nodes have."""
    temporary = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # sockets want short paths
    variables = s3_server.environment() | {"RAY_TMPDIR": temporary, "PYTHONPATH": str(ROOT)}
    with head_node(tmp_path, f"--temp-dir={temporary}", **variables) as environment:
        yield environment
    shutil.rmtree(temporary, ignore_errors=True)


def test_submitted_job_on_s3_tells_no_secret(cluster, s3_server, tiny_model_dir):
    client, name = s3_server.client(), uuid.uuid4().hex
    client.put_file(str(ROOT / "tests/data/sotu.parquet"), f"prompts/{name}/in/sotu.parquet")
    watcher = CommandLines()
    done = submit(
        cluster,
        f"model.target={tiny_model_dir}",
        f"input.path=s3://prompts/{name}/in",
        f"output.path=s3://outputs/{name}",
        "decoding.max_new_tokens=8",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = pyarrow.dataset.dataset(f"outputs/{name}", filesystem=client).to_table()
    assert table["source_row"].to_pylist() == list(range(24))
    assert set(table["status"].to_pylist()) == {"ok"}
    assert client.exists(f"outputs/{name}/_SUCCESS")
    objects = {path: client.cat_file(path) for path in client.find(f"outputs/{name}")}
    assert any(path.endswith("plan.json") for path in objects)
    logs = texts_below(Path(cluster["RAY_TMPDIR"]))
    assert any("job-driver" in path for path in logs)
    token = Path(cluster["RAY_AUTH_TOKEN_PATH"]).read_text()
    url = f"{cluster['RAY_API_SERVER_ADDRESS']}/api/jobs/"
    ask = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(ask, timeout=30) as answer:
        api = answer.read()
    assert b"jobs/summarize.py" in api
    seen = watcher.stop()
    assert any("summarize.py" in line for line in seen)
    places = {"stdout": done.stdout, "stderr": done.stderr, "api": api, **logs, **objects}
    places |= dict(enumerate(seen))
    assert finds(SECRET, places) == []
