"""The draft model: its K/V follow every row exactly, it drafts what it should, and no more."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from pipeline.config import DecodingConfig
from pipeline.decoding.choosing import Chooser, Position
from pipeline.decoding.drafters.make import DrafterCheckpoint, make_drafter
from pipeline.errors import ConfigError
from pipeline.records import SamplingParams
from tests.decoding.oracle import make_draft_model
from tests.tiny import TEXT, make_model, make_tokenizer

VOCAB = 512
IDS: list[int] = make_tokenizer()(TEXT)["input_ids"]
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=3)


@dataclass
class Row:
    slot: int
    tokens: list[int]
    num_prompt_tokens: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    noise_key: int = 7

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.tokens)


@dataclass
class Pass:
    """What one pass of the draft model was given, and what it found."""

    token_ids: list[int]
    positions: list[int]
    logits: torch.Tensor  # [kept, vocab]


class Watched:
    """A drafter whose every pass is recorded; the same model, untouched, tells what is right."""

    def __init__(self, model: Any = None, *, slots: int = 4, max_len: int = 256, **settings: Any):
        self.model = make_model() if model is None else model
        self.drafter = make_draft_model(self.model, **({"vocab_size": VOCAB} | settings))
        self.drafter.resize(slots, max_len)
        self.passes: list[Pass] = []
        self.model.register_forward_hook(self._record, with_kwargs=True)

    def _record(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if "cache" in kwargs:  # else it is `fresh`
            ids, positions = (kwargs[k][0].tolist() for k in ("input_ids", "position_ids"))
            self.passes.append(Pass(ids, positions, output.logits[0]))

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[list[int]]:
        """Drafts; the logits behind every one of their tokens are checked."""
        self.passes = []
        drafts = self.drafter.propose(rows, limits)
        by_slot = sorted(zip(rows, drafts, strict=True), key=lambda pair: pair[0].slot)
        decoding = [p for p in self.passes if len(p.logits)]
        assert len(decoding) == max(map(len, drafts), default=0)
        for j, found in enumerate(decoding):
            texts = [row.tokens + draft[:j] for row, draft in by_slot if len(draft) > j]
            expected = torch.stack([self.fresh(text) for text in texts])
            torch.testing.assert_close(found.logits, expected, rtol=1e-3, atol=1e-3)
        return drafts

    def fresh(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits `[vocab]` after `tokens` by a plain pass over all of them."""
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        with torch.inference_mode():
            logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        self.model.set_attn_implementation(before)
        return logits


# --- K/V follow the row


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("limit", [1, 3, 10])
def test_kv_are_right_whatever_was_accepted(limit: int, sampling: SamplingParams) -> None:
    watched = Watched()
    rows = [Row(slot, IDS[slot : slot + 5 + 9 * slot], sampling=sampling) for slot in (2, 0, 3)]
    drafts = watched.propose(rows, [limit] * 3)
    for round in range(limit + 3):
        for i, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            accepted = (round + i) % (limit + 1)  # none, some, all but one, all
            other = (draft[accepted] + 1) % VOCAB if accepted < limit else 9
            row.tokens += [*draft[:accepted], other]
        drafts = watched.propose(rows, [limit] * 3)
        assert len(watched.passes) == limit, "no pass but those that draft"
        pending = [len(p.token_ids) for p in watched.passes]
        assert pending[0] <= 6 and pending[1:] == [3] * (limit - 1)


def test_a_full_acceptance_leaves_two_tokens_to_feed() -> None:
    watched, row = Watched(), Row(1, IDS[:20])
    (draft,) = watched.propose([row], [4])
    row.tokens += [*draft, 9]
    watched.propose([row], [1])
    assert watched.passes[0].positions == [23, 24] and watched.passes[0].token_ids == [draft[-1], 9]
    row.tokens += [11]  # a draft that was rejected as a whole
    watched.propose([row], [1])
    assert watched.passes[0].positions == [25]


@pytest.mark.parametrize("lag", [1, 2, 7, 8, 9, 40])
def test_catches_up_after_steps_without_drafts(lag: int) -> None:
    watched, rows = Watched(step_tokens=16), [Row(0, IDS[:20]), Row(1, IDS[:30])]
    watched.propose(rows, [3, 3])
    for token in IDS[60 : 60 + lag]:
        rows[0].tokens.append(token)
        rows[1].tokens.append(token + 1)
        drafts = watched.propose(rows, [0, 2])  # as in the last steps before a row's budget
        assert drafts[0] == [] and len(drafts[1]) == 2
    watched.propose(rows, [3, 3])


