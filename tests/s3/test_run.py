"""Whole runs with input and output on a real S3 server, through Ray."""

import json
import uuid
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import ray
import yaml

from pipeline.config import load_config
from pipeline.errors import ConfigError
from pipeline.run import run
from pipeline.status import describe, read_status
from tests.fakes import Behaviour, fake_factory
from tests.s3.secrets import finds, texts_below
from tests.s3.server import READER_KEY, READER_SECRET, SECRET

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
ALL = [("a b/ä.parquet", i) for i in range(30)] + [("b.parquet", i) for i in range(20)]
FILES = {"a b/ä.parquet": range(30), "b.parquet": range(30, 50)}


class S3Job:
    """A run with the fake engine whose input and output lie on the server."""

    def __init__(self, server, model, folder, files=FILES):
        self.server, self.model, self.folder = server, model, folder
        self.name = uuid.uuid4().hex
        self.output = f"s3://outputs/{self.name}/out"
        client = server.client()
        for name, numbers in files.items():
            texts = [f"The mill number {n} stands by the river." for n in numbers]
            with client.open(f"prompts/{self.name}/{name}", "wb") as file:
                pq.write_table(pa.table({"text": texts}), file, row_group_size=7)

    def config(self, endpoint=None, **sections):
        options = self.server.options(endpoint)
        config = {
            "input": {
                "path": f"s3://prompts/{self.name}",
                "unit_rows": 4,
                "storage_options": options,
            },
            "output": {"path": self.output, "rows_per_file": 16, "storage_options": options},
            "model": {"target": str(self.model)},
            **sections,
        }
        file = self.folder / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        return load_config([file], task="summarize")

    def run(self, endpoint=None, **behaviour):
        fake = Behaviour(journal=str(self.folder / "journal"), **behaviour)
        return run(self.config(endpoint), make_factory=fake_factory(fake))

    def rows(self):
        folder = self.output.removeprefix("s3://")
        table = pyarrow.dataset.dataset(folder, filesystem=self.server.client()).to_table()
        addresses = (table[name].to_pylist() for name in ("source_file", "source_row"))
        return list(zip(*addresses, strict=True))

    def texts(self):
        """Text columns of each output file; names of outputs do not depend on their root."""
        folder, client = self.output.removeprefix("s3://"), self.server.client()
        columns = ["source_file", "source_row", "summary", "status"]
        return {
            path.rsplit("/", 1)[-1]: pq.read_table(
                path, filesystem=client, columns=columns
            ).to_pydict()
            for path in client.glob(f"{folder}/*.parquet")
        }

    def summary(self):
        folder = self.output.removeprefix("s3://")
        return json.loads(self.server.client().cat_file(f"{folder}/_run/summary.json"))

    def generated(self):
        lines = (self.folder / "journal").read_text().splitlines()
        return Counter(line.rsplit(" ", 1)[0] for line in lines)


@pytest.fixture
def job(s3_server, tiny_model_dir, tmp_path):
    return S3Job(s3_server, tiny_model_dir, tmp_path)


def test_every_row_once_and_a_second_run_is_nothing_to_do(job, capsys):
    assert job.run() == 0
    assert job.rows() == ALL
    status = read_status(job.output, job.server.options())
    assert describe(status).startswith("finished\n50 of 50 rows")
    assert job.run() == 0
    printed = capsys.readouterr().out
    assert "nothing to generate" in printed
    assert set(job.generated().values()) == {1}
    client, session = (
        job.server.client(),
        Path(ray._private.worker._global_node.get_session_dir_path()),
    )
    objects = {
        path: client.cat_file(path) for path in client.find(job.output.removeprefix("s3://"))
    }
    assert finds(SECRET, {"stdout": printed, **objects, **texts_below(session / "logs")}) == []


@pytest.mark.parametrize(
    ("section", "credentials", "path", "message"),
    [
        ("output", {"secret": "wrong"}, None, r"^output.path: s3://.*: access denied|secret key"),
        ("output", {"key": READER_KEY, "secret": READER_SECRET}, None, r"grant s3:PutObject"),
        (
            "output",
            {},
            "s3://nothere/out",
            r"^output.path: s3://nothere.*: there is no such bucket",
        ),
        ("input", {"secret": "wrong"}, None, r"^input.path: s3://.*: .*; (set|grant)"),
        ("input", {}, "s3://nothere/in", r"^input.path: s3://nothere/in: there is no such bucket"),
        ("input", {}, "s3://prompts/nothing", r"^input.path: nothing at s3://prompts/nothing"),
    ],
)
def test_refusals_come_before_any_engine(job, section, credentials, path, message):
    changed = {"storage_options": job.server.options(**credentials)}
    changed |= {"path": path} if path else {}
    config = job.config()
    settings = getattr(config, section).model_copy(update=changed)
    with pytest.raises(ConfigError, match=message):
        run(config.model_copy(update={section: settings}), make_factory=None)
