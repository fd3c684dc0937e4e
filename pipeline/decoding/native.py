"""What is compiled for decode steps on CPU: builds `kernels.c` once per machine and calls it.

torch's attention reads K/V of a decode step at a third of the memory's speed, and must pad rows to
a common length; its copies into the cache and its norms take many calls for little work. Where no
C compiler is at hand, torch serves all the same: `available()` tells.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from pipeline.decoding.conversion import cache_root
from pipeline.decoding.steps import Span, Step

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.c")
# Sums may be taken in any order, which is what makes them fast. Never -ffast-math: a library linked
# with it makes the whole process flush subnormal numbers to zero. OpenMP's symbols are torch's: a
# second runtime would compete with it for the cores.
_FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)
_DTYPES = (torch.float32, torch.bfloat16)
_COMPILE_SECONDS = 120

_POINTERS = ("query", "key", "value", "out", "slots", "starts", "offsets", "sinks")
_COUNTS = ("rows", "heads", "kv_heads", "head_dim", "value_dim", "query_token", "query_head")
_STRIDES = ("key_slot", "key_head", "key_place", "value_slot", "value_head", "value_place")

_WRITE_POINTERS = ("new_key", "new_value", "key", "value", "slots", "starts", "offsets")
_WRITE_COUNTS = (
    *("rows", "kv_heads", "places"),
    *("key_token", "key_head", "value_token", "value_head", "key_bytes", "value_bytes"),
    *("key_place", "value_place"),
)
_NORM = (  # arguments of rms_norm
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),
    *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_float),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int),
)


class _Task(ctypes.Structure):
    """`Task` of kernels.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in (*_COUNTS, *_STRIDES, "window")),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("is_bfloat16", ctypes.c_int),
        ("threads", ctypes.c_int),
    ]


class _Write(ctypes.Structure):
    """`Write` of kernels.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _WRITE_POINTERS),
        *((name, ctypes.c_int64) for name in _WRITE_COUNTS),
    ]


def suits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the compiled attention can take these tensors and is available."""
    tensors = (query, key, value)
    return (
        query.device.type == "cpu"
        and query.dtype in _DTYPES
        and all(t.dtype == query.dtype and t.stride(-1) == 1 for t in tensors)
        and available()
    )


