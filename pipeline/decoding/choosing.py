"""Chooses tokens for many rows in one batch, each exactly as `Sampler` chooses for its row alone.

Rows are grouped by rule, so that a step costs a few operations on blocks of logits rather than a
chain of processors per row. A choice depends on the row's own logits, settings, key and index
only, never on its neighbours in the batch.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.config import DecodingConfig
from pipeline.decoding.sampling import coupled_choice, gumbel_noise_block, processors
from pipeline.decoding.shortlist import Rule, first_length, rule_of, shortlist
from pipeline.errors import RowError
from pipeline.records import SamplingParams

# In place of a token, where the row has none to choose: no token id, so no draft token equals it.
ALL_FORBIDDEN = -1
BAD_LOGITS = -2

_TILES = 64
_LONGER = 16  # times as long is the list for a row whose first list missed survivors
_BLOCK = 1 << 16  # scores perturbed at a time on a CPU: their hashes stay in a core's cache
_BLOCK_GPU = 1 << 24


class Position(NamedTuple):
    """Where one token is chosen.

    `key`: `noise_key(params.seed, row_key)`. `t`: index of the generated token. `tokens`: the row's
    prompt and completion. `drafted`: draft tokens between those and this position. The last two
    are read under a repetition penalty only; positions of one row share one `tokens` object.
    """

    params: SamplingParams
    key: int
    t: int
    tokens: Sequence[int]
    drafted: Sequence[int]


class Chooser:
    """Chooses among the tokens of one vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def choose(self, logits: Tensor, positions: Sequence[Position]) -> list[int]:
        """The token at each of n positions.

        Args:
            logits: `[n, vocab]`, of any float dtype, on any device.

        Returns:
            n token ids; `ALL_FORBIDDEN` or `BAD_LOGITS` for a row at fault (see `choice_error`),
            which leaves the others alone.

        Raises:
            ValueError: if the shape is another.
        """
        self._check(logits, positions)
        groups = _by_rule(positions)
        if len(groups) == 1:
            (rule,) = groups
            return self._choose(rule, logits, positions).tolist()
        chosen = torch.empty(len(positions), dtype=torch.int64, device=logits.device)
        for rule, at, own in _parts(groups, positions, logits.device):
            chosen[at] = self._choose(rule, logits[at], own)
        return chosen.tolist()

    def process(self, logits: Tensor, positions: Sequence[Position]) -> Tensor:
        """Scores after the row's processors, float32 `[n, vocab]`; -inf where forbidden.

        Their softmax is what tokens are drawn from. At temperature 0 the highest is the choice.

        Raises:
            ValueError: if the shape of logits is not `[n, vocab]`.
        """
        self._check(logits, positions)
        scores = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        for rule, at, own in _parts(_by_rule(positions), positions, logits.device):
            adjusted = self._adjusted(rule, logits[at], own).float()
            scores[at] = torch.cat([_warped(rule, row[None]) for row in adjusted])
        return scores

    def choose_processed(self, scores: Tensor, positions: Sequence[Position]) -> list[int]:
        """The token at each of n positions from what `process` gives: `[n, vocab]`.

        Returns:
            As `choose`.
        """
        self._check(scores, positions)
        chosen = torch.empty(len(positions), dtype=torch.int64, device=scores.device)
        for rule, at, own in _parts(_by_rule(positions), positions, scores.device):
            greedy = rule.temperature == 0
            chosen[at] = (
                _or_fault(scores[at].argmax(1), scores[at].amax(1))
                if greedy
                else _choose_widely(1.0, scores[at], own)
            )
        return chosen.tolist()

    def _check(self, logits: Tensor, positions: Sequence[Position]) -> None:
        if logits.shape != (len(positions), self._vocab_size):
            expected = f"[{len(positions)}, {self._vocab_size}]"
            raise ValueError(f"logits must be {expected}, not {list(logits.shape)}")

    def _choose(self, rule: Rule, logits: Tensor, positions: Sequence[Position]) -> Tensor:
        logits = self._adjusted(rule, logits, positions)
        if rule.temperature == 0:
            tokens = _argmax(logits)
            return _or_fault(tokens, logits.gather(1, tokens[:, None]).squeeze(1))
        if rule.narrows:
            return _choose_narrowly(rule, logits, positions)
        return _choose_widely(rule.temperature, logits, positions)

    def _adjusted(self, rule: Rule, logits: Tensor, positions: Sequence[Position]) -> Tensor:
        """Logits after repetition penalty and bans; the same tensor where there are none."""
        if rule.repetition_penalty != 1.0:
            logits = _penalised(rule.repetition_penalty, logits, positions)
        if rule.banned_tokens:
            banned = torch.tensor(rule.banned_tokens, device=logits.device)
            logits = logits.index_fill(1, banned, -torch.inf)
        return logits


