"""Prints the README's config reference from the code: `python tests/readme_tables.py`."""

from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pipeline.config import RunConfig


def config_rows(model: Any = RunConfig, prefix: str = "") -> list[tuple[str, FieldInfo]]:
    """(dotted key, field) of every key that a user sets."""
    rows = []
    for name, field in model.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and hasattr(section, "model_fields"):
            rows += config_rows(section, f"{prefix}{name}.")
        elif prefix:
            rows.append((f"{prefix}{name}", field))
    return rows


def config_table() -> str:
    """Markdown table: key, default, meaning."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for key, field in config_rows():
        default = "required" if field.default is PydanticUndefined else f"`{field.default}`"
        default = {"`None`": "-"}.get(default, default)
        lines.append(f"| `{key}` | {default} | {field.description} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(config_table())
