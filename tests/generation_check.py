"""Does generation run in constant memory and time, and is a split sequence the whole one? On any model.

    python tests/generation_check.py --adapter out --json tests/results/generation.json
    ... --model M --prompt-tokens 2048 --new-tokens 8192        ... --splits: only the second question

Greedy decoding, linearized and teacher, in one run. Per thousand new tokens: median ms a token, bytes kept
between tokens (states, or the teacher's cache), peak resident memory. Linearized first: it must not grow.
Splits: the largest difference of any logit between one pass over 1,100 tokens and the same tokens in pieces
(n tokens, then four one by one, then the rest).
`--state-bits`: KL to the teacher on the same text read token by token, its state kept in 32 and in 16 bits.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import distill  # noqa: E402
import eval  # noqa: E402


def resident() -> int:
    """Bytes of memory that the process holds now (Linux), else its peak."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def kept(cache) -> int:
    """Bytes of a cache: rows of states, or growing keys and values."""
    rows = [row.nbytes() for layer in cache.layers for row in getattr(layer, "rows", ())]
    grown = [x.nbytes for layer in cache.layers for x in (layer.keys, layer.values) if x is not None]
    return sum(rows) + sum(grown)


@torch.no_grad()
def decode(model, prompt: torch.Tensor, new: int, every: int) -> list[dict]:
    cache = distill.hf.DynamicCache()
    for piece in prompt.split(512, 1):
        out = model(input_ids=piece, cache=cache, use_cache=True, logits_to_keep=1)
    token = out.logits[:, -1:].argmax(-1)
    parts = []
    for _ in range(0, new, every):
        times, peak = [], 0
        for _ in range(every):
            start = time.process_time()  # CPU time: other processes do not count
            token = model(input_ids=token, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
            times.append(time.process_time() - start)
            peak = max(peak, resident())
        ms, mean_ms = (1e3 * f(times) for f in (statistics.median, statistics.mean))
        parts.append(dict(ms=ms, mean_ms=mean_ms, state_bytes=kept(cache), resident=peak))
        print(f"{len(parts) * every:6d} new tokens  {parts[-1]}", flush=True)
    return parts


def in_pieces(model, ids: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """The logits of all tokens, read in pieces of these sizes with one cache."""
    cache = distill.hf.DynamicCache()
    pieces = ids.split(sizes, 1)
    return torch.cat([model(input_ids=x, cache=cache, use_cache=True).logits for x in pieces], 1)


@torch.no_grad()
def splits(model, ids: torch.Tensor, at: tuple[int, ...]) -> dict[int, float]:
    whole, result = model(input_ids=ids, use_cache=False).logits, {}
    for n in at:
        pieces = in_pieces(model, ids, [n, 1, 1, 1, 1, ids.shape[1] - n - 4])
        result[n] = (pieces - whole).abs().max().item()
        print(f"split at {n:5d}: largest difference of a logit {result[n]:.1e}", flush=True)
    return result


@torch.no_grad()
def in_bits(model, text: torch.Tensor, length: int, sequences: int) -> dict[str, list[float]]:
    """KL(teacher || row), nats a token, of every sequence: in one pass, and token by token after the first
    64, the state rounded at every step to `state_bits`."""
    config, result = model.linearize_config, {}
    for ids in text[:, : length * sequences].view(sequences, 1, length):
        with distill.as_teacher(model):
            teacher = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        one_by_one = [64] + [1] * (length - 64)
        for name, bits, sizes in (("one pass", 32, [length]), ("32", 32, one_by_one), ("16", 16, one_by_one)):
            distill.set_budgets(model, replace(config, state_bits=bits))
            row = in_pieces(model, ids, sizes)[0, :-1].float().log_softmax(-1)
            kl = F.kl_div(row, teacher, log_target=True, reduction="sum").item() / len(row)
            result.setdefault(name, []).append(kl)
            print(f"{name}: KL {kl:.5f}", flush=True)
    distill.set_budgets(model, config)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="")
    parser.add_argument("--adapter", required=True)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=8192)
    parser.add_argument("--every", type=int, default=1024)
    parser.add_argument("--splits", action="store_true")
    parser.add_argument("--state-bits", action="store_true")
    parser.add_argument("--text", default="", help="for --state-bits: a file [Python's help]")
    parser.add_argument("--length", type=int, default=1024, help="for --state-bits: tokens a sequence")
    parser.add_argument("--sequences", type=int, default=2, help="for --state-bits")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    model, tokenizer = distill.load_teacher(args.model)
    distill.load_linearized(model, args.adapter)
    prompt = eval.tokenized(tokenizer, eval.read_texts(args.text)[0])[None]
    result = dict(command="python tests/generation_check.py " + shlex.join(sys.argv[1:]))
    result |= dict(date=time.strftime("%Y-%m-%d"), machine=f"{os.cpu_count()} cores, {platform.machine()}")
    result |= dict(model=args.model or "embedded", every=args.every, threads=torch.get_num_threads())
    result["linearize"] = distill.dataclasses.asdict(model.linearize_config)
    if args.state_bits:
        result["kl"] = in_bits(model, prompt, args.length, args.sequences)
    elif args.splits:
        result["splits"] = splits(model, prompt[:, :1100], (1, 15, 16, 17, 63, 64, 65, 100, 1000))
    else:
        result["linear"] = decode(model, prompt[:, : args.prompt_tokens], args.new_tokens, args.every)
        with distill.as_teacher(model):
            result["teacher"] = decode(model, prompt[:, : args.prompt_tokens], args.new_tokens, args.every)
    for name in () if args.splits or args.state_bits else ("linear", "teacher"):
        first, last = result[name][0], result[name][-1]
        changes = {key: last[key] / first[key] - 1 for key in ("ms", "state_bytes", "resident")}
        result[f"{name}_change"] = changes
        print(name, "last against first part:", {key: f"{x:+.1%}" for key, x in changes.items()})
    distill.write_atomically(Path(args.json), lambda p: p.write_text(json.dumps(result) + "\n"))


if __name__ == "__main__":
    main()