def test_an_unchanged_row_and_a_shortened_draft_do_no_harm() -> None:
    watched, row = Watched(), Row(0, IDS[:12])
    (draft,) = watched.propose([row], [5])
    assert watched.propose([row], [5]) == [draft]
    row.tokens += draft[:3]  # verified up to there, the third being the target's own choice
    assert watched.propose([row], [2]) == [draft[3:]]


@pytest.mark.parametrize(("step_tokens", "prefills"), [(1, 28 + 48), (16, 5), (64, 2), (76, 1)])
def test_prompts_are_packed_into_few_passes(step_tokens: int, prefills: int) -> None:
    watched = Watched(step_tokens=step_tokens)
    rows = [Row(0, IDS[:4]), Row(1, IDS[:29]), Row(2, IDS[:49]), Row(3, IDS[:4])]
    watched.propose(rows[:3], [3, 5, 2])
    fed = [len(p.token_ids) for p in watched.passes if not len(p.logits)]
    assert len(fed) == prefills and max(fed) <= step_tokens
    drafting = [len(p.token_ids) for p in watched.passes[len(fed) :]]
    assert drafting == [4 + 1 + 1, 3, 2, 1, 1], "the last of each prompt, and the short one"
    rows[1].tokens.append(9)
    watched.propose(rows, [1] * 4)
    assert len(watched.passes) == 1, "a short prompt joins the drafting pass"


def test_slots_are_used_again() -> None:
    watched = Watched(slots=2)
    first = Row(0, IDS[:40])
    (draft,) = watched.propose([first, Row(1, IDS[3:9])], [6, 1])[:1]
    watched.drafter.release(first)
    again = Row(0, [*IDS[:40], *draft, 5])  # whose K/V would match, were they still the row's
    again.tokens[3] = 77
    watched.propose([again, Row(1, [*IDS[3:9], 8])], [4, 4])
    watched.drafter.release(Row(1, [1]))
    watched.drafter.release(Row(1, [1]))  # one that was never proposed for
    watched.drafter.resize(1, 64)
    assert watched.drafter.cache.num_slots == 1
    watched.propose([Row(0, IDS[:40])], [4])


def test_reports_the_memory_that_it_takes() -> None:
    watched = Watched()
    before = watched.drafter.bytes_per_token
    watched.propose([Row(0, IDS[:12])], [1])
    assert before == watched.drafter.bytes_per_token == watched.drafter.cache.bytes_per_token > 0


# --- The shared prefix


@pytest.mark.parametrize("max_len", [16, 256])
def test_a_shared_prefix_is_computed_once(max_len: int) -> None:
    watched = Watched(prefix_token_ids=IDS[:30], max_len=max_len)
    length = min(14, max_len - 2)
    rows = [Row(0, [*IDS[:length], 7]), Row(3, IDS[40 : 40 + length]), Row(1, IDS[:length])]
    watched.propose(rows, [2] * 3)
    prefills = [p.positions for p in watched.passes if not len(p.logits)]
    assert prefills == [list(range(min(30, max_len))), list(range(length - 1))]
    watched.drafter.release(rows[0])  # by now slot 3 holds a row that begins otherwise
    watched.propose([Row(0, IDS[:length]), *rows[1:]], [2, 0, 0])
    assert len(watched.passes) == 2
    watched.drafter.resize(4, max_len)
    watched.propose([Row(0, IDS[:length])], [2])
    assert len(watched.passes) == 3


# --- Which tokens, and how many


def test_draws_with_the_noise_and_rule_of_the_target() -> None:
    watched = Watched()
    rows = [Row(0, IDS[:20], 12, SAMPLED, 5), Row(1, IDS[:20], 12, SAMPLED, 6)]
    drafts = watched.propose(rows, [8, 8])
    assert drafts[0] != drafts[1]
    for row, draft in zip(rows, drafts, strict=True):
        for j, token in enumerate(draft):
            position = Position(row.sampling, row.noise_key, 8 + j, row.tokens, draft[:j])
            logits = watched.fresh(row.tokens + draft[:j])[None]
            assert Chooser(VOCAB).choose(logits, [position]) == [token]


def test_an_unsure_token_is_the_last() -> None:
    sure = Watched()
    rows = [Row(slot, IDS[slot : slot + 9]) for slot in range(4)]
    whole = sure.propose(rows, [12] * 4)
    assert [len(draft) for draft in whole] == [12] * 4
    for confidence in (0.4, 0.9, 1.0):
        drafts = Watched(confidence=confidence).propose(rows, [12] * 4)
        for row, draft, full in zip(rows, drafts, whole, strict=True):
            texts = [row.tokens + full[:j] for j in range(12)]
            p = [sure.fresh(t).softmax(0)[full[j]].item() for j, t in enumerate(texts)]
            unsure = next((j for j, x in enumerate(p) if x < confidence), 11)
            assert draft == full[: unsure + 1]
    lengths = {len(draft) for draft in Watched(confidence=0.4).propose(rows, [12] * 4)}
    assert lengths & set(range(2, 12)), "some draft goes on while sure, and then stops"


