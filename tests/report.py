"""Tables, paired differences, and the raw results beside what a figure needs to be run again."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from files import peak_memory, write_atomically

from distill import new_parameters


def text_table(result: dict) -> str:
    """The rows; then what "linear" saves against every control, sequence by sequence."""
    rows = result["rows"]
    head = (f"T = {result['seq_len']}", "ppl", "nll ± s.e.", "KL ± s.e.", "top-1", "pairs", "bytes/seq")
    lines = ["{:10s}{:>9s}{:>16s}{:>18s}{:>7s}{:>7s}{:>13s}".format(*head)]
    for name, row in rows.items():
        (nll, nll_se), (kl, kl_se), (top1, _) = (mean_and_error(row[m]) for m in ("nll", "kl", "top1"))
        figures = f"{math.exp(nll):9.3f}{nll:8.4f} ±{nll_se:.4f} {kl:9.5f} ±{kl_se:.4f} {top1:6.3f}"
        lines.append(f"{name:10s}{figures}{result['pairs'][name]:7d}{result['bytes'][name]:13,d}")
    for name in rows:
        if name not in ("teacher", "linear") and "linear" in rows:
            line = f"linear saves on {name:8s}"
            for metric in ("nll", "kl"):
                (saved, error), gap = (paired(rows, metric, row, name) for row in ("linear", "teacher"))
                part = f" ({saved / gap[0]:.0%} of its gap)" if gap[0] > 3 * gap[1] else ""
                line += f" {metric} {saved:+.4f} ± {error:.4f}{part}"
            lines.append(line)
    if len(rows["teacher"]["nll"]) == 1:
        lines.append("nan: a single held-out sequence has no standard error (--eval-tokens wants more)")
    return "\n".join(lines)


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error (nan for a single value)."""
    x = torch.tensor(values, dtype=torch.float64)
    return x.mean().item(), (x.std() / len(x) ** 0.5).item() if len(x) > 1 else math.nan


def paired(rows: dict, metric: str, row: str, control: str = "off") -> tuple[float, float]:
    """Mean and standard error of what `row` saves of the control's metric, item by item."""
    return mean_and_error([off - on for off, on in zip(rows[control][metric], rows[row][metric])])


def report(bench, path: Path, fingerprint: str, tasks: dict[str, Callable]) -> None:
    """Run the tasks of an eval.Bench, print their tables, write everything raw to `path` after each, beside
    what a figure needs to be run again. `fingerprint`: of the backbone; hashing it takes a while."""
    model, train = bench.model, bench.train
    result = dict(
        command="python " + shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        date=time.strftime("%Y-%m-%d"),
        machine=f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, {model.device}",
        torch=torch.__version__, threads=torch.get_num_threads(),
        train=getattr(model, "trained", dataclasses.asdict(train)),
        measured=dict(seq_len=train.seq_len, model=train.model, data=train.data, eval_data=train.eval_data),
        linearize=dataclasses.asdict(model.linearize_config), variants=model.controller.variants,
        new_parameters=sum(p.numel() for p in new_parameters(model).values()),
        fingerprint=fingerprint, training_cost=getattr(model, "training_cost", None),
    )  # fmt: skip
    for name, task in tasks.items():
        result[name], table = task(bench)
        result["peak_bytes"] = peak_memory(model.device)  # of the whole run, training included
        print(table, flush=True)
        write_atomically(path, lambda p: p.write_text(json.dumps(result) + "\n"))
