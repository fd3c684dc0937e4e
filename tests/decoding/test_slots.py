"""Slots and their schedule against naive models: none leaks, none starves, none sees another's."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pipeline.decoding import native
from pipeline.decoding.cache import SlotCache
from pipeline.decoding.checkpoint import estimate_memory
from pipeline.decoding.memory import SlotBudget
from pipeline.decoding.rows import Row
from pipeline.decoding.runner import ModelRunner
from pipeline.decoding.scheduler import Scheduler
from pipeline.decoding.steps import Span, Step, running
from pipeline.decoding.stopping import RowEnd, StopStrings
from pipeline.records import GenerationRequest, SamplingParams
from tests.decoding.architectures import FITTING, make
from tests.decoding.oracle import decode, generate, make_engine
from tests.decoding.test_architectures import Guessing
from tests.tiny import make_model, make_tokenizer

TOKENIZER = make_tokenizer()
MODEL = make_model()
STOPS = StopStrings(TOKENIZER, ())
PATIENCE = 16  # times that a row at the head of the queue may be passed over


# The schedule


class Schedule(RuleBasedStateMachine):
    """The scheduler as an engine drives it, with rows that end whenever hypothesis says so."""

    @initialize(num_slots=st.integers(1, 6), step_tokens=st.integers(1, 40))
    def start(self, num_slots: int, step_tokens: int) -> None:
        self.scheduler = Scheduler(num_slots, step_tokens)
        self.rows: list[Row] = []
        self.over: list[Row] = []
        self.head: Row | None = None
        self.passed_over = 0

    @rule(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8))
    def add(self, lengths: list[int]) -> None:
        for length in lengths:
            request = GenerationRequest(f"f:{len(self.rows)}", [5] * length)
            row = Row(request, SamplingParams(), 0, RowEnd(STOPS, frozenset(), 8))
            self.rows.append(row)
            self.scheduler.add(row)

    @rule()
    def step(self) -> None:
        """Admit, then prefill or decode; a decoding row grows by a token."""
        waiting, free = list(self.scheduler.waiting), self.scheduler.num_free
        admitted = self.scheduler.admit()
        assert len(admitted) == min(free, len(waiting))
        self._check_order(waiting, admitted)
        chunks = self.scheduler.prefill()
        assert bool(chunks) == any(row.prefilling for row in self.scheduler.running.values())
        assert sum(c.stop - c.start for c in chunks) <= self.scheduler.step_tokens
        assert len({id(chunk.row) for chunk in chunks}) == len(chunks)
        assert sum(not chunk.ends_prompt for chunk in chunks) <= (len(chunks) == 1)
        for chunk in chunks:
            assert chunk.row.prefilling and chunk.start == chunk.row.num_cached < chunk.stop
            chunk.row.num_cached = chunk.stop
            chunk.row.prefilling = not chunk.ends_prompt
        if not chunks:
            decoding = self.scheduler.decoding()
            assert [row.slot for row in decoding] == sorted(self.scheduler.running)
            for row in decoding:
                row.tokens.append(5)
                row.num_cached = len(row.tokens) - 1

    def _check_order(self, waiting: list[Row], admitted: list[Row]) -> None:
        """Rows are taken from the head of the queue, save that it may wait a little for a fit."""
        if not admitted:
            return
        if len(admitted) > 1:
            assert admitted == waiting[: len(admitted)]
        if waiting[0] is not self.head:
            self.head, self.passed_over = waiting[0], 0
        if waiting[0] not in admitted:
            self.passed_over += 1
        assert self.passed_over <= PATIENCE
        left = [row for row in waiting if row not in admitted]
        assert list(self.scheduler.waiting) == left, "the others keep their order"

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self.scheduler.decoding()))
        self.scheduler.release(row)
        self.over.append(row)

    @rule(num_slots=st.integers(1, 6))
    def resize(self, num_slots: int) -> None:
        """As after running out of memory: rows in flight go first, and start anew."""
        expected = [*self.scheduler.running.values(), *self.scheduler.waiting]
        tokens = [list(row.tokens) for row in expected]
        self.scheduler.resize(num_slots)
        assert list(self.scheduler.waiting) == expected
        assert [row.tokens for row in expected] == tokens
        assert not self.scheduler.running and self.scheduler.num_free == num_slots
        self.head = None  # the count goes on for another row

    @invariant()
    def no_slot_leaks(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert self.scheduler.num_free + len(running) == self.scheduler.num_slots
        assert sorted([*self.scheduler._free, *running]) == list(range(self.scheduler.num_slots))
        assert all(row.slot == slot for slot, row in running.items())
        held = [*running.values(), *waiting, *self.over]
        assert sorted(map(id, held)) == sorted(map(id, self.rows)), "no row is lost or doubled"
        assert self.scheduler.num_unfinished == len(self.rows) - len(self.over)

    def teardown(self) -> None:
        """Whatever came before, every row is admitted in the end."""
        if not hasattr(self, "scheduler"):
            return
        tokens = sum(len(row.tokens) for row in self.rows)
        for _ in range(tokens + 2 * len(self.rows) + 1):
            self.step()
            for row in self.scheduler.decoding():
                if not row.prefilling:
                    self.scheduler.release(row)
                    self.over.append(row)
            self.no_slot_leaks()
        assert not self.scheduler.num_unfinished


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_misfit_row_is_not_passed_over_for_ever() -> None:
    """One long row, and an endless supply of short ones that suit the neighbours better."""
    scheduler = Scheduler(num_slots=3, step_tokens=512)

    def add(length: int) -> Row:
        row = Row(
            GenerationRequest("f:0", [5] * length),
            SamplingParams(),
            0,
            RowEnd(STOPS, frozenset(), 8),
        )
        scheduler.add(row)
        return row

    for _ in range(3):
        add(10)
    scheduler.admit()
    long = add(500)
    for _ in range(PATIENCE):
        add(10)
        scheduler.release(scheduler.running[1])
        assert long not in scheduler.admit()
    scheduler.release(scheduler.running[1])
    assert scheduler.admit() == [long]


# The cache


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_cache_against_a_dict(data: st.DataObject) -> None:
    """Every place holds what was last written there, in each layer; K and V differ in width."""
    slots, max_len = 4, 12
    cache, known = SlotCache(slots, max_len), dict[tuple[int, int, int], float]()
    numbers = itertools.count(1)
    for _ in range(data.draw(st.integers(1, 6))):
        if known and data.draw(st.booleans()):
            source, target, length = (data.draw(st.integers(0, n)) for n in (3, 3, max_len))
            cache.copy_prefix(source, target, length)
            for layer, place in itertools.product((0, 5), range(length)):
                known[layer, target, place] = known.get((layer, source, place), 0.0)
            continue
        step = _draw_step(data, slots, max_len)
        for layer in (0, 5):
            tokens = torch.tensor([float(next(numbers)) for _ in range(step.num_tokens)])
            with running(step):
                keys, values = cache.update(
                    tokens.view(1, 1, -1, 1).expand(1, 2, -1, 3),
                    -tokens.view(1, 1, -1, 1).expand(1, 2, -1, 5),
                    layer,
                )
            for i, span in enumerate(step.spans):
                for j, place in enumerate(range(span.start, span.stop)):
                    known[layer, span.slot, place] = float(tokens[step.offsets[i] + j])
            expected = torch.tensor(
                [
                    [known.get((layer, step.first_slot + s, p), 0.0) for p in range(step.kv_len)]
                    for s in range(step.num_slots)
                ]
            )[:, None, :, None]
            assert keys.shape == (step.num_slots, 2, step.kv_len, 3)
            assert values.shape == (step.num_slots, 2, step.kv_len, 5)
            assert (keys == expected).all() and (values == -expected).all()
    assert cache.num_bytes in (0, 2 * slots * max_len * 2 * (3 + 5) * 4)


def _draw_step(data: st.DataObject, slots: int, max_len: int) -> Step:
    chosen = data.draw(st.lists(st.integers(0, slots - 1), min_size=1, unique=True))
    spans = []
    for slot in chosen:
        start = data.draw(st.integers(0, max_len - 1))
        spans.append(Span(slot, start, [5] * data.draw(st.integers(1, max_len - start))))
    return Step(spans, decoding=data.draw(st.booleans()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", FITTING)
def test_cache_takes_the_memory_that_was_planned(model_type: str, dtype: torch.dtype) -> None:
    model = make(model_type).to(dtype)
    runner = ModelRunner(model, SlotCache(3, 40))
    runner.forward(Step([Span(1, 0, [5, 6, 7])], decoding=False), [0])
    config = json.loads(model.config.to_json_string())  # as in a checkpoint
    planned = estimate_memory(config, str(dtype).removeprefix("torch."), None).kv_bytes_per_token
    assert runner.cache.bytes_per_token == planned
    assert runner.cache.num_bytes == planned * 3 * 40


# Rows do not see each other


PROMPTS = [[5 + (7 * i + j) % 400 for j in range(n)] for i, n in enumerate((30, 9, 47, 12, 3, 21))]
REQUESTS = [GenerationRequest(f"f:{i}", prompt) for i, prompt in enumerate(PROMPTS)]
PARAMS = SamplingParams(max_new_tokens=16)
NAN_TOKEN = 500


@pytest.fixture(params=[True, False], ids=["compiled", "torch"])
def compiled(request: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(native, "suits", lambda *_: False)
    return bool(request.param)


@pytest.mark.parametrize("window", [None, 10])
def test_no_row_reads_what_is_not_its_own(compiled: bool, window: int | None) -> None:
    """Other slots hold nan during a pass, and everything behind a row's last token is huge."""
    torch.set_num_threads(1)
    settings = {"sliding_window": window, "max_position_embeddings": 256}
    model = make("mistral", vocab_size=512, **settings)
    truth = {r.row_key: generate(model, r.prompt_token_ids, r.row_key, PARAMS) for r in REQUESTS}
    engine = make_engine(
        model,
        TOKENIZER,
        slots=3,
        params=PARAMS,
        step_tokens=16,
        method="draft_model",
        drafter=Guessing(truth),
        num_draft_tokens=4,
        prefix_token_ids=PROMPTS[2][:10],
    )
    forward, num_poisoned = engine._runner.forward, 0

    def poisoned(step: Step, keep: Sequence[int]) -> torch.Tensor:
        nonlocal num_poisoned
        parts = [part for layer in engine.cache._layers.values() for part in layer]
        num_poisoned += len(parts)
        others = sorted(set(range(engine.cache.num_slots)) - {span.slot for span in step.spans})
        with torch.inference_mode():
            saved = [part[others].clone() for part in parts]
            for part in parts:
                part[others] = torch.nan
                for span in step.spans:
                    part[span.slot, :, span.start :] = 1e18
            logits = forward(step, keep)
            for part, content in zip(parts, saved, strict=True):
                part[others] = content
        return logits

    engine._runner.forward = poisoned  # type: ignore[method-assign]
    tokens, completions = decode(engine, REQUESTS)
    assert tokens == truth and num_poisoned > 100
    assert sum(c.stats.num_accepted_draft_tokens for c in completions.values()) > 20


