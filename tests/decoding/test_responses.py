"""Thoughts and tool calls of chat models stay out of the text."""

from typing import Any

import pytest

from pipeline.config import DecodingConfig
from pipeline.decoding.reference import ReferenceEngine
from pipeline.decoding.responses import Responses
from pipeline.records import GenerationRequest, SamplingParams
from tests.decoding.oracle import make_engine
from tests.tiny import make_model, make_tokenizer

TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}
CHAT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


class Kind:
    """As much of a model as is read."""

    class config:
        model_type = "llama"


def responses(template: Any = TEMPLATE, kind: Any = Kind) -> tuple[Responses, Any]:
    tokenizer = make_tokenizer()
    tokenizer.response_template = template
    return Responses(tokenizer, kind), tokenizer


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("<think>What to say?</think>\nThe wheel turns.", "The wheel turns."),
        ("<think>What to say, what to", ""),
        ("  The wheel turns. ", "  The wheel turns. "),
        ("The wheel <think> turns", "The wheel"),
        ("", ""),
    ],
)
def test_the_answer_alone(completion: str, text: str) -> None:
    found, tokenizer = responses()
    prompt, tokens = (
        tokenizer(s, add_special_tokens=False)["input_ids"] for s in (CHAT, completion)
    )
    assert found.text(prompt, tokens) == text


def test_a_prompt_that_opens_the_thought() -> None:
    found, tokenizer = responses()
    ids = tokenizer(CHAT + "<think>")["input_ids"]
    assert found.text(ids, tokenizer("Hm.</think>Yes.")["input_ids"]) == "Yes."


def test_what_is_no_chat_is_left_alone() -> None:
    found, tokenizer = responses()
    tokens = tokenizer("<think>a</think>b")["input_ids"]
    assert found.text(tokenizer("Text:")["input_ids"], tokens) == "<think>a</think>b"
    found, _ = responses(template=None)
    assert found.text(tokenizer(CHAT)["input_ids"], tokens) == "<think>a</think>b"


def test_gemma_4_is_known_without_a_template() -> None:
    class Gemma:
        class config:
            model_type = "gemma4"

    found, tokenizer = responses(None, Gemma)
    prompt = tokenizer("<|turn>user\nHello<turn|>\n<|turn>model\n")["input_ids"]
    tokens = tokenizer("<|channel>thought\nHm.<channel|>Yes.<turn|>")["input_ids"]
    assert found.text(prompt, tokens) == "Yes."


@pytest.mark.parametrize("kind", ["batched", "transformers"])
def test_a_thought_that_never_ends(kind: str) -> None:
    """Through an engine: whatever the model says is thought."""
    target, tokenizer = make_model(), make_tokenizer()
    prompt = tokenizer(CHAT + "<think>")["input_ids"]
    texts = []
    for template in (None, TEMPLATE):
        tokenizer.response_template = template
        rule, config = SamplingParams(max_new_tokens=12), DecodingConfig(method="plain")
        engine: Any = (
            make_engine(target, tokenizer, 2)
            if kind == "batched"
            else ReferenceEngine(target, tokenizer, config, max_model_len=512)
        )
        engine.add_request(GenerationRequest("f:0", prompt, rule))
        done: list[Any] = []
        while engine.num_unfinished:
            done += engine.step()
        texts.append(done[0].text)
    assert texts[0] and texts[1] == ""
