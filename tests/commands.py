"""What `python distill.py generate` and `python eval.py` do with their options; eval.train is the third.

No part of the lesson: they load, check what was typed, and call what eval.py and distill.py teach.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from files import Progress, digest
from options import check_writable, configs_from, load_adapter
from texts import begun

import distill
from distill import UserError
from eval import KINDS, TASKS, Bench, add_controls, at_budget, load_data, report
from linear_attn import lookup


def generate(args: argparse.Namespace) -> None:
    """`python distill.py generate`: stream text in constant memory, then say what it took."""
    if not args.adapter:
        raise UserError("generate needs --adapter DIR (python distill.py makes one)")
    _, train = configs_from(args)
    model, tokenizer = distill.load_teacher(train.model, train.dtype, train.device, train.device_map)
    load_adapter(model, args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt.strip():
        raise UserError("the prompt is empty")
    ids = tokenizer(prompt, return_tensors="pt", verbose=False).to(model.device)
    cache, hot, start = distill.hf.DynamicCache(), args.temperature > 0, time.time()
    torch.manual_seed(train.seed)
    out = model.generate(
        **ids, cache=cache, max_new_tokens=args.max_new_tokens, prefill_chunk_size=1024,
        do_sample=hot, temperature=args.temperature if hot else None,
        streamer=distill.hf.TextStreamer(tokenizer, skip_prompt=True),
    )  # fmt: skip
    new, pairs = out.shape[1] - ids["input_ids"].shape[1], model.linearize_config.exact_pairs
    size = sum(row.nbytes() for layer in cache.layers for row in getattr(layer, "rows", ()))
    said = f"{out.shape[1]} tokens of context, {pairs} exact pairs (a mean over layers), state {size:,} bytes"
    rate = f"{new} new tokens, {new / (time.time() - start):.1f} a second with the prompt"
    print(f"\n{said}; {rate}", file=sys.stderr)


def evaluate(args: argparse.Namespace) -> None:
    """`python eval.py`: a saved adapter, or an ablation, on the tasks named; --readme: README's tables."""
    if args.readme:
        import readme_tables  # it knows every result, no run needs it

        return readme_tables.rewrite()
    config, train = configs_from(args)
    tasks = tuple(args.tasks.split(","))
    for name in tasks:
        lookup(TASKS, name, "task")
    check_writable(Path(args.json).resolve().parent)
    if not args.adapter and tasks != ("ablation",):
        raise UserError("every task but ablation needs --adapter DIR (python distill.py makes one)")
    model, tokenizer = distill.load_teacher(train.model, train.dtype, train.device, train.device_map)
    train = begun(train, tokenizer)
    data = load_data(tokenizer, train)
    if args.adapter:
        load_adapter(model, args)
    else:
        distill.linearize(model, config, train.layers or None, train.seed)
    add_controls(model)
    modes, kinds = model.controller.variants, tuple(args.kinds.split(","))
    rows = tuple(dict.fromkeys(["teacher", *(args.rows.split(",") if args.rows else modes)]))
    for row in rows[1:]:
        name, _, budget = row.partition("@")
        lookup(modes, name, "row")
        if "@" in row:
            modes[row] = at_budget(model, name, int(budget))
    for kind in kinds:
        lookup(dict.fromkeys(KINDS), kind, "kind")
    path, before = Path(args.json), distill.fingerprint(model)
    whose = sys.argv, before, digest(distill.new_parameters(model))
    progress = Progress(path.with_name(path.name + ".part"), whose)
    bench = Bench(
        model, tokenizer, *data, train, rows, args.limit, kinds, args.mmlu, args.lambada, args.plot, progress
    )
    report(bench, path, before, {name: TASKS[name] for name in tasks})
    progress.finish()
