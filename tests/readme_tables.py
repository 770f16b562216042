"""Rewrite the tables of README.md, between their markers, from the raw results in tests/results/*.json.

`python eval.py --readme` does it; a test fails while README.md is not what the results say.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import math
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from benchmarks import mmlu_answers
from figure import figure

import distill
import eval as evaluation

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "results"
MODELS = {"smollm2": "SmolLM2-135M", "qwen": "Qwen2.5-Coder-0.5B"}


def load(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def runs(kind: str) -> Iterator[tuple[str, dict]]:
    """(name of the model, run) of every result file of this kind, a pattern, that exists."""
    for key, model in MODELS.items():
        for path in sorted(RESULTS.glob(f"{key}_{kind}.json")):
            yield model, load(path.stem)


def config_of(run: dict, row: str) -> evaluation.LinearizeConfig:
    """What a row of a run computes: the run's config with the row's changes."""
    c, changes = evaluation.LinearizeConfig(**run["linearize"]), dict(run["variants"][row])
    if stretch := changes.pop("stretch", 0):  # until 2026-11-30 every budget was of the same proportions
        changes["budgets"] = [math.ceil(b * stretch) for b in c.budgets]
    return dataclasses.replace(c, **changes)


def default() -> str:
    return "```\n" + evaluation.text_table(load("default")["ppl"]) + "\n```"


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


NAMES = {
    "teacher": "teacher",
    "off": "memory off: sinks + the newest",
    "recent": "memory off, the newest, shared out among layers",
    "mass": "memory off, half of the pairs chosen by mass",
    "random": "memory, half of the pairs at random",
    "linear": "**memory, half chosen by mix (`best`)**",
    "bytes": "memory off, its bytes spent on further pairs, chosen by value",
}


def routing() -> str:
    """Every measured length of both models: rows with their controls, the part of the gap to "off" closed."""
    lines = ["| model, T | row | exact pairs | bytes/sequence | perplexity | KL to teacher | KL gap closed |"]
    lines.append("|---|---|---|---|---|---|---|")
    for model, run in runs("mix_????"):
        result = run["ppl"]
        rows, off = result["rows"], evaluation.mean_and_error(result["rows"]["off"]["kl"])[0]
        for row in (name for name in NAMES if name in rows):
            nll, _ = evaluation.mean_and_error(rows[row]["nll"])
            kl, error = evaluation.mean_and_error(rows[row]["kl"])
            shown = "0" if row == "teacher" else f"{kl:.3f} ± {error:.3f}"
            size = f"{result['pairs'][row]:,} | {result['bytes'][row]:,}"
            figures = f"{size} | {math.exp(nll):.2f} | {shown}"
            closed = "–" if row in ("teacher", "off") else f"{1 - kl / off:.0%}"
            lines.append(f"| {model}, {result['seq_len']:,} | {NAMES[row]} | {figures} | {closed} |")
    return "\n".join(lines)


def against() -> str:
    """What "best" saves on each control, sequence by sequence."""
    lines = []
    for model, run in runs("mix_????"):
        rows, length = run["ppl"]["rows"], run["ppl"]["seq_len"]
        count = len(rows["off"]["nll"])
        for control in (name for name in ("off", "mass", "random", "bytes") if name in rows):
            pairs = (evaluation.paired(rows, m, "linear", control) for m in ("nll", "kl"))
            text = ", ".join(f"{m} {x:+.3f} ± {e:.3f}" for m, (x, e) in zip(("nll", "KL"), pairs))
            lines.append(f"- {model}, T = {length:,}, saved on {control}: {text} ({count} sequences)")
    return "\n".join(lines)


def seeds() -> str:
    """The headline row of every seed: what is closed of the gap between "off" and the teacher."""
    gaps = "perplexity gap closed | KL gap closed | saved on equal bytes: nll, KL"
    lines = [f"| model | T | seed | sequences | {gaps} |"]
    lines.append("|---|---|---|---|---|---|---|")
    for model, run in runs("mix_*"):
        rows, closed = run["ppl"]["rows"], []
        for metric, size in (("nll", math.exp), ("kl", float)):
            teacher, off, on = (
                size(evaluation.mean_and_error(rows[r][metric])[0]) for r in ("teacher", "off", "linear")
            )
            closed.append(f"{(off - on) / (off - teacher):.0%}")
        saved = (evaluation.paired(rows, metric, "linear", "bytes") for metric in ("nll", "kl"))
        closed.append(", ".join(f"{x:+.3f} ± {error:.3f}" for x, error in saved))
        seed, count = run["train"]["seed"] % 10, len(rows["off"]["kl"])
        lines.append(f"| {model} | {run['ppl']['seq_len']:,} | {seed} | {count} | {' | '.join(closed)} |")
    return "\n".join(lines)


def bytes() -> str:
    """The memory against its bytes in further pairs, over budgets and lengths."""
    lines = ["| T | budget | pairs, MB | KL | pairs instead, MB | KL | memory saves nll | memory saves KL |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for run in sorted((run["ppl"] for _, run in runs("bytes_*")), key=lambda run: run["seq_len"]):
        rows, pairs = run["rows"], run["pairs"]
        for budget in (name.partition("@")[2] for name in rows if name.startswith("linear@")):
            both = f"linear@{budget}", f"bytes@{budget}"
            kl = (evaluation.mean_and_error(rows[name]["kl"])[0] for name in both)
            size = (run["bytes"][name] / 1e6 for name in both)
            shown = " | ".join(f"{pairs[n]:,}, {mb:.1f} | {x:.3f}" for n, mb, x in zip(both, size, kl))
            saved = (evaluation.paired(rows, m, *both) for m in ("nll", "kl"))
            text = " | ".join(f"{x:+.3f} ± {e:.3f}" for x, e in saved)
            lines.append(f"| {run['seq_len']:,} | {budget} | {shown} | {text} |")
    return "\n".join(lines)


def long() -> str:
    """The memory beyond the length it was trained at, against its bytes in further pairs."""
    lines = ["| model | T | fade | random positions in training | KL | pairs instead | memory saves KL |"]
    lines.append("|---" * 7 + "|")
    shown = {}  # further pairs know nothing of fading: one run of them does for all
    for model, run in runs("long_*"):
        shown.setdefault(model, {}).update({n.split("@")[0]: x for n, x in run["ppl"]["rows"].items()})
        both = ("linear", "bytes")
        kl, pairs = (evaluation.mean_and_error(shown[model][name]["kl"])[0] for name in both)
        saved, error = evaluation.paired(shown[model], "kl", *both)
        fade = f"{run['linearize'].get('fade') or '–'}"
        fade += ", when read" if "--fade" in run["command"] else ""
        offsets = f"up to {run['train']['offsets']:,}" if run["train"].get("offsets") else "–"
        figures = f"{kl:.3f} | {pairs:.3f} | {saved:+.3f} ± {error:.3f}"
        lines.append(f"| {model} | {run['ppl']['seq_len']:,} | {fade} | {offsets} | {figures} |")
    return "\n".join(lines)


def half() -> str:
    """In 16 bits: the memory's state in 32 and in 16, each against its bytes in further pairs."""
    lines = ["| T | the state in | pairs instead | memory saves nll | KL |", "|---|---|---|---|---|"]
    for run in sorted((run["ppl"] for _, run in runs("half_*")), key=lambda run: run["seq_len"]):
        rows, own = run["rows"], run["pairs"]["linear"]
        for bits, name in ((32, "bytes@96"), (16, "bytes")):
            saved = (evaluation.paired(rows, m, "linear", name) for m in ("nll", "kl"))
            text = " | ".join(f"{x:+.3f} ± {e:.3f}" for x, e in saved)
            more = run["pairs"][name] - own
            lines.append(f"| {run['seq_len']:,} | {bits} bits | {own} + {more} | {text} |")
    return "\n".join(lines)


