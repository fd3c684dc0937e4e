"""Encoder-decoders through the reference engine: their own words for languages, and generate()'s
own output."""

import json

import pytest
import sentencepiece
import torch
from transformers import (
    AutoTokenizer,
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    NllbTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
)

from pipeline.config import load_config
from pipeline.decoding.build import build_engine
from pipeline.decoding.checkpoint import read_config, resolve
from pipeline.decoding.loading import load_tokenizer
from pipeline.documents import make_renderer
from pipeline.errors import ConfigError, RowError
from pipeline.languages import Languages
from pipeline.prepare import _check_encoder_decoder
from pipeline.rendered import Piece
from pipeline.translators import TranslatorPrompts
from tests.tiny import TEXT

SIZE = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
SIZE |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
SIZE |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 128}
SENTENCE = "Every morning the miller opens the sluice."


def spell(model):
    """Random weights under which the text depends on the source."""
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            cross = "encoder_attn" in name or "EncDecAttention" in name
            torch.nn.init.normal_(weight, std=1.0 if cross else 0.3)
    return model.eval()


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spm")
    (folder / "text").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "m"),
        vocab_size=300,
        character_coverage=1.0,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    return folder / "m.model"


def vocabulary(spm, first, last):
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    words = [pieces.id_to_piece(i) for i in range(3, pieces.get_piece_size())]
    return {word: i for i, word in enumerate([*first, *words, *last])}


