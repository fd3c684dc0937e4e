"""The benchmark commands on a tiny model: they count right and compare right. Speed is not tested:
on a machine that is busy with other tests it means nothing."""

import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from jobs.bench import app
from pipeline.benchmark import engines
from pipeline.benchmark.engines import EngineContender, EngineSetup, run_together
from pipeline.benchmark.machine import OthersCpu
from pipeline.benchmark.models import Models
from pipeline.benchmark.runs import Run, compare, medians, speedup
from pipeline.benchmark.workload import load_workload, render, shared_head
from tests.tiny import TEXT

NEW_TOKENS = 6
PROMPTS = [
    {"task": "summarization", "prompt": f"Summarize: {TEXT[:200]}"},
    {"task": "translation", "prompt": "Translate this."},
    {"task": "summarization", "prompt": f"Summarize: {TEXT[100:260]}"},
    {"task": "summarization", "prompt": f"Summarize: {TEXT[50:330]}"},
]
FAKE_PEER = """
import argparse, json
parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("prompts")
for option in ("slots", "max-new-tokens", "max-model-len"):
    parser.add_argument("--" + option, type=int, required=True)
for option in ("threads", "tokens-out", "spec"):
    parser.add_argument("--" + option)
args = parser.parse_args()
rows = [json.loads(line) for line in open(args.prompts)]
assert all(row["prompt"].startswith("Summarize") for row in rows), rows
print("loading ...")
if args.spec == "ngram:3":
    raise SystemExit("no such drafts here")
with open(args.tokens_out, "w") as out:
    for row in rows:
        print(json.dumps([7] * args.max_new_tokens), file=out)
print(json.dumps({"peer": "fake", "seconds": 0.5, "threads": args.threads}))
"""


