"""The rows of a benchmark: prompts from a JSON-lines file, in the model's chat markup."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError

# Worked examples before a translation prompt of the form "Translate German to English: ...".
FEW_SHOT_HEAD = """\
Translate German to English: Der Zug nach Hamburg hat heute zwanzig Minuten Verspätung .
English: The train to Hamburg is twenty minutes late today .

Translate German to English: Die Stadt will im Herbst drei neue Schulen bauen .
English: The city wants to build three new schools in autumn .

Translate German to English: Niemand wurde bei dem Unfall verletzt .
English: Nobody was hurt in the accident .

"""


@dataclass(frozen=True)
class Workload:
    """What every contender generates.

    `texts`: the prompts as text, without chat markup. `prompts`: their token ids with it.
    `ignore_end`: go on to `max_new_tokens` whatever the model says. `temperature`: 0 is greedy.
    `lengths`: of each row instead of `max_new_tokens`, for our own engines. Rows that all begin and
    end at once are what plain decoding does best and no corpus offers.
    """

    texts: Sequence[str]
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    ignore_end: bool = False
    temperature: float = 0.0
    lengths: Sequence[int] | None = None
    _rounding: int = field(default=64, repr=False)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest row at most, rounded up."""
        longest = max(map(len, self.prompts)) + self.max_new_tokens
        return -(-longest // self._rounding) * self._rounding

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


def load_workload(
    path: Path,
    tokenizer: Any,
    *,
    task: str | None,
    limit: int | None,
    max_new_tokens: int,
    head: str = "",
    ignore_end: bool = False,
    chat: bool = True,
) -> Workload:
    """Rows of `path`: an object with a `prompt` a line.

    Args:
        task: keep the rows whose `task` is this.
        head: text put before every prompt.
        chat: make it a user turn, where the tokenizer has a chat template.

    Raises:
        ConfigError: if the file cannot be read or has no such rows.
    """
    texts = [head + text for text in read_prompts(path, task, limit)]
    prompts = [render(tokenizer, text, chat=chat) for text in texts]
    return Workload(texts, prompts, max_new_tokens, ignore_end)


def read_prompts(path: Path, task: str | None, limit: int | None) -> list[str]:
    """The prompts of a file as text.

    Raises:
        ConfigError: if it cannot be read or has no such rows.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        texts = [str(row["prompt"]) for row in rows if task in (None, row.get("task"))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"cannot read {path}: {error!r}; give JSON lines with a `prompt`"
        raise ConfigError("--prompts", problem) from None
    if not texts:
        raise ConfigError("--prompts", f"{path} has no rows of task {task}; leave out --task")
    return texts[:limit]


def render(tokenizer: Any, text: str, *, chat: bool = True) -> list[int]:
    """Token ids of one user turn; of the bare text where the tokenizer has no chat template."""
    if not chat or not tokenizer.chat_template:
        ids: list[int] = tokenizer(text)["input_ids"]
        return ids
    turns = [{"role": "user", "content": text}]
    marked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(marked, add_special_tokens=False)["input_ids"]
    return ids


def shared_head(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Token ids that all prompts begin with."""
    from pipeline.decoding.prefix import common_prefix

    first = prompts[0]
    return list(first[: min(common_prefix(first, prompt) for prompt in prompts)])
