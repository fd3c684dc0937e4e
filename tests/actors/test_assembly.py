"""Pieces of a row become one row."""

from actors.assembly import assemble
from pipeline.records import Completion, GenerationStats, sum_stats
from pipeline.rendered import Piece, RenderedPrompt
from pipeline.steptable import StepTable


def piece(column=0, joint=""):
    return Piece("", RenderedPrompt([1], 0), column, joint)


def test_statistics_are_sums():
    steps = StepTable({"a": [1.0, 2.0, 3.0, 4.0]})
    first = GenerationStats("plain", 3, decode_seconds=1.0, plain_decode_seconds=2.0, steps=steps)
    second = GenerationStats("mtp", 4, num_accepted_draft_tokens=5, drafted_at=[3, 2])
    second.plain_decode_seconds = 1.5
    total = sum_stats([first, second, GenerationStats("plain", 1, plain_decode_seconds=0.0)])
    assert (total.method, total.prompt_tokens, total.plain_decode_seconds) == ("mtp", 8, 3.5)
    assert total.drafted_at == [3, 2] and total.steps == steps
    assert sum_stats([first, GenerationStats()]).plain_decode_seconds is None
    assert first.prompt_tokens == 3 and first.steps == {"a": [1.0, 2.0, 3.0, 4.0]}


def test_the_worst_piece_decides_and_other_columns_keep_their_text():
    pieces = [piece(), piece(0, "\n\n"), piece(1)]
    completions = [
        Completion("r", "ok", " One. ", "stop"),
        Completion("r", "ok", "Two.", "length"),
        Completion("r", "error", error_type="engine_error", error="lost"),
    ]
    row, texts = assemble(pieces, completions, 2)
    assert texts == ["One.\n\nTwo.", None]
    assert (row.status, row.error_type) == ("error", "engine_error")
    assert row.error == "piece 3 of 3: lost" and row.finish_reason is None
    row, texts = assemble(pieces[:2], completions[:2], 1)
    assert (row.status, row.finish_reason, texts) == ("ok", "length", ["One.\n\nTwo."])
    late = Completion("r", "timeout", "Tw")
    row, texts = assemble(pieces[:2], [completions[0], late], 1)
    assert (row.status, texts) == ("timeout", ["One.\n\nTw"])
