"""The recurrence of linear_attn.py as Triton kernels, forward and backward. Entry point: `linear_attention`.

What you will learn here (read linear_attn.py first; its equations (1)-(5) go on here)
  1. How (1) becomes a few matrix products a chunk and one short loop over chunks: (6)-(12).
  2. How to differentiate that by hand: (13)-(19).
  3. The kernels, each citing its equations. They are tested against `recurrent`, the naive loop.
`python kernels.py` checks and times what this machine can run, the kernels too with TRITON_INTERPRET=1.

Forward. With the erase key e_t = b_t k_t, the value x_t = w_t v_t (made in PyTorch: autograd takes care of b
and w) and D_t = Diag(exp g_t), a per-head g_t repeated over channels, (1) is

    (6)  u_t = x_t - S_{t-1}^T D_t e_t          S_t = D_t S_{t-1} + k_t u_t^T          o_t = S_t^T q_t

so e_t reads the memory as q_t does, one step earlier. Unrolled in a chunk that starts from state S, with
G_i = g_1 + ... + g_i,

    (7)  S_i = Diag(exp G_i) S + sum_{j<=i} Diag(exp(G_i - G_j)) k_j u_j^T

and what a reader i sees of a key j is one number: N for readers e (j < i), P for readers q (j <= i).

    (8)  N_ij = sum_k e_ik k_jk exp(G_ik - G_jk)          P_ij = sum_k q_ik k_jk exp(G_ik - G_jk)
    (9)  exp(G_i - G_j) = exp(G_i - G_m) exp(G_m - G_j)          j <= m < i, both factors <= 1

A matrix product needs a factor of i times a factor of j. exp(G_i) exp(-G_j) overflows; a split at a border m
between the two does not. If l is the highest bit in which the positions i and j differ, a border of blocks of
2^l tokens lies between them: log2(C) masked products, one a level l, give all pairs. G is float64, so that
-1000 next to -0.001 costs no digit of a difference. With Q_in = Q * exp G, E_in = E * exp G (decayed from the
chunk's entry) and K_out = K * exp(G_C - G) (decayed to its exit):

    (10) U = X (x - E_in S)          X = (I + N)^{-1}
    (11) O = Q_in S + P U
    (12) S' = Diag(exp G_C) S + K_out^T U

Only (10) and (12) are sequential. X comes from forward substitution; the product formula for nilpotent N
explodes for equal keys with b = 1.

Backward, given dO and the exit state's gradient dS'. U enters (11), (12); R = x - E_in S and N enter (10),
with d(X) = -X dN X:

    (13) dU = P^T dO + K_out dS'
    (14) dR = X^T dU          (= dx)
    (15) dS = Diag(exp G_C) dS' + Q_in^T dO - E_in^T dR
    (16) dP = tril(dO U^T)          dN = -tril(dR U^T, -1)

A reader z with output gradient y and M = P or N (q has y = dO; e has y = dR and all its terms negative) gets

    (17) dz_i = exp(G_i) * S y_i + sum_j dM_ij exp(G_i - G_j) * k_j
    (18) dk_j = exp(G_C - G_j) * dS' u_j + sum_readers sum_i dM_ij exp(G_i - G_j) * z_i
    (19) dg_t = exp(G_C) * rowsum(S * dS') + sum_{j<t} (k_j * dk_j, exit term)
                + sum_{i>=t} (z_i * dz_i - k_i * dk_i, all other terms with i != j)

The textbook's single sum of z dz - k dk subtracts terms of order one whose difference is exp(-20) if g = -20.

Precision: tiles are float32. 16-bit inputs use tf32 products (3 bits above bfloat16, no float16 overflow),
float32 inputs full float32 unless torch.set_float32_matmul_precision allows tf32. Only the inputs are saved.

Hazards: `tl.trans` of a product that feeds a product was miscompiled on Hopper: use memory. Interpreted
bfloat16 products are wrong and stores truncate: here both are float32, and PyTorch rounds. Unrolled loops and
run-time strides spill. Grid axis 1 ends at 65,535: what grows is on axis 0.

Production kernels have bfloat16 operands, 16-token blocks for (8), scalar decays, tuned tiles."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from linear_attn import chunked, empty_state, lookup, recurrent, register

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # the torch paths work without it, and so does reading the kernels
    triton = tl = constexpr = None

jit: Callable = triton.jit if triton else (lambda kernel: kernel)
INTERPRETED = (
    triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
)  # fixed at import, as in Triton
LAUNCH = dict(num_warps=8, num_stages=1)  # of every kernel; tests/gpu_check.py compiles with them

# ---------------------------------------------------------------------------- tiles
# A memory is a (batch, g) pair; its R query heads are neighbours. N chunks of C tokens, t0 the chunk's first.
# z: a reader, q or e; R_Z of them a memory. `row` counts (batch, head) pairs, `index` chunks of rows.


@jit
def tile(ptr, row, heads: constexpr, t0, T, c, d0, D: constexpr, BD: constexpr):
    """Addresses of a (batch, T, heads, D) tensor at times t0 + c and BD channels from d0 on; which exist.

    The tile's corner is computed in 64 bits, since it passes 2^31 in real training runs: row or t0 is int64."""
    d = d0 + tl.arange(0, BD)
    corner = ptr + ((row // heads * T + t0) * heads + row % heads) * D
    return corner + (c[:, None] * (heads * D) + d[None, :]), (c < T - t0)[:, None] & (d < D)[None, :]


@jit
def load(ptr, row, heads: constexpr, t0, T, d0, D: constexpr, C: constexpr, BD: constexpr):
    """Tile [C, BD] in float32, 0 outside: a token beyond T has q = k = v = 0 and changes nothing.

    The index-th of many states (K, V) is such a tensor too: row = index, one head, K for the time."""
    at, inside = tile(ptr, row, heads, t0, T, tl.arange(0, C), d0, D, BD)
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@jit
def store(ptr, x, row, heads: constexpr, t0, T, d0, D: constexpr, C: constexpr, BD: constexpr):
    """The inverse of `load`."""
    at, inside = tile(ptr, row, heads, t0, T, tl.arange(0, C), d0, D, BD)
    tl.store(at, x, mask=inside)


@jit
def load_square(ptr, index, TRANSPOSED: constexpr, C: constexpr):
    """The index-th of many [C, C] matrices. Transposed by its addresses, never by tl.trans: see Hazards."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    return tl.load(ptr + index * C * C + (j * C + i if TRANSPOSED else i * C + j))


@jit
def decay(
    G, row, heads: constexpr, N, t0, since, until, d0, D: constexpr, DECAY: constexpr, C: constexpr,
    BD: constexpr,
):  # fmt: skip
    """(9): exp(g_since + ... + g_{until-1}) for positions in the chunk at t0: 0 its start, C its end.

    G holds sums over all tokens before a position, hence one more row than there are. No decay: 1."""
    factor = tl.full([1, 1], 1.0, tl.float32)
    if DECAY:
        at, inside = tile(G, row, heads, t0, N * C + 1, since, d0, D, BD)
        start = tl.load(at, mask=inside, other=0.0)
        at, inside = tile(G, row, heads, t0, N * C + 1, until, d0, D, BD)
        factor = tl.exp((tl.load(at, mask=inside, other=0.0) - start).to(tl.float32))
    return factor


@jit
def split_decay(
    G, row, heads: constexpr, N, t0, level, OF_KEYS: constexpr, d0, D: constexpr, DECAY: constexpr,
    C: constexpr, BD: constexpr,
):  # fmt: skip
    """(9)'s factor of the readers, from the last border of this level, or (OF_KEYS) to the next one."""
    c = tl.arange(0, C)
    border = c >> level << level
    if OF_KEYS:
        return decay(G, row, heads, N, t0, c + 1, border + (1 << level), d0, D, DECAY, C, BD)
    else:
        return decay(G, row, heads, N, t0, border, c + 1, d0, D, DECAY, C, BD)


@jit
def select(M, level, TRANSPOSED: constexpr, DECAY: constexpr, C: constexpr):
    """M where j < i and the level's border is between them; without decay no border is needed. Else 0."""
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    known = i < j if TRANSPOSED else j < i
    if DECAY:
        known = known & ((i ^ j) >> level == 1)
    return tl.where(known, M, 0.0)


@jit
def through_pairs(
    M, b, G, row, heads: constexpr, N, t0, k0, LEVELS, TO_KEYS: constexpr, K: constexpr, DECAY: constexpr,
    C: constexpr, BK: constexpr, PREC: constexpr,
):  # fmt: skip
    """sum_{j<i} M_ij exp(G_i - G_j) b_j for all i, as in (17); TO_KEYS: sum_{i>j} M_ij ... b_i, as in (18).

    TO_KEYS takes M transposed. Two tiles, M and the sum, live through a loop over levels."""
    total = tl.zeros([C, BK], tl.float32)
    for level in range(LEVELS):  # a run-time number: unrolled, the kernel spills
        b_in = b * split_decay(G, row, heads, N, t0, level, not TO_KEYS, k0, K, DECAY, C, BK)
        met = tl.dot(select(M, level, TO_KEYS, DECAY, C), b_in, input_precision=PREC)
        total += met * split_decay(G, row, heads, N, t0, level, TO_KEYS, k0, K, DECAY, C, BK)
    return total


# ---------------------------------------------------------------------------- kernels


@jit
def products_kernel(
    z, k, G, out, z_in, k_out, T, N, LEVELS, R_Z: constexpr, HEADS: constexpr, K: constexpr, DECAY: constexpr,
    INVERT: constexpr, C: constexpr, BK: constexpr, PREC: constexpr,
):  # fmt: skip
    """(8) by (9): P, or (INVERT) X; and Q_in or E_in, K_out. One program a chunk and reader."""
    index, n = tl.program_id(0).to(tl.int64), tl.program_id(0) % N
    z_row, row, t0 = index // N, index // N // R_Z, n.to(tl.int64) * C
    i, j, c, zero = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, C), tl.arange(0, 1)
    M = tl.zeros([C, C], tl.float32)
    for k0 in range(0, K, BK):  # M is a sum over channels: a block of them at a time
        bz = load(z, z_row, HEADS * R_Z, t0, T, k0, K, C, BK)
        bk = load(k, row, HEADS, t0, T, k0, K, C, BK)
        for level in range(LEVELS):
            right = bz * split_decay(G, row, HEADS, N, t0, level, False, k0, K, DECAY, C, BK)
            left = bk * split_decay(G, row, HEADS, N, t0, level, True, k0, K, DECAY, C, BK)
            met = tl.dot(right, tl.trans(left), input_precision=PREC)
            M += select(met, level, False, DECAY, C)
        if DECAY:
            bz_in = bz * decay(G, row, HEADS, N, t0, zero, c + 1, k0, K, DECAY, C, BK)
            store(z_in, bz_in, z_row, HEADS * R_Z, t0, T, k0, K, C, BK)
            if z_row % R_Z == 0:
                bk_out = bk * decay(G, row, HEADS, N, t0, c + 1, zero + C, k0, K, DECAY, C, BK)
                store(k_out, bk_out, row, HEADS, t0, T, k0, K, C, BK)
        if not INVERT:
            M += tl.where(i == j, tl.sum(bz * bk, 1)[:, None], 0.0)
    if INVERT:
        X = tl.where(i == j, 1.0, 0.0)
        for r in range(1, C):  # forward substitution: row r of X is the unit row minus (row r of N) X
            n_r = tl.sum(tl.where(i == r, M, 0.0), 0)
            X -= tl.where(i == r, tl.sum(n_r[:, None] * X, 0)[None, :], 0.0)
        M = X
    store(out, M, index, 1, 0, C, 0, C, C, C)


@jit
def walk_kernel(
    e_in, k_out, v, G, x, s0, u, s_in, s_end, T, N, HEADS: constexpr, K: constexpr, V: constexpr,
    DECAY: constexpr, ERASE: constexpr, C: constexpr, WK: constexpr, WV: constexpr, PREC: constexpr,
):  # fmt: skip
    """(10), (12), first chunk to last: U and all entry states. One program a memory and WV columns."""
    row, v0, zero = tl.program_id(0).to(tl.int64), tl.program_id(1) * WV, tl.arange(0, 1)
    S = load(s0, row, 1, 0, K, v0, V, WK, WV)
    for n in range(N):
        t0 = tl.cast(n, tl.int64) * C
        store(s_in, S, row * N + n, 1, 0, K, v0, V, WK, WV)
        U = load(v, row, HEADS, t0, T, v0, V, C, WV)
        if ERASE:
            U -= tl.dot(load(e_in, row, HEADS, t0, T, 0, K, C, WK), S, input_precision=PREC)
            U = tl.dot(load_square(x, row * N + n, False, C), U, input_precision=PREC)
        store(u, U, row, HEADS, t0, T, v0, V, C, WV)
        S *= tl.trans(decay(G, row, HEADS, N, t0, zero, zero + C, 0, K, DECAY, C, WK))
        S += tl.dot(tl.trans(load(k_out, row, HEADS, t0, T, 0, K, C, WK)), U, input_precision=PREC)
    store(s_end, S, row, 1, 0, K, v0, V, WK, WV)


@jit
def read_kernel(
    q_in, u, s_in, p, o, T, N, R: constexpr, HEADS: constexpr, K: constexpr, V: constexpr, C: constexpr,
    BK: constexpr, BV: constexpr, PREC: constexpr,
):  # fmt: skip
    """(11): one program a chunk, query head and block of BV columns of the output."""
    index, n, v0 = tl.program_id(0).to(tl.int64), tl.program_id(0) % N, tl.program_id(1) * BV
    q_row, row, t0 = index // N, index // N // R, n.to(tl.int64) * C
    U = load(u, row, HEADS, t0, T, v0, V, C, BV)
    O = tl.dot(load_square(p, index, False, C), U, input_precision=PREC)
    for k0 in range(0, K, BK):
        S = load(s_in, row * N + n, 1, k0, K, v0, V, BK, BV)
        O += tl.dot(load(q_in, q_row, HEADS * R, t0, T, k0, K, C, BK), S, input_precision=PREC)
    store(o, O, q_row, HEADS * R, t0, T, v0, V, C, BV)


@jit
def walk_back_kernel(
    q_in, e_in, k_out, G, p, x, do, ds_end, dr, ds_out, ds0, T, N, R: constexpr, HEADS: constexpr,
    K: constexpr, V: constexpr, DECAY: constexpr, ERASE: constexpr, C: constexpr, WK: constexpr,
    WV: constexpr, PREC: constexpr,
):  # fmt: skip
    """(13)-(15), last chunk to first; the programs are walk_kernel's. dU becomes dR in place."""
    row, v0, zero = tl.program_id(0).to(tl.int64), tl.program_id(1) * WV, tl.arange(0, 1)
    dS = load(ds_end, row, 1, 0, K, v0, V, WK, WV)
    for step in range(N):
        n = N - 1 - step
        t0 = tl.cast(n, tl.int64) * C
        store(ds_out, dS, row * N + n, 1, 0, K, v0, V, WK, WV)
        dR = tl.dot(load(k_out, row, HEADS, t0, T, 0, K, C, WK), dS, input_precision=PREC)
        dS *= tl.trans(decay(G, row, HEADS, N, t0, zero, zero + C, 0, K, DECAY, C, WK))
        for r in range(R):
            dO = load(do, row * R + r, HEADS * R, t0, T, v0, V, C, WV)
            dR += tl.dot(load_square(p, (row * R + r) * N + n, True, C), dO, input_precision=PREC)
            q_T = tl.trans(load(q_in, row * R + r, HEADS * R, t0, T, 0, K, C, WK))
            dS += tl.dot(q_T, dO, input_precision=PREC)
        if ERASE:
            dR = tl.dot(load_square(x, row * N + n, True, C), dR, input_precision=PREC)
            dS -= tl.dot(tl.trans(load(e_in, row, HEADS, t0, T, 0, K, C, WK)), dR, input_precision=PREC)
        store(dr, dR, row, HEADS, t0, T, v0, V, C, WV)
    store(ds0, dS, row, 1, 0, K, v0, V, WK, WV)


@jit
def reader_gradient_kernel(
    k, G, y, u, s_in, dm, dz, T, N, LEVELS, R_Z: constexpr, HEADS: constexpr, K: constexpr, V: constexpr,
    DECAY: constexpr, C: constexpr, BK: constexpr, BV: constexpr, PREC: constexpr,
):  # fmt: skip
    """(16) and (17) without j = i, for readers with output gradient y. One program a chunk and reader."""
    index, n = tl.program_id(0).to(tl.int64), tl.program_id(0) % N
    z_row, row, t0 = index // N, index // N // R_Z, n.to(tl.int64) * C
    dM = tl.zeros([C, C], tl.float32)
    for v0 in range(0, V, BV):
        Y, U = load(y, z_row, HEADS * R_Z, t0, T, v0, V, C, BV), load(u, row, HEADS, t0, T, v0, V, C, BV)
        dM += tl.dot(Y, tl.trans(U), input_precision=PREC)
    store(dm, dM, index, 1, 0, C, 0, C, C, C)
    for k0 in range(0, K, BK):
        dZ = tl.zeros([C, BK], tl.float32)
        for v0 in range(0, V, BV):
            S = load(s_in, row * N + n, 1, k0, K, v0, V, BK, BV)
            dZ += tl.dot(load(y, z_row, HEADS * R_Z, t0, T, v0, V, C, BV), tl.trans(S), input_precision=PREC)
        dZ *= decay(G, row, HEADS, N, t0, tl.arange(0, 1), tl.arange(0, C) + 1, k0, K, DECAY, C, BK)
        bk = load(k, row, HEADS, t0, T, k0, K, C, BK)
        dZ += through_pairs(dM, bk, G, row, HEADS, N, t0, k0, LEVELS, False, K, DECAY, C, BK, PREC)
        store(dz, dZ, z_row, HEADS * R_Z, t0, T, k0, K, C, BK)


@jit
def key_gradient_kernel(
    q, e, k, G, u, s_in, ds_out, dp, dn, dq, de, dk, dg, T, N, LEVELS, R: constexpr, HEADS: constexpr,
    K: constexpr, V: constexpr, DECAY: constexpr, ERASE: constexpr, C: constexpr, BK: constexpr,
    BV: constexpr, PREC: constexpr, EXACT: constexpr,
):  # fmt: skip
    """(18), (19) and j = i in (17). One program a chunk, memory and block of BK channels; no atomics."""
    index, k0 = tl.program_id(0).to(tl.int64), tl.program_id(1) * BK
    row, n, c, zero = index // N, index % N, tl.arange(0, C), tl.arange(0, 1)
    t0 = n * C
    bk = load(k, row, HEADS, t0, T, k0, K, C, BK)
    dK, dG = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    kept = tl.zeros([BK], tl.float32)
    for v0 in range(0, V, BV):
        dS = load(ds_out, index, 1, k0, K, v0, V, BK, BV)
        dK += tl.dot(load(u, row, HEADS, t0, T, v0, V, C, BV), tl.trans(dS), input_precision=PREC)
        if DECAY:
            kept += tl.sum(dS * load(s_in, index, 1, k0, K, v0, V, BK, BV), 1)
    dK *= decay(G, row, HEADS, N, t0, c + 1, zero + C, k0, K, DECAY, C, BK)
    left_chunk = bk * dK
    for r in range(R):
        q_row = row * R + r
        bq = load(q, q_row, HEADS * R, t0, T, k0, K, C, BK)
        dQ = load(dq, q_row, HEADS * R, t0, T, k0, K, C, BK)
        dP_T = load_square(dp, q_row * N + n, True, C)
        pairs = through_pairs(dP_T, bq, G, row, HEADS, N, t0, k0, LEVELS, True, K, DECAY, C, BK, PREC)
        own = tl.load(dp + (q_row * N + n) * C * C + c * C + c)[:, None]  # undecayed, hence not in dG
        store(dq, dQ + own * bk, q_row, HEADS * R, t0, T, k0, K, C, BK)
        dK += pairs + own * bq
        dG += bq * dQ - bk * pairs
    if ERASE:  # what e reads is subtracted
        be, dE = load(e, row, HEADS, t0, T, k0, K, C, BK), load(de, row, HEADS, t0, T, k0, K, C, BK)
        dN_T = load_square(dn, index, True, C)
        pairs = through_pairs(dN_T, be, G, row, HEADS, N, t0, k0, LEVELS, True, K, DECAY, C, BK, PREC)
        store(de, -dE, row, HEADS, t0, T, k0, K, C, BK)
        dK -= pairs
        dG -= be * dE - bk * pairs
    store(dk, dK, row, HEADS, t0, T, k0, K, C, BK)
    if DECAY:
        before = tl.where(c[None, :] < c[:, None], 1.0, 0.0)
        dg_t = tl.cumsum(dG, 0, reverse=True) + tl.dot(before, left_chunk, input_precision=EXACT)
        dg_t += kept[None, :] * decay(G, row, HEADS, N, t0, zero, zero + C, k0, K, DECAY, C, BK)
        store(dg, dg_t, row, HEADS, t0, T, k0, K, C, BK)


# ---------------------------------------------------------------------------- launching


def plan(
    R: int, HEADS: int, K: int, V: int, T: int, chunk: int, DECAY: bool, ERASE: bool, exact: bool
) -> dict:
    """What all kernels are compiled for. Tiles are [C, BK] and [C, BV]; a walk holds [WK, WV] of a state."""
    C = max(16, min(chunk, 1 << (T - 1).bit_length(), 64 if K <= 128 else 32))  # tl.dot wants 16 or more
    WK, WV = (max(16, 1 << (d - 1).bit_length()) for d in (K, V))
    precision = dict(PREC="ieee", EXACT="ieee") if exact else dict(PREC="tf32", EXACT="tf32x3")
    sizes = dict(R=R, HEADS=HEADS, K=K, V=V, C=C, BK=min(32, WK), BV=min(32, WV), WK=WK, WV=min(16, WV))
    return dict(sizes, DECAY=DECAY, ERASE=ERASE, **precision)


def launch(kernel, grid: tuple, named: dict) -> None:
    """Run `kernel` with those of the named values that are its parameters, on the GPU where its tensors are."""
    with torch.cuda.device_of(named["k"]):  # not always the current one
        kernel[grid](**{name: named[name] for name in kernel.arg_names}, **LAUNCH)


def states(q, e, k, v, g, s0, m: dict) -> dict:
    """What forward and backward both need, (8)-(10) and (12), with all else by the kernels' names."""
    (B, T, G, K), V, C, R = k.shape, v.shape[-1], m["C"], m["R"]
    N, new = -(-T // C), functools.partial(torch.empty, dtype=torch.float32, device=k.device)
    levels = 1 if g is None else C.bit_length() - 1
    a = dict(m, q=q, e=e, k=k, v=v, s0=s0, T=T, N=N, LEVELS=levels, G=None, x=None)
    a |= dict(q_in=q, e_in=e, k_out=k)  # right as they are without decay
    if g is not None:
        a["G"] = F.pad(g.double(), (0, 0, 0, 0, 1, N * C - T)).cumsum(1)
        a |= dict(q_in=new(q.shape), k_out=new(k.shape), e_in=None if e is None else new(e.shape))
    a |= dict(p=new(B * G * R, N, C, C), u=new(v.shape), s_in=new(B * G, N, K, V), s_end=new(s0.shape))
    of_q = dict(z=q, out=a["p"], z_in=a["q_in"], R_Z=R, INVERT=False)
    launch(products_kernel, (B * G * R * N,), a | of_q)
    if e is not None:
        a["x"] = new(B * G, N, C, C)
        of_e = dict(z=e, out=a["x"], z_in=a["e_in"], R_Z=1, INVERT=True)
        launch(products_kernel, (B * G * N,), a | of_e)
    launch(walk_kernel, (B * G, -(-V // m["WV"])), a)
    return a


class ChunkedDelta(torch.autograd.Function):
    """(6): contiguous (q, e, k, x, g, S0) -> (o, S), float32. e and g may be None."""

    @staticmethod
    def forward(ctx, q, e, k, v, g, s0, m):
        ctx.save_for_backward(q, e, k, v, g, s0)
        ctx.m, a = m, states(q, e, k, v, g, s0, m)
        (B, T, H, _), V = q.shape, v.shape[-1]
        a["o"] = a["u"].new_empty(B, T, H, V)
        launch(read_kernel, (B * H * a["N"], -(-V // m["BV"])), a)
        return a["o"], a["s_end"]

    @staticmethod
    @once_differentiable
    def backward(ctx, do, ds_end):
        inputs, m = ctx.saved_tensors, ctx.m
        a = states(*inputs, m) | dict(do=do.contiguous(), ds_end=ds_end.contiguous())
        q, e, k, v, g, _ = inputs
        for name, like in dict(
            dq=q, de=e, dk=k, dr=v, dg=g, ds0=a["s0"], ds_out=a["s_in"], dp=a["p"], dn=a["x"]
        ).items():
            a[name] = None if like is None else torch.empty_like(like, dtype=torch.float32)
        memories, N = k.shape[0] * k.shape[2], a["N"]
        launch(walk_back_kernel, (memories, -(-v.shape[-1] // m["WV"])), a)
        of_q = dict(y=a["do"], dm=a["dp"], dz=a["dq"], R_Z=m["R"])
        launch(reader_gradient_kernel, (memories * m["R"] * N,), a | of_q)
        if e is not None:
            of_e = dict(y=a["dr"], dm=a["dn"], dz=a["de"], R_Z=1)
            launch(reader_gradient_kernel, (memories * N,), a | of_e)
        launch(key_gradient_kernel, (memories * N, -(-k.shape[-1] // m["BK"])), a)
        grads = zip((a[name] for name in ("dq", "de", "dk", "dr", "dg", "ds0")), inputs)
        return *(None if d is None else d.to(z.dtype) for d, z in grads), None


IMPLEMENTATIONS: dict[str, Callable] = {"recurrent": recurrent, "chunked": chunked}


@register(IMPLEMENTATIONS, "triton")
def triton_attention(q_bthk, k_btgk, v_btgv, log_decay=None, erase=None, write=None, state=None, chunk=64):
    """The kernels behind `chunked`'s interface, on a GPU (or anywhere with TRITON_INTERPRET=1)."""
    if triton is None:
        raise ValueError("impl='triton' needs the package triton; choose recurrent, chunked or auto")
    if not (q_bthk.is_cuda or INTERPRETED):
        raise ValueError(f"impl='triton' needs CUDA tensors, got {q_bthk.device} (or TRITON_INTERPRET=1)")
    if torch.float64 in (q_bthk.dtype, v_btgv.dtype) or q_bthk.shape[-1] > 256:
        raise ValueError("impl='triton' has no float64 and no key dimension above 256; use impl='chunked'")
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk must be a power of two, got {chunk}")
    state = empty_state(k_btgk, v_btgv) if state is None else state.to(torch.float32)
    if q_bthk.numel() == 0 or v_btgv.numel() == 0:  # nothing to launch
        return recurrent(q_bthk, k_btgk, v_btgv, log_decay, erase, write, state)
    e_btgk = None if erase is None else erase[..., None].float() * k_btgk
    x_btgv = v_btgv if write is None else write[..., None].float() * v_btgv
    if log_decay is not None:
        log_decay = (log_decay if log_decay.dim() == 4 else log_decay[..., None]).expand_as(k_btgk)
    (_, T, H, K), G = q_bthk.shape, k_btgk.shape[2]
    exact = q_bthk.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    m = plan(H // G, G, K, v_btgv.shape[-1], T, chunk, log_decay is not None, erase is not None, exact)
    tensors = (q_bthk, e_btgk, k_btgk, x_btgv, log_decay, state)
    o_bthv, state = ChunkedDelta.apply(*(None if z is None else z.contiguous() for z in tensors), m)
    return o_bthv.to(v_btgv.dtype), state


say_once = functools.cache(print)


def linear_attention(
    q_bthk: Tensor, k_btgk: Tensor, v_btgv: Tensor, log_decay: Tensor | None = None,
    erase: Tensor | None = None, write: Tensor | None = None, state: Tensor | None = None,
    chunk: int = 64, impl: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Equation (1): arguments and results of `recurrent`, in the way that impl names.

    auto: triton for CUDA tensors, else chunked; there one token goes through the cheaper recurrence. Only a
    missing GPU or Triton changes the choice, no error does. LINEAR_ATTN_VERBOSE=1 prints each choice once."""
    why = "as asked"
    if impl == "auto":
        if q_bthk.is_cuda and triton is not None:
            impl, why = "triton", "CUDA tensors"
        else:
            impl, why = "chunked", "no Triton" if q_bthk.is_cuda else f"tensors on {q_bthk.device.type}"
    if impl == "chunked" and q_bthk.shape[1] == 1:
        impl, why = "recurrent", f"{why}, one token"
    run = lookup(IMPLEMENTATIONS, impl, "implementation")
    if os.environ.get("LINEAR_ATTN_VERBOSE") == "1":
        say_once(f"linear_attention: {impl} ({why})")
    args = (q_bthk, k_btgk, v_btgv, log_decay, erase, write, state)
    return run(*args) if run is recurrent else run(*args, chunk=chunk)


if __name__ == "__main__":
    from tests.gpu_check import cpu_tables  # how correct and how fast; measuring is no part of the lesson

    cpu_tables()
