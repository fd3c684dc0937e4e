"""Languages by BCP 47 code: whether a code is one, its name, and the closest that a model has."""

from collections.abc import Iterable
from dataclasses import dataclass

import langcodes

_CLOSE = 9  # langcodes' distance: other regions and scripts of one language lie below
_UNSPACED = {"Hans", "Hant", "Hani", "Jpan", "Thai", "Laoo", "Khmr", "Mymr"}


def check_language(code: str) -> str:
    """The code, if it is one.

    Raises:
        ValueError: it is none.
    """
    try:
        valid = langcodes.tag_is_valid(code)
    except (TypeError, AttributeError):
        valid = False
    if not valid:
        raise ValueError(f"{code!r} is no BCP 47 code; write one such as en, pt-BR or zh-Hans")
    return code


def language_name(code: str) -> str:
    """English name, such as `Portuguese (Brazil)`."""
    return str(langcodes.Language.get(code).display_name("en"))


def is_spaced(code: str | None) -> bool:
    """Whether the language's script puts spaces between sentences; an unknown one does."""
    return code is None or langcodes.Language.get(code).maximize().script not in _UNSPACED


def closest(code: str, supported: Iterable[str]) -> str | None:
    """The supported code for a language: `zho-Hans` for `zh`, `arb` for `ar`; None for none."""
    found, _ = langcodes.closest_match(code, list(supported), max_distance=_CLOSE)
    return None if found == "und" else found


@dataclass(frozen=True)
class Languages:
    """From what to what; None where the run does not say."""

    source: str | None = None
    target: str | None = None

    def fields(self) -> dict[str, str]:
        """What the template's placeholders stand for; "" for a source that is not told."""
        values = {"source_lang": self.source or "", "target_lang": self.target or ""}
        for name, code in (("source", self.source), ("target", self.target)):
            values[f"{name}_language"] = language_name(code) if code else ""
        return values


LANGUAGE_FIELDS = tuple(Languages().fields())
