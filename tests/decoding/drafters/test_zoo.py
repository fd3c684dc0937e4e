"""With trained models every method gives every row the tokens that it gets alone; and its drafts
are accepted as often as those of transformers, which no output could tell."""

import copy
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_layers import MtpModel

from pipeline.config import DecodingConfig
from pipeline.decoding.control import Bucket, ControlClock
from pipeline.decoding.drafters.base import Drafter, DraftRow
from pipeline.decoding.drafters.drafting import DraftChooser
from pipeline.decoding.drafters.make import DrafterCheckpoint, make_drafter
from pipeline.decoding.drafters.universal import UniversalDrafter
from pipeline.decoding.layers import replace_layers
from pipeline.decoding.loading import load_model, load_tokenizer
from pipeline.decoding.prefix import common_prefix
from pipeline.records import Completion, GenerationRequest, SamplingParams
from tests import zoo
from tests.decoding.oracle import decode, generate, make_engine
from tests.zoo import corpus
from tests.zoo.deepseek import published_tensors
from tests.zoo.gemma import WINDOW


@dataclass(frozen=True)
class Case:
    """A method with its models, and what share of its greedy drafts must be accepted."""

    target: str
    floor: float
    num_draft_tokens: int = 4
    drafter: str | None = None
    same: float = 1.0  # share of drafts behind the same tokens that transformers makes too
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "draft_model": Case("target", 0.65, drafter="draft", settings={"method": "draft_model"}),
    "early_exit": Case("layerskip", 0.9, settings={"method": "early_exit", "exit_layer": 2}),
    "mtp1": Case("mtp1", 0.75, 1, settings={"method": "mtp"}),
    "mtp2": Case("mtp2", 0.7, 2, settings={"method": "mtp"}),
    "mtp_drafter": Case(
        "gemma4", 0.55, 3, drafter="gemma4_assistant", settings={"method": "mtp_drafter"}
    ),
    "universal": Case("target", 0.4, drafter="other_tokenizer", settings={"method": "universal"}),
}
PARAMS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=3),
}
LENGTHS = [1, 2, 5, 9, 17, 30, 41, 56, 70, 83, 101, 120]  # of prompts, in tokens
BUDGETS = [16, 2, 9, 1, 24, 13, 5, 11, 28, 3, 20, 18]  # rows finish at different times
ROWS = list(range(len(LENGTHS)))
IDS: list[int] = corpus.token_ids(corpus.make_text_tokenizer()).tolist()
HEAD = IDS[:12]  # what half of the prompts begin with


@cache
def target(name: str) -> tuple[Any, Any]:
    """Loaded as for a run, with packed layers."""
    folder = zoo.path(name)
    model = load_model(folder, "float32", "cpu")
    replace_layers(model)
    return model, load_tokenizer(folder)


def prompt(i: int) -> list[int]:
    """From somewhere in the text; every other one that is long enough begins with `HEAD`."""
    start = (i + 1) * len(IDS) // (len(LENGTHS) + 2)
    ids = IDS[start : start + LENGTHS[i]]
    return HEAD + ids[len(HEAD) :] if i % 2 and len(ids) > len(HEAD) else ids


def requests(params: SamplingParams) -> list[GenerationRequest]:
    return [
        GenerationRequest(f"f:{i}", prompt(i), replace(params, max_new_tokens=BUDGETS[i]))
        for i in ROWS
    ]


@cache
def expected(name: str, kind: str) -> dict[str, list[int]]:
    """The target's own tokens, from transformers."""
    model, _ = target(name)
    return {
        r.row_key: generate(model, r.prompt_token_ids, r.row_key, r.sampling or SamplingParams())
        for r in requests(PARAMS[kind])
    }


def drafter_of(
    case: Case, drafter_folder: Path | None, *, chunk: int, prefix: Sequence[int], confidence: float
) -> Drafter:
    model, tokenizer = target(case.target)
    config = DecodingConfig.model_validate(
        case.settings | {"num_draft_tokens": case.num_draft_tokens, "draft_confidence": confidence}
    )
    folder = drafter_folder or (zoo.path(case.drafter) if case.drafter else None)
    files = DrafterCheckpoint(str(folder), "float32", "cpu") if folder else None
    made = make_drafter(
        config,
        model,
        files,
        tokenizer=tokenizer,
        step_tokens=chunk,
        prefix_token_ids=list(prefix),
    )
    assert made is not None
    return made


def run(
    case: Case,
    rows: Sequence[GenerationRequest],
    *,
    slots: int = 4,
    chunk: int = 64,
    prefix: Sequence[int] = (),
    confidence: float = 0.0,
    drafter_folder: Path | None = None,
    drafts: dict[tuple[int, ...], list[int]] | None = None,
) -> tuple[dict[str, list[int]], dict[str, Completion]]:
    drafter = drafter_of(case, drafter_folder, chunk=chunk, prefix=prefix, confidence=confidence)
    engine = make_engine(
        *target(case.target),
        slots,
        step_tokens=chunk,
        method=case.settings["method"],
        drafter=drafter,
        num_draft_tokens=case.num_draft_tokens,
        prefix_token_ids=prefix,
    )
    if drafts is not None:
        record(drafter, drafts)
        engine._clock = NeverControl()
    return decode(engine, random.Random(slots).sample(list(rows), len(rows)))


