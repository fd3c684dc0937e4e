"""The audit finds what drafting must not do, and takes nothing else for it."""

import copy
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.auditing import audit_lines, ratio_interval, student_95, summarize
from pipeline.decoding import batched
from pipeline.decoding.audit import AuditGroup, audit, warm_up, without_drafts
from pipeline.decoding.batched import BatchedEngine
from pipeline.decoding.choosing import Chooser
from pipeline.decoding.drafters.base import Drafter
from pipeline.decoding.loading import load_model, load_tokenizer
from pipeline.decoding.nearties import NearTies, doubtful_gap
from pipeline.decoding.verification import Verified, verify
from pipeline.records import GenerationRequest, SamplingParams
from tests import zoo
from tests.decoding.oracle import decode, make_draft_model, make_engine
from tests.zoo import corpus

IDS: list[int] = corpus.token_ids(corpus.make_text_tokenizer()).tolist()
HEAD = IDS[:12]
REQUESTS = [GenerationRequest(f"f:{i}", HEAD + IDS[40 * i : 40 * i + 9 + 7 * i]) for i in range(5)]
PARAMS = {
    "greedy": SamplingParams(max_new_tokens=20),
    "sampled": SamplingParams(max_new_tokens=20, temperature=0.8, top_p=0.95, seed=3),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any, Any]:
    """Target, tokenizer, draft model."""
    folder = zoo.path("target")
    draft = load_model(zoo.path("draft"), "float32", "cpu")
    return load_model(folder, "float32", "cpu"), load_tokenizer(folder), draft


def engine_of(models: Any, params: SamplingParams, slots: int = 3, **settings: Any) -> Any:
    target, tokenizer, draft = models
    vocab = target.config.vocab_size
    drafter = make_draft_model(draft, vocab, prefix_token_ids=HEAD)
    return make_engine(
        target,
        tokenizer,
        slots,
        params=params,
        method="draft_model",
        drafter=drafter,
        num_draft_tokens=4,
        prefix_token_ids=HEAD,
        **settings,
    )


def run(engine: BatchedEngine, **settings: Any) -> AuditGroup:
    return audit(engine, REQUESTS, settings.pop("texts", {}), **{"assisted_first": True} | settings)


@pytest.mark.parametrize("assisted_first", [True, False])
@pytest.mark.parametrize("params", PARAMS)
def test_drafting_changes_nothing(models: Any, params: str, assisted_first: bool) -> None:
    engine = engine_of(models, PARAMS[params])
    drafter = engine._drafter
    texts = {key: done.text for key, done in decode(engine, REQUESTS)[1].items()}
    fresh = engine_of(models, PARAMS[params])
    warm_up(fresh, REQUESTS)
    for each in (engine, fresh):
        group = run(each, assisted_first=assisted_first, texts=texts)
        assert list(group.verdicts.values()) == ["agree"] * len(REQUESTS)
        assert group.plain_seconds > 0 and group.assisted_seconds > 0
    assert engine._drafter is drafter


def test_plain_within_and_drafts_after(models: Any) -> None:
    """Also where the slots are made anew meanwhile, and the prefix is computed without drafts."""
    engine = engine_of(models, PARAMS["greedy"])
    with without_drafts(engine):
        plain, completions = decode(engine, REQUESTS)
    assert not any(done.stats.num_draft_tokens for done in completions.values())
    assert not engine._clock._seconds  # no evidence of the run's own
    assisted, completions = decode(engine, REQUESTS)
    assert assisted == plain
    fresh, expected = decode(engine_of(models, PARAMS["greedy"]), REQUESTS)
    assert fresh == plain
    for key, done in completions.items():  # the drafter lacks nothing
        assert done.stats.num_accepted_draft_tokens == expected[key].stats.num_accepted_draft_tokens
        assert done.stats.cached_prompt_tokens == expected[key].stats.cached_prompt_tokens


