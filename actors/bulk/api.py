"""The HTTP side: routes in OpenAI's shape, and the Serve deployment that answers them."""

import asyncio
import logging
from typing import Annotated, Any

import ray
from fastapi import APIRouter, FastAPI, File, Form, Header, Query, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from ray import serve
from starlette.exceptions import HTTPException

from actors.bulk.bodies import ChatBody, CompletionBody, first_problem
from actors.bulk.controller import NAMESPACE, controller_name
from actors.bulk.creation import BatchBody, create
from actors.bulk.errors import ApiError, invalid, not_found
from actors.bulk.generation import Generation
from actors.bulk.guard import Guard, Keys
from actors.bulk.state import ENDED, INPUT_LIFE_S, Batches, Files, page, run_store
from actors.bulk.views import batch_view, model_view
from pipeline import logs
from pipeline.config import RunConfig
from pipeline.htmlreport import REPORT_NAME
from pipeline.store.files import Store

logger = logging.getLogger(__name__)
MEGABYTE = 1_000_000
_NAME = 255


class Service:
    """What the routes need: the store, the replicas, the controller of batches."""

    def __init__(self, config: RunConfig, engine: Any, application: str) -> None:
        self.config = config
        self.model = config.serve.model_name or config.model.target
        self.options = config.output.storage_options
        store = Store(config.output.path, self.options)
        self.files, self.batches = Files(store), Batches(store)
        self.generation = Generation(engine, self.model, config.serve.max_queued_requests)
        self.engine = engine
        self._controller = controller_name(application)

    async def upload(
        self, owner: str, upload: UploadFile, purpose: str, life_s: int
    ) -> dict[str, Any]:
        """Store an uploaded file. Raises ApiError."""
        if purpose != "batch":
            raise invalid("purpose: only `batch`", "purpose", "invalid_purpose")
        data = await upload.read()
        stored = sum(meta["bytes"] for meta in await asyncio.to_thread(self.files.all, owner))
        if stored + len(data) > self.config.serve.max_stored_mb * MEGABYTE:
            problem = "the files of this key would be larger than it may store; delete some"
            raise ApiError(429, problem, "insufficient_quota")
        if not data:
            raise invalid("file: it is empty", "file", "empty_file")
        name = (upload.filename or "upload.jsonl")[:_NAME]  # shown to the client, never opened
        put = self.files.put
        return await asyncio.to_thread(put, owner, data, name, purpose, life_s=life_s)

    async def create_batch(self, owner: str, body: BatchBody, again: str | None) -> Any:
        arguments = (self.batches, self.files, self.config, owner, body, again)
        batch_id = await asyncio.to_thread(create, *arguments)
        self.wake()
        return await self.view(owner, batch_id)

    async def view(self, owner: str, batch_id: str) -> Any:
        arguments = (self.batches, self.options, owner, batch_id)
        return await asyncio.to_thread(batch_view, *arguments)

    def wake(self) -> None:
        """Tell the controller; should it be away, it looks for itself when it is back."""
        try:
            ray.get_actor(self._controller, NAMESPACE).wake.remote()
        except ValueError:
            logger.warning("the controller of batches is away")


def make_app(service: Service, keys: Keys) -> FastAPI:
    """The ASGI application."""
    app = FastAPI(title="Draftmill", version="1", docs_url=None, redoc_url=None)
    limit = service.config.serve.max_body_mb * MEGABYTE
    app.add_middleware(Guard, keys=keys, max_body=limit)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unforeseen)
    app.include_router(_models(service))
    app.include_router(_files(service))
    app.include_router(_batches(service))
    return app


