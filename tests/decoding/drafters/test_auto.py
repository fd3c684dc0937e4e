"""`method: auto`: whatever it chooses, rows stay as they are; and while it chooses not to draft, a
step is a plain step."""

import random
from collections import Counter
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from pipeline.config import DecodingConfig, Method
from pipeline.decoding.batched import BatchedEngine
from pipeline.decoding.controller.views import Plan, RowsView
from pipeline.decoding.drafters.auto import AutoDrafter
from pipeline.decoding.drafters.make import DrafterCheckpoint, make_drafter
from pipeline.records import GenerationRequest, SamplingParams
from tests import zoo
from tests.decoding.drafters.test_zoo import (
    CASES,
    HEAD,
    IDS,
    PARAMS,
    Case,
    check_counts,
    expected,
    requests,
    target,
)
from tests.decoding.oracle import decode, make_engine


def auto_drafter(case: Case, prefix: list[int] | None = None, chunk: int = 64) -> AutoDrafter:
    """With all that the case's models allow."""
    model, tokenizer = target(case.target)
    settings = case.settings | {"method": "auto"}
    files = None
    if case.drafter is not None:
        files = DrafterCheckpoint(str(zoo.path(case.drafter)), "float32", "cpu")
    drafter = make_drafter(
        DecodingConfig.model_validate(settings),
        model,
        files,
        tokenizer=tokenizer,
        step_tokens=chunk,
        prefix_token_ids=prefix or [],
    )
    assert isinstance(drafter, AutoDrafter)
    return drafter


def auto_engine(case: Case, drafter: AutoDrafter, slots: int, **settings: Any) -> BatchedEngine:
    defaults: dict[str, Any] = {"method": "auto", "drafter": drafter, "num_draft_tokens": 10}
    return make_engine(*target(case.target), slots, **(defaults | settings))


def plan_at_random(drafter: AutoDrafter, seed: int) -> Counter[Method]:
    """Have it switch methods and lengths at random; how often each was asked to draft."""
    dice, asked = random.Random(seed), Counter[Method]()
    methods: list[Method | None] = [None, *drafter.controller.methods]

    def plan(rows: RowsView) -> Plan:
        lengths: dict[Method, list[int]] = {}
        for i, limit in enumerate(rows.limits):
            method = dice.choice(methods)
            if method is not None and rows.kinds[method][i]:
                each = lengths.setdefault(method, [0] * len(rows))
                each[i] = dice.randint(0, min(limit, 5))
        asked.update(method for method, each in lengths.items() if any(each))
        return Plan({method: each for method, each in lengths.items() if any(each)})

    drafter.controller.plan = plan  # type: ignore[method-assign]
    drafter._is_due = lambda: dice.random() < 0.8  # type: ignore[method-assign]
    drafter._is_futile = lambda found: False  # type: ignore[method-assign]
    drafter.controller.may_use = lambda method: True  # type: ignore[method-assign]
    return asked


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("name", CASES)
def test_switching_at_random_changes_no_row(name: str, kind: str) -> None:
    case = CASES[name]
    drafter = auto_drafter(case, HEAD, chunk=7)
    asked = plan_at_random(drafter, seed=len(name))
    engine = auto_engine(case, drafter, 4, prefix_token_ids=HEAD, step_tokens=7)
    tokens, completions = decode(engine, requests(PARAMS[kind]))
    assert tokens == expected(case.target, kind)
    check_counts(completions)
    assert asked[case.settings["method"]] >= 8


@pytest.mark.parametrize("name", CASES)
def test_by_itself_it_changes_no_row_and_uses_what_pays(name: str) -> None:
    case = CASES[name]
    drafter = auto_drafter(case)
    engine = auto_engine(case, drafter, 4)
    rows = [
        GenerationRequest(f"g:{i}", IDS[20 * i : 20 * i + 30], SamplingParams(max_new_tokens=40))
        for i in range(10)
    ]
    tokens, completions = decode(engine, rows)
    plain, _ = decode(make_engine(*target(case.target), 4), rows)
    assert tokens == plain
    assert {c.stats.method for c in completions.values()} <= {"plain", *drafter.controller.methods}
    assert engine.num_unfinished == 0


def decode_ops(engine: BatchedEngine) -> list[str]:
    """Operators of the engine's next decode step, in order."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        engine.step()
    events = [e for e in recorded.events() if e.name.startswith(("aten::", "mkldnn", "draftmill"))]
    return [e.name for e in sorted(events, key=lambda event: event.time_range.start)]


@pytest.mark.parametrize("name", ["mtp1", "mtp_drafter", "draft_model", "early_exit"])
def test_settled_on_plain_its_step_is_a_plain_step(name: str) -> None:
    case = CASES[name]
    drafter = auto_drafter(case)
    for trial in drafter.controller._trials.values():
        trial.rest(0, succeeded=False)  # all were tried in vain
    drafter._search_seconds = 1e9  # and looked for often enough
    auto, plain = auto_engine(case, drafter, 4), make_engine(*target(case.target), 4)
    for engine in (auto, plain):
        for i in range(4):
            params = SamplingParams(max_new_tokens=30, end_tokens=())
            engine.add_request(GenerationRequest(f"f:{i}", IDS[9 * i : 9 * i + 20], params))
        while engine.times.decode_steps < 3:
            engine.step()
    ops = decode_ops(auto)
    assert len(ops) > 50
    assert ops == decode_ops(plain)
    assert auto._runner.hidden is None, "nothing captured"
    for other in drafter._others.values():
        cache = getattr(other, "_feeder", None)
        assert cache is None or not cache._slots, "no K/V of a draft model kept up to date"


def test_hidden_states_are_kept_again_once_wanted() -> None:
    """Rows that were decoded meanwhile have a gap: they are not drafted for, new ones are."""
    case = CASES["mtp1"]
    drafter = auto_drafter(case)
    mtp = drafter._others["mtp"]
    engine = auto_engine(case, drafter, 2)
    trial = drafter.controller._trials["mtp"]
    trial.rest(0, succeeded=False)
    params = SamplingParams(max_new_tokens=30, end_tokens=())
    engine.add_request(GenerationRequest("f:0", IDS[:20], params))
    engine.step()
    old = engine._scheduler.decoding()[0]
    assert mtp.lag(old) is None
    trial._is_running = True
    engine.add_request(GenerationRequest("f:1", IDS[30:50], params))
    engine.step()
    new = next(row for row in engine._scheduler.decoding() if row is not old)
    assert mtp.lag(new) is not None
    assert mtp.lag(old) is None


def test_lookups_are_judged_without_being_submitted() -> None:
    drafter = auto_drafter(CASES["early_exit"])
    drafter.controller.plan = lambda rows: Plan({})  # type: ignore[method-assign]
    drafter._is_due = lambda: True  # type: ignore[method-assign]
    engine = auto_engine(CASES["early_exit"], drafter, 2)
    params = SamplingParams(max_new_tokens=40, end_tokens=())
    text = IDS[100:160]  # known by heart: what follows its beginning is what followed it before
    _, completions = decode(engine, [GenerationRequest("f:0", [*text, *text[:20]], params)])
    assert completions["f:0"].stats.num_draft_tokens == 0
    survival = drafter.controller.survival["prompt_lookup"]
    assert survival.evidence >= 3
    assert sum(place.stood for places in survival._classes.values() for place in places) > 20
