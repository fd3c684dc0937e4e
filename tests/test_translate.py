"""Translations and long documents, with an engine that gives its prompt back."""

import asyncio
import functools
import json
import re

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from actors.attempts import AttemptsClient
from actors.generator import GenerationActor
from actors.prompter import load_renderer
from pipeline.config import load_config
from pipeline.decoding.loading import load_tokenizer
from pipeline.documents import make_renderer
from pipeline.errors import ConfigError
from pipeline.quality import rouge_l, score_translations
from pipeline.run import run
from pipeline.templates import check_template
from tests.fakes import Behaviour, FakeEngine, fake_factory

PARAGRAPH = "The mill stands where the river bends. Every morning the miller opens the sluice! "
LONG = "\n\n".join(f"{PARAGRAPH * 4}Sacks: {n}." for n in range(520))  # 30,000 words


class Recorder:
    """In place of a committer."""

    def commit(self, rows):
        self.rows = rows.to_pylist()
        return []


@pytest.fixture
def job(tiny_model_dir):
    """(columns, task, overrides) -> the committed rows, by the actors without Ray."""

    def go(columns, task, *overrides, echo_tokens=None):
        base = ["input.path=i", "output.path=o", f"model.target={tiny_model_dir}"]
        config = load_config([], [*base, *overrides], task=task)
        check_template(config, list(columns))
        limit = config.resources.max_model_len
        limit = (2048 if limit == "auto" else limit) - config.decoding.max_new_tokens
        count = len(next(iter(columns.values())))
        table = pa.table({"source_file": ["f"] * count, "source_row": range(count), **columns})
        echo = Behaviour(echo=str(tiny_model_dir), echo_tokens=echo_tokens)
        factory = functools.partial(FakeEngine, echo)
        kept, recorder = [table.schema.field(name) for name in config.kept], Recorder()
        renderer = functools.partial(load_renderer, config, limit)
        reducer = renderer if config.on_too_long == "map_reduce" else None
        actor = GenerationActor(
            *(factory, kept, config.text_columns, "run", recorder, AttemptsClient(), 2),
            reducer=reducer,
        )
        asyncio.run(actor(renderer().render_table(table)))
        return recorder.rows

    return go


PLAIN = ["prompt.style=plain", "decoding.max_new_tokens=200"]


def test_long_document_comes_back_whole(job):
    assert len(LONG.split()) > 30_000
    rows = job(
        {"text": [LONG, "Short.", None]},
        "translate",
        *[*PLAIN, "prompt.template='{text}'", "prompt.target_lang=fr"],
    )
    assert [row["status"] for row in rows] == ["ok", "ok", "skipped"]
    assert rows[0]["translation"] == LONG
    assert rows[1]["translation"] == "Short."
    assert rows[0]["chunks"] > 300 and rows[1]["chunks"] == 1 and rows[2]["chunks"] == 0
    # The fake says 5 new tokens and 0.1 s of prefill for each prompt.
    assert rows[0]["completion_tokens"] == 5 * rows[0]["chunks"]
    assert rows[0]["prefill_seconds"] == pytest.approx(0.1 * rows[0]["chunks"])
    assert rows[0]["truncated_prompt_tokens"] == 0


def test_sentences_are_translated_one_by_one_if_asked(job):
    text = "One two. Three four.\n\n  Five.\nSix seven"
    sets = [
        "prompt.template='[{source_lang}>{target_lang}] {text}'",
        "prompt.split_at=sentence",
        "prompt.source_lang=en",
    ]
    rows = job({"text": [text]}, "translate", *PLAIN, *sets, "prompt.target_lang=de")
    assert rows[0]["chunks"] == 4
    joined = "[en>de] One two. [en>de] Three four.\n\n  [en>de] Five.\n[en>de] Six seven"
    assert rows[0]["translation"] == joined


