"""Answers in OpenAI's shape, from completions of the engine."""

import json
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from actors.bulk.errors import row_error
from pipeline.records import Completion, GenerationStats, sum_stats


def statistics(stats: GenerationStats, truncated: int = 0) -> dict[str, Any]:
    """The extension `speculative` of an answer: what drafting did for the row."""
    forwards = stats.num_target_forwards
    return {
        "method": stats.method,
        "draft_tokens": stats.num_draft_tokens,
        "accepted_tokens": stats.num_accepted_draft_tokens,
        "acceptance_rate": stats.draft_acceptance_rate,
        "tokens_per_target_forward": stats.completion_tokens / forwards if forwards else None,
        "latency_s": stats.latency_seconds,
        "speedup": stats.speedup,
        "baseline": stats.speedup_basis,
        "truncated_prompt_tokens": truncated,
    }


def usage(all_stats: Iterable[GenerationStats]) -> dict[str, Any]:
    """Token counts of a request, summed over its rows."""
    stats = list(all_stats)
    prompt = sum(s.prompt_tokens for s in stats)
    new = sum(s.completion_tokens for s in stats)
    drafted = sum(s.num_draft_tokens for s in stats)
    accepted = sum(s.num_accepted_draft_tokens for s in stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_prompt_tokens for s in stats)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def answer(
    url: str, request_id: str, model: str, completions: list[Completion], truncated: list[int]
) -> dict[str, Any]:
    """The body of a finished request.

    Raises:
        ApiError: a row of it failed.
    """
    for completion in completions:
        if completion.status != "ok":
            kind = "timeout" if completion.status == "timeout" else completion.error_type
            raise row_error(kind, completion.error)
    chat = url == "/v1/chat/completions"
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(chat, i, c) for i, c in enumerate(completions)],
        "usage": usage(c.stats for c in completions),
        "system_fingerprint": None,
        "speculative": statistics(_joined(completions), sum(truncated)),
    }


def _choice(chat: bool, index: int, completion: Completion) -> dict[str, Any]:
    content: dict[str, Any] = {"text": completion.text}
    if chat:
        content = {"message": {"role": "assistant", "content": completion.text, "refusal": None}}
    return {
        "index": index,
        **content,
        "logprobs": None,
        "finish_reason": completion.finish_reason,
    }


def _joined(completions: list[Completion]) -> GenerationStats:
    """Statistics of a request with several rows: sums; of one row, its own."""
    if len(completions) == 1:
        return completions[0].stats
    parts = [completion.stats for completion in completions]
    latency = max(stats.latency_seconds for stats in parts)  # they are generated side by side
    return replace(sum_stats(parts), method=parts[0].method, latency_seconds=latency)


class Chunks:
    """The events of a streamed answer, as lines of `text/event-stream`."""

    def __init__(self, url: str, request_id: str, model: str) -> None:
        self._chat = url == "/v1/chat/completions"
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{request_id}",
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    def opening(self) -> str:
        """A chat begins with the role; completions begin with their text."""
        return (
            self._event([self._piece({"role": "assistant", "content": ""})]) if self._chat else ""
        )

    def text(self, text: str) -> str:
        return self._event([self._piece({"content": text} if self._chat else text)])

    def closing(self, completion: Completion, truncated: int, with_usage: bool) -> str:
        """The finish reason with the statistics, the usage if asked for, and the end."""
        piece = self._piece({} if self._chat else "", completion.finish_reason)
        last = self._event([piece], speculative=statistics(completion.stats, truncated))
        tokens = self._event([], usage=usage([completion.stats])) if with_usage else ""
        return f"{last}{tokens}data: [DONE]\n\n"

    def _piece(self, content: Any, reason: str | None = None) -> dict[str, Any]:
        field = "delta" if self._chat else "text"
        return {"index": 0, field: content, "logprobs": None, "finish_reason": reason}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        return event({**self._head, "choices": choices, **more})


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
