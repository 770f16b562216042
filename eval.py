"""Measure what a linearized model has lost, and what its memory adds to the exact pairs it keeps anyway.

What you will learn here: every figure stands beside its controls. "teacher" is the same frozen model with its
own attention; "off" has the same sinks and window, hence as many exact pairs, and no memory at all. A memory
counts only for what it adds to "off" (arXiv 2608.28444 found that row above published linearizations).

    python eval.py --adapter out                 perplexity, KL, top-1 agreement; error by layer and position
    python eval.py --tasks rules --layers 0 1    all update rules under sum and lse, layer by layer, one table
    ... --model M --data F --json FILE           another teacher, another text; everything raw in a file
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

import distill
from distill import TrainConfig, as_teacher, attention_modules, head_shape, linear_layers, relative_error
from interventions import LinearizeConfig, LinearizedAttention
from linear_attn import RULES

TASKS = ("text", "layers", "rules")

# ----------------------------------------------------------------------------- language modelling


def measure_text(model, sequences: Tensor) -> dict[str, dict[str, list[float]]]:
    """Teacher, memory off and linearized on (N, T) tokens: per sequence, in nats per token, `nll` and
    `kl` = KL(teacher || row); `top1` is the share of positions with the teacher's most likely token."""
    rows = {name: dict(nll=[], kl=[], top1=[]) for name in ("teacher", "off", "linear")}
    device = next(model.parameters()).device
    for ids in tqdm(sequences, desc="measure", leave=False, disable=None):
        ids, teacher = ids[None].to(device), None
        for name, row in rows.items():
            context = as_teacher(model) if name == "teacher" else model.controller.switch(name)
            with torch.no_grad(), context:
                logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            teacher, sums = logits if teacher is None else teacher, [0.0, 0.0, 0.0]
            # 128 positions at a time: a copy of all logits is 600 MB for Qwen's vocabulary at T = 1,024
            for *both, target in zip(logits.split(128), teacher.split(128), ids[0, 1:].split(128)):
                log_p, log_t = (x.float().log_softmax(-1) for x in both)
                sums[0] -= log_p.gather(1, target[:, None]).sum().item()
                sums[1] += F.kl_div(log_p, log_t, log_target=True, reduction="sum").item()
                sums[2] += (log_p.argmax(-1) == log_t.argmax(-1)).sum().item()
            for metric, total in zip(row.values(), sums):
                metric.append(total / len(logits))
    return rows


def measure_layers(model, sequences: Tensor, bins: int = 8) -> dict[str, dict]:
    """Normalised MSE of each replaced layer, mean |y_teacher - y|^2 / Var(y_teacher), on the teacher's
    inputs: for "off" and "linear", per layer and per layer and position (`bins` equal parts of T)."""
    layers, N, T = list(linear_layers(model)), len(sequences), sequences.shape[1]
    error = {name: {i: torch.zeros(T, dtype=torch.float64) for i in layers} for name in ("off", "linear")}
    variance = dict.fromkeys(layers, 0.0)

    def probe(module, teacher, student):
        i, project = module.layer_idx, distill.output_projection(module)
        y = project(teacher.flatten(2)).double().cpu()
        variance[i] += y.var(unbiased=False).item() / N
        for name in error:
            other = module.linear.variant(**model.controller.variants[name])
            difference = project(student(other).flatten(2)).double().cpu() - y
            error[name][i] += difference.square().mean((0, 2)) / N

    for ids in tqdm(sequences, desc="layers", leave=False, disable=None):
        distill.probe_layers(model, ids[None], probe)
    relative = {name: {i: e / variance[i] for i, e in errors.items()} for name, errors in error.items()}
    return {
        name: dict(
            layer={i: e.mean().item() for i, e in errors.items()},
            position={i: [part.mean().item() for part in e.tensor_split(bins)] for i, e in errors.items()},
        )
        for name, errors in relative.items()
    }


def state_bytes(model, length: int) -> dict[str, int]:
    """Bytes that one sequence of `length` tokens keeps: the teacher's cache, then each variant's state."""
    modes, total = model.controller.variants, dict.fromkeys(("teacher", *model.controller.variants), 0)
    for module in attention_modules(model):
        layer, (_, kv_heads, dim) = getattr(module, "linear", None), head_shape(model, module)
        cache = 2 * dim * kv_heads * length * model.dtype.itemsize
        total["teacher"] += cache
        for mode, changes in modes.items():
            total[mode] += cache if layer is None else layer.variant(**changes).state_bytes(length, model.dtype)
    return total


