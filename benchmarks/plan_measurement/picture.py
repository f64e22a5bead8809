"""Predicted against measured as an SVG: both axes logarithmic, the diagonal, and the band of 15%
around it.
"""

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10

SIZE, MARGIN = 420.0, 56.0
COLOURS = {
    "sft": "#4269d0",
    "reward": "#efb118",
    "ppo": "#ff725c",
    "dpo": "#3ca951",
    "rloo": "#9c6b4e",
    "grpo": "#97bbf5",
    "evaluate": "#a463f2",
}
STYLE = (
    "text{font:12px "
    "system-ui,sans-serif;fill:#1b1e23}.line{stroke:#9498a0;fill:none}@media(prefers-color-scheme:dark){text{fill:#e6e6e6}}"
)


def scatter(points: Sequence[tuple[str, float, float]], title: str) -> str:
    """(kind, measured, predicted) as dots, each with its values under the pointer."""
    values = [value for _, measured, predicted in points for value in (measured, predicted)]
    low, high = floor(4 * log10(min(values))) / 4, ceil(4 * log10(max(values))) / 4

    def place(value: float) -> float:
        return MARGIN + (log10(value) - low) / (high - low) * SIZE

    def dot(kind: str, measured: float, predicted: float) -> str:
        x, y = place(measured), SIZE + 2 * MARGIN - place(predicted)
        label = f"{kind}: measured {measured:.0f}, predicted {predicted:.0f}"
        return (
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' "
            f"fill='{COLOURS[kind]}'><title>{escape(label)}</title></circle>"
        )

    def diagonal(factor: float, dash: str) -> str:
        shift = log10(factor) / (high - low) * SIZE
        return (
            f"<line class='line' x1='{MARGIN}' y1='{SIZE + MARGIN - shift:.1f}' "
            f"x2='{MARGIN + SIZE}' y2='{MARGIN - shift:.1f}' {dash}/>"
        )

    ticks = [
        10**n * step
        for n in range(floor(low), ceil(high) + 1)
        for step in (1, 2, 5)
        if low <= log10(10**n * step) <= high
    ]
    band = "".join(
        [
            diagonal(1.0, ""),
            *(diagonal(factor, "stroke-dasharray='3 4'") for factor in (0.85, 1.15)),
        ]
    )
    frame = f"<rect class='line' x='{MARGIN}' y='{MARGIN}' width='{SIZE}' height='{SIZE}'/>"
    drawn = [frame, f"<clipPath id='frame'>{frame}</clipPath><g clip-path='url(#frame)'>{band}</g>"]
    drawn += [
        f"<text x='{place(t):.0f}' y='{SIZE + MARGIN + 18:.0f}' text-anchor='middle'>{t:g}</text>"
        for t in ticks
    ]
    drawn += [
        f"<text x='{MARGIN - 6:.0f}' y='{SIZE + 2 * MARGIN - place(t) + 4:.0f}' "
        f"text-anchor='end'>{t:g}</text>"
        for t in ticks
    ]
    drawn += [dot(*point) for point in points]
    keys = sorted({kind for kind, _, _ in points})
    drawn += [
        f"<circle cx='{MARGIN + 12}' cy='{MARGIN + 14 + 18 * i}' r='4' fill='{COLOURS[kind]}'/>"
        f"<text x='{MARGIN + 22}' y='{MARGIN + 18 + 18 * i}'>{escape(kind)}</text>"
        for i, kind in enumerate(keys)
    ]  # fmt: skip
    whole = SIZE + 2 * MARGIN
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {whole:.0f} {whole:.0f}' "
        f"width='{whole:.0f}' role='img' "
        f"aria-label='predicted against measured'><style>{STYLE}</style>"
        f"<text x='{MARGIN}' y='{MARGIN - 32}'>{escape(title)}</text>"
        f"<text x='{MARGIN}' y='{MARGIN - 14}'>plan upwards, measurement across; dashed: 15% "
        f"off</text>{''.join(drawn)}</svg>\n"
    )