def test_nan_stays_in_its_row(compiled: bool) -> None:
    """K and V of a row that failed on its logits reach no later row of the slot."""
    model = make_model()
    model.get_input_embeddings().weight.data[NAN_TOKEN] = torch.nan
    truth = {r.row_key: generate(model, r.prompt_token_ids, r.row_key, PARAMS) for r in REQUESTS}
    bad = [GenerationRequest(f"bad:{i}", [NAN_TOKEN] * 60) for i in range(3)]
    engine = make_engine(model, TOKENIZER, slots=3, params=PARAMS)
    tokens, completions = decode(engine, [*bad, *REQUESTS])
    assert all(completions[r.row_key].error_type == "bad_logits" for r in bad)
    assert {key: tokens[key] for key in truth} == truth


# Memory runs out, and slots grow


def test_rows_in_flight_queue_first_when_memory_runs_out() -> None:
    engine = make_engine(make_model(), TOKENIZER, slots=4, params=PARAMS, step_tokens=64)
    for request in REQUESTS:
        engine.add_request(request)
    for _ in range(4):
        engine.step()
    scheduler = engine._scheduler
    expected = [*scheduler.running.values(), *scheduler.waiting]
    assert len(scheduler.running) == 4
    tokens = [list(row.tokens) for row in expected]

    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    forward, engine._runner.forward = engine._runner.forward, fail  # type: ignore[method-assign]
    assert engine.step() == []
    engine._runner.forward = forward  # type: ignore[method-assign]
    assert list(scheduler.waiting) == expected and scheduler.num_free == scheduler.num_slots == 2
    assert [row.tokens for row in expected] == tokens


