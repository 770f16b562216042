"""Measure what a linearized model has lost, and what its memory adds to the exact pairs it keeps anyway.

What you will learn here: every figure stands beside its controls. The teacher is the same frozen model with
its own attention; "memory off" has the same sinks and window, the same number of exact pairs, and no memory
at all. A memory counts only for what it adds to that row (arXiv 2608.28444 found that row above published
linearizations).

    python eval.py --adapter out                      perplexity, KL, top-1 agreement; error per layer and position
    python eval.py --model M --adapter DIR --data F   another model, adapter or text; --json FILE keeps everything raw
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

import distill
from distill import TrainConfig, UserError, as_teacher, attention_modules, output_projection, write_atomically

# ----------------------------------------------------------------------------- language modelling


def measure_text(model: PreTrainedModel, sequences: Tensor) -> dict[str, dict[str, list[float]]]:
    """Teacher, memory off and linearized on (N, T) tokens. Per sequence, in nats per predicted token:
    nll, KL(teacher || row), and the share of positions with the teacher's most likely token (top1)."""
    rows = {name: dict(nll=[], kl=[], top1=[]) for name in ("teacher", "off", "linear")}
    device = next(model.parameters()).device
    for ids in tqdm(sequences, desc="measure", leave=False, disable=None):
        ids, teacher = ids[None].to(device), None
        for name, row in rows.items():
            context = as_teacher(model) if name == "teacher" else model.controller.switch(name)
            with torch.no_grad(), context:
                log_p = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            teacher = log_p if teacher is None else teacher
            row["nll"].append(-log_p.gather(1, ids[0, 1:, None]).mean().item())
            row["kl"].append(F.kl_div(log_p, teacher, log_target=True, reduction="sum").item() / len(log_p))
            row["top1"].append((log_p.argmax(-1) == teacher.argmax(-1)).float().mean().item())
    return rows


def measure_layers(model: PreTrainedModel, sequences: Tensor, bins: int = 8) -> dict[str, dict]:
    """Normalised MSE of each layer's output, mean |y_teacher - y|^2 / Var(y_teacher), on the teacher's own inputs.

    Returns, for "off" and "linear", the error per layer and per layer and position (`bins` equal parts of T).
    """
    T, device = sequences.shape[1], next(model.parameters()).device
    sums = {
        name: {i: torch.zeros(T, dtype=torch.float64) for i in distill.linear_layers(model)}
        for name in ("off", "linear")
    }
    variance = {i: 0.0 for i in sums["off"]}

    def probe(module, teacher, students):
        project = output_projection(module)
        y = project(teacher.flatten(2)).double()
        variance[module.layer_idx] += y.var(unbiased=False).item() / len(sequences)
        for name, student in students.items():
            error = (project(student().flatten(2)).double() - y).square().mean((0, 2))
            sums[name][module.layer_idx] += error.cpu() / len(sequences)

    with torch.no_grad(), model.controller.switch("probe", probe):
        for ids in sequences:
            model.base_model(input_ids=ids[None].to(device), use_cache=False)
    result = {}
    for name, errors in sums.items():
        by_layer = {i: e / variance[i] for i, e in errors.items()}
        result[name] = dict(
            layer={i: e.mean().item() for i, e in by_layer.items()},
            position={i: [part.mean().item() for part in e.tensor_split(bins)] for i, e in by_layer.items()},
        )
    return result


def state_bytes(model: PreTrainedModel, length: int) -> dict[str, int]:
    """Bytes that one sequence of `length` tokens keeps: the teacher's cache, sinks + window, and those + memory."""
    size, total = model.dtype.itemsize, dict(teacher=0, off=0, linear=0)
    for module in attention_modules(model):
        layer = getattr(module, "linear", None)
        heads, kv_heads, dim = distill.head_shape(model, module)
        pair = 2 * dim * size * kv_heads
        exact = pair * (length if layer is None else min(length, layer.config.exact_pairs))
        total["teacher"] += pair * length
        total["off"] += exact
        total["linear"] += exact + (0 if layer is None else layer.memory_bytes(size))
    return total


# ----------------------------------------------------------------------------- reports


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error over sequences (nan for a single one)."""
    x = torch.tensor(values, dtype=torch.float64)
    return x.mean().item(), (x.std() / len(x) ** 0.5).item() if len(x) > 1 else math.nan


def text_table(model: PreTrainedModel, rows: dict, length: int) -> str:
    """Teacher, memory off at the same number of exact pairs, linearized; then what the memory adds, paired."""
    c, size = model.linearize_config, state_bytes(model, length)
    names = {
        "teacher": "teacher (softmax)",
        "off": "sinks + window, memory off",
        "linear": f"linearized: {c.rule}, {c.merge}",
    }
    head = f"T = {length}"
    lines = [
        f"{head:27s} {'ppl':>8s} {'nll':>15s} {'KL to teacher':>17s} {'top-1':>6s} {'pairs':>6s} {'bytes/seq':>11s}"
    ]
    for key, name in names.items():
        (nll, nll_se), (kl, kl_se), (top1, _) = (mean_and_error(rows[key][m]) for m in ("nll", "kl", "top1"))
        pairs = length if key == "teacher" else min(length, c.exact_pairs)
        lines.append(
            f"{name:27s} {math.exp(nll):8.3f} {nll:7.4f} ±{nll_se:.4f} {kl:9.5f} ±{kl_se:.4f} {top1:6.3f} {pairs:6d} {size[key]:11,d}"
        )
    for metric in ("nll", "kl"):
        gain, error = mean_and_error(
            [off - on for off, on in zip(rows["off"][metric], rows["linear"][metric])]
        )
        lines.append(
            f"the memory lowers {metric:3s} by {gain:.5f} ± {error:.5f} (paired over {len(rows['off'][metric])} sequences)"
        )
    return "\n".join(lines)


def provenance() -> dict:
    """What a figure needs beside it to be run again."""
    return dict(command=" ".join(sys.argv), date=time.strftime("%Y-%m-%d"), torch=torch.__version__,
                machine=f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}")  # fmt: skip


def report_text(model: PreTrainedModel, sequences: Tensor, train: TrainConfig, out: Path) -> None:
    """Print the table, write everything raw to out/results.json."""
    rows = measure_text(model, sequences)
    print(text_table(model, rows, sequences.shape[1]))
    result = provenance() | dict(
        train=dataclasses.asdict(train),
        linearize=dataclasses.asdict(model.linearize_config),
        new_parameters=sum(
            p.numel() for layer in distill.linear_layers(model).values() for p in layer.parameters()
        ),
        state_bytes=state_bytes(model, sequences.shape[1]),
        text=rows,
    )
    write_atomically(out / "results.json", lambda p: p.write_text(json.dumps(result) + "\n"))
