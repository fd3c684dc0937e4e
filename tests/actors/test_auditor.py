"""What is audited, when, and against what; `tests/decoding/test_audit` has the comparison."""

import functools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.auditor import NEEDS_BATCHED, AuditActor
from pipeline import flow
from pipeline.auditing import summarize
from pipeline.config import RunConfig, load_config
from pipeline.decoding.build import build_engine
from pipeline.errors import ConfigError, EngineError
from pipeline.identity import text_settings
from pipeline.prepare import Job, plan_run, prepare
from pipeline.records import rendered_schema
from pipeline.run import SUMMARY_NAME, Options, _audit, _sample
from pipeline.store.files import Store
from pipeline.store.plan import Plan, part_name
from tests import zoo
from tests.fakes import Behaviour, FakeEngine
from tests.zoo import corpus

IDS: list[int] = corpus.token_ids(corpus.make_text_tokenizer()).tolist()


def config_of(folder: Path, *settings: str) -> RunConfig:
    base = [
        f"input.path={folder}/in",
        f"output.path={folder}/out",
        f"model.target={zoo.path('target')}",
        f"model.drafter={zoo.path('draft')}",
        "decoding.method=draft_model",
        "decoding.max_new_tokens=12",
        "input.unit_rows=3",
    ]
    return load_config([], [*base, *settings], task="summarize")


def actor_of(folder: Path, factory: Any = None) -> AuditActor:
    """For parts of two rows."""
    engine = functools.partial(
        build_engine, config_of(folder), "float32", "cpu", max_model_len=64, num_cpus=1
    )
    return AuditActor(factory or engine, Store(str(folder)), 2, "summary")


def rendered(count: int) -> pa.Table:
    """Row 1 was skipped by the prompt stage."""
    rows = [
        {
            "source_file": "a.parquet",
            "source_row": i,
            "status": "skipped" if i == 1 else None,
            "prompt_token_ids": IDS[30 * i : 30 * i + 8],
        }
        for i in range(count)
    ]
    return pa.Table.from_pylist(rows, schema=rendered_schema([]))


def publish(folder: Path, texts: list[str | None]) -> None:
    for start in range(0, len(texts), 2):
        mine = texts[start : start + 2]
        table = {
            "source_row": list(range(start, start + len(mine))),
            "status": [{None: "skipped", "cut": "timeout"}.get(text, "ok") for text in mine],
            "summary": mine,
        }
        pq.write_table(pa.table(table), folder / part_name("a.parquet", start // 2))


def test_groups_are_compared_with_what_was_written(tmp_path: Path) -> None:
    actor = actor_of(tmp_path)
    publish(tmp_path, ["spoilt", None, None, "cut", "spoilt", None])
    groups = [actor(rendered(5)).to_pylist()[0] for _ in range(3)]
    for group in groups:
        assert (group["rows"], group["agree"], group["errors"]) == (4, 2, 2)
        assert group["differing"] == ["a.parquet:0", "a.parquet:4"]
    found = summarize(groups, is_exact=True)
    low, high = found["measured_speedup_interval"]
    assert found["rows"] == 12 and 0 < low < high
    assert found["groups"] == 3
    assert actor(rendered(2).slice(1)).num_rows == 0  # nothing to generate


def test_other_engines_are_not_audited(tmp_path: Path) -> None:
    actor = actor_of(tmp_path, functools.partial(FakeEngine, Behaviour()))
    groups = actor(rendered(2)).to_pylist()
    assert summarize(groups, is_exact=True) == {"note": NEEDS_BATCHED}


@pytest.fixture
def job(tmp_path: Path) -> tuple[Job, Plan]:
    """20 rows in units of 3, of which a quarter is to be audited."""
    (tmp_path / "in").mkdir()
    texts = [f"text {i}" for i in range(20)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "in/a.parquet")
    made = prepare(config_of(tmp_path, "decoding.audit_fraction=0.25"))
    return made, plan_run(made)[0]


def test_which_units_and_when(job: tuple[Job, Plan], tmp_path: Path) -> None:
    made, plan = job
    cells = plan.sample(1.0)
    assert [cell.start for cell in cells] == list(range(0, 20, 3))
    sample = _sample(made, plan, cells, Options())
    assert len(sample) == 2 and sample == plan.sample(0.25) and set(sample) < set(cells)
    assert set(sample) < set(plan.sample(0.5)) and len(plan.sample(3 / 7)) == 3
    assert _sample(made, plan, [], Options()) == sample  # killed in its audit
    made.store.put(SUMMARY_NAME, b"{}")
    assert _sample(made, plan, [], Options()) == []  # finished
    assert _sample(made, plan, cells, Options()) == sample  # new files came
    assert _sample(made, plan, cells, Options(prompter=AuditActor)) == []
    off = prepare(config_of(tmp_path))
    assert _sample(off, plan, cells, Options()) == []
    assert text_settings(off.config, off.resolved) == text_settings(made.config, made.resolved)
    with pytest.raises(ConfigError, match=r"decoding.audit_fraction"):
        config_of(tmp_path, "decoding.audit_fraction=1.5")


def test_a_broken_audit_leaves_the_run_alone(job: tuple[Job, Plan], monkeypatch: Any) -> None:
    def broken(*args: Any) -> None:
        raise EngineError("the device is lost")

    monkeypatch.setattr(flow, "audit", broken)
    assert _audit(*job, [], None, None) == {"note": "failed: the device is lost"}