class NeverControl(ControlClock):
    """Every step drafts, as in transformers."""

    def wants_control(self, bucket: Bucket) -> bool:
        return False


def record(drafter: Drafter, drafts: dict[tuple[int, ...], list[int]]) -> None:
    """Keep each draft by the tokens before it."""
    propose = drafter.propose

    def recording(rows: Sequence[DraftRow], limits: Sequence[int]) -> list[list[int]]:
        found = propose(rows, limits)
        drafts.update((tuple(r.tokens), draft) for r, draft in zip(rows, found, strict=True))
        return found

    drafter.propose = recording  # type: ignore[method-assign]


def acceptance(completions: dict[str, Completion]) -> float:
    stats = [completion.stats for completion in completions.values()]
    drafted = sum(s.num_draft_tokens for s in stats)
    return sum(s.num_accepted_draft_tokens for s in stats) / drafted


def check_counts(completions: dict[str, Completion]) -> None:
    """Every pass yields one token beside the accepted ones, unless a draft token ends the row."""
    for completion in completions.values():
        stats = completion.stats
        yielded = stats.num_target_forwards + stats.num_accepted_draft_tokens
        assert stats.completion_tokens in (yielded, yielded - 1), completion
        if completion.finish_reason == "length":
            assert stats.completion_tokens == yielded, "a draft leaves room for a bonus token"


@pytest.mark.parametrize("slots", [1, 4, 16])
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("name", CASES)
def test_trained_drafters_change_no_row(name: str, kind: str, slots: int) -> None:
    case = CASES[name]
    chunk, prefix, confidence = {1: (512, (), 0.0), 4: (7, HEAD, 0.0), 16: (64, HEAD, 0.4)}[slots]
    tokens, completions = run(
        case,
        requests(PARAMS[kind]),
        slots=slots,
        chunk=chunk,
        prefix=prefix,
        confidence=confidence,
    )
    assert tokens == expected(case.target, kind)
    check_counts(completions)
    if kind == "greedy":
        assert acceptance(completions) > case.floor


@dataclass
class Drafted:
    """What was drafted behind which tokens, and how much of it stood."""

    drafts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0


def theirs(case: Case, prompts: Sequence[list[int]], budget: int) -> Drafted:
    """Of transformers' own assisted generation, row by row, with drafts of the same length."""
    model = load_model(zoo.path(case.target), "float32", "cpu")
    settings: dict[str, Any] = {}
    assistant = model
    if case.drafter is not None:
        folder = zoo.path(case.drafter)
        settings["assistant_model"] = assistant = load_model(folder, "float32", "cpu")
        if case.settings["method"] == "universal":
            settings["tokenizer"] = load_tokenizer(zoo.path(case.target))
            settings["assistant_tokenizer"] = load_tokenizer(folder)
    elif case.settings["method"] == "mtp":
        know_layers(model)
        settings["use_mtp"] = True
    else:
        settings["assistant_early_exit"] = case.settings["exit_layer"]
    assistant.generation_config.num_assistant_tokens = case.num_draft_tokens
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    found = Drafted()
    for ids in map(torch.tensor, prompts):
        with recorded_drafts(model) as drafts:
            output = model.generate(
                ids[None],
                attention_mask=torch.ones_like(ids[None]),
                do_sample=False,
                max_new_tokens=budget,
                **settings,
            )
        for before, draft in drafts.items():
            rest = output[0, len(before) :].tolist()
            # universal drafts may fill the row, which leaves no room for a bonus token
            draft = draft[: len(ids) + budget - len(before) - 1]
            found.drafted += min(len(draft), len(rest))
            found.accepted += common_prefix(draft, rest)
        found.drafts |= drafts
    return found


def know_layers(model: Any) -> None:
    """Make transformers find MTP layers whose number is not that of the published model."""
    first = model.config.num_hidden_layers
    numbers = range(first, first + model.config.num_nextn_predict_layers)
    model._keys_to_ignore_on_load_unexpected = [rf"layers\.{n}\." for n in numbers]


@contextmanager
def recorded_drafts(model: Any) -> Iterator[dict[tuple[int, ...], list[int]]]:
    """All drafts of `model.generate()`, each by the tokens before it."""
    drafts: dict[tuple[int, ...], list[int]] = {}

    def make(*args: Any, **kwargs: Any) -> Any:
        generator = type(model)._get_candidate_generator(model, *args, **kwargs)
        get = generator.get_candidates

        def get_candidates(input_ids: Any, **kwargs: Any) -> Any:
            show_accepted_only(kwargs.get("model_outputs"), input_ids.shape[1])
            found = get(input_ids, **kwargs)
            before = tuple(input_ids[0].tolist())
            drafts[before] = found[0][0, len(before) :].tolist()
            return found

        generator.get_candidates = get_candidates
        return generator

    model._get_candidate_generator = make
    yield drafts
    del model._get_candidate_generator


