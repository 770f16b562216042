"""How correct and how fast kernels.py is: on a GPU, and as far as that can be told without one.

    python kernels.py [--json FILE]           any machine: correctness; CPU times against recurrence and SDPA
    python tests/gpu_check.py --compile-only  no GPU: registers, spills, shared memory on sm_80 and sm_90
    python tests/gpu_check.py [--json FILE]   one GPU, under 5 minutes: correctness, then speed

On a GPU: outputs and all gradients of every decay kind, d = 64 and 128, every dtype, against float64 autograd
through `recurrent`, with the warps that kernels.py ships; then times in bfloat16, 16 heads of 128, against
F.scaled_dot_product_attention and, where `fla` can be imported, its chunk kernels on the same tensors.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

import kernels as M  # noqa: E402

triton = M.triton

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}  # bytes of shared memory a block may ask for
# float32 runs in full float32. 16-bit: rounding an output costs 2^-9 (bfloat16) or 2^-12 (float16) of its
# value, tf32 operands add 2^-11 a product, and some five products follow one another in the backward.
BOUND = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}
PEAK = {"H200": (495e12, 4.8e12), "H100": (495e12, 3.35e12), "A100": (156e12, 2.0e12)}  # tf32 flop/s, bytes/s


RULES = {
    "sum": ("", 0),
    "gla": ("channel", 0),
    "deltanet": ("", 1),
    "gdn": ("head", 1),
    "kda": ("channel", 1),
}


def example(rule: str, B=1, T=100, H=2, G=2, K=32, V=32, device="cpu", dtype=torch.float32, seed=0) -> list:
    """Random (q, k, v, log_decay, erase, write, state) of one of RULES, unit keys, on `device`."""
    gen = torch.Generator().manual_seed(seed)
    q, k, v, g, b, s = (
        torch.randn(shape, generator=gen)
        for shape in ((B, T, H, K), (B, T, G, K), (B, T, G, V), (B, T, G, K), (B, T, G), (B, G, K, V))
    )
    decay_kind, delta = RULES[rule]
    g = {"": None, "head": F.logsigmoid(g[..., 0] + 2), "channel": F.logsigmoid(g + 2)}[decay_kind]
    b = b.sigmoid() if delta else None
    q, k, v = (z.to(dtype) for z in (q / K**0.5, F.normalize(k, dim=-1), v))
    return [None if z is None else z.to(device) for z in (q, k, v, g, b, b, s)]


def gradients(fn: Callable, args: list, dtype=None) -> list[Tensor]:
    """[o, S, and the gradients of a fixed mixture of both with respect to every tensor in args]."""
    args = [None if z is None else z.detach().to(dtype or z.dtype, copy=True).requires_grad_() for z in args]
    o, S = fn(*args)
    weights = (
        torch.linspace(-1, 1, z.numel(), dtype=z.dtype, device=z.device).view(z.shape).cos() for z in (o, S)
    )
    loss = sum((z * w).sum() for z, w in zip((o, S), weights, strict=True))
    return [o.detach(), S.detach(), *torch.autograd.grad(loss, [z for z in args if z is not None])]


def relative_error(got: Tensor, want: Tensor) -> float:
    """max|got - want| / max|want|"""
    return ((got.double() - want.double()).abs().max() / want.abs().max().clamp(min=1e-30)).item()


def seconds(fn: Callable, args: list, backward: bool) -> float:
    """Best CPU time of two runs, one if it takes 3 s. (GPU times: tests/gpu_check.py.)"""
    leaves, best = [None if z is None else z.detach().requires_grad_(backward) for z in args], 1e9
    for _ in range(2):
        start = time.process_time()
        out = fn(*leaves)
        if backward:
            out.sum().backward()
        best = min(best, time.process_time() - start)
        if best > 3:
            break
    return best


def cpu_tables() -> None:
    """Check and time what this machine can run; --json FILE keeps the two tables."""
    parser = argparse.ArgumentParser(description=cpu_tables.__doc__)
    parser.add_argument("--json")
    path = parser.parse_args().json
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    errors, times = [], []
    print("largest relative error of outputs and gradients against float64 autograd through `recurrent`")
    for rule in RULES:
        for impl in ("chunked", "triton") if device == "cuda" or M.INTERPRETED else ("chunked",):
            args = example(rule, device=device)
            got = gradients(functools.partial(M.linear_attention, impl=impl), args)
            error = max(map(relative_error, got, gradients(M.recurrent, args, torch.float64)))
            errors.append(dict(rule=rule, impl=impl, error=error))
            print(f"  {rule:9s}{impl:9s}{error:.1e}")
    if errors[-1]["impl"] != "triton":
        print("  (triton: not run, it needs a GPU or TRITON_INTERPRET=1)")
    print("CPU seconds on one core: batch 1, 8 heads of 64, float32, deltanet (second chunked column: kda)")
    print("                     T  recurrent  chunked      kda     sdpa  recurrent/chunked  sdpa/chunked")
    for backward in (False, True):
        for T in (512, 1024, 2048, 4096, 8192):
            args, kda = (example(rule, T=T, H=8, G=8, K=64, V=64)[:6] for rule in ("deltanet", "kda"))
            qkv = [z.transpose(1, 2).contiguous() for z in args[:3]]
            loop = None
            if T <= (2048 if backward else 8192):  # autograd keeps every state: gigabytes, and minutes
                loop = seconds(lambda *a: M.recurrent(*a)[0], args, backward)
            fast, channel = (seconds(lambda *a: M.chunked(*a)[0], a, backward) for a in (args, kda))
            sdpa = seconds(lambda *a: F.scaled_dot_product_attention(*a, is_causal=True), qkv, backward)
            times.append(dict(backward=backward, T=T, recurrent=loop, chunked=fast, kda=channel, sdpa=sdpa))
            first, ratio = ("not run", "") if loop is None else (f"{loop:.3f}", f"{loop / fast:.1f}")
            print(f"{'forward' + '+backward' * backward:16s}{T:6d}{first:>11s}", end="")
            print(f"{fast:9.3f}{channel:9.3f}{sdpa:9.3f}{ratio:>19s}{sdpa / fast:14.2f}", flush=True)
    versions = dict(torch=torch.__version__, triton=getattr(triton, "__version__", None))
    machine = f"{platform.machine()}, {os.cpu_count()} cores, one thread"
    facts = dict(versions, machine=machine, date=time.strftime("%Y-%m-%d"))
    write(path, dict(facts, errors=errors, times=times))


def compile_kernel(kernel, capability: int, dtype: str, constants: dict):
    """The kernel as the launcher would compile it: bfloat16 or float32 inputs, pointers divisible by 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {n: c for n, c in constants.items() if n in kernel.arg_names}
    inputs, undecayed = {"q", "k", "do"}, {"q_in", "k_out", "y"}

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in ("T", "N", "LEVELS"):
            return "i32"
        if name == "G" and constants.get("DECAY"):
            return "*fp64"
        return (
            f"*{dtype}"
            if name in inputs or (name in undecayed and not constants.get("DECAY", True))
            else "*fp32"
        )

    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={n: kind(n) for n in names},
        constexprs={(names.index(n),): c for n, c in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if kind(n)[0] == "*"},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=M.LAUNCH)


