"""The training loop, its data and its losses."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from tests.zoo import corpus

BATCH = 8
LENGTH = 160  # tokens of a window, as long as any row of the tests
_OWN = 48  # windows that a model writes itself
_OWN_PROMPT = 8
RATE = 4e-3
WIDE_RATE = 1.5e-3  # of models several times as wide


def train(
    parameters: Iterable[torch.nn.Parameter],
    loss_of: Callable[[Tensor], Tensor],
    windows: Callable[[], Tensor],
    *,
    steps: int,
    rate: float = RATE,
) -> None:
    """Minimise `loss_of` windows `[BATCH, LENGTH]` of token ids."""
    trained = list(parameters)
    optimizer = torch.optim.AdamW(trained, rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(windows()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()


def text_windows(ids: Tensor) -> Callable[[], Tensor]:
    """From anywhere in the text."""
    pieces = ids.unfold(0, LENGTH, 1)
    return lambda: pieces[torch.randint(len(pieces), (BATCH,))]


def mixed_windows(model: Any, ids: Tensor) -> Callable[[], Tensor]:
    """Half of the text, half of what the model writes greedily itself: drafters must know both."""
    written = _write(model, ids)
    from_text = text_windows(ids)

    def windows() -> Tensor:
        own = written[torch.randint(len(written), (BATCH // 2,))]
        return torch.cat([own, from_text()[BATCH // 2 :]])

    return windows


@torch.no_grad()
def _write(model: Any, ids: Tensor) -> Tensor:
    """`[_OWN, LENGTH]`; goes on behind end tokens."""
    starts = torch.randint(len(ids) - _OWN_PROMPT, (_OWN, 1))
    new = written = ids[starts + torch.arange(_OWN_PROMPT)]
    cache = None
    while written.shape[1] < LENGTH:
        output = model(new, cache=cache, use_cache=True)
        cache, new = output.cache, output.logits[:, -1:].argmax(-1)
        written = torch.cat([written, new], 1)
    return written


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Of logits `[batch, length, vocab]` for the tokens that follow each."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def imitation_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Cross-entropy to the probabilities that the teacher's logits give."""
    return -(teacher.softmax(-1) * log_softmax(logits, -1)).sum(-1).mean()


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load(folder: Path) -> Any:
    """A trained model, frozen."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def train_on_text(model: Any, tokenizer: Any, *, steps: int, rate: float = RATE) -> None:
    """Make a causal language model know the text."""
    model.train()
    train(
        model.parameters(),
        lambda ids: next_token_loss(model(ids, use_cache=False).logits, ids),
        text_windows(corpus.token_ids(tokenizer)),
        steps=steps,
        rate=rate,
    )