@pytest.fixture(autouse=True)
def same_threads() -> Any:
    """A command sets torch's threads for its process, here that of all tests."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return path


def run(*words: Any) -> Any:
    return CliRunner().invoke(app, [*map(str, words), "--threads", "1"])


def run_generate(model: Path, prompts: Path, out: Path, *words: Any) -> dict[str, Any]:
    options = {
        "--model": model,
        "--prompts": prompts,
        "--task": "summarization",
        "--max-new-tokens": NEW_TOKENS,
        "--dtype": "float32",
        "--slots": "1,2",
        "--drafts": "3",
        "--json": out,
    }
    given = [word for pair in options.items() for word in pair]
    done = run("generate", *given, *words)
    assert done.exit_code == 0, done.output
    results: dict[str, Any] = json.loads(out.read_text())
    for entry in results["contenders"]:
        assert entry["name"] in done.stdout
    return results


def test_generate_compares_all_contenders(tiny_model_dir, prompts, tmp_path):
    drafting = ("--methods", "plain,prompt_lookup,draft_model", "--drafter", tiny_model_dir)
    words = (*drafting, "--repeats", 2, "--ignore-eos")
    results = run_generate(tiny_model_dir, prompts, tmp_path / "out.json", *words)
    methods = ["plain", "prompt_lookup:3", "draft_model:3"]
    assert [entry["name"] for entry in results["contenders"]] == [
        "hf/plain/1",
        "hf/prompt_lookup:3/1",
        "hf/draft_model:3/1",
        "hf/plain/2",
        *(f"draftmill/{method}/{slots}" for slots in (1, 2) for method in methods),
    ]
    for entry in results["contenders"]:
        assert len(entry["runs"]) == 2
        for one in entry["runs"]:
            check_run(entry["name"], one)
        assert entry["speedup"]["hf/plain/1"]["total"] > 0
        assert entry["speedup"]["draftmill/plain/2"]["decode"] > 0
    check_breakdown(results["breakdown"], [f"{m}/{slots}" for slots in (1, 2) for m in methods])
    assert results["workload"]["rows"] == 3
    assert results["machine"]["threads"] == 1
    assert results["machine"]["versions"]["torch"]


def check_run(name: str, run: dict[str, Any]) -> None:
    assert run["tokens"] == 3 * NEW_TOKENS
    assert run["agreement"] == {"rows_equal": 3, "rows": 3, "first_difference": None}, name
    assert run["prefill_seconds"] > 0
    assert run["decode_seconds"] > 0
    assert run["prefill_seconds"] + run["decode_seconds"] == pytest.approx(run["total_seconds"])
    assert 0 <= run["others_cpu"] <= 1
    if "/plain/" in name:
        assert run["target_passes"] == run["tokens"]
        assert run["acceptance"] is None
    elif "draft_model" in name:  # the target drafts for itself
        assert run["acceptance"] == 1
        assert run["tokens_per_target_pass"] > 1.5
    else:
        assert run["target_passes"] <= run["tokens"]


def check_breakdown(breakdown: list[dict[str, Any]], setups: list[str]) -> None:
    assert [part["setup"] for part in breakdown] == setups
    for part in breakdown:
        assert part["rows"] == int(part["setup"][-1])
        assert part["matrix_ms"] > 0
        assert part["attention_ms"] > 0
        parts = ("draft_ms", "matrix_ms", "attention_ms", "other_ops_ms", "host_ms")
        total = sum(part[name] for name in parts)
        assert total == pytest.approx(part["profiled_ms"], rel=0.05)
        assert (part["draft_ms"] > 0) == (not part["setup"].startswith("plain"))


def test_generate_runs_a_peer_and_survives_its_failure(tiny_model_dir, prompts, tmp_path):
    script = tmp_path / "peer.py"
    script.write_text(FAKE_PEER)
    peer = ("--peer-python", sys.executable, "--peer-script", script)
    words = (
        *peer,
        "--drafts",
        "2,3",
        "--no-breakdown",
        "--repeats",
        1,
        "--only",
        "hf/plain/1,vllm/*/2",
    )
    results = run_generate(tiny_model_dir, prompts, tmp_path / "out.json", *words)
    entries = {entry["name"]: entry for entry in results["contenders"]}
    assert list(entries) == ["hf/plain/1", "vllm/plain/2", "vllm/ngram:2/2", "vllm/ngram:3/2"]
    (fake,) = entries["vllm/plain/2"]["runs"]
    assert fake["tokens"] == 3 * NEW_TOKENS
    assert fake["total_seconds"] == 0.5
    assert fake["tokens_per_second"] == 6 * NEW_TOKENS
    assert fake["prefill_seconds"] is None
    assert fake["agreement"]["rows_equal"] == 0
    assert fake["agreement"]["first_difference"]["token"] == 0
    assert fake["agreement"]["first_difference"]["found"] == 7
    assert entries["vllm/ngram:3/2"]["runs"] == []
    (failure,) = results["failures"]
    assert failure["name"] == "vllm/ngram:3/2"
    assert "no such drafts here" in failure["error"]


def test_end_tokens_end_every_contenders_rows(tiny_model_dir, prompts, tmp_path):
    """Each decodes the reference's tokens up to the end token that is put in the way."""
    words = ("--no-breakdown", "--repeats", 1, "--max-new-tokens", 24)
    model = tmp_path / "model"
    shutil.copytree(tiny_model_dir, model)
    config = json.loads((model / "generation_config.json").read_text())
    config["eos_token_id"] = list(range(0, 512, 9))
    (model / "generation_config.json").write_text(json.dumps(config))
    results = run_generate(model, prompts, tmp_path / "out.json", *words)
    runs = [entry["runs"][0] for entry in results["contenders"]]
    assert {run["tokens"] for run in runs} == {runs[0]["tokens"]}
    assert 3 <= runs[0]["tokens"] < 3 * 24
    assert all(run["agreement"]["rows_equal"] == 3 for run in runs)


def test_step_measures_three_things(tiny_model_dir):
    options = ("--dtype", "float32", "--rows", 3, "--context", 40, "--repeats", 4)
    done = run("step", "--model", tiny_model_dir, *options)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    ratio = result["step_ms"] / result["forward_tokens_ms"]
    assert result["step_ratio"] == pytest.approx(ratio)
    assert result["forward_ratio"] > 0


def test_prefix_shares_the_head(tiny_model_dir, prompts):
    options = ("--dtype", "float32", "--slots", 2, "--repeats", 1)
    done = run("prefix", "--model", tiny_model_dir, "--prompts", prompts, *options)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["rows"] == 4
    assert 100 < result["shared_tokens"] < result["prompt_tokens"]
    assert result["ratio"] > 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--methods", "magic"), "--methods"),
        (("--slots", "one"), "--slots"),
        (("--drafts", "0"), "--drafts"),
        (("--task", "poetry"), "--prompts"),
        (("--only", "nobody/*"), "--only"),
        (("--peer-python", "python"), "--peer-script"),
        (("--few-shot-prefix", "absent.txt"), "--few-shot-prefix"),
        (("--methods", "draft_model"), "--drafter"),
    ],
)
def test_wrong_options_are_named(tiny_model_dir, prompts, words, named):
    done = run("generate", "--model", tiny_model_dir, "--prompts", prompts, *words)
    assert done.exit_code == 2
    assert named in done.stderr


def test_others_cpu_is_what_other_processes_use():
    spin = "import time\nend = time.time() + 60\nwhile time.time() < end: pass"
    others = OthersCpu()
    with subprocess.Popen([sys.executable, "-c", spin]) as other:
        time.sleep(1)
        share = others.share()
        other.kill()
    assert share > 0.3 / os.cpu_count()