def resources(compiled) -> dict:
    """Registers and stack bytes a thread, as the assembler reports them (stack above 0: spills)."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        out = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", out)}


def compile_only(json_path: str | None) -> bool:
    """The table; True if nothing spills and everything fits."""
    rows = []
    for capability in SHARED_LIMIT:
        for d in (64, 128):
            for decay in (True, False):
                plan = M.plan(1, 16, d, d, 8192, 64, decay, True, exact=False)
                for kernel in (getattr(M, name) for name in dir(M) if name.endswith("_kernel")):
                    constants = dict(plan, R_Z=1, INVERT=True)
                    compiled = compile_kernel(kernel, capability, "bf16", constants)
                    use = resources(compiled)
                    name = kernel.__name__.removesuffix("_kernel")
                    row = dict(sm=capability, d=d, decay=decay, kernel=name, shared=compiled.metadata.shared)
                    row |= dict(registers=use["REG"], stack=use["STACK"])
                    rows.append(row)
                    print(*(f"{key}={value}" for key, value in row.items()), flush=True)
    write(json_path, dict(triton=triton.__version__, **M.LAUNCH, rows=rows))
    return all(r["stack"] == 0 and r["shared"] <= SHARED_LIMIT[r["sm"]] for r in rows)


def correctness() -> list[dict]:
    rows = []
    for dtype, bound in BOUND.items():
        for rule in RULES:
            for d in (64, 128):
                args = example(rule, B=2, T=257, H=4, G=2, K=d, V=d, device="cuda", dtype=dtype)
                got = gradients(functools.partial(M.linear_attention, impl="triton"), args)
                error = max(map(relative_error, got, gradients(M.recurrent, args, torch.float64)))
                rows.append(dict(dtype=str(dtype)[6:], rule=rule, d=d, error=error, ok=error <= bound))
                print(*(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def milliseconds(fn) -> float:
    """Median over a fifth of a second, after warming up (the first call compiles)."""
    return triton.testing.do_bench(fn, warmup=50, rep=200, return_mode="median")


def competitors(rule: str, args: list) -> dict:
    """name -> (function of q, k, v, what else it needs); fla has the same layout."""
    q, k, v, g, b, _ = args[:6]
    table = {
        "triton": lambda q, k, v: M.linear_attention(q, k, v, g, b, b, impl="triton")[0],
        "sdpa": lambda q, k, v: F.scaled_dot_product_attention(
            *(z.transpose(1, 2) for z in (q, k, v)), is_causal=True
        ),
    }
    try:
        if rule == "deltanet":
            from fla.ops.delta_rule import chunk_delta_rule

            table["fla"] = lambda q, k, v: chunk_delta_rule(q, k, v, b.to(q), scale=1.0)[0]
        elif rule == "gdn":
            from fla.ops.gated_delta_rule import chunk_gated_delta_rule

            table["fla"] = lambda q, k, v: chunk_gated_delta_rule(q, k, v, g, b.to(q), scale=1.0)[0]
        elif rule == "kda":
            from fla.ops.kda import chunk_kda

            table["fla"] = lambda q, k, v: chunk_kda(q, k, v, g, b.to(q), scale=1.0)[0]
    except ImportError:
        pass
    return table


def speed(B=8, H=16, d=128) -> list[dict]:
    rows = []
    name = torch.cuda.get_device_name()
    peak = next((numbers for key, numbers in PEAK.items() if key in name), None)
    for rule in ("deltanet", "kda", "gdn"):
        for T in (2048, 8192, 32768) if rule != "gdn" else (8192,):
            batch = B if T <= 8192 else 1
            args = example(rule, B=batch, T=T, H=H, G=H, K=d, V=d, device="cuda", dtype=torch.bfloat16)
            leaves = [z.requires_grad_() for z in args[:3]]
            for impl, fn in competitors(rule, args).items():
                for backward in (False, True):

                    def run(fn=fn, backward=backward, leaves=leaves):
                        with torch.set_grad_enabled(backward):
                            o = fn(*leaves)
                        if backward:
                            torch.autograd.grad(o, leaves, o)

                    try:
                        ms = milliseconds(run)
                    except (
                        torch.OutOfMemoryError
                    ) as error:  # a fact about the size, not a failure of the check
                        print(f"{rule} {impl} T={T} backward={backward}: {type(error).__name__}", flush=True)
                        continue
                    # least work of a chunked form: four products with the state's shape, three within the
                    # chunk, 2 flops each, three times that with the backward; q, k, v, o once (twice)
                    tokens, factor = batch * T * H, 3 if backward else 1
                    flops = factor * tokens * 2 * (4 * d * d + 3 * 64 * d)
                    size = (2 if backward else 1) * tokens * 2 * 4 * d
                    row = dict(rule=rule, impl=impl, T=T, batch=batch, backward=backward, ms=ms)
                    if impl != "sdpa":
                        row |= dict(tflops=flops / ms / 1e9, gbs=size / ms / 1e6)
                        if peak:
                            row["of_roofline"] = max(flops / peak[0], size / peak[1]) * 1e3 / ms
                    rows.append(row)
                    print(
                        *(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
                        flush=True,
                    )
    return rows


def write(path: str | None, result: dict) -> None:
    if path:
        with open(path + ".new", "w") as file:
            json.dump(result, file, indent=1)
        os.replace(path + ".new", path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    if M.INTERPRETED:
        sys.exit("unset TRITON_INTERPRET: this script is about compiled kernels")
    if options.compile_only:
        sys.exit(0 if compile_only(options.json) else "spills, or too much shared memory")
    if not torch.cuda.is_available():
        sys.exit("no CUDA device; --compile-only works without one")
    start = time.time()
    checks = correctness()
    versions = dict(torch=torch.__version__, triton=triton.__version__, device=torch.cuda.get_device_name())
    result = dict(versions, date=time.strftime("%Y-%m-%d"), **M.LAUNCH, correctness=checks)
    write(options.json, result)  # kept even if a timing fails
    write(options.json, dict(result, speed=speed(), seconds=time.time() - start))
    sys.exit(0 if all(row["ok"] for row in checks) else "wrong results, see above")


if __name__ == "__main__":
    main()
