"""Incremental runs over a growing prefix of a real S3 server, killed and run again."""

import signal

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from pipeline.errors import InputError
from pipeline.incremental import Selection, dry_run
from pipeline.status import verify_output
from tests.s3.proxy import Fault
from tests.s3.test_faults_ray import Driver
from tests.s3.test_run import S3Job
from tests.test_incremental import Runs

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("ray_cluster"),
]


class S3Runs(Runs):
    """Incremental runs with the fake engine over a prefix; files need no time to settle."""

    def __init__(self, server, model, folder):
        self.job = S3Job(server, model, folder, files={})
        self.config, self.journal = self.job.config(), folder / "journal"
        self.client = server.client()

    def __call__(self, **options):
        return super().__call__(settle_s=0.0, **options)

    def make(self, name, numbers):
        with self.client.open(f"prompts/{self.job.name}/{name}", "wb") as file:
            pq.write_table(pa.table({"text": [f"The mill number {n}." for n in numbers]}), file)

    def rows(self):
        found = {}
        for name, row in self.job.rows():
            found.setdefault(name, []).append(row)
        return found


@pytest.fixture
def runs(s3_server, tiny_model_dir, tmp_path):
    return S3Runs(s3_server, tiny_model_dir, tmp_path)


def test_growing_prefix_with_kills(runs, proxy):
    runs.make("ds=1/a.parquet", range(6))
    for fault in (
        Fault("before", r"_run/commits/", "PUT", first=2),
        Fault("before", r"\.done\.json", "PUT"),
    ):
        driver = Driver(runs.job, proxy.endpoint, options=["--incremental"])
        fault.action, proxy.faults = driver.kill, [fault]
        code, output = driver.end()
        assert (code, fault.struck) == (-signal.SIGKILL, 1), output
    assert runs() == ["ds=1/a.parquet"]
    assert runs() == []
    assert runs.generated() in ({"ds=1/a.parquet": n} for n in (6, 8, 10))  # a kill costs a unit

    runs.make("ds=2/b.parquet", range(5))
    assert runs() == ["ds=2/b.parquet"]
    assert runs() == [] and runs.generated() == {"ds=2/b.parquet": 5}

    runs.make("ds=1/a.parquet", range(9))
    runs.make("ds=1/late.parquet", range(2))
    with pytest.raises(InputError, match=r"ds=1/a\.parquet changed"):
        dry_run(runs.config, Selection(settle_s=0.0))
    assert runs(on_change="ignore", lookback_s=3600.0) == ["ds=1/late.parquet"]
    assert runs(on_change="reprocess", partitions=("ds=1",)) == ["ds=1/a.parquet"]
    assert runs.generated() == {"ds=1/late.parquet": 2, "ds=1/a.parquet": 9}
    assert runs.rows() == {
        "ds=1/a.parquet": [*range(9)],
        "ds=1/late.parquet": [0, 1],
        "ds=2/b.parquet": [*range(5)],
    }
    assert verify_output(runs.job.output, runs.job.server.options())[0]