def choice_error(code: int) -> RowError:
    """The error of a row whose choice is one of the negative codes."""
    if code == ALL_FORBIDDEN:
        return RowError("no_token", "every token is forbidden; ban fewer tokens")
    return RowError("bad_logits", "the model's logits are not finite; try another dtype")


def _by_rule(positions: Sequence[Position]) -> dict[Rule, list[int]]:
    """Indices of the positions that share a rule. Rows mostly share the object of their params."""
    by_params: dict[int, list[int]] = {}
    for i, position in enumerate(positions):
        by_params.setdefault(id(position.params), []).append(i)
    groups: dict[Rule, list[int]] = {}
    for at in by_params.values():
        groups.setdefault(rule_of(positions[at[0]].params), []).extend(at)
    return groups


def _parts(
    groups: dict[Rule, list[int]], positions: Sequence[Position], device: torch.device
) -> Iterator[tuple[Rule, Tensor, list[Position]]]:
    for rule, at in groups.items():
        yield rule, torch.tensor(at, device=device), [positions[i] for i in at]


def _penalised(penalty: float, logits: Tensor, positions: Sequence[Position]) -> Tensor:
    """Logits in float32, those of each row's own tokens nearer to forbidden: what transformers'
    processor gives, without its copies of the block and for rows of any lengths."""
    rows, tokens = (ids.to(logits.device) for ids in _seen(positions, logits.shape[1]))
    scores = logits.to(torch.float32, copy=True)
    seen = scores[rows, tokens]
    scores[rows, tokens] = torch.where(seen < 0, seen * penalty, seen / penalty)
    return scores


def _seen(positions: Sequence[Position], vocab: int) -> tuple[Tensor, Tensor]:
    """Pairs of a position's index and a token before it, both int64 `[pairs]`."""
    shared: dict[int, Tensor] = {}
    histories = []
    for position in positions:
        history = shared.get(id(position.tokens))
        if history is None:
            history = torch.tensor(position.tokens, dtype=torch.int64)
            shared[id(position.tokens)] = history
        if position.drafted:
            history = torch.cat([history, torch.tensor(position.drafted)])
        histories.append(history)
    lengths = torch.tensor([len(history) for history in histories])
    rows, tokens = torch.arange(len(positions)).repeat_interleave(lengths), torch.cat(histories)
    known = tokens < vocab  # embeddings may outnumber logits
    return rows[known], tokens[known]


def _or_fault(tokens: Tensor, best: Tensor) -> Tensor:
    """The tokens, or a code where the best logit `[n]` tells that there is nothing to choose from.

    A NaN anywhere in a row is its best logit: argmax, amax and topk all take it for the largest.
    """
    codes = torch.where(best == -torch.inf, ALL_FORBIDDEN, BAD_LOGITS)
    return torch.where(best.isfinite(), tokens, codes)


def _argmax(logits: Tensor) -> Tensor:
    """The first of the highest logits, as `torch.argmax` finds it in float32, `[n]`.

    In tiles, since on a CPU `amax` is vectorised and `argmax` is not (8 times slower).
    """
    count, vocab = logits.shape
    if vocab % _TILES:
        return logits.float().argmax(1)
    tiles = logits.reshape(count, _TILES, -1)
    tile = tiles.amax(2).argmax(1)
    rows = torch.arange(count, device=logits.device)
    return tile * tiles.shape[2] + tiles[rows, tile].argmax(1)


def _choose_narrowly(rule: Rule, logits: Tensor, positions: Sequence[Position]) -> Tensor:
    """Among the survivors of top-k, top-p and min-p, `[n]`; by the warpers where lists fail."""
    chosen, sure = _choose_listed(rule, first_length(rule), logits, positions)
    best = logits.amax(1)
    for i in torch.nonzero(~sure & best.isfinite()).flatten().tolist():
        scores = _warped(rule, logits[i : i + 1].float())
        exact = coupled_choice(positions[i].key, positions[i].t, scores[0])
        if exact is not None:
            chosen[i] = exact
    return _or_fault(chosen, best)