class Follower(Drafter):
    """Follows the target's passes, as drafters with K and V of their own do."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.copies = 0

    def resize(self, num_slots: int, max_len: int) -> None:
        self.seen.clear()

    def after_pass(self, step: Any) -> None:
        self.seen |= {span.slot for span in step.spans}

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        assert source in self.seen, "a prefix that it never saw"
        self.copies += 1

    def propose(self, rows: Any, limits: Any) -> list[list[int]]:
        return [[] for _ in rows]


@pytest.mark.parametrize("first", [[], REQUESTS[:1], [GenerationRequest("f:other", IDS[50:70])]])
def test_drafters_miss_no_prefix(models: Any, first: list[GenerationRequest]) -> None:
    """Whether slots and prefix were made before or within."""
    drafter = Follower()
    engine = make_engine(
        *models[:2], params=PARAMS["greedy"], drafter=drafter, prefix_token_ids=HEAD
    )
    decode(engine, first)
    copies = drafter.copies
    with without_drafts(engine):
        decode(engine, REQUESTS)
    assert drafter.copies == copies
    decode(engine, REQUESTS)
    assert drafter.copies == copies + len(REQUESTS)


def tampered(monkeypatch: Any, old: int | None, new: int) -> None:
    """Make verification emit `new` in place of `old` (None: of every second token)."""

    def wrong(draft: Any, *args: Any) -> Verified:
        found = verify(draft, *args)
        if not draft:
            return found
        tokens = [
            new if t == old or (old is None and i % 2) else t for i, t in enumerate(found.tokens)
        ]
        return Verified(tokens, found.lossy)

    monkeypatch.setattr(batched, "verify", wrong)


def test_tampered_verification_is_found(models: Any, monkeypatch: Any) -> None:
    engine = engine_of(models, PARAMS["greedy"])
    tampered(monkeypatch, None, 5)
    group = run(engine)
    assert group.count("error") == len(REQUESTS)


def test_what_the_run_wrote_is_compared(models: Any) -> None:
    engine = engine_of(models, PARAMS["greedy"])
    texts = {key: done.text or "" for key, done in decode(engine, REQUESTS)[1].items()}
    texts["f:1"] = texts["f:1"][:-3] + "xyz"
    texts["f:2"] = ""
    verdicts = run(engine, texts=texts).verdicts
    assert [key for key, verdict in verdicts.items() if verdict == "error"] == ["f:1", "f:2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tie_is_no_error(models: Any, monkeypatch: Any, dtype: str) -> None:
    """Two tokens with one and the same logit, of which drafting took the other."""
    target, tokenizer, draft = (copy.deepcopy(models[0]), *models[1:])
    target = target.to(getattr(torch, dtype))
    models = (target, tokenizer, draft)
    engine = engine_of(models, PARAMS["greedy"])
    with without_drafts(engine):
        tokens, completions = decode(engine, REQUESTS[:1])
    text = completions["f:0"].text or ""
    token = tokens["f:0"][8]
    spare = max(set(range(target.config.vocab_size)) - set(IDS) - {token})
    assert spare > token  # so that it loses
    head = target.get_output_embeddings().weight
    with torch.no_grad():
        head[spare] = head[token]
    tampered(monkeypatch, token, spare)
    group = audit(engine, REQUESTS[:1], {}, assisted_first=True)
    assert group.verdicts == {"f:0": "near_tie"}
    # the run wrote the other's text
    other = text.replace(tokenizer.decode([token]), tokenizer.decode([spare]), 1)
    monkeypatch.setattr(batched, "verify", verify)
    assert audit(engine, REQUESTS[:1], {"f:0": other}, assisted_first=False).count("near_tie") == 1
    with torch.no_grad():  # far from a tie
        head[spare] = head[token] * 0.5
    tampered(monkeypatch, token, spare)
    assert audit(engine, REQUESTS[:1], {}, assisted_first=True).verdicts == {"f:0": "error"}
    monkeypatch.setattr(batched, "verify", verify)
    assert audit(engine, REQUESTS[:1], {"f:0": other}, assisted_first=False).count("error") == 1


class Saying:
    """A model in `dtype` that gives these logits."""

    device = torch.device("cpu")

    def __init__(self, logits: list[float], dtype: torch.dtype) -> None:
        self.model = torch.nn.Linear(1, 1, dtype=dtype)
        self.model.dtype = dtype  # type: ignore[assignment]
        self.logits = torch.tensor([logits])

    def forward(self, step: Any, keep: Any) -> Any:
        return self.logits


def between(
    models: Any, logits: list[float], dtype: torch.dtype, params: SamplingParams, a: int, b: int
) -> bool:
    row = engine_of(models, params)._admission.row(REQUESTS[0])
    ties = NearTies(Saying(logits, dtype), Chooser(len(logits)), 64)  # type: ignore[arg-type]
    both = ties.between(row, [1], (a, b)), ties.between(row, [1], (b, a))
    assert both[0] == both[1]
    return both[0]


@pytest.mark.parametrize(
    ("gap", "dtype", "is_tie"),
    [
        (0.9e-4, torch.float32, True),
        (1.1e-4, torch.float32, False),
        (0.25, torch.bfloat16, True),  # two units in the last place of 16
        (0.6, torch.bfloat16, False),
        (0.05, torch.float16, True),
        (0.08, torch.float16, False),
    ],
)
def test_how_close_a_near_tie_is(models: Any, gap: float, dtype: torch.dtype, is_tie: bool) -> None:
    logits = [3.0, 16.0, 16.0 - gap, 2.0]
    greedy = SamplingParams(max_new_tokens=9)
    assert between(models, logits, dtype, greedy, 1, 2) is is_tie
    assert not between(models, logits, dtype, greedy, 1, 0)
    assert doubtful_gap(torch.tensor(logits), torch.float16) == 4 * 16 * 2**-10


def test_borders_of_sampling_rules_are_in_doubt_too(models: Any) -> None:
    """With this noise the first of three likely tokens is behind the others."""
    bf16, base = torch.bfloat16, SamplingParams(max_new_tokens=9, temperature=50.0)
    logits = [16.0, 15.2, 15.0, 2.0]
    for seed in range(200):
        params = replace(base, seed=seed)
        row = engine_of(models, params)._admission.row(REQUESTS[0])
        position = batched.Position(params, row.noise_key, 1, [], ())
        first = Chooser(4).choose(torch.tensor([logits]), [position])[0]
        three = torch.tensor([[*logits[:3], -torch.inf]])
        order = [Chooser(4).choose(three, [position])[0]]
        three[0, order[0]] = -torch.inf
        order.append(Chooser(4).choose(three, [position])[0])
        if first == 2 and order == [2, 0]:
            break
    assert order == [2, 0]
    # Third or second, whichever survives; where only two do, it is the noise that decides.
    assert between(models, logits, bf16, replace(params, top_k=2), 2, 0)
    swapped = [16.0, 15.0, 15.2, 2.0]  # the second falls out
    assert between(models, swapped, bf16, replace(params, top_k=2), 2, 0)
    assert not between(models, [16.0, 14.0, 10.0, 2.0], bf16, replace(params, top_k=2), 2, 0)
    p = torch.softmax(torch.tensor(logits) / 50, 0)[:2].sum().item()
    for border in (p + 1e-4, p - 1e-4):  # the third is in, or just out
        assert between(models, logits, bf16, replace(params, top_p=border), 2, 0)
    assert not between(models, logits, bf16, replace(params, top_p=0.2), 2, 0)


@pytest.mark.parametrize(("nucleus", "is_tie"), [(0.77, True), (0.6, False)])
def test_the_border_of_a_nucleus_is_in_doubt_by_its_odds(
    models: Any, nucleus: float, is_tie: bool
) -> None:
    """Two probable tokens, and beyond the border a third before many as improbable."""
    logits = 16 + torch.tensor([0.5, 0.3, 0.00404] + [0.004] * 49).log() - math.log(0.5)
    params = SamplingParams(max_new_tokens=9, temperature=1.0)
    keys = range(9000)
    positions = [batched.Position(params, key, 1, [], ()) for key in keys]
    block = logits.repeat(len(keys), 1)
    first = Chooser(52).choose(block, positions)
    block[:, 2] = -torch.inf
    second = Chooser(52).choose(block, positions)
    row = engine_of(models, replace(params, top_p=nucleus))._admission.row(REQUESTS[0])
    row.noise_key = next(key for key in keys if (first[key], second[key]) == (2, 1))
    saying: Any = Saying(logits.tolist(), torch.bfloat16)
    assert NearTies(saying, Chooser(52), 64).between(row, [1], (1, 2)) is is_tie


def test_intervals() -> None:
    for freedom, exact in ((2, 4.3027), (3, 3.1824), (10, 2.2281), (100, 1.9840)):
        assert student_95(freedom) == pytest.approx(exact, rel=0.01)
    assert ratio_interval([1.2, 1.4]) is None
    low, high = ratio_interval([1.0, 2.0, 4.0]) or (0, 0)
    assert math.sqrt(low * high) == pytest.approx(2.0)
    assert math.log(high / 2) == pytest.approx(4.3027 * math.log(2) / math.sqrt(3), rel=0.01)


def test_the_summary_speaks_up() -> None:
    steps = {"4/18/plain/0": [5, 20, 1.0, 0.0125], "4/18/mtp/1": [25, 50, 1.0, 0.0]}
    steps["4/18/scheduled/0"] = [17.5, 70, 0.0, 0.0]
    estimate = {"prefill_seconds": 1.0, "decode_seconds": 2.0, "steps": json.dumps(steps)}
    one = {"rows": 8, "agree": 6, "near_ties": 1, "errors": 1, "differing": ["a:3"], "note": None}
    group = {**one, **estimate, "plain_seconds": 3.0, "assisted_seconds": 2.0}
    found = summarize([group, {**group, "plain_seconds": 5.0}], is_exact=True)
    assert (found["rows"], found["errors"], found["measured_speedup"]) == (16, 2, 2.0)
    assert found["estimated_speedup"] == pytest.approx(1.5)
    assert found["measured_speedup_interval"] is None
    lines = dict(audit_lines(found))
    assert "a:3" in lines["audit: 2 rows differ"]
    assert lines["measured speedup"].startswith("2.00x (2 groups")
    mixed = dict(audit_lines(summarize([{**group, "errors": 0, "differing": []}], is_exact=False)))
    assert "6 agree; an ensemble" in mixed["audit"]