def _models(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/healthz")
    async def healthz() -> Any:
        return {"status": "ok"}

    @router.get("/readyz")
    async def readyz() -> Any:
        try:
            stats = await asyncio.wait_for(service.engine.stats.remote(), 5)
        except Exception:
            raise ApiError(503, "no model is ready", "not_ready", retry_after=5) from None
        return {"status": "ready", "in_flight": service.generation.seats.taken, **stats}

    @router.get("/v1/models")
    async def models() -> Any:
        return {"object": "list", "data": [model_view(service.model)]}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> Any:
        if model != service.model:
            raise not_found("model", model)
        return model_view(model)

    @router.post("/v1/chat/completions")
    async def chat(body: ChatBody) -> Any:
        return await service.generation.generate("/v1/chat/completions", body)

    @router.post("/v1/completions")
    async def completions(body: CompletionBody) -> Any:
        return await service.generation.generate("/v1/completions", body)

    return router


def _files(service: Service) -> APIRouter:
    router = APIRouter()
    files = service.files

    @router.post("/v1/files")
    async def upload(
        request: Request,
        file: Annotated[UploadFile, File()],
        purpose: Annotated[str, Form()],
        seconds: Annotated[
            int, Form(alias="expires_after[seconds]", ge=3600, le=30 * 86_400)
        ] = INPUT_LIFE_S,
        anchor: Annotated[
            str, Form(alias="expires_after[anchor]", pattern="^created_at$")
        ] = "created_at",
    ) -> Any:
        return await service.upload(request.state.owner, file, purpose, seconds)

    @router.get("/v1/files")
    async def listing(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
        order: Annotated[str, Query(pattern="^(asc|desc)$")] = "desc",
        purpose: str | None = None,
    ) -> Any:
        found = await asyncio.to_thread(files.all, request.state.owner)
        found = [meta for meta in found if purpose in (None, meta["purpose"])]
        return page(found if order == "asc" else found[::-1], after, limit)

    @router.get("/v1/files/{file_id}")
    async def retrieve(request: Request, file_id: str) -> Any:
        return await asyncio.to_thread(files.get, request.state.owner, file_id)

    @router.get("/v1/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> Any:
        data = await asyncio.to_thread(files.content, request.state.owner, file_id)
        return Response(data, media_type="application/octet-stream")

    @router.delete("/v1/files/{file_id}")
    async def delete(request: Request, file_id: str) -> Any:
        await asyncio.to_thread(files.delete, request.state.owner, file_id)
        return {"id": file_id, "object": "file", "deleted": True}

    return router


def _batches(service: Service) -> APIRouter:
    router = APIRouter()
    batches = service.batches

    @router.post("/v1/batches")
    async def create_batch(
        request: Request,
        body: BatchBody,
        idempotency_key: Annotated[str | None, Header(max_length=256)] = None,
    ) -> Any:
        return await service.create_batch(request.state.owner, body, idempotency_key)

    @router.get("/v1/batches")
    async def listing(
        request: Request,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> Any:
        owner = request.state.owner
        ids = await asyncio.to_thread(batches.ids, owner)
        found = page([{"id": batch_id} for batch_id in ids], after, limit)
        views = [await service.view(owner, item["id"]) for item in found["data"]]
        return {**found, "data": views}

    @router.get("/v1/batches/{batch_id}")
    async def retrieve(request: Request, batch_id: str) -> Any:
        return await service.view(request.state.owner, batch_id)

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel(request: Request, batch_id: str) -> Any:
        owner = request.state.owner
        view = await service.view(owner, batch_id)
        if view["status"] in ENDED:
            problem = f"a batch that is {view['status']} cannot be cancelled"
            raise ApiError(409, problem, "batch_not_cancellable")
        await asyncio.to_thread(batches.cancel, owner, batch_id)
        service.wake()
        return await service.view(owner, batch_id)

    @router.get("/v1/batches/{batch_id}/report", response_class=HTMLResponse)
    async def report(request: Request, batch_id: str) -> Any:
        owner = request.state.owner
        created = await asyncio.to_thread(batches.request, owner, batch_id)
        store = run_store(batches.store, service.options, owner, batch_id)
        if created["task"] is not None:
            store = Store(created["output_uri"], service.options)
        try:
            page_ = await asyncio.to_thread(store.read, REPORT_NAME)
        except FileNotFoundError:
            raise not_found("report", batch_id) from None
        return HTMLResponse(page_)

    return router


async def _api_error(_: Request, error: Any) -> Response:
    return JSONResponse(error.body(), error.status, headers=error.headers())


async def _validation_error(request: Request, error: Any) -> Response:
    problems = error.errors()
    if problems[0]["type"] == "json_invalid":
        told = invalid("The body is not valid JSON.", code="invalid_json")
    else:
        told = first_problem(problems, skip=1)
    return await _api_error(request, told)


async def _http_error(request: Request, error: Any) -> Response:
    """Of the framework: unknown paths and methods, bodies that it could not read."""
    if isinstance(error.__cause__, ApiError):
        return await _api_error(request, error.__cause__)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
    told = ApiError(error.status_code, str(error.detail)[:200], code)
    return await _api_error(request, told)


async def _unforeseen(request: Request, error: Any) -> Response:
    logger.error("unforeseen: %s", type(error).__name__, exc_info=error)
    return await _api_error(request, ApiError(500, "An unforeseen failure.", "internal_error"))


@serve.ingress(None)
class Api:
    """The deployment behind HTTP. It holds no state, so there may be several."""

    def __init__(self, config: RunConfig, engine: Any, application: str) -> None:
        logs.configure(as_json=True)
        self._service = Service(config, engine, application)
        self._keys = Keys(config.serve.keys_file)

    async def close(self) -> int:
        """Take no more interactive requests; how many are still under way."""
        seats = self._service.generation.seats
        seats.closing = True
        return seats.taken

    def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(self._service, self._keys)
