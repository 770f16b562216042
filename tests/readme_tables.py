"""Rewrite the tables of README.md, between their markers, from the raw results in tests/results/*.json.

python tests/readme_tables.py            rewrite
python tests/readme_tables.py --check    exit status 1 if README.md is not what the results say (CI does this)
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import distill  # noqa: E402, F401
import eval as evaluation  # noqa: E402

RESULTS = ROOT / "tests" / "results"
MODELS = {"smollm2": "SmolLM2-135M", "qwen": "Qwen2.5-Coder-0.5B"}


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def default() -> str:
    return "```\n" + evaluation.text_table(load("default")) + "\n```"


def text() -> str:
    """One row per teacher, control and run."""
    lines = ["| model | exact pairs | row | trained | perplexity | KL to teacher | bytes/sequence |"]
    lines.append("|---|---|---|---|---|---|---|")
    for key, model in MODELS.items():
        for pairs in (64, 132):
            runs = {preset: load(f"{key}_{preset}_{pairs}") for preset in ("best", "paper")}
            best = runs["best"]
            for row, name in (("teacher", "teacher"), ("off", "memory off")):
                lines.append(text_row(model, pairs, best, row, name, "–"))
            for preset, run in runs.items():
                c, t = run["linearize"], run["train"]
                trained = f"{t['steps']} × {t['batch']} × {t['seq_len']}, {t['loss']}"
                lines.append(
                    text_row(model, pairs, run, "linear", f"{preset} ({c['rule']}, {c['merge']})", trained)
                )
    return "\n".join(lines)


def text_row(model: str, pairs: int, run: dict, row: str, name: str, trained: str) -> str:
    """Perplexity over the sequences that all runs of this model share, KL with the standard error."""
    nll, _ = evaluation.mean_and_error(run["text"][row]["nll"][: SHARED[model]])
    kl, error = evaluation.mean_and_error(run["text"][row]["kl"][: SHARED[model]])
    shown = "0" if row == "teacher" else f"{kl:.3f} ± {error:.3f}"
    exact = run["train"]["seq_len"] if row == "teacher" else pairs
    figures = f"{math.exp(nll):.2f} | {shown} | {run['state_bytes'][row]:,}"
    return f"| {model} | {exact} | {name} | {trained} | {figures} |"


SHARED = {
    "SmolLM2-135M": 10,
    "Qwen2.5-Coder-0.5B": 6,
}  # held-out sequences of 1,024 tokens that every run has


def paired() -> str:
    """What the memory adds to the same exact pairs, over all sequences of each run."""
    lines = []
    for key, model in MODELS.items():
        for preset in ("best", "paper"):
            for pairs in (64, 132):
                rows = load(f"{key}_{preset}_{pairs}")["text"]
                (nll, nll_se), (kl, kl_se) = (evaluation.paired(rows, m, "linear") for m in ("nll", "kl"))
                count = len(rows["off"]["nll"])
                figures = f"nll {nll:+.4f} ± {nll_se:.4f}, KL {kl:+.4f} ± {kl_se:.4f} over {count} sequences"
                lines.append(f"- {model}, {preset}, {pairs} pairs: {figures}")
    return "\n".join(lines)


def routers() -> str:
    """The memory of smollm2_best_132, trained under recency, read under other routers; the same sequences."""
    lines = ["| router, 132 pairs | perplexity | KL to teacher |", "|---|---|---|"]
    runs = [("memory off, recency", load("smollm2_mix_132"), "off")]
    runs += [("recency (128 newest)", load("smollm2_best_132"), "linear")]
    runs += [(f"{r} (64 newest + 64 chosen)", load(f"smollm2_{r}_132"), "linear") for r in ("mass", "mix")]
    count = len(runs[0][1]["text"]["off"]["nll"])
    for name, run, row in runs:
        nll, _ = evaluation.mean_and_error(run["text"][row]["nll"][:count])
        kl, error = evaluation.mean_and_error(run["text"][row]["kl"][:count])
        lines.append(f"| {name} | {math.exp(nll):.2f} | {kl:.3f} ± {error:.3f} |")
    return "\n".join(lines)


def rules() -> str:
    return "```\n" + evaluation.rules_table(load("rules")["rules"]) + "\n```"


def kernels() -> str:
    """Ratios of one run; a ratio above 1 means that the chunked form is faster."""
    lines = ["| | T | recurrence / chunked | SDPA / chunked | SDPA / chunked, kda |", "|---|---|---|---|---|"]
    for t in load("kernels_cpu")["times"]:
        loop = "–" if t["recurrent"] is None else f"{t['recurrent'] / t['chunked']:.1f}"
        kind = "forward + backward" if t["backward"] else "forward"
        sdpa, kda = (t["sdpa"] / t[name] for name in ("chunked", "kda"))
        lines.append(f"| {kind} | {t['T']:,} | {loop} | {sdpa:.2f} | {kda:.2f} |")
    return "\n".join(lines)


def lines() -> str:
    """Lines of each module."""
    counts = {p: len((ROOT / f"{p}.py").read_text().splitlines()) for p in ORDER}
    return (
        ", ".join(f"`{p}.py` {n}" for p, n in counts.items()) + f"; together {sum(counts.values()):,} lines."
    )


ORDER = ("linear_attn", "kernels", "interventions", "distill", "eval")
TABLES = (default, text, paired, routers, rules, kernels, lines)


def rewritten(readme: str) -> str:
    for table in TABLES:
        begin, end = f"<!-- {table.__name__} -->", f"<!-- /{table.__name__} -->"
        if begin not in readme or end not in readme:
            raise SystemExit(f"README.md has no markers {begin} ... {end}")
        new = f"{begin}\n{table()}\n{end}"
        readme = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _, new=new: new, readme, flags=re.S)
    return readme


def main() -> None:
    path = ROOT / "README.md"
    old = path.read_text()
    new = rewritten(old)
    if "--check" in sys.argv:
        sys.exit("README.md differs from tests/results: run tests/readme_tables.py" if new != old else 0)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(new)
    temporary.replace(path)


if __name__ == "__main__":
    main()
