"""What the zoo's models learn: little enough that tiny models know it well within seconds."""

from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from tests.tiny import TEXT, make_tokenizer

_DATA = Path(__file__).parents[1] / "data"
_MESSAGE = 2000  # characters of one message to Congress
_SENTENCES = 10  # of an interface, in two languages each


@cache
def documents() -> tuple[str, ...]:
    message = pq.read_table(_DATA / "sotu_short.parquet")["text"][0].as_py()[:_MESSAGE]
    table = pq.read_table(_DATA / "django_ui_en_fr_de_es.parquet").slice(0, _SENTENCES)
    pairs = [f"{row['en']}\n{row['de']}" for row in table.to_pylist()]
    return (TEXT, message, *pairs)


def text() -> str:
    return "\n".join(documents())


def make_text_tokenizer(vocab_size: int = 512) -> Any:
    return make_tokenizer(vocab_size, text())


def token_ids(tokenizer: Any) -> torch.Tensor:
    """All documents, each with its end token: int64 `[tokens]`."""
    ids: list[int] = []
    for document in documents():
        ids += [*tokenizer(document)["input_ids"], tokenizer.eos_token_id]
    return torch.tensor(ids)