# ----------------------------------------------------------------------------- rules against each other


def compare(model, tokens: Tensor, held_out: Tensor, train: TrainConfig, configs: dict) -> dict:
    """Train a layer of every config on the same teacher passes; held-out relative MSE by config and layer.

    All students of a layer see the same q, k, v and steps, so that differences are the configs' alone: one
    teacher pass feeds them all. The model must be linearized (any config) on the layers of interest.
    """
    students = {}
    for name, config in configs.items():
        for i, module in enumerate(attention_modules(model)):
            if i in linear_layers(model):
                torch.manual_seed(train.seed)
                heads, kv_heads, dim = head_shape(model, module)
                width = model.config.get_text_config().hidden_size
                students[name, i] = LinearizedAttention(config, width, heads, kv_heads, dim, dim)
                students[name, i].to(next(module.parameters()).device)
    trainable = {key: list(s.parameters()) for key, s in students.items() if list(s.parameters())}
    optimizer = torch.optim.AdamW(
        [p for params in trainable.values() for p in params], train.lr, (0.9, train.beta2), weight_decay=0.0
    )
    totals = {}

    def probe(module, teacher, student):
        for name in configs:
            key = name, module.layer_idx
            with torch.set_grad_enabled(learning and key in trainable):
                loss = relative_error(module, teacher, student(students[key]))
                if loss.requires_grad:
                    loss.backward()
            totals[key] = totals.get(key, 0.0) + loss.item()

    def passes(batches, count):
        for step, ids in enumerate(tqdm(batches, total=count, desc="rules", leave=False, disable=None)):
            distill.probe_layers(model, ids, probe)
            yield step

    learning = True
    for step in passes(distill.batches(tokens, train), train.steps):
        for params in trainable.values():
            torch.nn.utils.clip_grad_norm_(params, train.clip)
        optimizer.param_groups[0]["lr"] = distill.learning_rate(step, train)
        optimizer.step()
        optimizer.zero_grad()
    learning = False
    totals.clear()
    for _ in passes(held_out[:, None], len(held_out)):
        pass
    return {name: {i: totals[name, i] / len(held_out) for n, i in totals if n == name} for name in configs}


def rule_configs(base: LinearizeConfig) -> dict[str, LinearizeConfig]:
    """Every rule under both merges, all else as in `base`; `sum` also with the features, heads and biases of
    the paper, since a read that is only added must have the right size from the start; and the memory off."""
    names = ("features", "memory_per", "beta_bias", "decay_bias")
    paper = {name: distill.PRESETS["paper"][name] for name in names}
    made = {"memory off": dataclasses.replace(base, merge="off", router="recency")}
    for merge, more, note in (("sum", {}, ""), ("sum", paper, ", paper's"), ("lse", {}, "")):
        for rule in RULES:
            made[f"{rule} {merge}{note}"] = dataclasses.replace(base, rule=rule, merge=merge, **more)
    return made


def rules_table(result: dict) -> str:
    layers = list(next(iter(result.values())))
    heads = [f"layer {i}" for i in layers] + ["mean"]
    lines = ["held-out relative MSE".ljust(22) + "".join(f"{x:>10s}" for x in heads)]
    for name, errors in result.items():
        values = [*errors.values(), sum(errors.values()) / len(errors)]
        lines.append(name.ljust(22) + "".join(f"{x:10.4f}" for x in values))
    return "\n".join(lines)


# ----------------------------------------------------------------------------- reports


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error over sequences (nan for a single one)."""
    x = torch.tensor(values, dtype=torch.float64)
    return x.mean().item(), (x.std() / len(x) ** 0.5).item() if len(x) > 1 else math.nan


def paired(rows: dict, metric: str, row: str) -> tuple[float, float]:
    """Mean and standard error of what `row` saves of the memory-off row's nll or KL, sequence by sequence."""
    return mean_and_error([off - on for off, on in zip(rows["off"][metric], rows[row][metric])])