def _choose_listed(
    rule: Rule, length: int, logits: Tensor, positions: Sequence[Position]
) -> tuple[Tensor, Tensor]:
    """Choices from lists of the most probable tokens, and whether those are certain; both `[n]`."""
    vocab = logits.shape[1]
    found = shortlist(logits, rule, length)
    noise = gumbel_noise_block([(p.key, p.t) for p in positions], found.tokens)
    perturbed = noise.add_(found.scores).where(found.possible, -torch.inf)
    highest = perturbed == perturbed.amax(1, keepdim=True)
    chosen = found.tokens.where(highest, vocab).amin(1)  # the first of equals, as argmax
    certain = (found.certain & (found.tokens == chosen[:, None])).any(1)
    longer = _LONGER * length
    at = torch.nonzero(~found.complete).flatten()
    if longer < vocab and len(at):
        own = [positions[i] for i in at.tolist()]
        chosen[at], certain[at] = _choose_listed(rule, longer, logits[at], own)
        return chosen, certain
    return chosen, certain & found.complete


def _choose_widely(temperature: float, logits: Tensor, positions: Sequence[Position]) -> Tensor:
    """Among all tokens, `[n]`."""
    vocab = logits.shape[1]
    tokens = torch.arange(vocab, device=logits.device).unsqueeze(0)
    rows = max(1, (_BLOCK if logits.device.type == "cpu" else _BLOCK_GPU) // vocab)
    chosen = []
    for start in range(0, len(positions), rows):
        part = slice(start, start + rows)
        noise = gumbel_noise_block([(p.key, p.t) for p in positions[part]], tokens)
        scores = logits[part].float() / temperature
        chosen.append(noise.add_(scores).argmax(1))
    return _or_fault(torch.cat(chosen), logits.amax(1))


def _warped(rule: Rule, logits: Tensor) -> Tensor:
    """Scores of one row `[1, vocab]` after temperature, top-k, top-p and min-p.

    One row at a time, as `Sampler` does: the sums of top-p may round otherwise in a batch.
    """
    for warper in processors(rule._replace(repetition_penalty=1.0, banned_tokens=())):
        logits = warper(None, logits)
    return logits


def params_of(decoding: DecodingConfig, timeout_s: float | None = None) -> SamplingParams:
    """The settings that a run's config gives to rows without their own."""
    return SamplingParams(
        max_new_tokens=decoding.max_new_tokens,
        temperature=decoding.temperature,
        top_k=decoding.top_k,
        top_p=decoding.top_p,
        min_p=decoding.min_p,
        repetition_penalty=decoding.repetition_penalty,
        banned_tokens=tuple(decoding.banned_tokens),
        stop=tuple(decoding.stop),
        seed=decoding.seed,
        timeout_s=timeout_s,
    )


def validate_params(params: SamplingParams, vocab_size: int) -> None:
    """Refuse settings that no row can be decoded with.

    Raises:
        RowError: `bad_params`; the message names the field.
    """
    for field, fits, wanted in _limits(params, vocab_size):
        if not fits:
            problem = f"{field} is {getattr(params, field)!r}; it must be {wanted}"
            raise RowError("bad_params", problem)


def _limits(params: SamplingParams, vocab_size: int) -> Iterator[tuple[str, bool, str]]:
    """Field, whether its value fits, and what it must be. NaN fits nowhere."""
    p, inside = params, f"token ids from 0 to {vocab_size - 1}"
    yield "max_new_tokens", p.max_new_tokens >= 1, "at least 1"
    yield "temperature", 0 <= p.temperature < math.inf, "a finite number, at least 0"
    yield "top_k", p.top_k is None or p.top_k >= 1, "at least 1"
    yield "top_p", p.top_p is None or 0 < p.top_p <= 1, "above 0 and at most 1"
    yield "min_p", p.min_p is None or 0 <= p.min_p <= 1, "between 0 and 1"
    yield "repetition_penalty", 0 < p.repetition_penalty < math.inf, "a finite number above 0"
    yield "banned_tokens", all(0 <= t < vocab_size for t in p.banned_tokens), inside
    yield "banned_tokens", len(set(p.banned_tokens)) < vocab_size, "fewer than all tokens"
    yield "end_tokens", all(0 <= t < vocab_size for t in p.end_tokens or ()), inside
    yield "stop", all(p.stop), "strings that are not empty"
    yield "timeout_s", p.timeout_s is None or p.timeout_s > 0, "above 0 seconds"
