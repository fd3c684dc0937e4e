"""The house rules: imports point one way, commands start light, configs and README are true."""

import ast
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from pipeline.config import load_config
from tests.readme_tables import config_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

# Each room may import from the rooms above it, and `store` and `decoding` never meet.
LAYERS = [
    {"pipeline.errors", "pipeline.languages", "pipeline.splitting", "pipeline.logs"},
    {"pipeline.steptable"},
    {"pipeline.timing"},
    {"pipeline.sections"},
    {"pipeline.endpoint", "pipeline.limits"},
    {"pipeline.config", "pipeline.records", "pipeline.cells"},
    {"pipeline.stats", "pipeline.templates", "pipeline.identity", "pipeline.rendered"},
    {"pipeline.prompts", "pipeline.progress", "pipeline.translators", "pipeline.auditing"},
    {"pipeline.documents"},
    {"pipeline.store", "pipeline.decoding"},
    {"pipeline.prepare", "actors", "pipeline.status", "pipeline.benchmark"},
    {"pipeline.quality"},
    {"pipeline.report", "pipeline.htmlreport", "pipeline.flow", "pipeline.dryrun"},
    {"pipeline.monitor"},
    {"pipeline.run"},
    {"pipeline.incremental"},
    {"pipeline.cli", "actors.bulk"},
    {"jobs"},
]
RANK = {room: rank for rank, rooms in enumerate(LAYERS) for room in rooms}
MODULES = sorted(p for top in ("pipeline", "actors", "jobs") for p in (ROOT / top).rglob("*.py"))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str | None:
    matches = [room for room in RANK if module == room or module.startswith(room + ".")]
    return max(matches, key=len, default=None)


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_one_way(path):
    name = module_name(path)
    if name in ("pipeline", "actors", "jobs"):
        return
    room = room_of(name)
    assert room, f"{name} has no place in LAYERS"
    for imported in imports_of(path):
        other = room_of(imported)
        if other and other != room:
            assert RANK[other] < RANK[room], f"{name} imports {imported}"


def test_decoding_knows_no_ray_and_store_no_torch():
    for path in MODULES:
        name, tops = module_name(path), {i.split(".")[0] for i in imports_of(path)}
        if name.startswith("pipeline.decoding"):
            assert "ray" not in tops, name
        if name.startswith("pipeline.store"):
            assert not tops & {"torch", "transformers"}, name


@pytest.mark.parametrize("job", sorted((ROOT / "jobs").glob("[a-z]*.py")), ids=lambda p: p.name)
def test_help_is_light(job):
    code = (
        f"import sys, runpy; sys.argv = [{job.name!r}, '--help']\n"
        f"try: runpy.run_path({str(job)!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'ray', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "conf").glob("*.yaml")), ids=lambda p: p.name)
def test_configs_are_complete_runs(path):
    extra = ["input.path=requests"] if path.stem == "serve" else []  # it has no input of its own
    section = yaml.safe_load(path.read_text(encoding="utf-8"))
    config = load_config([path], extra, task=section.get("task", "summarize"))
    assert config.output.path
    assert section["model"]["target"]


def commands() -> list[str]:
    """Lines of the README's `sh` blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0].strip() for line in lines if line.strip()]


def test_readme_has_commands():
    assert {"make demo", "make test"} <= set(commands())


@pytest.mark.parametrize("command", commands())
def test_readme_commands_parse(command):
    """Every job, make target and config that the README names exists, with such options."""
    words = shlex.split(command)
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    elif {"jobs/summarize.py", "jobs/translate.py"} & set(words):
        job = next(word for word in words if word.startswith("jobs/"))
        rest = words[words.index(job) + 1 :]
        files = [value for option, value in pairwise(rest) if option == "--config"]
        overrides = [value for option, value in pairwise(rest) if option == "--set"]
        load_config([ROOT / file for file in files], overrides, task=job[5:-3])
        known = {"--config", "--set", "--dry-run", "--print-config", "--new-run", "--retry-failed"}
        known |= {"--incremental", "--since", "--until", "--partition", "--lookback", "--max-files"}
        known |= {"--settle", "--on-change", "--full-refresh"}
        assert {word for word in rest if word.startswith("--")} <= known
    elif "jobs/serve.py" in words:
        files = [value for option, value in pairwise(words) if option == "--config"]
        load_config([ROOT / file for file in files], ["input.path=requests"], task="summarize")
    elif "jobs/status.py" in words or "jobs/bench.py" in words:
        assert (ROOT / next(w for w in words if w.startswith("jobs/"))).exists()
    else:
        assert words[0] in {"ray", "kill", "export", "pip", ".venv/bin/pip"}, command


def test_readme_has_the_config_reference_of_the_code():
    assert config_table() in README, "paste the output of `python tests/readme_tables.py`"


def test_readme_lists_every_output_column():
    import pyarrow as pa

    from pipeline.records import output_schema

    for name in output_schema(["summary"], [pa.field("id", pa.string())]).names:
        assert f"`{name}`" in README, name


def test_no_file_is_out_of_hand():
    for path in MODULES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 340, path