def test_summary_of_a_long_document_in_rounds(job):
    rows = job(
        {"text": [LONG, "Short."]},
        "summarize",
        *["prompt.style=plain", "prompt.template='{text}'", "decoding.max_new_tokens=64"],
        *["decoding.on_too_long=map_reduce", "resources.max_model_len=512"],
        echo_tokens=40,
    )
    assert len(rows) == 2 and rows[1]["summary"] == "Short." and rows[1]["chunks"] == 1
    head = rows[0]["summary"].partition("\n")[0].strip()  # the head of the heads of all pieces
    assert len(head) > 50 and LONG.startswith(head)
    pieces = rows[0]["chunks"]
    assert rows[0]["completion_tokens"] == 5 * pieces
    assert 1_000 > pieces > 100


def test_summaries_that_never_shrink_are_an_error(job):
    rows = job(
        {"text": [LONG[:20_000], *["ok"] * 30]},
        "summarize",
        *["prompt.style=plain", "prompt.template='{text}'", "decoding.max_new_tokens=64"],
        *["decoding.on_too_long=map_reduce", "resources.max_model_len=512"],
    )
    assert rows[0]["error_type"] == "not_reduced" and rows[0]["summary"] is None
    assert rows[0]["chunks"] > 10 and rows[1]["status"] == "ok"


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_whole_job_with_several_languages_and_references(tmp_path, tiny_model_dir, capsys):
    columns = {
        "en": ["Yes, it is.", "No.", LONG[:9_000]],
        "de": ["de: Yes, it is.", "de: Never at all.", None],
        "pt-BR": ["pt-BR: Yes, it is.", "pt-BR: No.", None],
    }
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "in" / "a.parquet")
    sets = [
        *[f"input.path={tmp_path / 'in'}", f"output.path={tmp_path / 'out'}"],
        *[f"model.target={tiny_model_dir}", *PLAIN, "input.text_column=en"],
        *["prompt.source_lang=en", "prompt.target_lang=[de, pt-BR]"],
        *["prompt.template='{target_lang}: {text}'", "input.reference_column='{target_lang}'"],
    ]
    config = load_config([], sets, task="translate")
    assert run(config, make_factory=fake_factory(Behaviour(echo=str(tiny_model_dir)))) == 0
    rows = pyarrow.dataset.dataset(tmp_path / "out").to_table().to_pylist()
    assert [row["translation_de"] for row in rows[:2]] == ["de: Yes, it is.", "de: No."]
    assert rows[1]["translation_pt_BR"] == "pt-BR: No."
    assert [row["chunks"] for row in rows[:2]] == [2, 2] and rows[2]["chunks"] > 40
    assert re.sub("de: ", "", rows[2]["translation_de"]) == LONG[:9_000].strip()
    assert rows[0]["de"] == columns["de"][0]
    found = json.loads((tmp_path / "out/_run/summary.json").read_text())["quality"]
    results = [row["translation_de"] for row in rows[:2]]
    assert found["translation_de"] == {
        "rows": 2,
        **score_translations(results, columns["de"][:2], "de"),
    }
    assert 30 < found["translation_de"]["chrf"] < 100
    assert "version:" in found["translation_de"]["bleu_signature"]
    assert found["translation_pt_BR"]["chrf"] == 100
    assert "chrF 100.0" in capsys.readouterr().out
    assert "chrF 100.0" in (tmp_path / "out/_run/report.html").read_text()


def test_languages_of_each_row(job):
    columns = {"text": ["a", "b", "c", "d"], "from": ["en", "fr", None, "en"]}
    columns["to"] = ["fr", "zh-Hans", "de", "klingonese"]
    rows = job(
        columns,
        "translate",
        *[*PLAIN, "prompt.source_lang_column=from", "prompt.target_lang_column=to"],
    )
    assert rows[0]["translation"] == "English: a\nFrench:"
    assert rows[1]["translation"] == "French: b\nChinese (Simplified):"
    assert rows[2]["error_type"] == rows[3]["error_type"] == "bad_language"
    assert "'from' is empty" in rows[2]["error"]
    assert "klingonese" in rows[3]["error"]


