"""Attention over a slot cache, ragged over its rows, in the shape of an `AttentionInterface`.

Prompt chunks attend one by one. So do decoding rows on CPU, in compiled code (see `native`);
elsewhere in groups, padded to the longest draft. The query heads that share a K/V head are folded
into the query axis: K and V are read once.
Called with the storage that `SlotCache.update` returned, or what the model made of it.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from pipeline.decoding import native
from pipeline.decoding.latents import Absorbed, beside
from pipeline.decoding.steps import Step, active_step

NAME = "draftmill"
_QUERY_BLOCK = 256  # query tokens that share a mask: none reads keys far behind its own place


def ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from the active step's tokens to their rows.

    Args:
        query: `[1, heads, N, head_dim]`.
        key, value: `[step.num_slots, kv_heads, step.kv_len, head_dim]`; head_dim may differ. Of a
            layer that has `absorbed` (see `latents`), in decode steps: latents and rotated parts.
        sliding_window: positions that a token sees, itself included; None: all before it.
        softcap: bound of the scores, as in Gemma 2.
        s_aux: `[heads]`, one sink logit per head, as in GPT-OSS.

    Returns:
        `[1, N, heads, head_dim of value]`, and None for the weights that are never kept.
    """
    step = active_step()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = _Attend(scale, sliding_window, softcap, s_aux)
    if step.decoding:
        absorbed: Absorbed | None = getattr(module, "absorbed", None)
        if absorbed is None:
            return _decode(step, query, key, value, attend), None
        found = _decode(step, absorbed.query(query), beside(key, value), key, attend)
        return absorbed.value(found), None
    pieces = []
    for i, span in enumerate(step.spans):
        row = span.slot - step.first_slot
        tokens = slice(step.offsets[i], step.offsets[i + 1])
        k, v = key[row : row + 1, :, : span.stop], value[row : row + 1, :, : span.stop]
        pieces.append(_prefill(step, i, query[:, :, tokens], k, v, attend))
    # contiguous as transformers' own is: some models take a view of it
    return torch.cat(pieces, 1) if len(pieces) > 1 else pieces[0].contiguous(), None


def _decode(
    step: Step, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: "_Attend"
) -> torch.Tensor:
    """All rows: `[1, N, heads, head_dim]`."""
    packed = query[0].transpose(0, 1)  # [N, heads, head_dim]
    if native.suits(packed, key, value):
        out = native.attend_rows(
            step,
            packed,
            key,
            value,
            scale=attend.scale,
            window=attend.window,
            softcap=attend.softcap,
            sinks=attend.sinks,
        )
        return out[None]
    return _by_groups(step, packed, key, value, attend)[None]


def _by_groups(
    step: Step, packed: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: "_Attend"
) -> torch.Tensor:
    """All rows, group by group: `[N, heads, head_dim]` to the same."""
    heads, head_dim = packed.shape[1:]
    kv_heads, width = key.shape[1], step.max_count
    fold = heads // kv_heads
    if step.is_even:
        padded = packed.reshape(-1, width, heads, head_dim)
    else:
        padded = packed.new_zeros(len(step.spans), width, heads, head_dim)
        padded[step.span_indices, step.columns] = packed
    # The columns go inside: [rows, kv_heads, fold, width, head_dim]
    folded = padded.view(-1, width, kv_heads, fold, head_dim).permute(0, 2, 3, 1, 4).contiguous()
    out = folded.new_empty(*folded.shape[:4], value.shape[3])
    for index, group in enumerate(step.groups):
        slot = step.spans[group.first].slot - step.first_slot
        rows, slots = slice(group.first, group.last), slice(slot, slot + group.last - group.first)
        q = folded[rows, :, :, : group.width].flatten(2, 3)
        k, v = key[slots, :, : group.kv_len], value[slots, :, : group.kv_len]
        mask = _group_mask(step, index, fold, attend.window, packed.dtype)
        result = attend(q, k, v, mask, fold)
        out[rows, :, :, : group.width] = result.view(len(q), kv_heads, fold, group.width, -1)
    out = out.permute(0, 3, 1, 2, 4).reshape(len(step.spans), width, heads, -1)
    out = out.flatten(0, 1) if step.is_even else out[step.span_indices, step.columns]
    return out.contiguous()


