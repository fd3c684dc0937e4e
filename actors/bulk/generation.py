"""Interactive requests: from a body to an answer, whole or streamed."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayError
from starlette.responses import StreamingResponse

from actors.bulk.bodies import ChatBody, CompletionBody
from actors.bulk.errors import ApiError, invalid
from actors.bulk.replies import Chunks, answer, event
from actors.bulk.seats import Seat, Seats
from pipeline.errors import EngineError

logger = logging.getLogger(__name__)
Body = ChatBody | CompletionBody


class Generation:
    """Hands requests to the replicas.

    Args:
        engine: the handle of the model deployment.
        model: the name that requests must give.
    """

    def __init__(self, engine: Any, model: str, max_in_flight: int) -> None:
        self._engine = engine
        self._model = model
        self.seats = Seats(max_in_flight)

    async def generate(self, url: str, body: Body) -> Any:
        """The answer: JSON, or a stream of events.

        Raises:
            ApiError: whatever is wrong.
        """
        if body.model != self._model:
            problem = f"The model {body.model[:80]!r} does not exist; this endpoint has "
            problem += repr(self._model)
            raise ApiError(404, problem, "model_not_found", "model")
        request_id = secrets.token_hex(12)
        logger.info("asked", extra={"request": request_id, "url": url, "stream": bool(body.stream)})
        seat = self.seats.take()
        if body.stream:
            return await self._stream(url, body, request_id, seat)
        try:
            result = await self._engine.answer.remote(body, request_id)
        except (RayError, EngineError) as error:
            raise _lost(error) from None
        finally:
            seat.leave()
        if isinstance(result, ApiError):
            raise result
        completions, truncated = result
        return answer(url, request_id, self._model, completions, truncated)

    async def _stream(self, url: str, body: Body, request_id: str, seat: Seat) -> Any:
        if isinstance(body, CompletionBody) and len(body.prompts) > 1:
            seat.leave()
            raise invalid("stream: with one prompt only", "stream", "unsupported_value")
        pieces = self._engine.options(stream=True).stream.remote(body, request_id)
        try:
            first = await anext(pieces)
        except (RayError, EngineError) as error:
            raise _lost(error) from None
        if isinstance(first, ApiError):  # in time for a status of its own
            raise first
        chunks = Chunks(url, request_id, self._model)
        events = self._events(chunks, first, pieces, body, seat)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)

    async def _events(
        self, chunks: Chunks, first: Any, pieces: Any, body: Body, seat: Seat
    ) -> AsyncIterator[str]:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        try:
            yield chunks.opening()
            piece = first
            while not isinstance(piece, tuple):
                if isinstance(piece, ApiError):
                    yield event(piece.body())
                    return
                yield chunks.text(piece)
                piece = await anext(pieces)
            completion, truncated = piece
            yield chunks.closing(completion, truncated, with_usage)
        except (RayError, EngineError, StopAsyncIteration) as error:
            yield event(_lost(error).body())
        except asyncio.CancelledError:  # the client has gone
            pieces.cancel()
            raise
        finally:
            seat.leave()


def _lost(error: BaseException) -> ApiError:
    logger.warning("a request was lost with its replica: %s", type(error).__name__)
    return ApiError(
        503, "The model is being restarted; try again.", "engine_unavailable", retry_after=5
    )