def renderer(tokenizer_folder, *overrides):
    base = ["input.path=i", "output.path=o", "model.target=m", "prompt.target_lang=[fr, de]"]
    config = load_config([], [*base, *overrides], task="translate")
    return make_renderer(config, load_tokenizer(tokenizer_folder), 300)


def test_examples_go_with_their_language(tiny_model_dir):
    examples = [
        {"text": "red", "output": "rouge", "target_lang": "fr"},
        {"text": "red", "output": "rot", "target_lang": "de"},
        {"text": "1", "output": "1"},
    ]
    documents = renderer(
        tiny_model_dir,
        *[*PLAIN, "prompt.source_lang=en", f"prompt.few_shot={json.dumps(examples)}"],
    )
    table = pa.table({"source_file": ["f"], "source_row": [0], "text": ["blue"]})
    pieces = documents.render_table(table)["pieces"][0].as_py()
    tokenizer = load_tokenizer(tiny_model_dir)
    french, german = (tokenizer.decode(piece["token_ids"]) for piece in pieces)
    assert (
        french == "English: red\nFrench: rouge\n\nEnglish: 1\nFrench: 1\n\nEnglish: blue\nFrench:"
    )
    assert german == french.replace("French", "German").replace("rouge", "rot")
    assert [piece["key"] for piece in pieces] == [":fr", ":de"]  # the rows' sampling noise


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["prompt.target_lang="], r"prompt\.target_lang: translations need it"),
        (["prompt.target_lang=[fr, engl]"], r"prompt\.target_lang: 'engl' is no BCP 47 code"),
        (["prompt.target_lang=yes"], r"prompt\.target_lang: "),
        (["prompt.source_lang=12"], r"prompt\.source_lang: "),
        (
            ["prompt.target_lang_column=to"],
            r"prompt\.target_lang_column: prompt\.target_lang is given too",
        ),
        (["decoding.on_too_long=map_reduce"], r"decoding\.on_too_long: .* use split"),
        (PLAIN, r"prompt\.source_lang: the prompt's template names the language"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides, message, tiny_model_dir):
    with pytest.raises(ConfigError, match=message):
        renderer(tiny_model_dir, *overrides)


def test_yaml_reads_norwegian_as_false():
    base = ["input.path=i", "output.path=o", "model.target=m"]
    config = load_config([], [*base, "prompt.target_lang=[fr, no]"], task="translate")
    assert config.text_columns == ["translation_fr", "translation_no"]


def test_summaries_are_not_split():
    base = ["input.path=i", "output.path=o", "model.target=m"]
    with pytest.raises(ConfigError, match=r"on_too_long: split .* use map_reduce"):
        load_config([], [*base, "decoding.on_too_long=split"], task="summarize")


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence():
    # Lin 2004: "police kill the gunman" and "the gunman kill police" against "police killed ...".
    reference = "police killed the gunman"
    assert rouge_l(["police kill the gunman"], [reference]) == pytest.approx(3 / 4)
    assert rouge_l(["the gunman kill police"], [reference]) == pytest.approx(2 / 4)
    assert rouge_l(["a a b A"], ["a, b a c a"]) == pytest.approx(2 * 3 / 9)
    assert rouge_l(["", "same"], ["x", "Same."]) == pytest.approx(0.5)


def test_long_texts_are_cut_without_counting_them_whole(tiny_model_dir):
    documents = renderer(
        tiny_model_dir, *PLAIN, "prompt.source_lang=en", "prompt.template='{text}'"
    )
    endless = "word" * 20_000
    table = pa.table({"source_file": ["f"], "source_row": [0], "text": [endless]})
    pieces = documents.render_table(table)["pieces"][0].as_py()
    tokenizer = load_tokenizer(tiny_model_dir)
    french = [piece for piece in pieces if piece["column"] == 0]
    assert "".join(tokenizer.decode(piece["token_ids"]) for piece in french) == endless
    assert all(len(piece["token_ids"]) <= 100 for piece in pieces)
    assert re.fullmatch(r":fr:\d+", french[-1]["key"])
