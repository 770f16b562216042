"""Everything that only a GPU can tell about kernels.py, in one script of under 5 minutes; and what needs no GPU.

    python tests/gpu_check.py [--json FILE]     correctness, then speed, on the current CUDA device
    python tests/gpu_check.py --compile-only    registers, spills and shared memory for sm_80 and sm_90, no GPU needed

Correctness: outputs and all gradients of every decay kind, d = 64 and 128, every dtype, against float64 autograd
through `recurrent`, with the number of warps that kernels.py ships. Speed: bfloat16, batch 8, 16 heads of 128, against
F.scaled_dot_product_attention and, where `fla` can be imported, its chunk kernels on the same tensors.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import triton  # noqa: E402

import kernels as M  # noqa: E402

SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}  # bytes of shared memory a block may ask for
# float32 runs in full float32. 16-bit: one rounding of an output is 2^-9 (bfloat16) or 2^-12 (float16) of its own
# value, tf32 operands add 2^-11 a product, and some five products follow one another in the backward.
BOUND = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}
PEAK = {"H200": (495e12, 4.8e12), "H100": (495e12, 3.35e12), "A100": (156e12, 2.0e12)}  # tf32 flop/s, bytes/s


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
        return f"*{dtype}" if name in inputs or (name in undecayed and not constants.get("DECAY", True)) else "*fp32"

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
        out = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", out)}


def compile_only(json_path: str | None) -> bool:
    """The table; True if nothing spills and everything fits."""
    rows = []
    for capability in SHARED_LIMIT:
        for d in (64, 128):
            for decay in (True, False):
                plan = M.plan(1, 16, d, d, 8192, 64, decay, True, exact=False)
                for kernel in M.KERNELS:
                    constants = dict(plan, R_X=1, INVERT=True)
                    if kernel is M.read_back_kernel and not decay:
                        continue  # has no decay: the same kernel
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
        for rule in M.RULES:
            for d in (64, 128):
                args = M.example(rule, B=2, T=257, H=4, G=2, K=d, V=d, device="cuda", dtype=dtype)
                got = M.gradients(functools.partial(M.linear_attention, impl="triton"), args)
                error = max(map(M.relative_error, got, M.gradients(M.recurrent, args, torch.float64)))
                rows.append(dict(dtype=str(dtype)[6:], rule=rule, d=d, error=error, ok=error <= bound))
                print(*(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    return rows


def milliseconds(fn) -> float:
    """Median over a fifth of a second, after warming up (the first call compiles)."""
    return triton.testing.do_bench(fn, warmup=50, rep=200, return_mode="median")


def competitors(rule: str, args: list) -> dict:
    """name -> (function of q, k, v, what else it needs); fla works on the same (batch, time, heads, dim) layout."""
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
            args = M.example(rule, B=batch, T=T, H=H, G=H, K=d, V=d, device="cuda", dtype=torch.bfloat16)
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
                    except torch.OutOfMemoryError as error:  # a fact about the size, not a failure of the check
                        print(f"{rule} {impl} T={T} backward={backward}: {type(error).__name__}", flush=True)
                        continue
                    # the least work any chunked form does: four products with the state's shape and three within
                    # the chunk, 2 flops each, three times as much for forward+backward; q, k, v, o once (twice)
                    tokens, factor = batch * T * H, 3 if backward else 1
                    flops = factor * tokens * 2 * (4 * d * d + 3 * 64 * d)
                    size = (2 if backward else 1) * tokens * 2 * 4 * d
                    row = dict(rule=rule, impl=impl, T=T, batch=batch, backward=backward, ms=ms)
                    if impl != "sdpa":
                        row |= dict(tflops=flops / ms / 1e9, gbs=size / ms / 1e6)
                        if peak:
                            row["of_roofline"] = max(flops / peak[0], size / peak[1]) * 1e3 / ms
                    rows.append(row)
                    print(*(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
    return rows


def write(path: str | None, result: dict) -> None:
    if path:
        with open(path + ".new", "w") as file:
            json.dump(result, file, indent=1)
        os.replace(path + ".new", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