def routers() -> str:
    """The same memory and pairs, chosen by each router. The run with `mix` is that of --block 32."""
    lines = ["| router | perplexity | KL to teacher | more KL than mix |", "|---|---|---|---|"]
    files = dict(value="router_value", error="router_error", passage="router_passage", mix="block_32")
    rows = {router: load(f"smollm2_{file}")["ppl"]["rows"]["linear"] for router, file in files.items()}
    for router, row in rows.items():
        (nll, _), (kl, error) = (evaluation.mean_and_error(row[m]) for m in ("nll", "kl"))
        more, more_error = evaluation.paired(rows, "kl", "mix", router)
        extra = "–" if router == "mix" else f"{more:+.4f} ± {more_error:.4f}"
        lines.append(f"| {router} | {math.exp(nll):.2f} | {kl:.3f} ± {error:.3f} | {extra} |")
    return "\n".join(lines)


def layers() -> str:
    """Rank correlation of a layer's error, as the memory leaves it, with what might predict it."""
    lines = ["| model | layers | mass beyond the exact pairs | key concentration | residual |"]
    lines.append("|---|---|---|---|---|")
    for model, run in runs("layers"):
        layer, correlation = run["layers"]["layer"], run["layers"]["correlation"]
        figures = " | ".join(f"{correlation[n]:+.2f}" for n in ("mass", "concentration", "residual"))
        lines.append(f"| {model} | {len(layer)} | {figures} |")
    return "\n".join(lines)