def test_stops_at_an_end_token() -> None:
    row = Row(0, IDS[:9])
    (whole,) = Watched().propose([row], [12])
    end = next(t for t in whole[2:] if t not in whole[:2])
    cut = whole[: whole.index(end) + 1]
    assert len(cut) < 12
    assert Watched(end_tokens=[end]).propose([row], [12]) == [cut]
    own = replace(row, sampling=replace(GREEDY, end_tokens=()))
    assert Watched(end_tokens=[end]).propose([own], [12]) == [whole]
    own = replace(row, sampling=replace(GREEDY, end_tokens=(end,)))
    assert Watched().propose([own], [12]) == [cut]


def test_limits_differ_and_rows_come_in_any_order() -> None:
    rows = [Row(slot, IDS[slot : slot + 9]) for slot in range(4)]
    whole = Watched().propose(rows, [6] * 4)
    order = [2, 0, 3, 1]
    drafts = Watched().propose([rows[i] for i in order], [5, 0, 1, 6])
    assert drafts == [whole[2][:5], [], whole[3][:1], whole[1]]
    assert Watched().propose([], []) == []


# --- Where the models do not match


def test_never_drafts_tokens_beyond_the_targets() -> None:
    model = make_model(vocab_size=VOCAB + 64)
    model.lm_head.weight.data[VOCAB:] = model.lm_head.weight.data[:64] * 50
    rows = [Row(0, IDS[:9]), Row(1, IDS[:9], sampling=SAMPLED)]
    drafts = Watched(model, confidence=0.1).propose(rows, [8, 8])
    assert all(0 <= token < VOCAB for draft in drafts for token in draft) and drafts[0]


@pytest.mark.parametrize("prefix", [(), [*IDS[:19], 505]])
def test_rows_with_tokens_that_it_does_not_know_get_no_drafts(prefix: list[int]) -> None:
    watched = Watched(make_model(vocab_size=500), prefix_token_ids=prefix)
    banning = replace(SAMPLED, banned_tokens=(505,))
    rows = [Row(0, [*IDS[:5], 505, 4, 3]), Row(1, IDS[:20]), Row(2, IDS[:20], sampling=banning)]
    assert [len(draft) for draft in watched.propose(rows, [3] * 3)] == [0, 3, 3]
    others_only = replace(GREEDY, banned_tokens=tuple(range(500)))
    assert watched.drafter.propose([Row(3, IDS[:5], sampling=others_only)], [3]) == [[]]
    rows[1].tokens += [500]  # the target may choose what the draft model does not have
    assert [len(draft) for draft in watched.propose(rows, [3] * 3)] == [0, 0, 3]
    rows[1].tokens += [4]
    assert [len(draft) for draft in watched.propose(rows, [3] * 3)] == [0, 0, 3]


def test_stays_within_its_positions() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB, n_positions=24, n_embd=32, n_layer=1, n_head=2)
    watched = Watched(GPT2LMHeadModel(config).eval())
    assert watched.drafter.cache.max_len == 24
    rows = [Row(0, IDS[:20]), Row(1, IDS[:24]), Row(2, IDS[:25]), Row(3, IDS[:23])]
    drafts = watched.propose(rows, [9] * 4)
    assert [len(draft) for draft in drafts] == [5, 1, 0, 2]
    assert max(place for found in watched.passes for place in found.positions) == 23
    rows[0].tokens += [*drafts[0], 7]
    assert watched.propose(rows[:1], [9]) == [[]]


# --- Loading


def test_loads_what_the_config_names(tiny_model_dir: Path) -> None:
    decoding = DecodingConfig(method="draft_model", draft_confidence=0)

    def load(reference: Path) -> Any:
        files = DrafterCheckpoint(str(reference), "float32", "cpu")
        return make_drafter(
            decoding,
            make_model(),
            files,
            tokenizer=make_tokenizer(),
            step_tokens=64,
            prefix_token_ids=[],
        )

    drafter = load(tiny_model_dir)
    drafter.resize(1, 64)
    assert drafter.propose([Row(0, IDS[:9])], [4]) == Watched().propose([Row(0, IDS[:9])], [4])
    with pytest.raises(ConfigError, match=r"^model\.drafter: no folder"):
        load(tiny_model_dir / "gone")
