"""The draft model is checked before anything is loaded, and does not make a run another run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import load_config
from pipeline.dryrun import dry_run
from pipeline.errors import ConfigError
from pipeline.prepare import Job, prepare
from tests.tiny import make_model, make_tiny_model, make_tokenizer

Check = Callable[..., Job]
SIZE = len(make_tokenizer())


@pytest.fixture
def overrides(tmp_path: Path, tiny_model_dir: Path) -> list[str]:
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": ["12 sacks on Monday"]}), tmp_path / "in" / "a.parquet")
    paths = {"input.path": "in", "output.path": "out"}
    return [
        f"model.target={tiny_model_dir}",
        "decoding.method=draft_model",
        *(f"{key}={tmp_path / name}" for key, name in paths.items()),
    ]


@pytest.fixture
def check(overrides: list[str]) -> Check:
    def run(drafter: Path, *more: str) -> Job:
        sets = [*overrides, f"model.drafter={drafter}", *more]
        return prepare(load_config([], sets, task="summarize"))

    return run


def with_tokenizer(folder: Path, tokenizer: Any, **config: Any) -> Path:
    make_model(1, **config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_smaller_model_with_the_same_tokenizer(tmp_path: Path, check: Check) -> None:
    job = check(make_tiny_model(tmp_path / "small", 1, num_hidden_layers=1))
    assert job.drafter is not None and job.drafter.name == "small"
    assert job.drafter.key == "model.drafter"


def test_is_not_part_of_what_makes_a_run(
    tmp_path: Path, check: Check, tiny_model_dir: Path
) -> None:
    job = check(make_tiny_model(tmp_path / "small", 1))
    for other in (
        check(tiny_model_dir),
        check(tiny_model_dir, "decoding.draft_confidence=0"),
        check(tiny_model_dir, "decoding.method=plain"),
    ):
        assert (other.fingerprint, other.settings) == (job.fingerprint, job.settings)


def test_other_methods_do_not_look_at_it(tmp_path: Path, check: Check) -> None:
    assert check(tmp_path / "gone", "decoding.method=plain").drafter is None


@pytest.mark.parametrize("target_has_more", [False, True])
def test_added_and_padding_tokens_may_differ(
    tmp_path: Path, check: Check, target_has_more: bool
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<image>"])
    plain = make_tiny_model(tmp_path / "plain")
    padded = with_tokenizer(tmp_path / "padded", tokenizer, vocab_size=640)
    target, drafter = (padded, plain) if target_has_more else (plain, padded)
    assert check(drafter, f"model.target={target}").drafter is not None
    file = padded / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "<image>"]
    content["model"]["vocab"] |= {f"[PAD{SIZE}]": SIZE}  # as converters fill it up
    file.write_text(json.dumps(content), encoding="utf-8")
    assert check(drafter, f"model.target={target}").drafter is not None


def swapped() -> Any:
    """The tokenizer with its last two tokens in each other's place."""
    tokenizer = make_tokenizer()
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = content["model"]["vocab"]
    a, b = sorted(vocab, key=vocab.get)[-2:]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    changed = tokenizer.backend_tokenizer.from_str(json.dumps(content))
    return type(tokenizer)(tokenizer_object=changed, eos_token="<|im_end|>")


@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        ("smaller", r"token 400 is absent in its vocabulary, '.+' in the target's"),
        ("swapped", rf"token {SIZE - 2} is '.+' in its vocabulary, '.+' in the target's"),
    ],
)
def test_another_vocabulary_is_for_universal(
    tmp_path: Path, check: Check, kind: str, difference: str
) -> None:
    tokenizer = swapped() if kind == "swapped" else make_tokenizer(400)
    folder = with_tokenizer(tmp_path / kind, tokenizer)
    remedy = r"choose a model with the target's tokenizer \(method universal is for others\)$"
    with pytest.raises(ConfigError, match=rf"^model\.drafter: {difference}; {remedy}"):
        check(folder)


def test_what_cannot_draft_is_refused(tmp_path: Path, check: Check) -> None:
    with pytest.raises(ConfigError, match=r"^model\.drafter: no folder"):
        check(tmp_path / "gone")
    folder = make_tiny_model(tmp_path / "seq")
    config = json.loads((folder / "config.json").read_text())
    config |= {"is_encoder_decoder": True, "model_type": "t5"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"^model\.drafter: t5 is an encoder-decoder"):
        check(folder)


def test_dry_run_counts_its_memory(
    tmp_path: Path, overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(*more: str) -> dict[str, str]:
        config = load_config([], [*overrides, "model.dtype=float32", *more], task="summarize")
        dry_run(config, new_run=False, retry_failed=False)
        output = capsys.readouterr().out.splitlines()
        return dict(line.split(maxsplit=1) for line in output if not line.startswith(" "))

    folder = make_tiny_model(tmp_path / "small", num_hidden_layers=1)
    alone = lines("decoding.method=plain")
    both = lines(f"model.drafter={folder}")
    more = lines(f"model.drafter={folder}", "decoding.method=universal")
    target, same, longer = (
        int(one["KV"].split()[1].replace(",", "")) for one in (alone, both, more)
    )
    assert longer - target == (same - target) * 3 // 2, "another tokenizer may take more tokens"
    assert "drafter" not in alone and both["drafter"] == str(folder)
    # Two layers with two K/V heads of 16 in float32, and one such layer more.
    assert alone["KV"].startswith("cache   512 bytes a token")
    assert both["KV"].startswith("cache   768 bytes a token")


@pytest.mark.parametrize("method", ["universal", "mtp_drafter"])
def test_other_methods_take_any_vocabulary(
    tmp_path: Path, check: Check, tiny_model_dir: Path, method: str
) -> None:
    folder = with_tokenizer(tmp_path / "swapped", swapped())
    for drafter in (folder, tiny_model_dir):
        job = check(drafter, f"decoding.method={method}")
        assert job.drafter is not None and job.drafter.folder == drafter
    with pytest.raises(ConfigError, match=r"^model\.drafter: no folder"):
        check(tmp_path / "gone", f"decoding.method={method}")
