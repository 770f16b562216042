"""`python distill.py plan`: what a model will take, from its config alone. Estimates; no weight is loaded.

    python tests/scaling.py --model M --seq-len 1024 --batch 1 --json F     one step, planned and measured

Bytes a token, a layer, in the terms of the code (L = exact pairs + block, 4 bytes a number unless said):
    forward     6 D + 3 I               residual stream, norms, q, k, v; the three products of the MLP
    branch      3 H L + 2 G L (K + V) / block + 14 H K
                what a layer's own branch keeps for its backward pass: scores, their exponentials and
                probabilities; gathered keys and values of a block; features, reads and what merges them
Peak of training (weights in --dtype; new parameters in float32 with gradient and two moments: 16 bytes each)
    layer       process + weights + 16 new + tokens (forward + 2 branch)        one layer, whatever the depth
    ce, kl      process + weights + 16 new + tokens (layers (forward + branch) + 4 vocabulary)
    --recompute process + weights + 16 new + tokens (layers D + forward + 2 branch + 4 vocabulary)
    --allocate  process + weights + T (layers (D + 2 H K) + 2 forward + 4 vocabulary)     of one sequence
With N devices (torchrun) each has 1/N of the layers' weights, all of embedding and output projection, and 1/N
of the batch: Qwen2.5-32B, 8 x 4,096 tokens on 8 devices, 62.4 GB / 8 + 3.1 GB + 0.9 GB + 4.6 GB = 16.8 GB.
Qwen2.5-32B on one device, 1 x 4,096 tokens: 32.76 billion weights x 2 bytes = 65.5 GB, 56 million new
parameters x 16 bytes = 0.9 GB, and for the layer loss 4,096 tokens x 1.13 MB = 4.6 GB: 71.4 GB in all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shlex
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import torch
from files import peak_memory
from options import configs_from, parser_for

import distill
from distill import UserError, head_shape, linearize, new_parameters
from eval import state_bytes

PROCESS = 350 * 2**20  # Python, torch and transformers on a CPU; measured, smollm2 and qwen


def estimate(name: str, config, train, gpus: int = 1) -> dict[str, float]:
    """Everything in bytes, but for the counts of parameters and `crossover`, in tokens."""
    if config is None:
        raise UserError("plan knows models and options; it does not read an --adapter")
    hf_config = config_of(name)
    dtype = getattr(torch, "float32" if train.dtype == "auto" else train.dtype)
    with torch.device("meta"):
        model = distill.hf.AutoModelForCausalLM.from_config(hf_config, dtype=dtype).eval()
        frozen = sum(p.numel() for p in model.parameters())
        linearize(model, config, train.layers or None)
    text, modules = model.config.get_text_config(), distill.attention_modules(model)
    (H, G, K), D = head_shape(model, modules[0]), text.hidden_size
    new, L = sum(p.numel() for p in new_parameters(model).values()), config.exact_pairs + config.block
    wide = max(p.shape[0] for name, p in model.named_parameters() if "mlp" in name or "experts" in name)
    forward = (6 * D + 3 * wide) * dtype.itemsize
    branch = 4 * (3 * H * L + 2 * G * L * 2 * K / config.block + 14 * H * K)
    ends = {e.weight for e in (model.get_input_embeddings(), model.get_output_embeddings())}  # one if tied
    whole = sum(weight.numel() for weight in ends)
    weights = ((frozen - whole) / gpus + whole) * dtype.itemsize
    tokens, fixed = -(-train.batch // gpus) * train.seq_len, PROCESS + weights + 16 * new
    logits, one_layer = 4 * 4 * text.vocab_size, forward + 2 * branch
    deep = len(modules) * (forward + branch) + logits
    again = len(modules) * D * dtype.itemsize + one_layer + logits
    kept = len(modules) * (D + 2 * H * K) * dtype.itemsize  # every layer's input, answer and its gradient
    size = state_bytes(model, 10**6, ("teacher", "linear"))
    return dict(
        parameters=frozen, new=new, weights=frozen * dtype.itemsize, state=size["linear"],
        layer=fixed + tokens * one_layer, end_to_end=fixed + tokens * deep, recompute=fixed + tokens * again,
        allocate=PROCESS + weights + train.seq_len * (kept + 2 * forward + logits),
        crossover=size["linear"] / (size["teacher"] / 10**6),
    )  # fmt: skip


def config_of(name: str):
    """The model's config: from a folder or config.json without a network, else from the hub."""
    try:
        return distill.hf.AutoConfig.from_pretrained(name or distill.EMBEDDED)
    except Exception as error:
        raise UserError(f"cannot read the config of {name!r}: {distill.brief(error)}") from None