def questions() -> str:
    """MMLU and LAMBADA of every run: accuracy, its paired difference to the teacher's, what says more. Runs
    of the same adapter and rows on parts of the questions count as one."""
    lines = ["| model, task | exact pairs | row | accuracy | - teacher ± s.e. | same answer | KL |"]
    lines.append("|---|---|---|---|---|---|---|")
    pooled = {}
    for path in sorted(RESULTS.glob("*_mmlu_*.json")) + sorted(RESULTS.glob("*_lambada_*.json")):
        run, (key, task, *_) = load(path.stem), path.stem.split("_")
        rows = answers(task, run[task])
        part = pooled.setdefault((key, task, str(run["linearize"]), *rows), (run, rows))[1]
        if part is not rows:
            part |= {n: {k: x + rows[n][k] for k, x in row.items()} for n, row in part.items()}
    for (key, task, *_), (run, rows) in pooled.items():
        for name, row in rows.items():
            pairs = "all" if name == "teacher" else config_of(run, name).exact_pairs
            count, hits = len(row["hit"]), row["hit"]
            gain, error = evaluation.mean_and_error([x - y for x, y in zip(hits, rows["teacher"]["hit"])])
            kl, kl_error = evaluation.mean_and_error(row["kl"] or [math.nan])
            kl = "–" if math.isnan(kl) else f"{kl:.3f} ± {kl_error:.3f}"
            shown = f"{sum(hits) / count:.1%} | {gain:+.1%} ± {error:.1%} | {sum(row['same']) / count:.1%}"
            lines.append(f"| {MODELS[key]}, {task} ({count:,}) | {pairs} | {name} | {shown} | {kl} |")
    return "\n".join(lines)


def answers(task: str, result: dict) -> dict[str, dict]:
    """Item by item, of every row: right or wrong, whether as the teacher, and KL (none of LAMBADA)."""
    if task == "lambada":
        hits = {name: row["hit"] for name, row in result["rows"].items()}
        same = {n: [x == y for x, y in zip(h, hits["teacher"])] for n, h in hits.items()}
        return {n: dict(hit=h, same=same[n], kl=[]) for n, h in hits.items()}
    return mmlu_answers(result)


def ablation() -> str:
    """The ladder and the rules, as `eval.py --tasks ablation` prints them, and layer by layer."""
    run = load("smollm2_ablation")["ablation"]
    which = list(next(iter(run.values()))["layer"])
    lines = [
        "| design | exact pairs | " + " | ".join(f"layer {i}" for i in which) + " | mean error | ppl | KL |"
    ]
    lines.append("|---" * (len(which) + 5) + "|")
    for name, row in run.items():
        errors = [row["layer"][i] for i in which]
        (nll, _), (kl, kl_error) = (evaluation.mean_and_error(row[m]) for m in ("nll", "kl"))
        shown = " | ".join(f"{x:.3f}" for x in (*errors, sum(errors) / len(errors)))
        lines.append(
            f"| {name} | {row['pairs']} | {shown} | {math.exp(nll):.2f} | {kl:.4f} ± {kl_error:.4f} |"
        )
    lines.append("\nSaved, sequence by sequence (positive: the first is better):\n")
    for row, control in LADDER:
        (nll, nll_error), (kl, kl_error) = (evaluation.paired(run, m, row, control) for m in ("nll", "kl"))
        saved = f"nll {nll:+.4f} ± {nll_error:.4f}, KL {kl:+.4f} ± {kl_error:.4f}"
        lines.append(f"- {row}, on {control}: {saved}")
    return "\n".join(lines)


LADDER = (
    ("+ window", "pure"),
    ("+ sinks", "+ window"),
    ("+ conv", "+ sinks"),
    ("+ routing", "+ conv"),
    ("gdn lse", "memory off"),
    ("gla lse", "memory off"),
    ("gdn lse", "gla lse"),
    ("gdn lse", "gdn sum"),
)


