import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

from pipeline.config import DecodingConfig, RunConfig
from pipeline.decoding import observation, stopping
from pipeline.decoding.build import build_engine
from pipeline.decoding.reference import ReferenceEngine
from pipeline.decoding.sampling import Sampler
from pipeline.errors import ConfigError, EngineError
from pipeline.records import Completion, GenerationRequest
from tests.tiny import TEXT, make_model, make_tokenizer

TOKENIZER = make_tokenizer()
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalty": {"repetition_penalty": 1.1, "banned_tokens": [7, 300]},
    "sampled": {"temperature": 0.8, "top_k": 50},
    "everything": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "banned_tokens": [7, 300],
        "seed": 3,
    },
}
BASE = {"max_new_tokens": 96, "num_draft_tokens": 10}


@pytest.fixture
def model() -> Any:
    torch.set_num_threads(1)
    return make_model()


def _prompt(i: int) -> list[int]:
    return list(TOKENIZER(TEXT[i * 31 : i * 31 + 120])["input_ids"])


def _engine(model: Any, *, max_model_len: int = 2048, **settings: Any) -> ReferenceEngine:
    timeout = settings.pop("row_timeout_s", None)
    decoding = DecodingConfig.model_validate(BASE | settings)
    return ReferenceEngine(
        model, TOKENIZER, decoding, max_model_len=max_model_len, row_timeout_s=timeout
    )


def _decode(engine: ReferenceEngine, prompt: list[int], key: str) -> tuple[list[int], Completion]:
    """One row's tokens and completion."""
    observers = []
    run = engine._run

    def spy(request: GenerationRequest, observer: Any) -> None:
        observers.append(observer)
        run(request, observer)

    engine._run = spy  # type: ignore[method-assign]
    engine.add_request(GenerationRequest(key, prompt))
    (completion,) = engine.step()
    engine._run = run  # type: ignore[method-assign]
    return (observers[0].end.tokens if observers else []), completion


@contextmanager
def _forwards(model: Any) -> Iterator[list[list[int]]]:
    """The token ids of every target pass, seen from within the model."""
    seen: list[list[int]] = []

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["input_ids"][0].tolist())

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def _expected_counts(forwards: list[list[int]], tokens: list[int]) -> tuple[int, int, int, int]:
    """Forwards, spec steps, drafted and accepted of a row, replayed from what the model saw."""
    done = spec_steps = drafted = accepted = 0
    for query in forwards:
        draft = [] if done == 0 else query[1:]
        left = tokens[done:]
        matches = 0
        while matches < min(len(draft), len(left)) and draft[matches] == left[matches]:
            matches += 1
        kept = min(matches + 1, len(left))
        spec_steps += bool(draft)
        accepted += matches
        done += kept
        # a rejected draft was drafted in full; only what lies past the row's end never counts
        drafted += min(len(draft), kept) if done == len(tokens) else len(draft)
    assert done == len(tokens)
    return len(forwards), spec_steps, drafted, accepted


