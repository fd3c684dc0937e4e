"""What the tests of batches share."""

import json
import time

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def lines_of(rows: int, **body) -> bytes:
    """A batch's input: `row-0`, `row-1`, ..."""
    return b"".join(
        json.dumps(
            {
                "custom_id": f"row-{n}",
                "method": "POST",
                "url": CHAT,
                "body": {
                    "model": "tiny",
                    "messages": [{"role": "user", "content": f"Number {n}"}],
                    **body,
                },
            }
        ).encode()
        + b"\n"
        for n in range(rows)
    )


def start_batch(client, data: bytes, window: str = "24h"):
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window=window)


def wait_for(client, batch, done, seconds: float = 120):
    """Poll until `done(batch)`."""
    deadline = time.monotonic() + seconds
    while not done(batch):
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    return batch


def wait_end(client, batch, seconds: float = 120):
    return wait_for(client, batch, lambda b: b.status in ENDED, seconds)


def by_id(client, file_id: str | None) -> dict[str, dict]:
    """custom_id -> line of a result file; each must occur once."""
    if file_id is None:
        return {}
    lines = client.files.content(file_id).text.splitlines()
    found = {line["custom_id"]: line for line in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found