def show_accepted_only(outputs: Any, length: int) -> None:
    """Mend what transformers shows a drafter that reads the target's K and V: of each layer those
    of the first `length` places, which behind the window, where early places are gone, takes in
    rejected tokens; and one place more than the window holds."""
    states = getattr(outputs, "shared_kv_states", None)
    if states is None:
        return
    rejected = states["full_attention"][0].shape[2] - (length - 1)  # the last token is not in yet
    seen = {"full_attention": length, "sliding_attention": WINDOW}
    for kind, pair in states.items():
        states[kind] = tuple(x[:, :, : x.shape[2] - rejected][:, :, -seen[kind] :] for x in pair)


@pytest.mark.parametrize("name", [name for name in CASES if name != "universal"])
def test_drafts_are_as_good_as_those_of_transformers(name: str) -> None:
    case, budget = CASES[name], 30
    prompts = [prompt(i) for i in ROWS[2:]]  # their second MTP layer fails on shorter ones
    if case.settings["method"] in ("draft_model", "early_exit"):
        # They draft before the target has seen the prompt: begin one token later.
        model, _ = target(case.target)
        params = SamplingParams(max_new_tokens=1)
        begun = [p + generate(model, p, "f:0", params) for p in prompts]
    else:
        begun = prompts
    params = SamplingParams(max_new_tokens=budget)
    rows = [GenerationRequest(f"f:{i}", ids, params) for i, ids in enumerate(prompts)]
    ours: dict[tuple[int, ...], list[int]] = {}
    _, completions = run(case, rows, drafts=ours)
    other = theirs(case, begun, budget + len(prompts[0]) - len(begun[0]))
    assert acceptance(completions) >= other.accepted / other.drafted - 0.02
    both = [(ours[before], other.drafts[before]) for before in ours.keys() & other.drafts.keys()]
    same = sum(common_prefix(a, b) == min(len(a), len(b)) for a, b in both)
    assert len(both) >= 0.9 * len(ours) and same >= case.same * len(both), (same, len(both))


def test_drafts_by_text_are_as_good_as_those_of_transformers() -> None:
    """Which joins text and tokens otherwise, so that its drafts are others."""
    case, budget, dice = CASES["universal"], 40, random.Random(1)
    starts = [dice.randrange(len(IDS) - 100) for _ in range(20)]
    prompts = [IDS[start : start + dice.randrange(5, 100)] for start in starts]
    model, tokenizer = target(case.target)
    files = DrafterCheckpoint(str(zoo.path("other_tokenizer")), "float32", "cpu")
    drafter = UniversalDrafter(
        files.model(),
        DraftChooser(model.config.vocab_size, end_tokens=[tokenizer.eos_token_id]),
        tokenizer,
        files.tokenizer(),
        step_tokens=64,
        translation="text",
    )
    engine = make_engine(model, tokenizer, drafter=drafter, method="universal", num_draft_tokens=4)
    params = SamplingParams(max_new_tokens=budget)
    rows = [GenerationRequest(f"f:{i}", ids, params) for i, ids in enumerate(prompts)]
    _, completions = decode(engine, rows)
    other = theirs(case, prompts, budget)
    assert acceptance(completions) >= other.accepted / other.drafted - 0.02


@pytest.mark.parametrize("name", ["mtp1", "mtp2"])
def test_checkpoints_hold_mtp_layers_as_published(name: str) -> None:
    """What is loaded is what was saved, bit by bit."""
    model = load_model(zoo.path(name), "float32", "cpu")
    first = model.config.num_hidden_layers
    saved = load_file(zoo.path(name) / "model.safetensors")
    know_layers(model)
    layers = MtpModel.from_pretrained(model)
    loaded = published_tensors(layers, first)
    number = re.compile(r"model\.layers\.(\d+)\.")
    published = {
        key: tensor
        for key, tensor in saved.items()
        if (match := number.match(key)) and int(match[1]) >= first
    }
    assert len(layers.layers) == int(name[-1])
    assert loaded.keys() == published.keys()
    assert all(torch.equal(loaded[key], published[key]) for key in loaded)


def test_an_assistant_with_ordered_embeddings(tmp_path: Path) -> None:
    """Its head reads tokens by clusters; with all of them it drafts what the plain head does."""
    model = load_model(zoo.path("gemma4_assistant"), "float32", "cpu")
    config = copy.deepcopy(model.config)
    config.use_ordered_embeddings = True
    config.num_centroids = config.centroid_intermediate_top_k = 8
    ordered = type(model)(config)
    ordered.load_state_dict(model.state_dict(), strict=False)
    vocab_size = config.get_text_config().vocab_size
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))
    ordered.masked_embedding.token_ordering.copy_(order)
    ordered.save_pretrained(tmp_path)
    rows = requests(PARAMS["greedy"])
    case = CASES["mtp_drafter"]
    plain: dict[tuple[int, ...], list[int]] = {}
    clustered: dict[tuple[int, ...], list[int]] = {}
    run(case, rows, drafts=plain)
    run(case, rows, drafts=clustered, drafter_folder=tmp_path)
    assert plain == clustered
