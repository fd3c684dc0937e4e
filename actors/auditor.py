"""The audit actor: a Ray Data callable that generates rows again, both ways, and compares."""

import json
from typing import Any

import pyarrow as pa

from actors.generator import EngineFactory
from pipeline.auditing import ESTIMATE, GROUP_SCHEMA
from pipeline.decoding.audit import AuditGroup, audit, warm_up
from pipeline.decoding.batched import BatchedEngine
from pipeline.records import GenerationRequest
from pipeline.store.files import Store
from pipeline.store.publish import published_texts

NEEDS_BATCHED = "not done: it needs the batched engine"


class AuditActor:
    """Audits tables of `records.rendered_schema`, each as one group; commits nothing."""

    def __init__(
        self, engine_factory: EngineFactory, store: Store, rows_per_file: int, text_column: str
    ) -> None:
        """The last three: where the run's texts are."""
        self._engine = engine_factory()
        self._published = store, rows_per_file, text_column
        self._num_groups = 0

    def __call__(self, rows: pa.Table) -> pa.Table:
        """A table of `auditing.GROUP_SCHEMA` with a row, or none if no row is to be generated.

        Raises:
            EngineError: the engine failed.
        """
        requests = _requests(rows)
        if not isinstance(self._engine, BatchedEngine):
            return pa.Table.from_pylist([{"note": NEEDS_BATCHED}], schema=GROUP_SCHEMA)
        if not requests:
            return GROUP_SCHEMA.empty_table()
        if not self._num_groups:
            warm_up(self._engine, requests)
        self._num_groups += 1
        texts = self._texts(rows)
        group = audit(self._engine, requests, texts, assisted_first=self._num_groups % 2 == 1)
        return pa.Table.from_pylist([_row(group)], schema=GROUP_SCHEMA)

    def _texts(self, rows: pa.Table) -> dict[str, str]:
        """By row key, what the run wrote."""
        by_file: dict[str, list[int]] = {}
        for address in rows.select(["source_file", "source_row"]).to_pylist():
            by_file.setdefault(address["source_file"], []).append(address["source_row"])
        store, rows_per_file, column = self._published
        return {
            f"{file}:{index}": text
            for file, indices in by_file.items()
            for index, text in published_texts(store, file, indices, rows_per_file, column).items()
        }


def _requests(rows: pa.Table) -> list[GenerationRequest]:
    """Of the rows that the prompt stage let through."""
    names = ["source_file", "source_row", "status", "prompt_token_ids"]
    return [
        GenerationRequest(f"{row['source_file']}:{row['source_row']}", row["prompt_token_ids"])
        for row in rows.select(names).to_pylist()
        if row["status"] is None and row["prompt_token_ids"] is not None  # not one of pieces
    ]


def _row(group: AuditGroup) -> dict[str, Any]:
    return {
        "rows": len(group.verdicts),
        "agree": group.count("agree"),
        "near_ties": group.count("near_tie"),
        "errors": group.count("error"),
        "differing": [key for key, verdict in group.verdicts.items() if verdict == "error"],
        "plain_seconds": group.plain_seconds,
        "assisted_seconds": group.assisted_seconds,
        **{name: getattr(group.estimate, name) for name in ESTIMATE},
        "steps": json.dumps(group.estimate.steps),
    }
