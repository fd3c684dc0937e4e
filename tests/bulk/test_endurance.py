"""Kills, cancels, expiry, load: with an engine that takes its time but no model."""

import asyncio
import os
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.bulk.conftest import MAX_IN_FLIGHT, SLOTS
from tests.bulk.helpers import by_id, lines_of, start_batch, wait_end, wait_for
from tests.bulk.test_bad_requests import ask

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
ROWS = 200


def journal(fake) -> list[list[str]]:
    file = fake.folder / "journal"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def long_answer(client, **options):
    messages = [{"role": "user", "content": "A long one"}]
    return client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=390, **options
    )


def controller():
    import ray

    return ray.get_actor("fake-batches", "draftmill")


def test_batch_survives_its_replica_its_runner_and_the_controller(fake):
    import ray

    client = fake.client()
    batch = start_batch(client, lines_of(ROWS, max_tokens=30))
    wait_for(client, batch, lambda b: b.request_counts.completed >= 30)
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(long_answer, client)
        stream = long_answer(client, stream=True)
        next(stream)
        time.sleep(0.5)
        kill(int(journal(fake)[-1][2]))
        with pytest.raises(openai.APIError, match="restarted"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="restarted") as lost:
            whole.result()
    assert (lost.value.status_code, lost.value.code) == (503, "engine_unavailable")
    wait_for(client, batch, lambda b: b.request_counts.completed >= 80)
    runner = ray.get(controller().running.remote())[batch.id]
    kill(runner)
    kill(ray.get(controller().__ray_call__.remote(lambda _: os.getpid())))
    batch = wait_end(client, batch)
    assert batch.status == "completed", batch
    assert batch.request_counts.completed == ROWS
    found = by_id(client, batch.output_file_id)
    assert set(found) == {f"row-{n}" for n in range(ROWS)}
    texts = [
        line["response"]["body"]["choices"][0]["message"]["content"] for line in found.values()
    ]
    assert len(set(texts)) == ROWS and all(text.endswith("word30") for text in texts)


def test_batch_that_expires_says_so_of_every_request(fake):
    client = fake.client()
    batch = start_batch(client, lines_of(500, max_tokens=390), window="1s")
    done = check_unfinished(client, batch, "expired", 500)
    assert done < 100


def check_unfinished(client, batch, status: str, rows: int) -> int:
    """What is done is in the output, what is not in the errors; how many are done."""
    batch = wait_end(client, batch)
    assert batch.status == status, batch
    done, undone = by_id(client, batch.output_file_id), by_id(client, batch.error_file_id)
    assert len(done) == batch.request_counts.completed < rows
    assert batch.request_counts.total == rows == len(done) + len(undone)
    assert set(done) | set(undone) == {f"row-{n}" for n in range(rows)}
    assert {line["error"]["code"] for line in undone.values()} == {f"batch_{status}"}
    assert {line["response"] for line in undone.values()} == {None}
    return len(done)


@pytest.mark.parametrize("streamed", [True, False])
def test_client_that_leaves_frees_its_slot(fake, streamed):
    before = sum(words[0] == "cancel" for words in journal(fake))
    if streamed:
        stream = long_answer(fake.client(), stream=True)
        next(stream)
        stream.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            long_answer(fake.client(timeout=0.5))
    deadline = time.monotonic() + 3  # it would have taken 4 s
    while sum(words[0] == "cancel" for words in journal(fake)) == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


Answer = tuple[int, float, str | None]


def async_client(fake) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{fake.url}/v1", api_key=fake.keys["alice"], max_retries=0, timeout=60
    )


async def one(client: openai.AsyncOpenAI, n: int, max_tokens: int) -> Answer:
    """(status, seconds, Retry-After)."""
    started = time.monotonic()
    messages = [{"role": "user", "content": f"Request {n}"}]
    try:
        await client.chat.completions.create(model="tiny", messages=messages, max_tokens=max_tokens)
        return 200, time.monotonic() - started, None
    except openai.RateLimitError as error:
        wait = error.response.headers.get("retry-after")
        return error.status_code, time.monotonic() - started, wait


async def many(fake, count: int, max_tokens: int) -> list[Answer]:
    """Requests that are sent at once."""
    async with async_client(fake) as client:
        return await asyncio.gather(*(one(client, n, max_tokens) for n in range(count)))


async def refused(fake, count: int, wanted: int) -> list[str | None]:
    """Sends long requests until `wanted` were told to come back, then hangs up; what they were
    told."""
    waits: list[str | None] = []
    async with async_client(fake) as client:
        tasks = {asyncio.create_task(one(client, n, 390)) for n in range(count)}
        while tasks and len(waits) < wanted:
            done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            waits += [wait for status, _, wait in (t.result() for t in done) if status == 429]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return waits


def test_excess_is_told_to_come_back(fake):
    waits = asyncio.run(refused(fake, MAX_IN_FLIGHT + 50, 20))
    assert len(waits) >= 20 and all(waits)
    deadline = time.monotonic() + 15  # the others would take more than a minute
    while ask(fake, "GET", "/readyz")[2]["in_flight"]:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_two_hundred_at_once(fake):
    before = ask(fake, "GET", "/readyz")[2]
    results = asyncio.run(many(fake, 200, max_tokens=8))
    after = ask(fake, "GET", "/readyz")[2]
    done = sorted(seconds for status, seconds, _ in results if status == 200)
    told = [wait for status, _, wait in results if status == 429]
    assert len(done) + len(told) == 200
    assert len(done) >= MAX_IN_FLIGHT and all(told)
    steps = after["steps_while_waiting"] - before["steps_while_waiting"]
    full = (
        after["occupancy"] * after["steps_while_waiting"]
        - before["occupancy"] * before["steps_while_waiting"]
    )
    assert full / steps > 0.9
    print(
        f"\n200 at once: {len(done)} answered, {len(told)} told to come back; "
        f"p50 {statistics.median(done):.2f} s, p99 {done[int(0.99 * len(done))]:.2f} s, "
        f"occupancy {full / steps:.3f} over {steps:.0f} steps"
    )


def test_big_batch_starves_nobody_and_keeps_what_is_done_when_cancelled(fake):
    client = fake.client()
    batch = start_batch(client, lines_of(1000, max_tokens=12))
    wait_for(client, batch, lambda b: b.request_counts.completed >= 10)
    latencies = []
    while len(latencies) < 40:
        started = time.monotonic()
        messages = [{"role": "user", "content": f"Question {len(latencies)}"}]
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
        latencies.append(time.monotonic() - started)
    done = client.batches.retrieve(batch.id).request_counts.completed
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    assert done <= check_unfinished(client, batch, "cancelled", 1000)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    latencies.sort()
    median, worst = statistics.median(latencies), latencies[-1]
    print(f"\nbeside a batch: {len(latencies)} requests, p50 {median:.2f} s, worst {worst:.2f} s")
    # 4 steps of its own, and a slot: at most 12 steps for each of the 2 rows that go before it
    assert median < 0.5 and worst < 3.0


def test_slots_are_as_told(fake):
    assert ask(fake, "GET", "/readyz")[2]["slots"] == SLOTS