def _raw(model: Any, prompt: list[int], key: str, settings: dict[str, Any]) -> list[int]:
    """The oracle: `generate()` without any of our observation."""
    decoding = DecodingConfig.model_validate(BASE | settings)
    processors = Sampler(decoding, model.config.vocab_size).for_row(key, len(prompt))
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        logits_processor=LogitsProcessorList(processors),
        do_sample=False,
        max_new_tokens=decoding.max_new_tokens,
    )
    return list(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_tokens_equal_generate_and_counts_equal_what_the_model_saw(
    model: Any, settings: dict[str, Any]
) -> None:
    plain = _engine(model, method="plain", **settings)
    lookup = _engine(model, method="prompt_lookup", **settings)
    accepted = 0
    for i in range(6):
        prompt, key = _prompt(i), f"f:{i}"
        expected = _raw(model, prompt, key, settings)
        for engine in (plain, lookup):
            with _forwards(model) as forwards:
                tokens, completion = _decode(engine, prompt, key)
            assert tokens == expected
            stats = completion.stats
            assert _expected_counts(forwards, tokens) == (
                stats.num_target_forwards,
                stats.num_spec_steps,
                stats.num_draft_tokens,
                stats.num_accepted_draft_tokens,
            )
            assert stats.completion_tokens == len(tokens)
            assert stats.completion_tokens == (
                stats.num_target_forwards + stats.num_accepted_draft_tokens
            )
            assert forwards[0] == prompt, "the prefill verifies nothing"
            assert stats.prompt_tokens == len(prompt)
            assert (stats.method == "prompt_lookup") == (stats.num_accepted_draft_tokens > 0)
        accepted += stats.num_accepted_draft_tokens
    assert accepted > 20


@pytest.mark.parametrize("settings", [SETTINGS["greedy"], SETTINGS["sampled"]], ids=str)
def test_rows_that_end_inside_a_draft(model: Any, settings: dict[str, Any]) -> None:
    """Stretches of the text become stop strings; where they do not spell text, end tokens."""
    prompt = _prompt(0)
    full, _ = _decode(_engine(model, method="plain", **settings), prompt, "f:0")
    end_tokens = model.generation_config.eos_token_id
    ended_on_draft = 0
    for at in range(3, len(full) - 5, 4):
        text = TOKENIZER.decode(full[at : at + 5], skip_special_tokens=True)
        use_string = "\ufffd" not in text and text
        stop = {"stop": [text, "never"]} if use_string else {}
        model.generation_config.eos_token_id = [501, full[at]] if not use_string else end_tokens
        plain_tokens, plain = _decode(
            _engine(model, method="plain", **stop, **settings), prompt, "f:0"
        )
        with _forwards(model) as forwards:
            engine = _engine(model, method="prompt_lookup", **stop, **settings)
            tokens, completion = _decode(engine, prompt, "f:0")
        assert tokens == plain_tokens == full[: len(tokens)] and len(tokens) <= at + 5
        assert completion.text == plain.text
        assert completion.finish_reason == plain.finish_reason == "stop"
        stats = completion.stats
        expected = _expected_counts(forwards, tokens)
        assert expected == (
            stats.num_target_forwards,
            stats.num_spec_steps,
            stats.num_draft_tokens,
            stats.num_accepted_draft_tokens,
        )
        last_is_draft = (
            stats.num_target_forwards + stats.num_accepted_draft_tokens - stats.completion_tokens
        )
        assert last_is_draft in (0, 1)
        ended_on_draft += last_is_draft
        if use_string:
            assert text not in str(completion.text)
    assert ended_on_draft > 0


@pytest.mark.parametrize("budget", [1, 2, 3, 30])
def test_drafts_stay_within_the_models_positions(model: Any, budget: int) -> None:
    prompt = (_prompt(0) * 3)[:100]
    limit = len(prompt) + budget
    tokens, _ = _decode(_engine(model, method="plain", max_model_len=limit), prompt, "f:0")
    with _forwards(model) as forwards:
        engine = _engine(model, method="prompt_lookup", max_model_len=limit)
        drafted, completion = _decode(engine, prompt, "f:0")
    assert drafted == tokens and len(tokens) == budget
    assert completion.finish_reason == "length"
    seen = len(prompt)
    for query in forwards[1:]:
        assert seen + len(query) <= limit - 1, "the last token is never fed back"
        seen += 1


def test_acceptance_floor() -> None:
    """Text that repeats itself for good must be drafted nearly perfectly."""
    model = make_model(tie_word_embeddings=True)
    model.lm_head.weight.data /= 16
    engine = _engine(model, method="prompt_lookup", max_new_tokens=150)
    drafted = accepted = forwards = 0
    for i in range(5):
        stats = _decode(engine, _prompt(i), f"f:{i}")[1].stats
        drafted += stats.num_draft_tokens
        accepted += stats.num_accepted_draft_tokens
        forwards += stats.num_target_forwards
    assert drafted > 400 and accepted / drafted >= 0.9
    assert 5 * 150 / forwards > 4


def test_speedup_of_plain_is_one_and_all_time_is_attributed(model: Any) -> None:
    engine = _engine(model, method="plain", max_new_tokens=40)
    engine.warm_up()
    plain = decode = wall = attributed = 0.0
    for i in range(16):
        started = time.perf_counter()
        stats = _decode(engine, _prompt(i), f"f:{i}")[1].stats
        wall += time.perf_counter() - started
        attributed += stats.prefill_seconds + stats.decode_seconds
        if stats.plain_decode_seconds is not None:
            plain += stats.plain_decode_seconds
            decode += stats.decode_seconds
        assert stats.num_control_steps == stats.completion_tokens - 1
        assert stats.control_seconds == pytest.approx(stats.decode_seconds)
        assert stats.draft_seconds == 0
    assert plain / decode == pytest.approx(1.0, abs=0.001)
    assert 0.9 < attributed / wall <= 1.0


def test_drafting_runs_interleave_control_steps_and_charge_the_drafter(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter that is slow and always wrong must show as a slowdown, not as a speedup."""
    prompt = (_prompt(0) * 6)[:140]
    tokens, _ = _decode(_engine(model, method="plain"), prompt, "f:0")
    right = dict(enumerate(tokens, len(prompt)))

    class Wrong:
        max_length = 10_000

        def get_candidates(self, ids: torch.Tensor) -> tuple[torch.Tensor, None]:
            time.sleep(0.03)
            token = (right.get(ids.shape[1], 0) + 1) % 500
            return torch.cat([ids, torch.full((1, 5), token)], dim=1), None

    real = observation.GuardedLookup
    monkeypatch.setattr(
        "pipeline.decoding.reference.GuardedLookup", lambda lookup, row: real(Wrong(), row)
    )
    engine = _engine(model, method="prompt_lookup")
    found, completion = _decode(engine, prompt, "f:0")
    stats = completion.stats
    assert found == tokens
    assert stats.num_accepted_draft_tokens == 0 and stats.method == "plain"
    assert stats.num_spec_steps + stats.num_control_steps == stats.num_target_forwards - 1
    assert 6 <= stats.num_control_steps <= 9  # three in each of two buckets, and a late one
    assert stats.draft_seconds > 0.01 * stats.num_spec_steps
    assert stats.draft_acceptance_rate == 0.0
    assert stats.speedup is not None and stats.speedup < 0.8


def test_speedup_is_unknown_without_evidence(model: Any) -> None:
    engine = _engine(model, method="plain", max_new_tokens=3)
    first = _decode(engine, _prompt(0), "f:0")[1].stats
    assert first.num_control_steps == 2
    assert first.plain_decode_seconds is None and first.speedup is None
    assert first.speedup_basis == "none"
    second = _decode(engine, _prompt(0), "f:0")[1].stats
    assert second.speedup_basis == "control_steps"


def test_one_token_rows_have_no_decode(model: Any) -> None:
    stats = _decode(_engine(model, method="prompt_lookup", max_new_tokens=1), _prompt(0), "f")[
        1
    ].stats
    assert (stats.completion_tokens, stats.num_target_forwards) == (1, 1)
    assert stats.decode_seconds == 0 and stats.speedup is None and stats.prefill_seconds > 0


def test_the_checkpoints_own_settings_do_not_leak(model: Any) -> None:
    expected = [_decode(_engine(model, method="plain"), _prompt(i), f"f:{i}")[0] for i in range(2)]
    model.generation_config = GenerationConfig(
        eos_token_id=2,
        pad_token_id=0,
        do_sample=True,
        temperature=0.1,
        top_k=3,
        repetition_penalty=1.9,
        no_repeat_ngram_size=2,
        suppress_tokens=list(range(3, 200)),
        begin_suppress_tokens=[9],
        forced_eos_token_id=2,
        min_new_tokens=90,
        max_length=30,
        num_beams=2,
        prompt_lookup_num_tokens=4,
    )
    for method in ("plain", "prompt_lookup"):
        engine = _engine(model, method=method)
        assert [_decode(engine, _prompt(i), f"f:{i}")[0] for i in range(2)] == expected


@pytest.mark.parametrize("method", ["plain", "prompt_lookup"])
def test_models_without_end_or_pad_tokens(model: Any, method: str) -> None:
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = None
    tokens, completion = _decode(_engine(model, method=method), _prompt(0), "f:0")
    assert len(tokens) == 96 and completion.finish_reason == "length"


def test_sampled_text_depends_on_row_and_seed_only(model: Any) -> None:
    def decode(key: str, seed: int, before: int = 0) -> list[int]:
        engine = _engine(model, temperature=1.0, seed=seed, max_new_tokens=20)
        for i in range(before):
            _decode(engine, _prompt(i), f"other:{i}")
        return _decode(engine, _prompt(0), key)[0]

    base = decode("f:0", 0)
    assert decode("f:0", 0, before=2) == base
    assert decode("f:1", 0) != base and decode("f:0", 1) != base


def test_rows_at_fault_become_errors_and_the_others_go_on(model: Any) -> None:
    engine = _engine(model, max_model_len=50, max_new_tokens=5)
    rows = {"empty": [], "long": [9] * 50, "fits": [9] * 49, "odd": [512], "good": _prompt(0)[:9]}
    for key, prompt in rows.items():
        engine.add_request(GenerationRequest(key, prompt))
    assert engine.num_unfinished == 5
    done = {c.row_key: c for _ in rows for c in engine.step()}
    assert engine.num_unfinished == 0 and engine.step() == []
    errors = {key: done[key].error_type for key in ("empty", "long", "odd")}
    assert errors == {"empty": "empty_prompt", "long": "prompt_too_long", "odd": "bad_token"}
    assert done["long"].status == "error" and done["long"].text is None
    assert done["long"].error == "the prompt has 50 tokens; 49 fit the model"
    assert done["long"].stats.prompt_tokens == 50
    assert done["fits"].stats.completion_tokens == 1 and done["fits"].finish_reason == "length"
    assert done["good"].stats.completion_tokens == 5 and done["good"].status == "ok"


@pytest.mark.parametrize("method", ["plain", "prompt_lookup"])
def test_timeout_keeps_the_text_so_far(
    model: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, _ = _decode(_engine(model, method=method), _prompt(0), "f:0")
    ticks = iter(range(1000))
    monkeypatch.setattr(stopping.time, "monotonic", lambda: next(ticks))
    engine = _engine(model, method=method, row_timeout_s=10)
    partial, completion = _decode(engine, _prompt(0), "f:0")
    assert completion.status == "timeout" and completion.finish_reason is None
    assert completion.stats.num_target_forwards == 10
    assert partial == tokens[: len(partial)] and 10 <= len(partial) < 96
    assert completion.text == TOKENIZER.decode(partial, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("error", "error_type"),
    [
        (RuntimeError("no such luck"), "engine_error"),
        (torch.OutOfMemoryError("CUDA out of memory"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
    ],
)
def test_exceptions_are_the_rows_and_leave_no_trace(
    model: Any, error: Exception, error_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine(model)
    expected, _ = _decode(engine, _prompt(0), "f:0")
    forward, calls = model.forward, iter(range(1000))

    def fail_in_the_middle(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 5:
            raise error
        return forward(*args, **kwargs)

    fail_in_the_middle.__signature__ = __import__("inspect").signature(forward)  # type: ignore
    with monkeypatch.context() as patch:
        patch.setattr(model, "forward", fail_in_the_middle)
        _, completion = _decode(engine, _prompt(0), "f:0")
    assert (completion.status, completion.error_type) == ("error", error_type)
    assert completion.error == f"{type(error).__name__}: {error}"
    assert "_get_candidate_generator" not in vars(model)
    assert _decode(engine, _prompt(0), "f:0")[0] == expected


def test_a_lost_device_is_no_fault_of_the_row(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any, **kwargs: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    engine = _engine(model)
    monkeypatch.setattr(model, "generate", lost)
    engine.add_request(GenerationRequest("f:0", _prompt(0)))
    with pytest.raises(EngineError, match="device failed"):
        engine.step()


def test_models_that_cannot_take_drafts_back_are_refused(model: Any) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    mamba = MambaForCausalLM(MambaConfig(vocab_size=512, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ConfigError, match=r"^decoding.method: prompt_lookup .*mamba.*use plain"):
        _engine(mamba, method="prompt_lookup").warm_up()
    engine = _engine(mamba, method="plain", max_new_tokens=4)
    engine.warm_up()
    assert _decode(engine, _prompt(0), "f:0")[1].status == "ok"


def test_drafting_with_a_model_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"^decoding.method: draft_model .*engine: batched"):
        _engine(model, method="draft_model")


def test_build_engine_from_a_config(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", logger="pipeline.decoding")
    config = RunConfig.model_validate(
        {
            "input": {"path": "in"},
            "output": {"path": "out"},
            "model": {"target": str(tiny_model_dir)},
            "decoding": {"max_new_tokens": 8, "engine": "transformers"},
        }
    )
    warm_up, warmed = ReferenceEngine.warm_up, []
    monkeypatch.setattr(ReferenceEngine, "warm_up", lambda e: warmed.append(warm_up(e)))
    engine = build_engine(config, "float32", "cpu", 64, 1.0)
    assert warmed == [None]
    engine.add_request(GenerationRequest("f:0", _prompt(0)[:20]))
    (completion,) = engine.step()
    assert completion.status == "ok" and completion.stats.completion_tokens == 8
    assert "engine: transformers (as configured)" in caplog.text
