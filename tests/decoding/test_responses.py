"""Thoughts and tool calls of chat models stay out of the text."""

from typing import Any

import pytest

from pipeline.decoding.responses import Responses
from pipeline.records import GenerationRequest, SamplingParams
from tests.decoding.drafters.random_drafters import make_assistant
from tests.decoding.oracle import make_engine
from tests.decoding.small import Files, drafter_for
from tests.tiny import make_tokenizer

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


def test_through_the_engine() -> None:
    """A target that thinks: forced, token by token, by banning all others is not needed; its own
    words are parsed like any."""
    from tests.decoding.architectures import make

    target = make(
        "gemma4_text",
        vocab_size=512,
        vocab_size_per_layer_input=512,
        max_position_embeddings=512,
    )
    tokenizer = make_tokenizer()
    prompt = tokenizer(CHAT)["input_ids"]
    texts = []
    for template in (
        None,
        TEMPLATE | {"fields": {"content": {"open": "\u00ff", "content": "text"}}},
    ):
        tokenizer.response_template = template
        drafter = drafter_for(target, Files(make_assistant(target)), method="mtp_drafter")
        engine = make_engine(
            target, tokenizer, 2, drafter=drafter, num_draft_tokens=2, method="mtp_drafter"
        )
        params = SamplingParams(max_new_tokens=12, end_tokens=())
        engine.add_request(GenerationRequest("f:0", prompt, params))
        done = []
        while engine.num_unfinished:
            done += engine.step()
        texts.append(done[0].text)
    assert texts[0] and texts[0] != texts[1]
