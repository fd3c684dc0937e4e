"""An engine without a model but with slots: as slow as told, with text that can be checked."""

import os
import time
from dataclasses import dataclass, field

from pipeline.records import Completion, GenerationRequest, GenerationStats
from tests.fakes import fake_text


@dataclass
class _Row:
    request: GenerationRequest
    done: int = 0


@dataclass
class SlotEngine:
    """Each step gives every row in a slot one word; a row has `words` of them."""

    slots: int = 8
    step_seconds: float = 0.0
    words: int = 4
    journal: str | None = None
    waiting: list[_Row] = field(default_factory=list)
    running: list[_Row] = field(default_factory=list)

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def num_slots(self) -> int:
        return self.slots

    @property
    def num_running(self) -> int:
        return len(self.running)

    def add_request(self, request: GenerationRequest) -> None:
        self.waiting.append(_Row(request))

    def cancel(self, row_key: str) -> None:
        self._note("cancel", row_key)
        self.waiting = [row for row in self.waiting if row.request.row_key != row_key]
        self.running = [row for row in self.running if row.request.row_key != row_key]

    def partial_text(self, row_key: str) -> str:
        row = next((r for r in self.running if r.request.row_key == row_key), None)
        return text_of(row.request, row.done) if row else ""

    def step(self) -> list[Completion]:
        while self.waiting and len(self.running) < self.slots:
            self.running.append(self.waiting.pop(0))
        if not self.running:
            return []
        if self.step_seconds:
            time.sleep(self.step_seconds)
        for row in self.running:
            row.done += 1
        over = [row for row in self.running if row.done >= self._words(row)]
        self.running = [row for row in self.running if row.done < self._words(row)]
        return [self._complete(row) for row in over]

    def _words(self, row: _Row) -> int:
        sampling = row.request.sampling
        return min(self.words, sampling.max_new_tokens) if sampling else self.words

    def _complete(self, row: _Row) -> Completion:
        self._note("row", row.request.sampling.noise_row)
        words = self._words(row)
        stats = GenerationStats(
            method="prompt_lookup",
            prompt_tokens=len(row.request.prompt_token_ids),
            completion_tokens=words,
            num_target_forwards=words,
            latency_seconds=words * self.step_seconds + 0.001,
        )
        text = text_of(row.request, words)
        return Completion(row.request.row_key, "ok", text, "stop", stats=stats)

    def _note(self, what: str, key: object) -> None:
        if self.journal:
            with open(self.journal, "a") as file:
                file.write(f"{what} {key} {os.getpid()}\n")


def text_of(request: GenerationRequest, words: int) -> str:
    """`<digest of the prompt> word2 word3 ...`."""
    names = [fake_text(request.prompt_token_ids), *(f"word{n + 2}" for n in range(words - 1))]
    return " ".join(names)
