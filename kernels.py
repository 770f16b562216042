"""DOCSTRING"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linear_attn import chunked, empty_state, lookup, recurrent, register

try:
    import triton
    import triton.language as tl
except ImportError:  # the torch paths work without it, and so does reading the kernels
    triton = tl = None

jit: Callable = triton.jit if triton else (lambda kernel: kernel)
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"  # decided at import, as Triton does
MAX_KEY_DIM = 256

# ---------------------------------------------------------------------------- tiles


@jit
def rows(ptr, row, heads, t, T, d0, D, BD: tl.constexpr):
    """Pointers and mask of tile [len(t), BD] of a (batch, time, heads, dim) tensor: times t, channels d0...

    `row` counts (batch, head) pairs. It and t are 64 bits wide: offsets pass 2^31 in real training runs."""
    d = d0 + tl.arange(0, BD)
    start = ((row // heads * T + t) * heads + row % heads) * D
    return ptr + start[:, None] + d[None, :], ((t >= 0) & (t < T))[:, None] & (d < D)[None, :]


@jit
def load(ptr, row, heads, t, T, d0, D, BD: tl.constexpr):
    """A tile in float32 with zeros outside: a token beyond T has q = k = v = 0 and changes nothing."""
    at, inside = rows(ptr, row, heads, t, T, d0, D, BD)
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@jit
def store(ptr, x, row, heads, t, T, d0, D, BD: tl.constexpr):
    at, inside = rows(ptr, row, heads, t, T, d0, D, BD)
    tl.store(at, x.to(ptr.dtype.element_ty), mask=inside)


@jit
def decay(G, row, heads, since, until, T, d0, D, BD: tl.constexpr):
    """exp(g_{since+1} + ... + g_until) for vectors of times: a difference of the float64 sums G, G_{-1} = 0."""
    a, inside_a = rows(G, row, heads, tl.minimum(since, T - 1), T, d0, D, BD)
    b, inside_b = rows(G, row, heads, tl.minimum(until, T - 1), T, d0, D, BD)
    return tl.exp((tl.load(b, mask=inside_b, other=0.0) - tl.load(a, mask=inside_a, other=0.0)).to(tl.float32))


@jit
def state_tile(ptr, index, k0, K, v0, V, BK: tl.constexpr, BV: tl.constexpr):
    """Pointers and mask of tile [BK, BV] at (k0, v0) of the index-th of many (K, V) matrices."""
    k, v = k0 + tl.arange(0, BK), v0 + tl.arange(0, BV)
    return ptr + index * K * V + k[:, None] * V + v[None, :], (k < K)[:, None] & (v < V)[None, :]


@jit
def meets(left, right, level):
    """Is token `right` in an odd block of 2^level tokens, and `left` in the even block just before it?"""
    return (right >> level & 1 == 1) & (left >> level == (right >> level) - 1)


# ---------------------------------------------------------------------------- kernels


@jit
def products_kernel(
    x, k, G, out, x_in, k_out, T, N, X_HEADS, HEADS, K, LEVELS, DECAY: tl.constexpr, INVERT: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(8): P for x = q, or (INVERT) (9) X = (I + N)^-1 for x = e. One program a chunk and head of x."""
    x_row, n = (tl.program_id(0) // N).to(tl.int64), tl.program_id(0) % N
    row = x_row // (X_HEADS // HEADS)  # query heads h = g*r lie next to each other
    i, j, c = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, C)
    t_first = n.to(tl.int64) * C
    t = t_first + c
    M = tl.zeros([C, C], tl.float32)
    for k0 in range(0, K, BK):  # M is a sum over channels: a block of them at a time
        bx = load(x, x_row, X_HEADS, t, T, k0, K, BK)
        bk = load(k, row, HEADS, t, T, k0, K, BK)
        if DECAY:
            for level in range(LEVELS):
                start = t - (c & ((1 << level) - 1))
                right = bx * decay(G, row, HEADS, start - 1, t, T, k0, K, BK)
                left = bk * decay(G, row, HEADS, t, start + (1 << level) - 1, T, k0, K, BK)
                M += tl.where(meets(j, i, level), tl.dot(right, tl.trans(left), input_precision=PREC), 0.0)
            start, end = t * 0 + t_first - 1, t * 0 + t_first + C - 1
            store(x_in, bx * decay(G, row, HEADS, start, t, T, k0, K, BK), x_row, X_HEADS, t, T, k0, K, BK)
            if x_row % (X_HEADS // HEADS) == 0:
                store(k_out, bk * decay(G, row, HEADS, t, end, T, k0, K, BK), row, HEADS, t, T, k0, K, BK)
        else:
            M += tl.where(i > j, tl.dot(bx, tl.trans(bk), input_precision=PREC), 0.0)
        if not INVERT:
            M += tl.where(i == j, tl.sum(bx * bk, 1)[:, None], 0.0)
    if INVERT:
        X = tl.where(i == j, 1.0, 0.0)
        for level in range(LEVELS):  # rolled on purpose: unrolled, this loop took a minute to compile and spilled
            corner = tl.where(meets(j, i, level), M, 0.0)
            X -= tl.dot(tl.dot(X, corner, input_precision=EXACT), X, input_precision=EXACT)
        M = X
    tl.store(out + tl.program_id(0).to(tl.int64) * C * C + i * C + j, M)


@jit
def walk_kernel(
    e_in, k_out, v, G, x, s0, u, s_in, s_end, T, N, HEADS, K, V, DECAY: tl.constexpr, ERASE: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(10), (12), first chunk to last: U and every chunk's entry state. A program a memory and BV columns of it."""
    row, v0 = tl.program_id(0).to(tl.int64), tl.program_id(1) * BV
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    at, inside = state_tile(s0, row, 0, K, v0, V, BK, BV)
    S = tl.load(at, mask=inside, other=0.0)
    for n in range(N):
        t0 = tl.cast(n, tl.int64) * C
        t = t0 + tl.arange(0, C)
        at, inside = state_tile(s_in, row * N + n, 0, K, v0, V, BK, BV)
        tl.store(at, S, mask=inside)
        U = load(v, row, HEADS, t, T, v0, V, BV)
        if ERASE:
            U -= tl.dot(load(e_in, row, HEADS, t, T, 0, K, BK), S, input_precision=PREC)
            U = tl.dot(tl.load(x + (row * N + n) * C * C + i * C + j), U, input_precision=PREC)
        store(u, U, row, HEADS, t, T, v0, V, BV)
        if DECAY:
            end = t0 + C - 1 + tl.arange(0, 1)
            S *= tl.trans(decay(G, row, HEADS, end - C, end, T, 0, K, BK))
        S += tl.dot(tl.trans(load(k_out, row, HEADS, t, T, 0, K, BK)), U, input_precision=PREC)
    at, inside = state_tile(s_end, row, 0, K, v0, V, BK, BV)
    tl.store(at, S, mask=inside)


@jit
def read_kernel(
    q_in, u, s_in, p, o, T, N, Q_HEADS, HEADS, K, V,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(11), all chunks at once: one program a chunk, query head and block of BV columns of the output."""
    q_row, n, v0 = (tl.program_id(0) // N).to(tl.int64), tl.program_id(0) % N, tl.program_id(1) * BV
    row = q_row // (Q_HEADS // HEADS)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    t = n.to(tl.int64) * C + tl.arange(0, C)
    P = tl.load(p + tl.program_id(0).to(tl.int64) * C * C + i * C + j)
    O = tl.dot(P, load(u, row, HEADS, t, T, v0, V, BV), input_precision=PREC)
    for k0 in range(0, K, BK):
        at, inside = state_tile(s_in, row * N + n, k0, K, v0, V, BK, BV)
        S = tl.load(at, mask=inside, other=0.0)
        O += tl.dot(load(q_in, q_row, Q_HEADS, t, T, k0, K, BK), S, input_precision=PREC)
    store(o, O, q_row, Q_HEADS, t, T, v0, V, BV)


@jit
def walk_back_kernel(
    q_in, e_in, k_out, G, p, x, do, ds_end, dr, ds_out, ds0, T, N, Q_HEADS, HEADS, K, V, DECAY: tl.constexpr,
    ERASE: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(13)-(15), last chunk to first; the programs are walk_kernel's."""
    row, v0, R = tl.program_id(0).to(tl.int64), tl.program_id(1) * BV, Q_HEADS // HEADS
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    at, inside = state_tile(ds_end, row, 0, K, v0, V, BK, BV)
    dS = tl.load(at, mask=inside, other=0.0)
    for step in range(N):
        n = N - 1 - step
        t0 = tl.cast(n, tl.int64) * C
        t = t0 + tl.arange(0, C)
        at, inside = state_tile(ds_out, row * N + n, 0, K, v0, V, BK, BV)
        tl.store(at, dS, mask=inside)
        dU = tl.dot(load(k_out, row, HEADS, t, T, 0, K, BK), dS, input_precision=PREC)
        if DECAY:
            end = t0 + C - 1 + tl.arange(0, 1)
            dS *= tl.trans(decay(G, row, HEADS, end - C, end, T, 0, K, BK))
        for r in range(R):
            q_row = row * R + r
            dO = load(do, q_row, Q_HEADS, t, T, v0, V, BV)
            P_T = tl.load(p + (q_row * N + n) * C * C + j * C + i)  # transposed by the load
            dU += tl.dot(P_T, dO, input_precision=PREC)
            dS += tl.dot(tl.trans(load(q_in, q_row, Q_HEADS, t, T, 0, K, BK)), dO, input_precision=PREC)
        if ERASE:
            X_T = tl.load(x + (row * N + n) * C * C + j * C + i)
            dU = tl.dot(X_T, dU, input_precision=PREC)  # from here on dR
            dS -= tl.dot(tl.trans(load(e_in, row, HEADS, t, T, 0, K, BK)), dU, input_precision=PREC)
        store(dr, dU, row, HEADS, t, T, v0, V, BV)
    at, inside = state_tile(ds0, row, 0, K, v0, V, BK, BV)
    tl.store(at, dS, mask=inside)


@jit
def reader_gradient(
    bx, bk, G, y, y_row, Y_HEADS, u, s_in, row, HEADS, index, t, t0, T, k0, K, V, LEVELS,
    OWN: tl.constexpr, DECAY: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(16)-(18) for one reader x whose reads have gradient Y: (dx, its part of dk, its part of dG)."""
    i, j, c = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, C)
    dx, dk = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    dM, dM_T = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for v0 in range(0, V, BV):
        Y, U = load(y, y_row, Y_HEADS, t, T, v0, V, BV), load(u, row, HEADS, t, T, v0, V, BV)
        at, inside = state_tile(s_in, index, k0, K, v0, V, BK, BV)
        dx += tl.dot(Y, tl.trans(tl.load(at, mask=inside, other=0.0)), input_precision=PREC)
        dM += tl.dot(Y, tl.trans(U), input_precision=PREC)
        dM_T += tl.dot(U, tl.trans(Y), input_precision=PREC)  # again, not tl.trans(dM): see Hazards
    dG = tl.zeros([C, BK], tl.float32)
    if DECAY:
        dx *= decay(G, row, HEADS, t * 0 + t0 - 1, t, T, k0, K, BK)
        dG = bx * dx
        for level in range(LEVELS):
            start = t - (c & ((1 << level) - 1))
            right = decay(G, row, HEADS, start - 1, t, T, k0, K, BK)
            left = decay(G, row, HEADS, t, start + (1 << level) - 1, T, k0, K, BK)
            dx_w = right * tl.dot(tl.where(meets(j, i, level), dM, 0.0), bk * left, input_precision=PREC)
            dk_w = left * tl.dot(tl.where(meets(i, j, level), dM_T, 0.0), bx * right, input_precision=PREC)
            dx += dx_w
            dk += dk_w
            dG += bx * dx_w - bk * dk_w
    else:
        dx += tl.dot(tl.where(i > j, dM, 0.0), bk, input_precision=PREC)
        dk += tl.dot(tl.where(i < j, dM_T, 0.0), bx, input_precision=PREC)
    if OWN:  # a query also reads its own token, undecayed
        own = tl.sum(tl.where(i == j, dM, 0.0), 1)[:, None]
        dx += own * bk
        dk += own * bx
    return dx, dk, dG


@jit
def gradient_kernel(
    q, e, k, G, u, s_in, do, dr, ds_out, dq, de, dk, dg, T, N, Q_HEADS, HEADS, K, V, LEVELS,
    DECAY: tl.constexpr, ERASE: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PREC: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(16)-(19): dq, de, dk, dg. One program a chunk, memory and block of BK channels; no atomics."""
    index, k0, R = tl.program_id(0).to(tl.int64), tl.program_id(1) * BK, Q_HEADS // HEADS
    row, t0 = index // N, index % N * C
    t = t0 + tl.arange(0, C)
    bk = load(k, row, HEADS, t, T, k0, K, BK)
    dK, dG = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    kept = tl.zeros([BK], tl.float32)
    for v0 in range(0, V, BV):
        at, inside = state_tile(ds_out, index, k0, K, v0, V, BK, BV)
        dS = tl.load(at, mask=inside, other=0.0)
        dK += tl.dot(load(u, row, HEADS, t, T, v0, V, BV), tl.trans(dS), input_precision=PREC)
        if DECAY:
            at, inside = state_tile(s_in, index, k0, K, v0, V, BK, BV)
            kept += tl.sum(dS * tl.load(at, mask=inside, other=0.0), 1)
    if DECAY:
        dK *= decay(G, row, HEADS, t, t * 0 + t0 + C - 1, T, k0, K, BK)
        end = t0 + C - 1 + tl.arange(0, 1)
        later = tl.where(tl.arange(0, C)[:, None] > tl.arange(0, C)[None, :], 1.0, 0.0)
        dg_exit = tl.dot(later, bk * dK, input_precision=EXACT)
        dg_exit += kept[None, :] * decay(G, row, HEADS, end - C, end, T, k0, K, BK)
    for r in range(R):
        q_row = row * R + r
        bq = load(q, q_row, Q_HEADS, t, T, k0, K, BK)
        dx, dk_x, dG_x = reader_gradient(
            bq, bk, G, do, q_row, Q_HEADS, u, s_in, row, HEADS, index, t, t0, T, k0, K, V, LEVELS,
            True, DECAY, C, BK, BV, PREC,
        )  # fmt: skip
        store(dq, dx, q_row, Q_HEADS, t, T, k0, K, BK)
        dK += dk_x
        dG += dG_x
    if ERASE:
        be = load(e, row, HEADS, t, T, k0, K, BK)
        dx, dk_x, dG_x = reader_gradient(
            be, bk, G, dr, row, HEADS, u, s_in, row, HEADS, index, t, t0, T, k0, K, V, LEVELS,
            False, DECAY, C, BK, BV, PREC,
        )  # fmt: skip
        store(de, -dx, row, HEADS, t, T, k0, K, BK)
        dK -= dk_x
        dG -= dG_x
    store(dk, dK, row, HEADS, t, T, k0, K, BK)
    if DECAY:
        here_on = tl.where(tl.arange(0, C)[:, None] <= tl.arange(0, C)[None, :], 1.0, 0.0)
        store(dg, dg_exit + tl.dot(here_on, dG, input_precision=EXACT), row, HEADS, t, T, k0, K, BK)


# ---------------------------------------------------------------------------- launching


def plan(q: Tensor, v: Tensor, chunk: int) -> dict:
    """Tile sizes and precisions. The warps are constants below; nothing is tuned per device."""
    K, V, T = q.shape[-1], v.shape[-1], q.shape[1]
    C = max(16, min(chunk, triton.next_power_of_2(T), 64 if K <= 128 else 32))
    exact = v.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return dict(
        C=C,
        LEVELS=C.bit_length() - 1,
        BK=max(16, triton.next_power_of_2(K)),
        BK_SMALL=min(32, max(16, triton.next_power_of_2(K))),
        BV=min(32, max(16, triton.next_power_of_2(V))),
        PREC="ieee" if exact else "tf32",
        EXACT="ieee" if exact else "tf32x3",
    )


class ChunkedDelta(torch.autograd.Function):
    """(6) in kernels: (q, e, k, v, g, S0) -> (o, S). e and g may be None."""

    @staticmethod
    def states(q, e, k, v, g, s0, m: dict) -> dict:
        """What forward and backward both need: (8)-(10), (12)."""
        (B, T, H, K), HEADS, V, C = q.shape, k.shape[2], v.shape[-1], m["C"]
        N, f32 = triton.cdiv(T, C), dict(dtype=torch.float32, device=q.device)
        G = q_in = e_in = k_out = x = None
        p = torch.empty(B * H, N, C, C, **f32)
        if g is None:  # undecayed, readers and keys are the same everywhere in the chunk
            q_in, e_in, k_out = q, e, k
        else:
            G = g.double().cumsum(1)
            q_in, e_in, k_out = (None if z is None else torch.empty_like(z, **f32) for z in (q, e, k))
        products = dict(DECAY=g is not None, C=C, BK=m["BK_SMALL"], PREC=m["PREC"], EXACT=m["EXACT"], **LAUNCH)
        products_kernel[(B * H * N,)](
            q, k, G, p, q_in, k_out, T, N, H, HEADS, K, m["LEVELS"], INVERT=False, **products
        )
        if e is not None:
            x = torch.empty(B * HEADS, N, C, C, **f32)
            products_kernel[(B * HEADS * N,)](
                e, k, G, x, e_in, k_out, T, N, HEADS, HEADS, K, m["LEVELS"], INVERT=True, **products
            )
        u, s_in, s_end = torch.empty(B, T, HEADS, V, **f32), torch.empty(B * HEADS, N, K, V, **f32), torch.empty_like(s0)
        walk_kernel[(B * HEADS, triton.cdiv(V, m["BV"]))](
            e_in, k_out, v, G, x, s0, u, s_in, s_end, T, N, HEADS, K, V, DECAY=g is not None, ERASE=e is not None,
            C=C, BK=m["BK"], BV=m["BV"], PREC=m["PREC"], **LAUNCH,
        )  # fmt: skip
        return G, q_in, e_in, k_out, p, x, u, s_in, s_end

    @staticmethod
    def forward(ctx, q, e, k, v, g, s0, chunk):
        q, e, k, v, g, s0 = (None if z is None else z.contiguous() for z in (q, e, k, v, g, s0))
        ctx.save_for_backward(q, e, k, v, g, s0)
        ctx.plan = m = plan(q, v, chunk)
        (B, T, H, K), HEADS, V = q.shape, k.shape[2], v.shape[-1]
        G, q_in, e_in, k_out, p, x, u, s_in, s_end = ChunkedDelta.states(q, e, k, v, g, s0, m)
        o = torch.empty(B, T, H, V, dtype=torch.float32, device=q.device)
        N = s_in.shape[1]
        read_kernel[(B * H * N, triton.cdiv(V, m["BV"]))](
            q_in, u, s_in, p, o, T, N, H, HEADS, K, V, C=m["C"], BK=m["BK_SMALL"], BV=m["BV"], PREC=m["PREC"], **LAUNCH
        )  # fmt: skip
        return o, s_end

    @staticmethod
    @once_differentiable
    def backward(ctx, do, ds_end):
        q, e, k, v, g, s0 = ctx.saved_tensors
        (B, T, H, K), HEADS, V, m = q.shape, k.shape[2], v.shape[-1], ctx.plan
        do, ds_end = do.contiguous(), ds_end.contiguous()
        G, q_in, e_in, k_out, p, x, u, s_in, _ = ChunkedDelta.states(q, e, k, v, g, s0, m)
        N, dr = p.shape[1], torch.empty_like(v, dtype=torch.float32)
        ds0, ds_out = torch.empty_like(s0), torch.empty_like(s_in)
        flags = dict(DECAY=g is not None, ERASE=e is not None, C=m["C"], BV=m["BV"], PREC=m["PREC"])
        walk_back_kernel[(B * HEADS, triton.cdiv(V, m["BV"]))](
            q_in, e_in, k_out, G, p, x, do, ds_end, dr, ds_out, ds0, T, N, H, HEADS, K, V, **flags, BK=m["BK"], **LAUNCH
        )  # fmt: skip
        dq, de, dk, dg = (None if z is None else torch.empty_like(z, dtype=torch.float32) for z in (q, e, k, g))
        gradient_kernel[(B * HEADS * N, triton.cdiv(K, m["BK_SMALL"]))](
            q, e, k, G, u, s_in, do, dr, ds_out, dq, de, dk, dg, T, N, H, HEADS, K, V, m["LEVELS"], **flags,
            BK=m["BK_SMALL"], EXACT=m["EXACT"], **LAUNCH,
        )  # fmt: skip
        grads = ((dq, q), (de, e), (dk, k), (dr, v), (dg, g), (ds0, s0))
        return *(None if d is None else d.to(z.dtype) for d, z in grads), None


LAUNCH = dict(num_warps=8, num_stages=1)
IMPLEMENTATIONS: dict[str, Callable] = {"recurrent": recurrent, "chunked": chunked}


@register(IMPLEMENTATIONS, "triton")
def triton_attention(q_bthk, k_btgk, v_btgv, log_decay=None, erase=None, write=None, state=None, chunk=64):
    """The kernels behind `recurrent`'s interface."""
    state = empty_state(k_btgk, v_btgv) if state is None else state.to(torch.float32)
    if q_bthk.numel() == 0 or v_btgv.numel() == 0:  # nothing to launch; keeps shapes and gradients
        return recurrent(q_bthk, k_btgk, v_btgv, log_decay, erase, write, state)
    e_btgk = None if erase is None else erase[..., None].float() * k_btgk
    x_btgv = v_btgv if write is None else write[..., None].float() * v_btgv
    if log_decay is not None:
        log_decay = (log_decay if log_decay.dim() == 4 else log_decay[..., None]).expand_as(k_btgk)
    o, state = ChunkedDelta.apply(q_bthk, e_btgk, k_btgk, x_btgv, log_decay, state, chunk)
    return o.to(v_btgv.dtype), state


def linear_attention(
    q_bthk: Tensor,
    k_btgk: Tensor,
    v_btgv: Tensor,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = 64,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    args = (q_bthk, k_btgk, v_btgv, log_decay, erase, write, state)
    if impl == "auto":
        impl = "recurrent" if q_bthk.shape[1] == 1 else "chunked"
    run = lookup(IMPLEMENTATIONS, impl, "implementation")
    return run(*args) if impl == "recurrent" else run(*args, chunk=chunk)
