"""The configuration: precedence, overrides, and one line of error that names key and remedy."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.config import RunConfig, dump_yaml, load_config
from pipeline.errors import ConfigError, DraftmillError

MINIMAL = "input: {path: in}\noutput: {path: out}\nmodel: {target: t}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


def problem(files: list[Path], *overrides: str) -> str:
    """The one line that a user sees; it ends the job with code 2."""
    with pytest.raises(ConfigError) as caught:
        load_config(files, overrides, task="summarize")
    error = caught.value
    assert error.exit_code == 2 and isinstance(error, DraftmillError)
    assert str(error).startswith(f"{error.key}: ")
    assert "\n" not in str(error)
    return str(error)


def in_file(path: Path, text: str) -> list[Path]:
    path.write_text(text)
    return [path]


# --- precedence and parsing


def test_defaults_files_overrides(file: Path, tmp_path: Path) -> None:
    second = tmp_path / "second.yaml"
    second.write_text("decoding: {seed: 2, top_k: 5}\ninput: {text_column: body}\n")
    file.write_text(MINIMAL + "decoding: {seed: 1, max_new_tokens: 9}\n")
    config = load_config([file, second], ["decoding.top_k=7", "decoding.top_k=8"], task="summarize")
    assert config.decoding.max_new_tokens == 9  # first file
    assert config.decoding.seed == 2  # the later file wins, key by key
    assert config.decoding.top_k == 8  # --set over files, the later one wins
    assert config.input.path == "in" and config.input.text_column == "body"
    assert config.decoding.method == "prompt_lookup"  # default


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("decoding.temperature=0.5", "decoding", "temperature", 0.5),
        ("decoding.min_p=1e-3", "decoding", "min_p", 0.001),
        ("decoding.top_k=null", "decoding", "top_k", None),
        ("decoding.stop=['\\n', 'END']", "decoding", "stop", ["\\n", "END"]),
        ('decoding.stop=["\\n"]', "decoding", "stop", ["\n"]),
        ("prompt.template=x = {text}", "prompt", "template", "x = {text}"),
        ("prompt.chat_template_kwargs.thinking=no", "prompt", "chat_template_kwargs", None),
        ("input.path=s3://b/k?a=b", "input", "path", "s3://b/k?a=b"),
        ("input.unit_rows=12", "input", "unit_rows", 12),
        ("resources.num_cpus=1", "resources", "num_cpus", 1.0),
        ("resources.num_cpus=auto", "resources", "num_cpus", "auto"),
        (" decoding.seed =3", "decoding", "seed", 3),
    ],
)
def test_override_values_are_yaml(
    file: Path, override: str, section: str, key: str, value: object
) -> None:
    expected = {"thinking": False} if key == "chat_template_kwargs" else value
    config = load_config([file], [override], task="summarize")
    assert getattr(getattr(config, section), key) == expected


def test_empty_sections_and_files_change_nothing(file: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing\n")
    plain = load_config([file], task="summarize")
    assert load_config([file, empty], task="summarize") == plain
    file.write_text(MINIMAL + "decoding:\n#  seed: 1\n")
    assert load_config([file], task="summarize") == plain


def test_overrides_alone_make_a_config() -> None:
    sets = ["input.path=in", "output.path=out", "model.target=t"]
    assert load_config([], sets, task="summarize").output.path == "out"


def test_config_is_immutable(file: Path) -> None:
    config = load_config([file], task="summarize")
    with pytest.raises(ValidationError):
        config.decoding.seed = 3  # type: ignore[misc]


def test_derived_values(file: Path) -> None:
    config = load_config([file], task="summarize")
    assert config.text_columns == ["summary"] and config.input.kept == []
    config = load_config([file], ["output.text_column=s", "input.id_column=id"], task="summarize")
    assert config.text_columns == ["s"] and config.input.kept == ["id"]
    sets = ["input.keep_columns=[a, b, a]", "input.id_column=id", "prompt.target_lang=fr"]
    config = load_config([file], sets, task="translate")
    assert config.text_columns == ["translation"] and config.kept == ["a", "b"]


def test_dump_yaml_round_trips(file: Path, tmp_path: Path) -> None:
    overrides = [
        "prompt.template='é: {text}\n\n'",
        "prompt.few_shot=[{text: 'no', output: '1'}]",
        "prompt.chat_template_kwargs={enable_thinking: false, n: 1.5}",
        "decoding.stop=['\\n', \"\\t\", '# x', 'null']",
        "input.keep_columns=[]",
        "input.storage_options={key: {a: [1, null]}}",
        "resources.num_gpus=0.5",
        "decoding.min_p=1e-3",
        "task=translate",
        "prompt.target_lang=[fr, pt-BR]",
    ]
    config = load_config([file], overrides, task="translate")
    copy = tmp_path / "copy.yaml"
    copy.write_text(dump_yaml(config), encoding="utf-8")
    assert load_config([copy], task="translate") == config
    assert "é" in dump_yaml(config)


# --- what is wrong, and what to do


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("decoding.methd=plain", "decoding.methd: unknown key; did you mean decoding.method?"),
        ("decodin.seed=1", "decodin: unknown key; did you mean decoding?"),
        (
            "wings.seed=1",
            "wings: unknown key; known keys: task, prompt, input, output, model, decoding, "
            "resources, faults, serve",
        ),
        (
            "model.wings=1",
            "model.wings: unknown key; known keys: target, revision, drafter, dtype, device",
        ),
        (
            "resources.num_cpus=foo",
            "resources.num_cpus: input should be 'auto' or Input should be a valid number, "
            "unable to parse string as a number (got 'foo')",
        ),
        ("resources.num_cpus=-1", "resources.num_cpus: must be `auto`, 0 or more (got -1)"),
        (
            "resources.num_gpus=.nan",
            "resources.num_gpus: input should be 'auto' or Input should be a finite number "
            "(got nan)",
        ),
        ("input.unit_rows=0", "input.unit_rows: must be `auto` or at least 1 (got 0)"),
        ("input.max_rows=0", "input.max_rows: input should be greater than or equal to 1 (got 0)"),
        (
            "resources.max_model_len=1",
            "resources.max_model_len: must be `auto` or at least 2 (got 1)",
        ),
        (
            "resources.max_model_len=256",
            "decoding.max_new_tokens: 256 leaves no room for a prompt in "
            "resources.max_model_len=256; lower it",
        ),
        (
            "decoding.method=universal",
            "model.drafter: universal needs it; name a smaller model, of whatever tokenizer, or "
            "use decoding.method=prompt_lookup",
        ),
        (
            "decoding.method=early_exit",
            "decoding.exit_layer: early_exit needs it; give the number of layers to draft with, "
            "such as a quarter of the model's",
        ),
        (
            "decoding.ensemble_weight=0.7",
            "decoding.ensemble_weight: prompt_lookup drafts do without probabilities; unset it, or "
            "choose a method of draft_model, early_exit, mtp, mtp_drafter",
        ),
        (
            "decoding.ensemble_weight=1",
            "decoding.ensemble_weight: input should be less than 1 (got 1)",
        ),
        (
            "decoding.num_draft_tokens=0",
            "decoding.num_draft_tokens: must be `auto` or 1 to 256 (got 0)",
        ),
        (
            "decoding.method=magic",
            "decoding.method: input should be 'plain', 'prompt_lookup', 'draft_model', "
            "'early_exit', 'mtp', 'mtp_drafter', 'universal' or 'auto' (got 'magic')",
        ),
        (
            "decoding.method=draft_model",
            "model.drafter: draft_model needs it; name a smaller model with the target's "
            "tokenizer, or use decoding.method=prompt_lookup",
        ),
        (
            "decoding.draft_confidence=1.1",
            "decoding.draft_confidence: input should be less than or equal to 1 (got 1.1)",
        ),
        (
            "decoding.stop=['']",
            "decoding.stop: an empty stop string would end every completion; remove it (got [''])",
        ),
        ("decoding.stop=END", "decoding.stop: input should be a valid list (got 'END')"),
        (
            "decoding.temperature=.inf",
            "decoding.temperature: input should be a finite number (got inf)",
        ),
        (
            "prompt.few_shot=[{text: a}]",
            "prompt.few_shot: example 0 has no `output`; add it (got [{'text': 'a'}])",
        ),
        ("input.path=", "input.path: input should be a valid string (got None)"),
        ("task=translate", "task: the file is for 'translate'; run its own job instead"),
        ("decoding", "--set: 'decoding' is not of the form section.key=value"),
        ("decoding..seed=1", "--set: 'decoding..seed=1' is not of the form section.key=value"),
        ("=1", "--set: '=1' is not of the form section.key=value"),
        ("prompt.template={", "prompt.template: '{' is not valid YAML; quote it"),
    ],
)
def test_wrong_override_names_key_and_remedy(file: Path, override: str, line: str) -> None:
    assert problem([file], override) == line


def test_the_reference_engine_does_not_draft_with_a_model(file: Path) -> None:
    sets = ["decoding.method=draft_model", "model.drafter=d", "decoding.engine=transformers"]
    line = "decoding.engine: transformers does not draft with draft_model; use engine: batched"
    assert problem([file], *sets) == line
    assert load_config([file], sets[:2], task="summarize").model.drafter == "d"


def test_wrong_key_in_a_file_reads_the_same(file: Path) -> None:
    files = in_file(file, MINIMAL + "decoding: {methd: plain}\n")
    assert problem(files) == "decoding.methd: unknown key; did you mean decoding.method?"
    files = in_file(file, MINIMAL + "decoding: {7: plain}\n")
    assert problem(files).startswith("decoding.7: unknown key; known keys: engine, method")
    files = in_file(file, MINIMAL + "7: plain\n")
    assert problem(files).startswith("7: unknown key; known keys: task, prompt")


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("", "input.path"),
        ("input:\noutput: {path: out}\nmodel: {target: t}\n", "input.path"),
        ("input: {}\noutput: {path: out}\nmodel: {target: t}\n", "input.path"),
        ("input: {path: in}\nmodel: {target: t}\n", "output.path"),
        ("input: {path: in}\noutput: {path: out}\n", "model.target"),
    ],
)
def test_missing_key_is_named(file: Path, text: str, key: str) -> None:
    line = f"{key}: is required; set it in the config or with --set"
    assert problem(in_file(file, text)) == line


def test_missing_file_and_folder(file: Path, tmp_path: Path) -> None:
    absent = tmp_path / "absent.yaml"
    assert problem([absent]) == f"--config: no file {absent}; check the path"
    assert problem([tmp_path]).startswith(f"--config: cannot read {tmp_path}: ")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"a: [\n", "is not valid YAML: while parsing a flow node"),
        (b"a: 1\n b: 2\n", "is not valid YAML: mapping values are not allowed here"),
        (b"!!python/object:os.system x\n", "is not valid YAML: could not determine a constructor"),
        (b"[1]\n", "holds no mapping; write `section:` and keys below"),
        (b"input\n", "holds no mapping; write `section:` and keys below"),
        (b"a: \xff\n", "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_bad_file_is_named(file: Path, content: bytes, complaint: str) -> None:
    file.write_bytes(content)
    line = problem([file])
    assert line.startswith("--config: ") and str(file) in line and complaint in line


def test_every_key_has_a_description() -> None:
    for name, section in RunConfig.model_fields.items():
        if name != "task":
            fields = section.annotation.model_fields  # type: ignore[union-attr]
            assert all(field.description for field in fields.values()), name


def test_printed_config_hides_secrets_of_stores(file: Path) -> None:
    options = "{key: me, secret: s3cr3t, client_kwargs: {aws_session_token: s3cr3t, region: eu}}"
    sets = [f"{section}.storage_options={options}" for section in ("input", "output")]
    shown = dump_yaml(load_config([file], sets, task="summarize"))
    assert "s3cr3t" not in shown
    assert shown.count("'***'") == 4
    assert shown.count("region: eu") == 2
