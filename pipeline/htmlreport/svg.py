"""Charts as inline SVG, in the colours of the page's style sheet (classes `s1`, `s2`, ...).

Every function takes plain numbers and returns a whole `<svg>`; a mark's `<title>` is its tooltip.
"""

import math
from collections.abc import Callable, Sequence
from html import escape

from markupsafe import Markup

WIDTH, HEIGHT = 400, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 8, 12, 34
Format = Callable[[float], str]


def short(value: float) -> str:
    """A number in few characters: `1.2M`, `34k`, `5.6`, `0.07`."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.3g}"


def bars(
    values: Sequence[float],
    labels: Sequence[str],
    *,
    name: str,
    x_title: str,
    titles: Sequence[str],
    whole: bool = False,
) -> Markup:
    """Vertical bars, one per value; every label that finds room is written below its bar."""
    frame = _Frame(name, x_title, max(values, default=0.0), whole)
    step = frame.width / max(len(values), 1)
    thick = min(step * 0.84, 48.0)
    every = max(1, -(-len(values) // 8))
    for i, (value, label, title) in enumerate(zip(values, labels, titles, strict=True)):
        centre = _LEFT + (i + 0.5) * step
        frame.bar(centre - thick / 2, thick, 0.0, value, "s1", title)
        if i % every == 0:
            frame.x_label(centre, label)
    return frame.svg()


def stacked(
    series: Sequence[Sequence[float]],
    labels: Sequence[str],
    *,
    name: str,
    x_title: str,
    titles: Sequence[Sequence[str]],
) -> Markup:
    """Stacked vertical bars: `series[k][i]` is the part of class k in bar i."""
    sums = [sum(column) for column in zip(*series, strict=True)]
    frame = _Frame(name, x_title, max(sums, default=0.0), whole=True)
    step = frame.width / max(len(labels), 1)
    every = max(1, -(-len(labels) // 8))
    for i, label in enumerate(labels):
        below = 0.0
        for k, values in enumerate(series):
            if values[i]:
                left = _LEFT + i * step + step * 0.08
                frame.bar(left, step * 0.84, below, values[i], f"s{k + 1}", titles[k][i])
            below += values[i]
        if i % every == 0:
            frame.x_label(_LEFT + (i + 0.5) * step, label)
    return frame.svg()


def steps(
    edges: Sequence[float],
    values: Sequence[float | None],
    *,
    name: str,
    x_title: str,
    titles: Sequence[str],
    x_format: Format = short,
) -> Markup:
    """A filled step line: `values[i]` holds from `edges[i]` to `edges[i + 1]`; None is a gap."""
    frame = _Frame(name, x_title, max((v for v in values if v is not None), default=0.0))
    span = (edges[-1] - edges[0]) or 1.0
    xs = [_LEFT + (edge - edges[0]) / span * frame.width for edge in edges]
    line: list[str] = []
    for i, value in enumerate(values):
        if value is not None:
            y = frame.y(value)
            line += [f"{xs[i]:.1f},{y:.1f}", f"{xs[i + 1]:.1f},{y:.1f}"]
        if line and (value is None or i == len(values) - 1):
            first, last = (point.partition(",")[0] for point in (line[0], line[-1]))
            area = [f"{first},{frame.y(0):.1f}", *line, f"{last},{frame.y(0):.1f}"]
            frame.add(f'<polygon class="s1 area" points="{" ".join(area)}"/>')
            frame.add(f'<polyline class="s1 line" points="{" ".join(line)}"/>')
            line = []
    for i, title in enumerate(titles):
        frame.add(
            f'<rect class="hit" x="{xs[i]:.1f}" y="{_TOP}" width="{xs[i + 1] - xs[i]:.1f}" '
            f'height="{frame.height}"><title>{escape(title)}</title></rect>'
        )
    for part in range(5):
        frame.x_label(_LEFT + part / 4 * frame.width, x_format(edges[0] + span * part / 4))
    return frame.svg()


def share_bar(parts: Sequence[tuple[str, float, str]]) -> Markup:
    """One horizontal bar of (class, share 0 to 1, tooltip)."""
    pieces, left = [], 0.0
    for style, share, title in parts:
        width = share * WIDTH
        pieces.append(
            f'<rect class="{style}" x="{left:.1f}" y="0" width="{max(width - 1.5, 0.5):.1f}" '
            f'height="16" rx="2"><title>{escape(title)}</title></rect>'
        )
        left += width
    body = "".join(pieces)
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} 16" preserveAspectRatio="none" class="share" role="img" '
        f'aria-label="shares">{body}</svg>'
    )


class _Frame:
    """Axes, grid and scales of one chart."""

    def __init__(self, name: str, x_title: str, top: float, whole: bool = False) -> None:
        """`whole`: values are counts."""
        self.width, self.height = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
        ticks = _ticks(top, whole)
        self._top = ticks[-1]
        self._parts = [f"<title>{escape(name)}</title>"]
        for tick in ticks:
            y = self.y(tick)
            style = "axis" if tick == 0 else "grid"
            self.add(f'<path class="{style}" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
            self.add(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="end">{short(tick)}</text>')
        middle = _LEFT + self.width / 2
        self.add(f'<text x="{middle}" y="{HEIGHT - 4}" class="mid title">{escape(x_title)}</text>')
        self._name = name

    def y(self, value: float) -> float:
        return _TOP + self.height * (1 - value / self._top)

    def add(self, piece: str) -> None:
        self._parts.append(piece)

    def bar(
        self, left: float, width: float, base: float, value: float, style: str, title: str
    ) -> None:
        top, bottom = self.y(base + value), self.y(base)
        self.add(
            f'<rect class="{style}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{bottom - top:.1f}"><title>{escape(title)}</title></rect>'
        )

    def x_label(self, x: float, label: str) -> None:
        at = "end" if x > WIDTH - 20 else "mid"
        self.add(f'<text x="{x:.1f}" y="{HEIGHT - 19}" class="{at}">{escape(label)}</text>')

    def svg(self) -> Markup:
        body = "".join(self._parts)
        return Markup(
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self._name)}">'
            f"{body}</svg>"
        )


def _ticks(top: float, whole: bool) -> list[float]:
    """0 and one to five round steps up to at least `top`."""
    if top <= 0:
        return [0.0, 1.0]
    size = 10.0 ** math.floor(math.log10(top))
    sizes = (s * size for s in (0.2, 0.5, 1.0, 2.0, 5.0))
    step = next(s for s in sizes if s * 5 >= top * 0.999 and not (whole and s < 1))
    return [round(i * step, 12) for i in range(math.ceil(top * 0.999 / step) + 1)]
