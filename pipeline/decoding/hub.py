"""The Hugging Face hub: which commit a name means now, and its files. Imports neither torch nor
transformers; without a connection the local cache answers."""

from pathlib import Path

from pipeline.errors import ConfigError

CONNECT_SECONDS = 1.5  # one try: huggingface_hub's own retries take 23 s when there is no network
_TEXT_FILES = ("*.json", "*.txt", "*.model", "*.jinja")


def find_commit(hub_id: str, revision: str | None, key: str) -> str:
    """The commit of `hub_id` at `revision`, whose config.json is then in the cache.

    Raises:
        ConfigError: no such model or revision, gated, or neither reachable nor in the cache.
    """
    from huggingface_hub import errors as hub
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        commit = _ask_hub(hub_id, revision)
        if commit is not None:
            hf_hub_download(hub_id, "config.json", revision=commit, etag_timeout=CONNECT_SECONDS)
            return commit
    except hub.GatedRepoError:
        raise ConfigError(key, f"{hub_id} is gated; accept its terms and set HF_TOKEN") from None
    except hub.RepositoryNotFoundError:
        problem = f"no folder and no hub model {hub_id}; check it, or set HF_TOKEN if private"
        raise ConfigError(key, problem) from None
    except hub.RevisionNotFoundError:
        problem = f"{hub_id} has no revision {revision}; choose a branch, tag or commit of it"
        raise ConfigError("model.revision", problem) from None
    except hub.EntryNotFoundError:
        problem = f"{hub_id} has no config.json; choose a model in transformers' format"
        raise ConfigError(key, problem) from None
    cached = try_to_load_from_cache(hub_id, "config.json", revision=revision)
    if not isinstance(cached, str):
        raise ConfigError(
            key,
            f"no folder {hub_id}, no hub model of that name in the cache, and the hub cannot be "
            "reached; check the path, or the connection and HF_HUB_OFFLINE",
        )
    return Path(cached).parent.name  # .../snapshots/<commit>/config.json


def _ask_hub(hub_id: str, revision: str | None) -> str | None:
    """The hub's answer; None where it gives none. Errors that are an answer pass through."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub import errors as hub

    if constants.HF_HUB_OFFLINE:
        return None
    answers = (hub.RepositoryNotFoundError, hub.RevisionNotFoundError, hub.EntryNotFoundError)
    try:
        url = hf_hub_url(hub_id, "config.json", revision=revision)
        return get_hf_file_metadata(url, timeout=CONNECT_SECONDS).commit_hash
    except answers:
        raise
    except Exception:  # the HTTP client's own classes: no route, timeout, proxy, a 5xx
        return None


def cached_snapshot(hub_id: str, commit: str) -> Path:
    """Where the cache keeps the files of a commit that `find_commit` found, all or some."""
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(hub_id, "config.json", revision=commit)).parent


def download(hub_id: str, commit: str, key: str) -> Path:
    """Download the files that transformers loads; nothing is fetched twice.

    Raises:
        ConfigError: if the files cannot be had.
    """
    from huggingface_hub import snapshot_download

    try:
        for weights in ("*.safetensors", "*.bin"):
            folder = Path(
                snapshot_download(
                    hub_id,
                    revision=commit,
                    allow_patterns=[*_TEXT_FILES, weights],
                    ignore_patterns=["*/*"],  # subfolders hold other formats of the same weights
                )
            )
            if any(folder.glob(weights)):
                return folder
    except OSError as error:  # huggingface_hub's own errors are OSErrors
        reason = " ".join(str(error).split())
        raise ConfigError(
            key, f"cannot download {hub_id}: {reason}; check the connection"
        ) from None
    raise ConfigError(
        key, f"{hub_id} has no weights in a format that can be loaded; choose another"
    )