def attend_rows(
    step: Step,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of all rows of a decode step; what `suits` accepts.

    Args:
        query: `[N, heads, head_dim]`, packed.
        key, value: `[step.num_slots, kv_heads, step.kv_len, head_dim]`; head_dim may differ.
        sinks: `[heads]`.

    Returns:
        `[N, heads, head_dim of value]`.

    Raises:
        MemoryError: no room for scores.
    """
    out = query.new_empty(query.shape[0], query.shape[1], value.shape[3])
    sinks = None if sinks is None else sinks.float().contiguous()
    shapes = (query.shape, query.stride(), key.shape, key.stride(), value.shape, value.stride())
    alike = (*shapes, query.dtype, scale, window, softcap)
    task = step.tasks.get(alike)  # of a layer like this one: only the data are elsewhere
    if task is None:
        task = step.tasks[alike] = _task(step, query, key, value, scale, window, softcap)
    task.query, task.key, task.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
    task.out, task.sinks = out.data_ptr(), None if sinks is None else sinks.data_ptr()
    if _compiled().attend_rows(ctypes.byref(task)):
        raise MemoryError("can't allocate memory for attention scores")
    return out


def _task(
    step: Step,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> _Task:
    slots, starts, offsets = (t.data_ptr() for t in step.row_tensors)
    return _Task(
        *(None, None, None, None, slots, starts, offsets, None),
        *(len(step.spans), query.shape[1], key.shape[1], query.shape[2], value.shape[3]),
        *query.stride()[:2],
        *key.stride()[:3],
        *value.stride()[:3],
        window or 0,
        scale,
        softcap or 0.0,
        query.dtype == torch.bfloat16,
        torch.get_num_threads(),
    )


def write_rows(
    step: Step,
    storage: tuple[torch.Tensor, torch.Tensor],
    new: tuple[torch.Tensor, torch.Tensor],
) -> bool:
    """Copy the K and V of a decode step to their places.

    Args:
        storage: of K and of V, `[slots, kv_heads, places, size]`, contiguous but for what may lie
            between places; the sizes may differ.
        new: `[kv_heads, N, size]` of the same dtype.

    Returns:
        Whether it could: nothing is written where not.

    Raises:
        IndexError: if the step reaches beyond the storage.
    """
    (k, v), (new_k, new_v) = storage, new
    fits = all(
        x.device.type == "cpu" and x.stride(2) == 1 and x.dtype == y.dtype
        for x, y in ((new_k, k), (new_v, v))
    )
    if not fits or not available():
        return False
    alike = (k.shape, v.shape, k.stride(), v.stride(), k.dtype, new_k.stride(), new_v.stride())
    write = step.tasks.get(alike)
    if write is None:
        if step.kv_len > k.shape[2] or step.first_slot + step.num_slots > k.shape[0]:
            raise IndexError(f"the step reaches beyond {k.shape[0]} slots of {k.shape[2]} places")
        slots, starts, offsets = (t.data_ptr() for t in step.row_tensors)
        strides = [n * x.itemsize for x in new for n in (x.stride(1), x.stride(0))]
        write = step.tasks[alike] = _Write(
            *(None, None, None, None, slots, starts, offsets),
            *(len(step.spans), k.shape[1], k.shape[2], *strides),
            *(x.shape[3] * x.itemsize for x in storage),
            *(x.stride(2) * x.itemsize for x in storage),
        )
    first = step.first_slot
    write.new_key, write.new_value = new_k.data_ptr(), new_v.data_ptr()
    write.key = k.data_ptr() + first * k.stride(0) * k.itemsize
    write.value = v.data_ptr() + first * v.stride(0) * v.itemsize
    _compiled().write_rows(ctypes.byref(write))
    return True


def rms_norm(
    x: torch.Tensor, scale: torch.Tensor | None, eps: float, *, rounds: bool
) -> torch.Tensor | None:
    """`x / sqrt(mean(x^2) + eps) * scale` over the last axis, computed in float32.

    Args:
        x: `[..., size]`.
        scale: float32 `[size]`, contiguous; None: 1.
        rounds: to the dtype of `x` before the scale too, as Llama does.

    Returns:
        The same shape and dtype, contiguous; None if it is none of the dtypes or not on CPU.
    """
    if x.device.type != "cpu" or x.dtype not in _DTYPES or not available():
        return None
    size = stride = x.shape[-1]
    if not x.is_contiguous():
        if _is_rows(x):
            stride = x.stride(-2)
        else:
            x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    _compiled().rms_norm(
        x.data_ptr(),
        None if scale is None else scale.data_ptr(),
        out.data_ptr(),
        x.numel() // size if size else 0,
        stride,
        size,
        eps,
        x.dtype == torch.bfloat16,
        rounds,
        torch.get_num_threads(),
    )
    return out


def _is_rows(x: torch.Tensor) -> bool:
    """Whether it is rows a constant stride apart, such as columns cut out of a matrix."""
    return x.dim() > 1 and x.stride(-1) == 1 and x.numel() == x.shape[-1] * x.shape[-2]


@functools.cache
def available() -> bool:
    """Whether the compiled attention could be built and computes what torch computes."""
    if _library() is None:
        return False
    if all(map(_agrees, _DTYPES)):
        return True
    logger.warning("the compiled attention computes something else here: torch's serves instead")
    return False


def _agrees(dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    lengths, width, heads, kv_heads, size = (5, 40), 3, 4, 2, 24
    spans = [Span(i, length - width, [0] * width) for i, length in enumerate(lengths)]
    step = Step(spans, decoding=True)
    key, value = (torch.randn(2, kv_heads, 40, size, generator=generator).to(dtype) for _ in "kv")
    query = torch.randn(2 * width, heads, size, generator=generator).to(dtype)
    out = attend_rows(step, query, key, value, scale=0.2).float()
    for i, length in enumerate(lengths):
        rows = slice(i * width, (i + 1) * width)
        k, v = (part[i, :, :length].float().repeat_interleave(2, 0) for part in (key, value))
        mask = torch.ones(width, length, dtype=torch.bool).tril(length - width)
        q = query[rows].float().transpose(0, 1)
        expected = scaled_dot_product_attention(q, k, v, mask, scale=0.2).transpose(0, 1)
        if (out[rows] - expected).abs().max() > (1e-5 if dtype == torch.float32 else 2e-2):
            return False
    return True


def _compiled() -> ctypes.CDLL:
    """The library, where it is `available`."""
    library = _library()
    assert library is not None
    return library


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(_build()))
        library.rms_norm.argtypes = _NORM
        library.rms_norm.restype = library.write_rows.restype = None
        return library
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        reason = " ".join(str(detail).split())[:200]
        logger.info("decode steps on CPU: torch's operators (no compiled ones: %s)", reason)
        return None


def _build() -> Path:
    """The shared library, compiled for this CPU unless it is there already."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise OSError("no C compiler; install gcc for faster decoding")
    identity = [_SOURCE.read_text(encoding="utf-8"), *_FLAGS, platform.machine(), _cpu()]
    name = hashlib.blake2b("\n".join(identity).encode(), digest_size=8).hexdigest()
    folder = cache_root() / "native"
    path = folder / f"kernels-{name}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # several actors may build at once
            built = Path(scratch) / path.name
            command = [*compiler.split(), *_FLAGS, "-o", str(built), str(_SOURCE), "-lm"]
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS
            )
            built.replace(path)
    return path


def _cpu() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((x for x in lines if x.startswith(("flags", "Features"))), "")
