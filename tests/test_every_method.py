"""Each method's config in `conf/` as a whole job, with trained models in place of the big ones."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from pipeline.config import load_config
from pipeline.run import run
from tests import zoo
from tests.zoo import corpus

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
CONF = Path(__file__).parents[1] / "conf"
# Target, drafter, and what else the small models need.
MODELS: dict[str, tuple[str, str | None, list[str]]] = {
    "draft_model": ("target", "draft", []),
    "early_exit": ("layerskip", None, ["decoding.exit_layer=2"]),
    "mtp": ("mtp1", None, []),
    "mtp_drafter": ("gemma4", "gemma4_assistant", []),
    "universal": ("target", "other_tokenizer", ["decoding.stop=[]"]),
}
ROWS = 6


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pieces of the text that the models know."""
    words, folder = corpus.text().split(" "), tmp_path_factory.mktemp("documents")
    starts = [i * len(words) // (ROWS + 1) for i in range(ROWS)]
    texts = [" ".join(words[start : start + 10 + 6 * i]) for i, start in enumerate(starts)]
    table = {"id": list(range(ROWS)), "text": texts}
    pq.write_table(pa.table(table), folder / "a.parquet")
    return folder


def summarize(name: str, target: str, output: Path, documents: Path, *settings: str) -> Any:
    config = load_config(
        [CONF / f"{name}.yaml"],
        [
            f"input.path={documents}",
            f"output.path={output}",
            f"model.target={zoo.path(target)}",
            "model.dtype=float32",
            "prompt.style=plain",
            "prompt.template='{text}'",
            "decoding.max_new_tokens=24",
            *settings,
        ],
        task="summarize",
    )
    assert run(config) == 0
    return pyarrow.dataset.dataset(output).to_table()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, documents: Path) -> list[str]:
    """Texts of the target that two methods draft for, without drafts."""
    table = summarize("plain", "target", tmp_path_factory.mktemp("plain"), documents)
    return list(table["summary"].to_pylist())


@pytest.mark.parametrize("method", MODELS)
def test_by_config_alone(
    method: str, plain: list[str], documents: Path, tmp_path: Path, capsys: Any
) -> None:
    target, drafter, settings = MODELS[method]
    if drafter is not None:
        settings = [*settings, f"model.drafter={zoo.path(drafter)}"]
    audited = method == "draft_model"
    if audited:  # half of the rows, in groups of two
        audit = ["decoding.audit_fraction=0.5", "input.unit_rows=1", "resources.slots=1"]
        settings = [*settings, *audit]
    table = summarize(method, target, tmp_path, documents, *settings)
    assert target != "target" or table["summary"].to_pylist() == plain
    assert set(table["status"].to_pylist()) == {"ok"}
    assert set(table["method"].to_pylist()) <= {method, "plain"}
    for row in table.to_pylist():
        whole = row["num_target_forwards"] + row["num_accepted_draft_tokens"]
        assert row["completion_tokens"] in (whole, whole - 1)
    summary = json.loads((tmp_path / "_run/summary.json").read_text())
    totals, found = summary["totals"], summary["audit"]
    assert totals["num_accepted_draft_tokens"] > 0.3 * totals["num_draft_tokens"] > 0
    assert bool(found) == audited
    if audited:
        assert (found["rows"], found["agree"], found["errors"], found["groups"]) == (3, 3, 0, 2)
        assert found["measured_speedup"] == found["plain_seconds"] / found["assisted_seconds"] > 0
        assert "3 rows generated again" in capsys.readouterr().out
        assert "3 rows generated again" in (tmp_path / "_run/report.html").read_text()


def test_an_ensemble_says_its_price(
    plain: list[str], documents: Path, tmp_path: Path, capsys: Any
) -> None:
    settings = [f"model.drafter={zoo.path('draft')}", "decoding.ensemble_weight=0.2"]
    table = summarize("draft_model", "target", tmp_path, documents, *settings)
    assert table["summary"].to_pylist() != plain
    lossy = sum(table["num_lossy_draft_tokens"].to_pylist())
    assert f"{lossy:,} tokens (" in capsys.readouterr().out and lossy > 0