def _prefill(
    step: Step,
    index: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attend: "_Attend",
) -> torch.Tensor:
    """One span: query `[1, heads, n, head_dim]` -> `[1, n, heads, value_dim]`."""
    heads, kv_heads = query.shape[1], key.shape[1]
    fold = heads // kv_heads
    span = step.spans[index]
    windowed = attend.window is not None and attend.window < span.stop
    if span.start == 0 and not windowed and attend.is_plain:
        k, v = (x.repeat_interleave(fold, 1) if fold > 1 else x for x in (key, value))
        out = scaled_dot_product_attention(query, k, v, is_causal=True, scale=attend.scale)
        return out.transpose(1, 2)
    pieces = []
    for start in range(span.start, span.stop, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, span.stop)
        first = 0 if attend.window is None else max(0, start + 1 - attend.window)
        q = query[:, :, start - span.start : stop - span.start]
        q = q.reshape(1, kv_heads, fold * (stop - start), -1)
        mask = _block_mask(step, (start, stop, first), fold, attend.window, query.dtype)
        out = attend(q, key[:, :, first:stop], value[:, :, first:stop], mask, fold)
        pieces.append(out.reshape(1, heads, stop - start, -1))
    return torch.cat(pieces, 2).transpose(1, 2)


class _Attend:
    """Attention proper, of one layer's kind: `softmax(scale * q k + mask) v`."""

    def __init__(
        self,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        self.scale, self.window, self.softcap, self.sinks = scale, window, softcap, sinks

    @property
    def is_plain(self) -> bool:
        """Whether torch's fused attention can do it."""
        return self.softcap is None and self.sinks is None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        fold: int,
    ) -> torch.Tensor:
        """query `[rows, kv_heads, fold * n, head_dim]`, mask `[rows, 1, fold * n, kv_len]`."""
        if self.is_plain:
            return scaled_dot_product_attention(query, key, value, mask, scale=self.scale)
        scores = torch.matmul(query, key.transpose(2, 3)).float() * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        scores = scores + mask
        if self.sinks is None:
            weights = torch.softmax(scores, -1)
        else:  # a sink takes part in the softmax and is then dropped
            sinks = (
                self.sinks.float()
                .view(key.shape[1], fold, 1)
                .expand(-1, -1, query.shape[2] // fold)
            )
            sinks = sinks.reshape(1, key.shape[1], -1, 1).expand(len(query), -1, -1, 1)
            weights = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
        return torch.matmul(weights.to(value.dtype), value)


def _group_mask(
    step: Step, index: int, fold: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Additive mask `[rows, 1, fold * width, kv_len]`, made once per step and kind of layer."""
    key = (index, fold, window, dtype)
    if key not in step.masks:
        group = step.groups[index]
        spans = step.spans[group.first : group.last]
        # Columns beyond a span see what its last token sees: anything but nothing, whose softmax
        # would be nan.
        limits = [[min(s.start + j, s.stop - 1) for j in range(group.width)] for s in spans]
        positions = torch.tensor(limits, device=step.device)
        mask = _additive(positions, group.kv_len, window, dtype)
        step.masks[key] = mask.repeat(1, fold, 1)[:, None]
    return step.masks[key]


def _block_mask(
    step: Step, block: tuple[int, int, int], fold: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Additive mask `[1, 1, fold * (stop - start), stop - first]` of tokens `[start, stop)` over
    places `[first, stop)`; `block` is (start, stop, first)."""
    key = (block, fold, window, dtype)
    if key not in step.masks:
        start, stop, first = block
        positions = torch.arange(start, stop, device=step.device)
        mask = _additive(positions[None], stop, window, dtype)[..., first:]
        step.masks[key] = mask.repeat(1, fold, 1)[:, None]
    return step.masks[key]


def _additive(
    positions: torch.Tensor, kv_len: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """0 where the token at `positions` `[rows, n]` sees a place, -inf elsewhere `[.., kv_len]`."""
    visible = visible_places(positions, kv_len, window)
    return torch.zeros(visible.shape, dtype=dtype, device=positions.device).masked_fill_(
        ~visible, -torch.inf
    )


def visible_places(positions: torch.Tensor, kv_len: int, window: int | None) -> torch.Tensor:
    """Which of the places 0 to `kv_len - 1` tokens see: bool `[*positions.shape, kv_len]`.

    A token sees those up to its own, the last `window` of them if that is given.
    """
    places = torch.arange(kv_len, device=positions.device)
    visible = places <= positions[..., None]
    if window is not None:
        visible &= places > positions[..., None] - window
    return visible


AttentionInterface.register(NAME, ragged_attention)
