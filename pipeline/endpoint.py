"""The `serve` section of the configuration: what the bulk endpoint adds to a run's settings."""

from pydantic import Field, field_validator

from pipeline.sections import Section

MAX_BODY_MB = 200  # OpenAI's own limit for an uploaded file


class ServeConfig(Section):
    host: str = Field("127.0.0.1", description="Address that the endpoint listens on.")
    port: int = Field(8000, ge=1, le=65535, description="Port of the endpoint.")
    model_name: str | None = Field(
        None, description="Name of the model to clients. Unset: `model.target`."
    )
    keys_file: str | None = Field(
        None,
        description="File of `name sha256` lines, one per API key; `--new-key NAME` adds one. "
        "Unset: no keys, and only this host may listen.",
    )
    max_body_mb: int = Field(
        100, ge=1, le=MAX_BODY_MB, description="Request body at most, in MB: uploads are bodies."
    )
    max_batch_rows: int = Field(
        50_000, ge=1, description="Requests in an input file of a batch at most."
    )
    max_stored_mb: int = Field(
        10_000, ge=1, description="Uploaded files of a key at most, together, in MB."
    )
    max_queued_requests: int = Field(
        256,
        ge=1,
        description="Interactive requests in flight at most; those above are told 429.",
    )
    max_open_batches: int = Field(
        64, ge=1, description="Unfinished batches of a key at most; those above are told 429."
    )
    parallel_batches: int = Field(2, ge=1, description="Batches that run at a time; others wait.")
    allowed_uris: list[str] = Field(
        [],
        description="Folders or URL prefixes that `input_uri` and `output_uri` may lie in; none: "
        "neither is accepted.",
    )
    shutdown_s: float = Field(
        30.0, ge=0, description="Seconds that running requests get when the endpoint stops."
    )

    @field_validator("allowed_uris")
    @classmethod
    def _prefixes_are_absolute(cls, prefixes: list[str]) -> list[str]:
        for prefix in prefixes:
            if not (prefix.startswith("/") or "://" in prefix) or ".." in prefix:
                raise ValueError(f"{prefix!r} is no absolute folder or URL; write one")
        return prefixes