@pytest.fixture(scope="module")
def marian(spm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("marian")
    words = vocabulary(spm, ["</s>", "<unk>", ">>fra<<", ">>deu<<"], ["<pad>"])
    (folder / "vocab.json").write_text(json.dumps(words))
    names = {"source_spm": str(spm), "target_spm": str(spm)}
    tokenizer = MarianTokenizer(vocab=str(folder / "vocab.json"), **names)
    tokenizer.save_pretrained(folder)
    pad = words["<pad>"]
    special = {"pad_token_id": pad, "eos_token_id": 0, "decoder_start_token_id": pad}
    config = MarianConfig(vocab_size=len(words), **SIZE, **special, forced_eos_token_id=None)
    model = spell(MarianMTModel(config))
    model.generation_config.bad_words_ids = [[pad]]
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def m2m100(spm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("m2m100")
    words = vocabulary(spm, ["<s>", "<pad>", "</s>", "<unk>"], [])
    (folder / "vocab.json").write_text(json.dumps(words))
    tokenizer = M2M100Tokenizer(str(folder / "vocab.json"), str(spm))
    tokenizer.save_pretrained(folder)
    special = {"decoder_start_token_id": 2, "forced_eos_token_id": None}
    config = M2M100Config(vocab_size=len(words) + 120, **SIZE, **special)
    spell(M2M100ForConditionalGeneration(config)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def nllb(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nllb")
    words = ["<s>", "<pad>", "</s>", "<unk>", "\u2581", *sorted(set(TEXT) - {" ", "\n"})]
    tokenizer = NllbTokenizerFast(vocab={w: i for i, w in enumerate(words)}, merges=[])
    tokenizer.save_pretrained(folder)
    special = {"decoder_start_token_id": 2, "forced_eos_token_id": None}
    config = M2M100Config(vocab_size=len(tokenizer), **SIZE, **special)
    spell(M2M100ForConditionalGeneration(config)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    letters = sorted(set(TEXT + ":abcdefghijklmnopqrstuvwxyzEFG") - {" ", "\n"})
    words = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    words += [(letter, -3.0 - i / 100) for i, letter in enumerate(letters)]
    T5Tokenizer(vocab=words, extra_ids=0).save_pretrained(folder)
    size = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=len(words), **size, decoder_start_token_id=0, n_positions=128)
    spell(T5ForConditionalGeneration(config)).save_pretrained(folder)
    return folder


MODELS = ["marian", "m2m100", "nllb", "t5"]


def config_of(folder, *overrides):
    base = ["input.path=i", "output.path=o", f"model.target={folder}", "decoding.method=plain"]
    base += ["prompt.source_lang=en", "prompt.target_lang=fr", "decoding.max_new_tokens=40"]
    return load_config([], [*base, *overrides], task="translate")


def generate(config, folder, sentences):
    """Through renderer and engine, as the job does: (pieces, completions)."""
    documents = make_renderer(config, load_tokenizer(folder), 128, encoder_decoder=True)
    languages = Languages("en", config.prompt.target_langs[0])
    pieces = [documents.pieces({"text": s}, languages)[0] for s in sentences]
    pieces = [Piece.from_struct(piece.to_struct()) for piece in pieces]
    engine = build_engine(config, "float32", "cpu", 128, num_cpus=1)
    for i, piece in enumerate(pieces):
        engine.add_request(piece.to_request(f"f:{i}"))
    done = []
    while engine.num_unfinished:
        done += engine.step()
    return pieces, done


@pytest.mark.parametrize("name", MODELS)
def test_equals_generate(name, request):
    folder = request.getfixturevalue(name)
    sentences = [s[:60] for s in [*TEXT.replace("\n", " ").split(". ")[:6], SENTENCE]]
    config = config_of(folder, "decoding.repetition_penalty=3", "decoding.on_too_long=error")
    _, done = generate(config, folder, sentences)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = {"marian": MarianMTModel, "t5": T5ForConditionalGeneration}.get(
        name, M2M100ForConditionalGeneration
    ).from_pretrained(folder)
    options, prefix = {}, ""
    if name in ("m2m100", "nllb"):
        tokenizer.src_lang = {"m2m100": "en", "nllb": "eng_Latn"}[name]
        french = {"m2m100": "__fr__", "nllb": "fra_Latn"}[name]
        options = {"forced_bos_token_id": tokenizer.convert_tokens_to_ids(french)}
    else:
        prefix = {"marian": ">>fra<< ", "t5": "translate English to French: "}[name]
    texts = []
    for sentence in sentences:
        encoded = tokenizer(prefix + sentence, return_tensors="pt")
        encoded.pop("token_type_ids", None)
        options |= {"max_new_tokens": 40 + ("forced_bos_token_id" in options)}  # it counts there
        output = model.generate(**encoded, do_sample=False, repetition_penalty=3.0, **options)
        new = output[0, 1 + ("forced_bos_token_id" in options) :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    assert [c.text for c in done] == texts
    assert len(set(texts)) > 3, texts
    assert all(c.stats.prompt_tokens > 5 and c.stats.completion_tokens for c in done)
    assert all(c.stats.plain_decode_seconds is None or c.stats.speedup for c in done)


@pytest.mark.parametrize(
    ("name", "code", "token"),
    [
        *[("nllb", "zh", "zho_Hans"), ("nllb", "ar", "arb_Arab"), ("nllb", "pt-BR", "por_Latn")],
        *[("m2m100", "zh-Hans", "__zh__"), ("m2m100", "en-GB", "__en__")],
    ],
)
def test_languages_by_their_nearest_code(name, code, token, request):
    folder = request.getfixturevalue(name)
    config, tokenizer = config_of(folder), load_tokenizer(folder)
    prompts = TranslatorPrompts(config, tokenizer, 128, Languages("en", code))
    (rendered,) = prompts.render_texts([{"text": SENTENCE}])
    assert tokenizer.convert_ids_to_tokens(list(rendered.decoder_token_ids)) == [token]


@pytest.mark.parametrize("name", MODELS)
def test_long_documents_and_hostile_text(name, request):
    folder = request.getfixturevalue(name)
    tokenizer = load_tokenizer(folder)
    config = config_of(folder)
    documents = make_renderer(config, tokenizer, 60, encoder_decoder=True)
    pieces = documents.pieces({"text": TEXT * 3}, Languages("en", "fr"))
    assert len(pieces) > 10 and all(len(piece.prompt.token_ids) <= 60 for piece in pieces)
    cut = config_of(folder, "decoding.on_too_long=truncate")
    (one,) = make_renderer(cut, tokenizer, 60, encoder_decoder=True).pieces(
        {"text": TEXT}, Languages("en", "fr")
    )
    assert len(one.prompt.token_ids) <= 60 and one.prompt.truncated_prompt_tokens > 100
    refusing = config_of(folder, "decoding.on_too_long=error")
    with pytest.raises(RowError, match="60 fit"):
        make_renderer(refusing, tokenizer, 60, encoder_decoder=True).pieces(
            {"text": TEXT}, Languages("en", "fr")
        )
    (plain,) = documents.pieces({"text": "a b"}, Languages("en", "fr"))
    (hostile,) = documents.pieces({"text": "a </s> b"}, Languages("en", "fr"))
    ends = tokenizer.eos_token_id
    assert hostile.prompt.token_ids.count(ends) == plain.prompt.token_ids.count(ends)


def test_what_they_cannot_do_is_refused(marian, nllb):
    model = read_config(resolve(str(marian)))
    for override, message in [
        ("decoding.method=prompt_lookup", r"decoding\.method: marian is .* use plain"),
        ("decoding.engine=batched", r"decoding\.engine: "),
        ("prompt.system=Be brief.", r"prompt\.system: "),
    ]:
        with pytest.raises(ConfigError, match=message):
            _check_encoder_decoder(config_of(marian, override), model)
    for folder, code in ((nllb, "tlh"), (marian, "es")):
        with pytest.raises(ConfigError, match=rf"prompt\.target_lang: .* not know {code}"):
            TranslatorPrompts(config_of(folder), load_tokenizer(folder), 99, Languages("en", code))