def text_table(result: dict) -> str:
    """Teacher, memory off at the same number of exact pairs, linearized; then what the memory adds."""
    c, rows, size = LinearizeConfig(**result["linearize"]), result["text"], result["state_bytes"]
    length = result["measured"]["seq_len"]
    names = {"teacher": "teacher (softmax)", "off": "memory off", "linear": f"memory ({c.rule}, {c.merge})"}
    head = (f"T = {length}", "ppl", "nll ± s.e.", "KL ± s.e.", "top-1", "pairs", "bytes/seq")
    lines = ["{:24s}{:>8s}{:>17s}{:>18s}{:>7s}{:>7s}{:>13s}".format(*head)]
    for key, name in names.items():
        (nll, nll_se), (kl, kl_se), (top1, _) = (mean_and_error(rows[key][m]) for m in ("nll", "kl", "top1"))
        pairs = length if key == "teacher" else min(length, c.exact_pairs)
        figures = f"{math.exp(nll):8.3f}{nll:9.4f} ±{nll_se:.4f} {kl:9.5f} ±{kl_se:.4f} {top1:6.3f}"
        lines.append(f"{name:24s}{figures}{pairs:7d}{size[key]:13,d}")
    for metric in ("nll", "kl"):
        (saved, error), (gap, gap_error) = (paired(rows, metric, row) for row in ("linear", "teacher"))
        part = f", {saved / gap:.0%} of the gap to the teacher" if gap > 3 * gap_error else ""
        lines.append(f"the memory lowers {metric:3s} by {saved:.5f} ± {error:.5f} (paired){part}")
    return "\n".join(lines)


def layers_table(result: dict) -> str:
    lines = ["normalised MSE by layer, and by eighths of the sequence (linearized)"]
    for i, off in result["off"]["layer"].items():
        by_position = " ".join(f"{e:.3f}" for e in result["linear"]["position"][i])
        on = result["linear"]["layer"][i]
        lines.append(f"layer {i:3d}   memory off {off:.4f}   linearized {on:.4f}   {by_position}")
    return "\n".join(lines)


def provenance(model, train: TrainConfig, fingerprint: str) -> dict:
    """What a figure needs beside it to be run again."""
    device = next(model.parameters()).device
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}, {device}"
    return dict(
        command="python " + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]), date=time.strftime("%Y-%m-%d"),
        machine=machine, torch=torch.__version__, train=getattr(model, "trained", dataclasses.asdict(train)),
        measured=dict(seq_len=train.seq_len, model=train.model, data=train.data, eval_data=train.eval_data),
        linearize=dataclasses.asdict(model.linearize_config), fingerprint=fingerprint,
    )  # fmt: skip


def report(
    model, held_out: Tensor, train: TrainConfig, path: Path, fingerprint: str, tasks=("text",), tokens=None
) -> None:
    """Run the tasks, print their tables, write everything raw to `path`. `fingerprint`: of the backbone, from
    the caller, who has it already: hashing every weight once more takes seconds to minutes."""
    result = provenance(model, train, fingerprint)
    result["new_parameters"] = sum(p.numel() for p in distill.new_parameters(model).values())
    if "text" in tasks:
        result["state_bytes"] = state_bytes(model, held_out.shape[1])
        result["text"] = measure_text(model, held_out)
        print(text_table(result))
    if "layers" in tasks:
        result["layers"] = measure_layers(model, held_out)
        print(layers_table(result["layers"]))
    if "rules" in tasks:
        configs = rule_configs(model.linearize_config)
        result["rules"] = compare(model, tokens, held_out, train, configs)
        print(rules_table(result["rules"]))
    distill.write_atomically(path, lambda p: p.write_text(json.dumps(result) + "\n"))


def run(args: argparse.Namespace) -> None:
    config, train = distill.configs_from(args)
    tasks = tuple(args.tasks.split(","))
    if bad := [t for t in tasks if t not in TASKS]:
        raise distill.UserError(f"unknown task {bad[0]!r}; choose from: {', '.join(TASKS)}")
    distill.check_writable(Path(args.json).resolve().parent)
    if not args.adapter and tasks != ("rules",):
        raise distill.UserError("tasks text and layers need --adapter DIR (python distill.py makes one)")
    model, tokenizer = distill.load_teacher(train.model, train.dtype, train.device)
    tokens, held_out = distill.load_data(tokenizer, train)
    if args.adapter:
        distill.load_linearized(model, args.adapter)
    else:
        distill.linearize(model, config, train.layers or None, train.seed)
    report(model, held_out, train, Path(args.json), distill.fingerprint(model), tasks, tokens)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapter", help="folder that distill.py wrote")
    parser.add_argument("--tasks", default="text,layers", help=f"any of {', '.join(TASKS)} [text,layers]")
    parser.add_argument("--json", default="results.json", help="where everything goes raw [results.json]")
    return distill.command_line(parser, run, argv)


if __name__ == "__main__":
    sys.exit(main())