def retrieval() -> str:
    """Greedy exact matches of each measured kind, length and budget."""
    lines = ["| model | kind | T | row | pairs | found |", "|---|---|---|---|---|---|"]
    for path in sorted(RESULTS.glob("*_retrieval_*.json")):
        result = load(path.stem)
        model, config = MODELS[path.stem.split("_")[0]], config_of(result, "linear")
        for row, kinds in result["retrieval"]["rows"].items():
            changed = config if row == "teacher" else config_of(result, row)
            pairs = "all" if row == "teacher" else changed.exact_pairs
            even = ", even" if len(set(config.budgets)) == 1 else ""
            name = "teacher" if row == "teacher" else f"{row} ({changed.router}{even})"
            for kind, how in kinds.items():
                found = f"{sum(how['greedy']):.0f} of {len(how['greedy'])}"
                length = result["retrieval"]["seq_len"]
                lines.append(f"| {model} | {kind} | {length:,} | {name} | {pairs} | {found} |")
    return "\n".join(dict.fromkeys(lines))  # the teacher is in every file: once is enough


def generation() -> str:
    """The first and the last thousand of the tokens, and the change between them."""
    result = load("generation")
    lines = ["| | | ms a token | bytes kept | resident memory |", "|---|---|---|---|---|"]
    for row, name in (("linear", "linearized"), ("teacher", "teacher")):
        for part, which in (("first", 0), ("last", -1)):
            x = result[row][which]
            figures = f"{x['ms']:.1f} | {x['state_bytes']:,} | {x['resident'] / 2**20:.0f} MiB"
            lines.append(f"| {name} | {part} {result['every']:,} new tokens | {figures} |")
        x = result[f"{row}_change"]
        lines.append(f"| | change | {x['ms']:+.1%} | {x['state_bytes']:+.1%} | {x['resident']:+.1%} |")
    return "\n".join(lines)


def splits() -> str:
    """The largest logit difference at each split."""
    runs = {name: load(f"splits_{name}")["splits"] for name in ("best", "paper")}
    lines = ["| split at | " + " | ".join(runs["best"]) + " |", "|---|" + "---|" * len(runs["best"])]
    for name, run in runs.items():
        lines.append(f"| {name} | " + " | ".join(f"{x:.0e}" for x in run.values()) + " |")
    return "\n".join(lines)


def kernels() -> str:
    """Ratios of one run; a ratio above 1 means that the chunked form is faster."""
    lines = ["| | T | recurrence / chunked | SDPA / chunked | SDPA / chunked, kda |", "|---|---|---|---|---|"]
    for t in load("kernels_cpu")["times"]:
        loop = "–" if t["recurrent"] is None else f"{t['recurrent'] / t['chunked']:.1f}"
        kind = "forward + backward" if t["backward"] else "forward"
        sdpa, kda = (t["sdpa"] / t[name] for name in ("chunked", "kda"))
        lines.append(f"| {kind} | {t['T']:,} | {loop} | {sdpa:.2f} | {kda:.2f} |")
    return "\n".join(lines)


def memory() -> str:
    """Peak memory of one training step, planned and measured."""
    lines = ["| model | loss | tokens | planned | measured | ratio | seconds |", "|---" * 7 + "|"]
    for path in sorted(RESULTS.glob("*_peak_*.json")):
        x = load(path.stem)
        planned, measured = (x[key] / 1e9 for key in ("planned", "measured"))
        figures = f"{planned:.2f} GB | {measured:.2f} GB | {planned / measured:.2f} | {x['seconds']:.0f}"
        tokens, loss = f"{x['batch']} × {x['seq_len']:,}", x["loss"]
        loss += ", recomputed" if x.get("recompute") else ""
        lines.append(f"| {MODELS[path.stem.split('_')[0]]} | {loss} | {tokens} | {figures} |")
    return "\n".join(lines)


def training() -> str:
    """What whole runs took: the steps, and the peak up to their end, --allocate included."""
    lines = ["| model | loss | steps | threads | minutes | tokens/s | peak memory |", "|---" * 7 + "|"]
    for model, run in runs("train*"):
        t, cost = run["train"], run["training_cost"]
        steps, rate = f"{t['steps']} × {t['batch']} × {t['seq_len']:,}", cost["tokens_per_second"]
        minutes = t["steps"] * t["batch"] * t["seq_len"] / rate / 60
        figures = f"{minutes:.0f} | {rate:.0f} | {cost['peak_bytes'] / 1e9:.2f} GB"
        lines.append(f"| {model} | {t['loss']} | {steps} | {run['threads']} | {figures} |")
    return "\n".join(lines)


