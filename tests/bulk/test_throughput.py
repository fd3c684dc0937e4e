"""The endpoint against its own engine, on the demo model and the same requests, taking turns."""

import asyncio
import time

import openai
import pytest

from pipeline.config import load_config
from pipeline.decoding.build import build_engine
from pipeline.records import GenerationRequest

pytestmark = [pytest.mark.ray, pytest.mark.model, pytest.mark.soak, pytest.mark.timeout(550)]
ROWS, TOKENS, ROUNDS = 16, 48, 2
MESSAGES = [
    [{"role": "user", "content": f"Write about mill number {n} in the valley. " * (5 + n)}]
    for n in range(ROWS)
]


def test_endpoint_keeps_up_with_its_engine(bulk_cluster, tmp_path):
    from actors.bulk import app
    from actors.bulk.bodies import ChatBody
    from actors.bulk.rendering import RequestRenderer
    from pipeline.decoding.checkpoint import materialize, resolve
    from pipeline.decoding.loading import load_tokenizer

    settings = [
        "input.path=requests",
        f"output.path={tmp_path}",
        "model.target=demo:smollm2",
        f"decoding.max_new_tokens={TOKENS}",
        "resources.slots=16",
        "resources.max_model_len=1024",
        f"serve.port={bulk_cluster}",
    ]
    config = load_config([], settings, task="summarize")
    resolved = app.check(config)
    app.start(config, resolved, name="model")
    engine = build_engine(config, resolved.dtype, resolved.device, resolved.max_model_len, 2.0)
    tokenizer = load_tokenizer(materialize(resolve("demo:smollm2")))
    renderer = RequestRenderer(config, tokenizer, resolved.max_model_len)
    body = [ChatBody(model="demo:smollm2", messages=m) for m in MESSAGES]
    prompts = [renderer.render(one)[0] for one in body]

    def own() -> tuple[float, int]:
        started, tokens = time.monotonic(), 0
        for n, prompt in enumerate(prompts):
            engine.add_request(GenerationRequest(f"r{n}", prompt.token_ids, prompt.sampling))
        while engine.num_unfinished:
            tokens += sum(c.stats.completion_tokens for c in engine.step())
        return time.monotonic() - started, tokens

    async def served() -> tuple[float, int]:
        url = f"http://127.0.0.1:{bulk_cluster}/model/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            started = time.monotonic()
            create = client.chat.completions.create
            answers = await asyncio.gather(
                *(create(model="demo:smollm2", messages=messages) for messages in MESSAGES)
            )
            return time.monotonic() - started, sum(a.usage.completion_tokens for a in answers)

    own(), asyncio.run(served())  # warm both
    pairs = [(own(), asyncio.run(served())) for _ in range(ROUNDS)]
    own_s, served_s = (sum(pair[i][0] for pair in pairs) for i in (0, 1))
    assert {pair[0][1] for pair in pairs} == {pair[1][1] for pair in pairs}
    tokens = sum(pair[0][1] for pair in pairs)
    print(f"\nengine {tokens / own_s:.1f} tokens/s, endpoint {tokens / served_s:.1f}")
    app.stop_controller("model")
    assert own_s / served_s >= 0.8