def test_compare_finds_the_first_difference():
    found = compare([[1, 2, 3], [1, 2], [4]], [[1, 2, 3], [1, 2, 3], [5]])
    assert (found.rows_equal, found.rows) == (1, 3)
    assert found.first_difference == {"row": 2, "token": 0, "found": 4, "expected": 5}
    found = compare([[1, 2]], [[1, 2, 3]])
    assert found.first_difference == {"row": 0, "token": 2, "found": None, "expected": 3}


def test_speedup_is_of_runs_that_were_neighbours():
    own = [Run([[1]], 1.0, 0.5), Run([[1]], 2.0, 1.5), Run([[1]], 4.0)]
    base = [Run([[1]], 2.0, 1.0), Run([[1]], 6.0, 5.0), Run([[1]], 4.0)]
    assert speedup(own, base, "total_seconds") == 2
    assert speedup(own, base, "decode_seconds") == 2
    assert medians(own)["prefill_seconds"] == 1
    assert medians(own)["acceptance"] is None


def test_shared_head_is_what_all_prompts_begin_with():
    assert shared_head([[1, 2, 3, 4], [1, 2, 3], [1, 2, 9]]) == [1, 2]
    assert shared_head([[1, 2], [3]]) == []


def test_prompts_without_a_chat_template_are_taken_as_they_are():
    class Bare:
        chat_template = None

        def __call__(self, text: str) -> Any:
            return {"input_ids": [len(text)]}

    assert render(Bare(), "four") == [4]


def test_auto_beside_fixed_choices(tiny_model_dir: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "auto.json"
    options = {
        "--model": tiny_model_dir,
        "--prompts": prompts,
        "--workloads": "summarization,random,copy",
        "--slots": "1,2",
        "--drafts": "2",
        "--repeats": 2,
        "--least-rows": 3,
        "--max-new-tokens": NEW_TOKENS,
        "--json": out,
    }
    result = run("auto", *(word for option in options.items() for word in option))
    assert result.exit_code == 0, result.output
    cases = json.loads(out.read_text())["cases"]
    names = [(case["workload"], case["slots"]) for case in cases]
    assert names == [(w, n) for w in ("summarization", "random", "copy") for n in (1, 2)]
    for case in cases:
        rates, runs = case["tokens_per_second"], case["runs"]
        assert set(case["screened"]) == {"plain", "prompt_lookup:2"}
        assert case["best"] in case["screened"]
        assert case["rows"] == 6 * case["slots"], "prompts again where there are too few"
        assert {key: len(each) for key, each in runs.items()} == {"auto": 2, "best": 2, "plain": 2}
        counts = {one["tokens"] for each in runs.values() for one in each}
        assert len(counts) == 1  # drafts never change a row
        if case["workload"] != "summarization":  # which may end early
            dice = random.Random(1)  # rows end at different times
            lengths = [dice.randint(NEW_TOKENS // 2, NEW_TOKENS) for _ in range(case["rows"])]
            assert counts == {sum(lengths)} and len(set(lengths)) > 1
        assert case["auto_over_plain"] == pytest.approx(rates["auto"] / rates["plain"])
        assert all(one["target_passes"] == one["tokens"] for one in runs["plain"])
        assert all(0 < one["prefill_seconds"] < one["total_seconds"] for one in runs["auto"])


def test_engines_side_by_side_do_what_each_does_alone(
    tiny_model_dir: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_TURN_SECONDS", 1e-9)  # a step each
    models = Models(str(tiny_model_dir), None, "float32")
    workload = load_workload(
        prompts, models.tokenizer, task=None, limit=None, max_new_tokens=NEW_TOKENS
    )
    setups = [EngineSetup("plain", 1), EngineSetup("prompt_lookup", 3, 2), EngineSetup("auto", 2)]
    contenders = [EngineContender(setup.label, models, setup) for setup in setups]
    order: list[int] = []
    for i, contender in enumerate(contenders):
        begin = contender.begin

        def watched(*args: Any, i: int = i, begin: Any = begin) -> Any:
            progress = begin(*args)
            turn = progress.take_turn
            progress.take_turn = lambda seconds: (order.append(i), turn(seconds))
            return progress

        contender.begin = watched  # type: ignore[method-assign]
    together = run_together(contenders, workload)
    alone = [EngineContender(s.label, models, s).run(workload) for s in setups]
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert len({tuple(map(tuple, one.tokens)) for one in together}) == 1
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert set(order) == {0, 1, 2} and changes >= len(PROMPTS) * NEW_TOKENS / 2
