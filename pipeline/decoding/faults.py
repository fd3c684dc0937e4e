"""Which exceptions mean that memory is short, and which that the device is lost."""

import gc

import torch

from pipeline.errors import EngineError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether less work at once may succeed."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate" in str(error)


def release_memory() -> None:
    """Give back what is no longer referenced."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def check_device(error: BaseException) -> None:
    """Tell errors that leave a GPU unusable for this process.

    Raises:
        EngineError: for such an error.
    """
    if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
        raise EngineError(f"the device failed: {type(error).__name__}: {error}") from error
