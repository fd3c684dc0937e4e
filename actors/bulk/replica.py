"""The model deployment: one engine per replica, for interactive requests and rows of batches."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from actors.bulk.bodies import ChatBody, CompletionBody
from actors.bulk.errors import ApiError, row_error
from actors.bulk.feeder import Feeder, TextStream, Ticket
from actors.bulk.rendering import Prompt, RequestRenderer
from pipeline import logs
from pipeline.config import RunConfig
from pipeline.decoding.checkpoint import materialize, resolve
from pipeline.decoding.choosing import params_of
from pipeline.decoding.engine import ServingEngine
from pipeline.decoding.loading import load_tokenizer, settle_heap
from pipeline.records import Completion, GenerationRequest

logger = logging.getLogger(__name__)

Body = ChatBody | CompletionBody


class Replica:
    """Generates. Errors of a request are returned, not raised: Ray would wrap them.

    Args:
        make_engine: called here, on the replica's node.
    """

    def __init__(
        self, config: RunConfig, max_model_len: int, make_engine: Callable[[], ServingEngine]
    ) -> None:
        logs.configure(as_json=True)
        checkpoint = resolve(config.model.target, config.model.revision)
        tokenizer = load_tokenizer(materialize(checkpoint))
        self._renderer = RequestRenderer(config, tokenizer, max_model_len)
        engine = make_engine()
        if not hasattr(engine, "partial_text"):
            raise RuntimeError("this model needs the engine of transformers, which cannot serve")
        settle_heap()
        self._feeder = Feeder(engine, params_of(config.decoding, config.faults.row_timeout_s))

    def check_health(self) -> None:
        """Serve replaces a replica whose engine is lost."""
        if self._feeder.failure is not None:
            raise RuntimeError("the engine failed") from self._feeder.failure

    def stats(self) -> dict[str, float]:
        return self._feeder.stats()

    async def answer(
        self, body: Body, request_id: str
    ) -> tuple[list[Completion], list[int]] | ApiError:
        """An interactive request: its completions and how many prompt tokens each lost."""
        try:
            prompts = await asyncio.to_thread(self._renderer.render, body)
        except ApiError as error:
            return error
        tickets = [self._submit(prompt, request_id, i) for i, prompt in enumerate(prompts)]
        completions = [await self._completion(ticket, tickets) for ticket in tickets]
        return completions, [prompt.truncated_prompt_tokens for prompt in prompts]

    async def stream(
        self, body: Body, request_id: str
    ) -> AsyncIterator[str | ApiError | tuple[Completion, int]]:
        """A request with one prompt: pieces of its text, then the completion."""
        try:
            (prompt,) = await asyncio.to_thread(self._renderer.render, body)
        except ApiError as error:
            yield error
            return
        texts: asyncio.Queue[str | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def on_text(text: str | None) -> None:
            loop.call_soon_threadsafe(texts.put_nowait, text)

        ticket = self._submit(prompt, request_id, 0, on_text)
        ticket.future.add_done_callback(lambda _: on_text(None))
        stream = TextStream(prompt.sampling.stop)
        try:
            while (text := await texts.get()) is not None:
                if piece := stream.grow(text):
                    yield piece
            completion = ticket.future.result()
            if completion.status != "ok":
                kind = "timeout" if completion.status == "timeout" else completion.error_type
                yield row_error(kind, completion.error)
                return
            if piece := stream.end(completion.text or ""):
                yield piece
            yield completion, prompt.truncated_prompt_tokens
        finally:
            if not ticket.future.done():  # nobody listens any more
                self._feeder.cancel(ticket)

    async def row(self, request: GenerationRequest) -> Completion:
        """A row of a batch."""
        ticket = self._feeder.submit(request, urgent=False)
        return await self._completion(ticket, [ticket])

    def _submit(self, prompt: Prompt, request_id: str, index: int, on_text: Any = None) -> Ticket:
        request = GenerationRequest(f"{request_id}:{index}", prompt.token_ids, prompt.sampling)
        return self._feeder.submit(request, urgent=True, on_text=on_text)

    async def _completion(self, ticket: Ticket, together: list[Ticket]) -> Completion:
        """Wait for a row; if the client goes away, give up all rows of its request."""
        try:
            return await asyncio.wrap_future(ticket.future)
        except asyncio.CancelledError:
            for one in together:
                self._feeder.cancel(one)
            raise