def test_slots_fit_rows_far_behind_the_first() -> None:
    """As many are admitted at once as the first few leave room for."""
    budget = SlotBudget(max_slots=32, kv_bytes=32 * 64, bytes_per_token=1)
    params = SamplingParams(max_new_tokens=3)
    engine = make_engine(MODEL, TOKENIZER, params=params, budget=budget)
    lengths = [20] * 16 + [200] * 8
    requests = [GenerationRequest(f"f:{i}", [5] * n) for i, n in enumerate(lengths)]
    _, completions = decode(engine, requests)
    assert all(completion.status == "ok" for completion in completions.values())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_every_row_fits_its_slot(data: st.DataObject) -> None:
    """Whatever the memory and the lengths; the model is only pretended."""
    budget = SlotBudget(
        max_slots=data.draw(st.integers(1, 40)),
        kv_bytes=data.draw(st.integers(1, 8192)),
        bytes_per_token=data.draw(st.integers(1, 4)),
    )
    prefix = data.draw(st.booleans())
    engine = make_engine(
        MODEL,
        TOKENIZER,
        params=SamplingParams(max_new_tokens=3),
        budget=budget,
        step_tokens=data.draw(st.integers(1, 600)),
        prefix_token_ids=[5] * 10 if prefix else (),
    )

    def forward(step: Step, keep: Sequence[int]) -> torch.Tensor:
        assert step.kv_len <= engine.cache.max_len
        assert all(span.slot < engine.cache.num_slots for span in step.spans)
        assert len({span.slot for span in step.spans}) == len(step.spans)
        return torch.zeros(len(keep), 512)

    engine._runner.forward = forward  # type: ignore[method-assign]
    lengths = data.draw(st.lists(st.integers(1, 500), min_size=1, max_size=60))
    for i, length in enumerate(lengths):
        engine.add_request(GenerationRequest(f"f:{i}", [5] * length))
    completions = []
    while engine.num_unfinished:
        completions += engine.step()
        for row in engine._scheduler.running.values():
            assert row.max_tokens <= engine.cache.max_len
    assert len(completions) == len(lengths)
    assert all(completion.status == "ok" for completion in completions)
