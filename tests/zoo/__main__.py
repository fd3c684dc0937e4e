"""Train all members that are not there yet, and say what each took."""

import argparse
import json
import random
import time
from pathlib import Path

from tests import zoo
from tests.zoo import corpus

_PROMPTS, _TOKENS = 48, 40


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.zoo", description=__doc__)
    parser.add_argument("--wide", action="store_true", help="those for benchmarks too")
    parser.add_argument("--prompts", type=Path, help="write prompts of the text they know here")
    options = parser.parse_args()
    for name in [*zoo.RECIPES, *(zoo.WIDE if options.wide else ())]:
        started = time.monotonic()
        folder = zoo.path(name)
        seconds = time.monotonic() - started
        megabytes = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        print(f"{name:22} {seconds:6.1f} s {megabytes:6.2f} MB  {folder}", flush=True)
    if options.prompts:
        options.prompts.write_text("".join(map(_line, _prompts())), encoding="utf-8")


def _line(prompt: str) -> str:
    return json.dumps({"prompt": prompt, "task": "known"}) + "\n"


def _prompts() -> list[str]:
    """From anywhere in the text."""
    tokenizer = corpus.make_text_tokenizer()
    ids, dice = corpus.token_ids(tokenizer).tolist(), random.Random(0)
    starts = [dice.randrange(len(ids) - 3 * _TOKENS) for _ in range(_PROMPTS)]
    return [tokenizer.decode(ids[at : at + _TOKENS], skip_special_tokens=True) for at in starts]


if __name__ == "__main__":
    main()