def speed() -> str:
    """Ratios to the teacher of the same run, and bytes."""
    times = "prefill ms/token | × teacher | decode ms/token | × teacher"
    lines = [f"| model | tokens | row | {times} | bytes × teacher |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    shortest_first = sorted(runs("speed_*"), key=lambda x: min(map(int, x[1]["speed"]["lengths"])))
    for model, run in shortest_first:
        for length, rows in sorted(run["speed"]["lengths"].items(), key=lambda x: int(x[0])):
            teacher = rows["teacher"]
            for name, row in rows.items():
                if name != "teacher":
                    c = config_of(run, name)
                    other = c.router != "recency" and c.block != evaluation.LinearizeConfig.block
                    name += f" ({c.router}, block {c.block})" if other else f" ({c.router})"
                ratio = {key: row[key] / teacher[key] for key in ("prefill", "decode", "bytes")}
                prefill = f"{1e3 * row['prefill'] / int(length):.2f} | {ratio['prefill']:.2f}"
                decode = f"{1e3 * row['decode']:.0f} | {ratio['decode']:.2f}"
                figures = f"{prefill} | {decode} | {ratio['bytes']:.3f}"
                lines.append(f"| {model} | {int(length):,} | {name} | {figures} |")
    return "\n".join(lines)


def hybrid() -> str:
    """Which layers should keep softmax?"""
    lines = ["| model | kept | choice | perplexity | KL | layers |", "|---|---|---|---|---|---|"]
    for model, run in runs("hybrid"):
        for name, row in run["hybrid"].items():
            how, part = name.split(":")
            (nll, _), (kl, error) = (evaluation.mean_and_error(row[m]) for m in ("nll", "kl"))
            figures = f"{math.exp(nll):.2f} | {kl:.4f} ± {error:.4f}"
            layers = " ".join(map(str, row["layers"]))
            lines.append(f"| {model} | {float(part):.0%} | {how} | {figures} | {layers} |")
    return "\n".join(lines)


def lora() -> str:
    """The same loss and steps, with frozen projections and with LoRA on them."""
    lines = ["| projections | peak rate | trained parameters | perplexity | KL | frozen saves nll | KL |"]
    lines.append("|---" * 7 + "|")
    frozen, rows = load("smollm2_frozen"), {}
    for name, run in [("frozen", frozen), *(("LoRA beside them", run) for _, run in runs("lora_*"))]:
        rows[name], saved = run["ppl"]["rows"]["linear"], "– | –"
        (nll, _), (kl, error) = (evaluation.mean_and_error(rows[name][m]) for m in ("nll", "kl"))
        if run is not frozen:
            pairs = (evaluation.paired(rows, m, "frozen", name) for m in ("nll", "kl"))
            saved = " | ".join(f"{x:+.4f} ± {e:.4f}" for x, e in pairs)
        figures = f"{math.exp(nll):.2f} | {kl:.4f} ± {error:.4f} | {saved}"
        lines.append(f"| {name} | {run['train']['lr']:g} | {run['new_parameters']:,} | {figures} |")
    return "\n".join(lines)


def comment_share(path: Path) -> float:
    """Lines with a comment or of a docstring, as a part of all that are not empty."""
    source = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    told = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            told |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    full = [number for number, line in enumerate(source.splitlines(), 1) if line.strip()]
    return len(told.intersection(full)) / len(full)


def lines() -> str:
    """Lines of each module, and how much of them is comment."""
    counts = {p: len((ROOT / f"{p}.py").read_text().splitlines()) for p in ORDER}
    each = ", ".join(f"`{p}.py` {n} ({comment_share(ROOT / f'{p}.py'):.0%})" for p, n in counts.items())
    return f"Lines (share of comments): {each}; together {sum(counts.values()):,} lines."


ORDER = ("linear_attn", "kernels", "interventions", "distill", "eval")
TABLES = (
    default,
    seeds,
    routing,
    against,
    bytes,
    long,
    half,
    routers,
    layers,
    retrieval,
    generation,
    splits,
    text,
    paired,
    ablation,
    questions,
    kernels,
    memory,
    training,
    hybrid,
    lora,
    speed,
    lines,
)


def rewritten(readme: str) -> str:
    for table in TABLES:
        begin, end = f"<!-- {table.__name__} -->", f"<!-- /{table.__name__} -->"
        if begin not in readme or end not in readme:
            raise SystemExit(f"README.md has no markers {begin} ... {end}")
        new = f"{begin}\n{table()}\n{end}"
        readme = re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _, new=new: new, readme, flags=re.S)
    return readme


def rewrite() -> None:
    """README.md and its figure, as tests/results say; `python eval.py --readme`."""
    path = ROOT / "README.md"
    for target, content in ((path, rewritten(path.read_text())), (RESULTS / "figure.svg", figure(load))):
        distill.write_atomically(target, lambda temporary, content=content: temporary.write_text(content))
