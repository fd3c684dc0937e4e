"""Two vocabularies meet in bytes: whatever one spells the other spells too, whole characters only,
and a row that grows is spelled anew at its end alone."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.decoding.drafters.drafting import DraftChooser, Drafting
from pipeline.decoding.drafters.spelling import Spelling, begins_character, num_whole
from pipeline.decoding.drafters.translation import (
    TextTranslation,
    TokenTranslation,
    Vocabularies,
)
from pipeline.decoding.prefix import common_prefix
from tests.tiny import TEXT, make_tokenizer
from tests.vocabularies import (
    OTHER_SCRIPTS,
    DraftedRow,
    metaspace_tokenizer,
    permutation,
    permuted_tokenizer,
    unigram_tokenizer,
)

TOKENIZERS = {
    "byte-level": make_tokenizer(),
    "smaller": make_tokenizer(400),
    "metaspace": metaspace_tokenizer(),
    "unigram": unigram_tokenizer(),
}
SPELLINGS = {name: Spelling(tokenizer) for name, tokenizer in TOKENIZERS.items()}
WITH_BYTES = ["byte-level", "smaller", "metaspace"]
CHARACTERS = "aZ 4.\n▁Ġüßéω中字🙂🚀\u200d\u0301<>|"
TEXTS = st.text(st.sampled_from(CHARACTERS), max_size=24)
few = settings(max_examples=25, deadline=None)


def vocabularies(target: str, draft: str) -> Vocabularies:
    sizes = [len(TOKENIZERS[name]) for name in (target, draft)]
    return Vocabularies(SPELLINGS[target], SPELLINGS[draft], *sizes)


def by_text(target: str, draft: str) -> TextTranslation:
    return TextTranslation(vocabularies(target, draft), DraftChooser(len(TOKENIZERS[target])))


def by_tokens(target: str, draft: str) -> TokenTranslation:
    chooser = DraftChooser(len(TOKENIZERS[target]))
    return TokenTranslation(vocabularies(target, draft), chooser, "cpu")


def ids_of(name: str, text: str) -> list[int]:
    ids: list[int] = TOKENIZERS[name](text, add_special_tokens=False)["input_ids"]
    return ids


# --- What tokens spell


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_spell_what_they_decode_to(name: str) -> None:
    tokenizer, spelling = TOKENIZERS[name], SPELLINGS[name]
    (anchor,) = ids_of(name, "stone")[-1:]
    before = tokenizer.decode([anchor])
    for token, data in spelling.spelled.items():
        if num_whole(data) == len(data) and "\ufffd" not in (text := data.decode(errors="replace")):
            assert tokenizer.decode([anchor, token])[len(before) :] == text
    known = TEXT.replace("\n", " ")
    assert spelling.data(ids_of(name, known)).decode().strip() == known
    assert not spelling.spelled.keys() & spelling.special.keys()
    assert all(spelling.spelled[index] == data for data, index in spelling.ids.items())


@pytest.mark.parametrize("name", WITH_BYTES)
def test_what_is_spelled_is_what_was_asked_for(name: str) -> None:
    spelling = SPELLINGS[name]

    @few
    @given(TEXTS, TEXTS, st.binary(max_size=3))
    def check(before: str, text: str, garbage: bytes) -> None:
        data = garbage + text.encode()
        ids = spelling.spell_after(before.encode(), data)
        assert spelling.data(ids) == data
        if "▁" not in text:  # which is a space to some
            spelled = spelling.data(spelling.spell(data))
            assert spelled.removeprefix(b" ") == data.removeprefix(b" ")

    check()


@pytest.mark.parametrize("name", WITH_BYTES)
def test_goes_on_as_the_tokenizer_would(name: str) -> None:
    spelling = SPELLINGS[name]
    whole = ids_of(name, "the river bends at the mill")
    for cut in range(1, len(whole)):
        before, data = spelling.data(whole[:cut]), spelling.data(whole[cut:])
        assert spelling.spell_after(before, data) == whole[cut:]


def test_duplicates_are_spelled_by_the_tokenizers_own_token() -> None:
    spelling = SPELLINGS["metaspace"]
    tokenizer = TOKENIZERS["metaspace"]
    assert spelling.ids[b"e"] == tokenizer.convert_tokens_to_ids("e")
    assert spelling.spelled[tokenizer.convert_tokens_to_ids("<0x65>")] == b"e"
    assert spelling.start == [tokenizer.bos_token_id] and SPELLINGS["byte-level"].start == []


@few
@given(TEXTS, st.integers(0, 60))
def test_a_character_that_has_only_begun_is_cut(text: str, cut: int) -> None:
    data = text.encode()[:cut]
    whole = data[: num_whole(data)]
    assert whole.decode() == data.decode(errors="ignore")
    assert begins_character(text.encode()[len(whole) :])
    assert begins_character(data) and not begins_character("ü".encode()[1:])


@pytest.mark.parametrize("data", [b"\xbc", b"\x80\x80\x80\x80", b"a\xff", b"\xf8\x80"])
def test_what_is_no_character_stays(data: bytes) -> None:
    assert num_whole(data) == len(data)


# --- Which tokens are the same


PAIRS = [(a, b) for a in TOKENIZERS for b in TOKENIZERS if a != b]


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_the_same_tokens_spell_the_same(target: str, draft: str) -> None:
    both = vocabularies(target, draft)
    theirs, own = SPELLINGS[target], SPELLINGS[draft]
    assert len(set(both.same.values())) == len(both.same), "one to one"
    for token, index in both.same.items():
        if token in theirs.special or index in own.special:
            assert (token == theirs.eos) == (index == own.eos)
        else:
            assert theirs.spelled[token] == own.spelled[index]
    texts = {b for b in theirs.spelled.values()} & {b for b in own.spelled.values()}
    assert len(both.same) >= len(texts), "none is missed"
    assert 0 < both.overlap <= 1
    assert both.same[theirs.eos] == own.eos


def test_tokens_beyond_a_models_logits_are_left_out() -> None:
    both = Vocabularies(SPELLINGS["byte-level"], SPELLINGS["metaspace"], 300, 290)
    assert both.same and max(both.same) < 300 and max(both.same.values()) < 290


def test_the_order_of_a_vocabulary_does_not_matter() -> None:
    places = permutation(512)
    other = Spelling(permuted_tokenizer(TOKENIZERS["byte-level"], places))
    both = Vocabularies(SPELLINGS["byte-level"], other, 512, 512)
    tokens = TOKENIZERS["byte-level"].get_vocab().values()
    assert both.same == {token: places[token] for token in tokens} and both.overlap == 1.0


# --- A row as the draft model sees it


@pytest.mark.parametrize("target", WITH_BYTES)
@pytest.mark.parametrize("draft", WITH_BYTES)
def test_token_by_token_spells_the_row(target: str, draft: str) -> None:
    translation, own = by_tokens(target, draft), SPELLINGS[draft]
    tokens = ids_of(target, OTHER_SCRIPTS + TEXT)
    row = DraftedRow(3, tokens[:1])
    for at in (1, 2, 9, 80, len(tokens)):
        row.tokens = tokens[:at]
        ids = translation.ids(row)
        assert ids == translation.ids_of(row.tokens)
        assert own.data(ids) == SPELLINGS[target].data(row.tokens)
    translation.release(3)
    assert translation.ids(DraftedRow(3, tokens[:4])) == translation.ids_of(tokens[:4])


@pytest.mark.parametrize("target", WITH_BYTES)
@pytest.mark.parametrize("draft", WITH_BYTES)
def test_text_is_spelled_anew_at_the_end_alone(target: str, draft: str) -> None:
    translation, own = by_text(target, draft), SPELLINGS[draft]
    tokens = ids_of(target, OTHER_SCRIPTS + TEXT)
    row, before = DraftedRow(0, tokens[:1]), list[int]()
    for at in range(1, len(tokens) + 1):
        row.tokens = tokens[:at]
        ids = translation.ids(row)
        data = SPELLINGS[target].data(row.tokens)
        assert own.data(ids).removeprefix(b" ") == data[: num_whole(data)].removeprefix(b" ")
        assert len(before) - common_prefix(before, ids) <= 16
        before = ids
    assert len(tokens) - translation._rows[0].num_settled < 64
    canonical = own.spell(SPELLINGS[target].data(tokens))
    assert ids[len(own.start) :] == canonical, "as if spelled at once"


def test_what_a_tokenizer_cannot_spell_is_left_out() -> None:
    tokens = ids_of("byte-level", "the 🙂\nmill")
    for translation in (by_tokens("byte-level", "unigram"), by_text("byte-level", "unigram")):
        text = SPELLINGS["unigram"].data(translation.ids_of(tokens)).decode()
        assert text.replace(" ", "") == "themill"


def test_markup() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    tokens = tokenizer("<|im_start|>user\nGrain<|im_end|>\n<|endoftext|>Ü")["input_ids"]
    tokens.append(5000)  # from rows of the embedding that no token has
    own = TOKENIZERS["metaspace"]
    for translation in (by_tokens("byte-level", "metaspace"), by_text("byte-level", "metaspace")):
        ids = translation.ids_of(tokens)
        assert ids[0] == own.bos_token_id and ids.count(own.bos_token_id) == 1
        end = ids.index(own.eos_token_id)
        spelled = SPELLINGS["metaspace"].data
        assert spelled(ids[:end]).replace(b" ", b"") == b"<|im_start|>user\nGrain"
        assert spelled(ids[end:]).replace(b" ", b"") == "\nÜ".encode()
    back = by_tokens("metaspace", "byte-level")
    assert back.ids_of(own("mill")["input_ids"]) == ids_of("byte-level", " mill")
    smaller = by_text("byte-level", "smaller")
    assert smaller.ids_of(tokens[:4])[0] == tokens[0], "both write it so"


# --- Drafts by text


def draft_of(
    translation: TextTranslation, tokens: Sequence[int], ids: Sequence[int], limit: int = 200
) -> list[int]:
    """What comes of ids that the draft model chose."""
    row = DraftedRow(0, list(tokens))
    translation.ids(row)
    drafting = Drafting(row, limit)
    for index in ids:
        drafting.add(index, None, False)
    found = translation.draft(drafting)
    translation.release(0)
    return found


@pytest.mark.parametrize(("target", "draft"), [p for p in PAIRS if "unigram" not in p])
def test_drafts_never_split_a_character(target: str, draft: str) -> None:
    translation = by_text(target, draft)
    theirs, own = SPELLINGS[target], SPELLINGS[draft]

    @few
    @given(TEXTS.filter(bool), TEXTS.filter(bool), st.integers(0, 60), st.integers(0, 60))
    def check(before: str, text: str, head: int, cut: int) -> None:
        """The row ends anywhere, the draft too."""
        tokens = theirs.spell_after(b"", before.encode())
        tokens = tokens[: max(1, len(tokens) - head % 4)]
        data = theirs.data(tokens)
        tail = data[num_whole(data) :]
        rest = (before + text).encode()[num_whole(data) :]
        ids = own.spell_after(b"", rest)[: 1 + cut]
        wanted = own.data(ids)
        wanted = wanted[: num_whole(wanted)]
        draft = theirs.data(draft_of(translation, tokens, ids))
        if not wanted.startswith(tail):
            assert draft == b""
        else:
            assert tail + draft == wanted
            assert num_whole(data + draft) == len(data + draft) or not draft

    check()


def test_drafts_begin_where_the_row_ends() -> None:
    translation, own = by_text("byte-level", "metaspace"), SPELLINGS["metaspace"]
    tokens = ids_of("byte-level", "the river bends at the mill, and the wheel turns slowly; 34")
    for cut in range(1, len(tokens)):
        rest = SPELLINGS["byte-level"].data(tokens[cut:])
        ids = own.spell_after(b"", rest)
        assert draft_of(translation, tokens[:cut], ids) == tokens[cut:]
        assert len(draft_of(translation, tokens[:cut], ids, limit=2)) <= 2
    assert draft_of(translation, tokens, []) == []


def test_drafts_have_no_tokens_that_the_target_lacks() -> None:
    tokens = ids_of("byte-level", "12 sacks on Monday, 34 on Tuesday")
    size = tokens[7]
    both = Vocabularies(SPELLINGS["byte-level"], SPELLINGS["smaller"], size, 400)
    ids = ids_of("smaller", "12 sacks on Monday, 34 on Tuesday")
    found = draft_of(TextTranslation(both, DraftChooser(size)), tokens[:1], ids[1:])
    assert found == tokens[1 : 1 + len(found)] and max(found, default=0) < size
    assert found or tokens[1] >= size


def test_a_draft_may_end_the_row() -> None:
    translation, own = by_text("byte-level", "metaspace"), TOKENIZERS["metaspace"]
    tokens = ids_of("byte-level", "the river")
    ends = [*SPELLINGS["metaspace"].spell_after(b"", b" bends"), own.eos_token_id]
    wanted = [*ids_of("byte-level", " bends"), TOKENIZERS["byte-level"].eos_token_id]
    assert draft_of(translation, tokens, ends) == wanted
    begins = [own.bos_token_id, *ends]
    assert draft_of(translation, tokens, begins) == wanted, "other special tokens say nothing"
