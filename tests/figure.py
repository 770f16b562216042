"""The README's figure, tests/results/figure.svg, from the raw results: KL to the teacher over bytes kept.

Written as plain SVG: no plotting package, and the same text from the same numbers.
`python eval.py --readme` calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

WIDTH, HEIGHT, LEFT, BOTTOM = 720, 340, 60, 50


def figure(load: Callable[[str], dict], model="smollm2", title="SmolLM2-135M", T: int = 2048) -> str:
    """load(name) is a results file's content. All points are means over the same first sequences."""
    runs = [load(f"{model}_{kind}_{T}")["ppl"] for kind in ("mix", "bytes")]
    count = min(len(run["rows"]["teacher"]["kl"]) for run in runs)
    at = {name: (run["bytes"][name] / 1e6, sum(row["kl"][:count]) / count)
          for run in runs for name, row in run["rows"].items()}  # fmt: skip
    series = dict(
        linear=("#1b6ca8", "memory + routed pairs (best)"),
        bytes=("#c2571a", "the same bytes as further pairs"),
        off=("#777777", "the newest pairs, no memory"),
        mass=("#4a8f3c", "half chosen by attention, no memory"),
    )
    right, top = 20.0, 0.1 * math.ceil(10 * max(kl for _, kl in at.values()))

    def x(size: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * math.log(size / 5) / math.log(right / 5)

    def y(kl: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 40) * kl / top

    def text(px: float, py: float, words: str, anchor: str = "middle", color: str = "#222") -> str:
        return f'<text x="{px:.1f}" y="{py:.1f}" text-anchor="{anchor}" fill="{color}">{words}</text>'

    cache = at["teacher"][0]
    head = f"{title}, T = {T:,}: KL to the teacher (nats a token), {count} sequences of WikiText-2 test"
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {box}>', text(WIDTH / 2, 22, head)]
    out.insert(1, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for size in (5, 7, 10, 14, 20):
        out.append(f'<path d="M{x(size):.1f} {y(0):.1f}V{y(top):.1f}" stroke="#eee"/>')
        out.append(text(x(size), y(0) + 16, f"{size} MB"))
    for step in range(round(10 * top) + 1):
        out.append(f'<path d="M{LEFT} {y(step / 10):.1f}H{WIDTH - 20}" stroke="#eee"/>')
        out.append(text(LEFT - 8, y(step / 10) + 4, f"{step / 10:.1f}", "end"))
    below = f"bytes kept for a sequence; the teacher's cache: {cache:.0f} MB, KL 0"
    out.append(text(WIDTH / 2, HEIGHT - 12, below))
    for number, (name, (color, label)) in enumerate(series.items()):
        points = sorted(at[row] for row in at if row.split("@")[0] == name)
        path = " ".join(f"{x(size):.1f},{y(kl):.1f}" for size, kl in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        out += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="4" fill="{color}"/>' for a, b in points]
        out.append(f'<circle cx="{WIDTH - 270}" cy="{52 + 18 * number}" r="4" fill="{color}"/>')
        out.append(text(WIDTH - 260, 56 + 18 * number, label, "start", color))
    return "\n".join([*out, "</svg>"]) + "\n"