def plan(args: argparse.Namespace) -> None:
    """`python distill.py plan --model M --gpus 4x80`."""
    config, train = configs_from(args)
    try:
        count, each = (int(x) for x in args.gpus.lower().split("x"))
    except ValueError:
        raise UserError(f"--gpus wants NUMBERxGIGABYTES, as 1x80, got {args.gpus!r}") from None
    if train.dtype == "auto":  # as on a GPU
        train = dataclasses.replace(train, dtype="bfloat16")
    x = estimate(train.model, config, train, count)
    GB, name = 1e9, train.model or "embedded"
    print(f"model       {name}: {x['parameters']:,} parameters, {x['weights'] / GB:.2f} GB")
    print(f"new         {x['new']:,} parameters ({x['new'] / x['parameters']:.2%}), trained in float32")
    stages = {"--allocate": "allocate", "--loss layer": "layer", "--loss ce, kl": "end_to_end",
              "--recompute 1": "recompute"}  # fmt: skip
    for name, key in stages.items():
        fits = "fits" if x[key] < each * GB else "does not fit"
        size = f"{count if key == 'allocate' else train.batch} x {train.seq_len} tokens, {train.dtype}"
        print(f"{name:14s} {x[key] / GB:.2f} GB a device at {size}: {fits} {count} x {each} GB (estimate)")
    if x["allocate"] >= each * GB:
        print("               --allocate 0, or the shares first: --seq-len 1024 --steps 1, then --adapter")
    less = f"less than the teacher's cache beyond {x['crossover']:,.0f} tokens"
    print(f"generation  a state of {x['state'] / 1e6:.1f} MB a sequence, {less}")


def measure(args: argparse.Namespace) -> None:
    """The first training step, random tokens, after every weight was read (the fingerprint of a run does)."""
    config, train = configs_from(args)
    x = estimate(train.model, config, train)
    model, _ = distill.load_teacher(train.model, train.dtype, "cpu")
    distill.fingerprint(model)
    linearize(model, config, train.layers or None)
    optimizer = torch.optim.AdamW(new_parameters(model).values())
    ids = torch.randint(0, 1000, (train.batch, train.seq_len), generator=torch.Generator().manual_seed(0))
    peak_memory(model.device, reset=True)
    start = time.time()
    with distill.recomputed(model, train.recompute):
        distill.LOSSES[train.loss](model, ids)
    optimizer.step()
    planned = x["layer" if train.loss == "layer" else "recompute" if train.recompute else "end_to_end"]
    result = dict(
        planned=planned,
        measured=peak_memory(model.device),
        seconds=time.time() - start,
        threads=torch.get_num_threads(),
    )
    result |= dict(
        command="python tests/scaling.py " + shlex.join(sys.argv[1:]), date=time.strftime("%Y-%m-%d")
    )
    result |= dict(machine=f"{os.cpu_count()} cores, {platform.machine()}", loss=train.loss)
    result |= dict(batch=train.batch, seq_len=train.seq_len, recompute=train.recompute)
    print(json.dumps(result))
    distill.write_atomically(Path(args.json), lambda p: p.write_text(json.dumps(result) + "\n"))


if __name__ == "__main__":
    json_too = lambda parser: parser.add_argument("--json", required=True)  # noqa: E731
    measure(parser_for(dict(measure=measure), json_too).parse_args())
