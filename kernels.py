"""The recurrence of linear_attn.py as Triton kernels, forward and backward; `linear_attention` is the entry point.

What you will learn here (after linear_attn.py, whose equations (1)-(5) this module continues)
  1. How (1) becomes a few matrix products a chunk, with one short loop over chunks: (6)-(12).
  2. How to differentiate that by hand: (13)-(19).
  3. What the kernels look like, each citing the equations it computes; `recurrent`, the naive loop, is the test.
`python kernels.py` checks and times what this machine can run; TRITON_INTERPRET=1 runs the kernels without a GPU.

Forward. With the erase key e_t = b_t k_t, the written value x_t = w_t v_t (both made in PyTorch, so that autograd
takes care of b and w) and D_t = Diag(exp g_t), a per-head g_t being repeated over channels, (1) is

    (6)  u_t = x_t - S_{t-1}^T D_t e_t          S_t = D_t S_{t-1} + k_t u_t^T          o_t = S_t^T q_t

so e_t reads the memory just as q_t does, one step earlier. With G_i = g_1 + ... + g_i inside a chunk that starts
from state S, unrolling gives

    (7)  S_i = Diag(exp G_i) S + sum_{j<=i} Diag(exp(G_i - G_j)) k_j u_j^T

What a reader sees of the keys before it is a number per pair, N for readers e (j < i), P for readers q (j <= i):

    (8)  N_ij = sum_k e_ik k_jk exp(G_ik - G_jk)          P_ij = sum_k q_ik k_jk exp(G_ik - G_jk)
    (9)  exp(G_i - G_j) = exp(G_i - G_m) exp(G_m - G_j)          j <= m < i, both factors <= 1

To be a matrix product the sum must split into a factor of i and one of j. exp(G_i) exp(-G_j) overflows; splitting
at a border m between the two tokens does not. Tokens whose positions differ first in bit l, counted from the
highest, meet across a border of blocks of 2^l tokens: one masked product for each of the log2(C) levels gives all
pairs. G is kept in float64: a decay of -1000 next to one of -0.001 then costs no digit of their difference.
With E_in = E * exp G, Q_in = Q * exp G (rows decayed from the chunk's entry) and K_out = K * exp(G_C - G):

    (10) U = X (x - E_in S)          X = (I + N)^{-1}
    (11) O = Q_in S + P U
    (12) S' = Diag(exp G_C) S + K_out^T U

Only (10) and (12) are sequential, in `walk_kernel`; all else runs for every chunk at once. X is found by forward
substitution: the product formula for a nilpotent inverse explodes for equal keys with b = 1.

Backward, last chunk to first, given dO and dS', the gradient of the chunk's exit state. U enters (11) and (12);
R = x - E_in S and N enter (10), and d(X) = -X dN X turns into the outer product of dR and U:

    (13) dU = P^T dO + K_out dS'
    (14) dR = X^T dU          (= dx)
    (15) dS = Diag(exp G_C) dS' + Q_in^T dO - E_in^T dR
    (16) dP = tril(dO U^T)          dN = -tril(dR U^T, -1)

Readers e are like readers q with dR for dO and a minus sign. For a reader z (q or e) with output gradient y:

    (17) dz_i = exp(G_i) * S y_i + sum_j dM_ij exp(G_i - G_j) * k_j          M = P or N
    (18) dk_j = exp(G_C - G_j) * dS' u_j + sum_readers sum_i dM_ij exp(G_i - G_j) * z_i
    (19) dg_t = exp(G_C) * rowsum(S * dS') + sum_{i>=t} (z_i * dz_i - k_i * dk_i)_{i != j} + sum_{j<t} (k_j * dk_j)_exit

In (19) every product in the middle sum comes from pairs (17), (18) with i != j, plus the entry term of (17); what
leaves through the exit is added up on its own. The shorter textbook form, one reversed cumulative sum of
z dz - k dk, subtracts terms of order one whose difference is exp(-20) after a decay of -20.

Precision. Tiles are float32 whatever the inputs are. 16-bit inputs use tf32 tensor cores: 3 bits more than bfloat16
for U, P and S, and no overflow of a float16 state. float32 inputs use full float32, or tf32 if
torch.set_float32_matmul_precision says so. Only inputs are saved; the backward recomputes (8)-(12).

Hazards, each met by us or by others: no `tl.trans` of a product that feeds another product (miscompiled on Hopper:
transpose through memory); interpreted bfloat16 products are wrong and bfloat16 stores truncate (here all
products and stores are float32 and PyTorch rounds); constant trip counts and strides known at compile time decide
between 0 and 4,000 bytes of spills; grid axis 1 ends at 65,535, so that anything that grows is on axis 0.

What a production kernel does differently: bfloat16 operands, tiles chosen per device, (8) in blocks of 16 tokens,
a scalar path for per-head decays, e and x formed on the fly, 16-bit workspaces.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from linear_attn import chunked, empty_state, lookup, recurrent, register

try:
    import triton
    import triton.language as tl
except ImportError:  # the torch paths work without it, and so does reading the kernels
    triton = tl = None

jit: Callable = triton.jit if triton else (lambda kernel: kernel)
INTERPRETED = (
    triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
)  # decided at import, as Triton does
MAX_KEY_DIM = 256
LAUNCH = dict(num_warps=8, num_stages=1)  # the same for every kernel; tests/test_kernels.py compiles with it

# ---------------------------------------------------------------------------- tiles


@jit
def load(ptr, row, heads: tl.constexpr, t0, T, d0, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """Tile [C, BD] of a (batch, time, heads, dim) tensor from time t0 and channel d0 on, in float32.

    Zero outside: a token beyond T has q = k = v = 0 and changes nothing. `row` counts (batch, head) pairs.
    The tile's corner is computed in 64 bits, since it passes 2^31 in real training runs."""
    c, d = tl.arange(0, C), d0 + tl.arange(0, BD)
    corner = ptr + ((row // heads * T + t0) * heads + row % heads) * D
    return tl.load(
        corner + (c[:, None] * (heads * D) + d[None, :]),
        mask=(c < T - t0)[:, None] & (d < D)[None, :],
        other=0.0,
    ).to(tl.float32)


@jit
def store(ptr, x, row, heads: tl.constexpr, t0, T, d0, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr):
    """The inverse of `load`."""
    c, d = tl.arange(0, C), d0 + tl.arange(0, BD)
    corner = ptr + ((row // heads * T + t0) * heads + row % heads) * D
    tl.store(
        corner + (c[:, None] * (heads * D) + d[None, :]), x, mask=(c < T - t0)[:, None] & (d < D)[None, :]
    )


@jit
def decay(
    G, row, heads: tl.constexpr, N, t0, since, until, d0, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr
):
    """(9): exp(g_since + ... + g_{until-1}), two vectors of positions in the chunk at t0 (0: its start, C: its end)."""
    d = d0 + tl.arange(0, BD)
    corner = G + ((row // heads * (N * C + 1) + t0) * heads + row % heads) * D
    start = tl.load(corner + (since[:, None] * (heads * D) + d[None, :]), mask=(d < D)[None, :], other=0.0)
    end = tl.load(corner + (until[:, None] * (heads * D) + d[None, :]), mask=(d < D)[None, :], other=0.0)
    return tl.exp((end - start).to(tl.float32))


@jit
def state_tile(ptr, index, k0, K: tl.constexpr, v0, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Pointers and mask of tile [BK, BV] at (k0, v0) of the index-th of many (K, V) matrices."""
    k, v = k0 + tl.arange(0, BK), v0 + tl.arange(0, BV)
    return ptr + index * K * V + k[:, None] * V + v[None, :], (k < K)[:, None] & (v < V)[None, :]


# ---------------------------------------------------------------------------- kernels
# One memory is one (batch, g) pair; its R query heads h lie next to each other. Every kernel gets T, N chunks and the
# sizes and flags of `plan`. x: a reader, q or e. INVERT: x is e. R_X: readers of this kind a memory.


@jit
def products_kernel(
    x, k, G, out, x_in, k_out, T, N, LEVELS, R_X: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr,
    DECAY: tl.constexpr, INVERT: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(8) by (9): P, or X of (10); and the decayed readers and keys of (10)-(12). One program a chunk and reader."""
    index, n = tl.program_id(0).to(tl.int64), tl.program_id(0) % N
    x_row, row, t0 = index // N, index // N // R_X, n.to(tl.int64) * C
    i, j, c, zero = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, C), tl.arange(0, 1)
    M = tl.zeros([C, C], tl.float32)
    for k0 in range(0, K, BK):  # M is a sum over channels: a block of them at a time
        bx = load(x, x_row, HEADS * R_X, t0, T, k0, K, C, BK)
        bk = load(k, row, HEADS, t0, T, k0, K, C, BK)
        if DECAY:
            for level in range(LEVELS):  # 0 .. LEVELS-1, a run-time number: unrolled, the kernel spills
                start = c >> level << level
                right = bx * decay(G, row, HEADS, N, t0, start, c + 1, k0, K, C, BK)
                left = bk * decay(G, row, HEADS, N, t0, c + 1, start + (1 << level), k0, K, C, BK)
                met = tl.dot(right, tl.trans(left), input_precision=PREC)
                M += tl.where((i > j) & ((i ^ j) >> level == 1), met, 0.0)
            bx_in = bx * decay(G, row, HEADS, N, t0, zero, c + 1, k0, K, C, BK)
            store(x_in, bx_in, x_row, HEADS * R_X, t0, T, k0, K, C, BK)
            if x_row % R_X == 0:
                bk_out = bk * decay(G, row, HEADS, N, t0, c + 1, zero + C, k0, K, C, BK)
                store(k_out, bk_out, row, HEADS, t0, T, k0, K, C, BK)
        else:
            M += tl.where(i > j, tl.dot(bx, tl.trans(bk), input_precision=PREC), 0.0)
        if not INVERT:
            M += tl.where(i == j, tl.sum(bx * bk, 1)[:, None], 0.0)
    if INVERT:
        X = tl.where(i == j, 1.0, 0.0)
        for r in range(1, C):  # forward substitution: row r of X is the unit row minus (row r of N) X
            n_r = tl.sum(tl.where(i == r, M, 0.0), 0)
            X -= tl.where(i == r, tl.sum(n_r[:, None] * X, 0)[None, :], 0.0)
        M = X
    tl.store(out + index * C * C + i * C + j, M)


@jit
def walk_kernel(
    e_in, k_out, v, G, x, s0, u, s_in, s_end, T, N, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    DECAY: tl.constexpr, ERASE: tl.constexpr, C: tl.constexpr, WK: tl.constexpr, WV: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(10), (12), first chunk to last: U and every entry state. One program a memory and WV columns of its state."""
    row, v0, zero = tl.program_id(0).to(tl.int64), tl.program_id(1) * WV, tl.arange(0, 1)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    at, inside = state_tile(s0, row, 0, K, v0, V, WK, WV)
    S = tl.load(at, mask=inside, other=0.0)
    for n in range(N):
        t0 = tl.cast(n, tl.int64) * C
        at, inside = state_tile(s_in, row * N + n, 0, K, v0, V, WK, WV)
        tl.store(at, S, mask=inside)
        U = load(v, row, HEADS, t0, T, v0, V, C, WV)
        if ERASE:
            U -= tl.dot(load(e_in, row, HEADS, t0, T, 0, K, C, WK), S, input_precision=PREC)
            U = tl.dot(tl.load(x + (row * N + n) * C * C + i * C + j), U, input_precision=PREC)
        store(u, U, row, HEADS, t0, T, v0, V, C, WV)
        if DECAY:
            S *= tl.trans(decay(G, row, HEADS, N, t0, zero, zero + C, 0, K, C, WK))
        S += tl.dot(tl.trans(load(k_out, row, HEADS, t0, T, 0, K, C, WK)), U, input_precision=PREC)
    at, inside = state_tile(s_end, row, 0, K, v0, V, WK, WV)
    tl.store(at, S, mask=inside)


@jit
def read_kernel(
    q_in, u, s_in, p, o, T, N, R: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(11): one program a chunk, query head and block of BV columns of the output."""
    index, n, v0 = tl.program_id(0).to(tl.int64), tl.program_id(0) % N, tl.program_id(1) * BV
    q_row, row, t0 = index // N, index // N // R, n.to(tl.int64) * C
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    P = tl.load(p + index * C * C + i * C + j)
    O = tl.dot(P, load(u, row, HEADS, t0, T, v0, V, C, BV), input_precision=PREC)
    for k0 in range(0, K, BK):
        at, inside = state_tile(s_in, row * N + n, k0, K, v0, V, BK, BV)
        S = tl.load(at, mask=inside, other=0.0)
        O += tl.dot(load(q_in, q_row, HEADS * R, t0, T, k0, K, C, BK), S, input_precision=PREC)
    store(o, O, q_row, HEADS * R, t0, T, v0, V, C, BV)


@jit
def read_back_kernel(
    p, do, du, T, N, R: tl.constexpr, HEADS: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """The first term of (13): one program a chunk, memory and block of BV columns."""
    row, n, v0 = (tl.program_id(0) // N).to(tl.int64), tl.program_id(0) % N, tl.program_id(1) * BV
    i, j, t0 = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], n.to(tl.int64) * C
    dU = tl.zeros([C, BV], tl.float32)
    for r in range(R):
        P_T = tl.load(p + ((row * R + r) * N + n) * C * C + j * C + i)  # transposed by the load: see Hazards
        dU += tl.dot(P_T, load(do, row * R + r, HEADS * R, t0, T, v0, V, C, BV), input_precision=PREC)
    store(du, dU, row, HEADS, t0, T, v0, V, C, BV)


@jit
def walk_back_kernel(
    q_in, e_in, k_out, G, x, do, du, ds_end, dr, ds_out, ds0, T, N, R: tl.constexpr, HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, ERASE: tl.constexpr, C: tl.constexpr, WK: tl.constexpr,
    WV: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(13)-(15), last chunk to first; the programs are walk_kernel's."""
    row, v0, zero = tl.program_id(0).to(tl.int64), tl.program_id(1) * WV, tl.arange(0, 1)
    i, j = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    at, inside = state_tile(ds_end, row, 0, K, v0, V, WK, WV)
    dS = tl.load(at, mask=inside, other=0.0)
    for step in range(N):
        n = N - 1 - step
        t0 = tl.cast(n, tl.int64) * C
        at, inside = state_tile(ds_out, row * N + n, 0, K, v0, V, WK, WV)
        tl.store(at, dS, mask=inside)
        dR = load(du, row, HEADS, t0, T, v0, V, C, WV)
        dR += tl.dot(load(k_out, row, HEADS, t0, T, 0, K, C, WK), dS, input_precision=PREC)
        if DECAY:
            dS *= tl.trans(decay(G, row, HEADS, N, t0, zero, zero + C, 0, K, C, WK))
        for r in range(R):
            dO = load(do, row * R + r, HEADS * R, t0, T, v0, V, C, WV)
            q_T = tl.trans(load(q_in, row * R + r, HEADS * R, t0, T, 0, K, C, WK))
            dS += tl.dot(q_T, dO, input_precision=PREC)
        if ERASE:
            X_T = tl.load(x + (row * N + n) * C * C + j * C + i)
            dR = tl.dot(X_T, dR, input_precision=PREC)
            dS -= tl.dot(tl.trans(load(e_in, row, HEADS, t0, T, 0, K, C, WK)), dR, input_precision=PREC)
        store(dr, dR, row, HEADS, t0, T, v0, V, C, WV)
    at, inside = state_tile(ds0, row, 0, K, v0, V, WK, WV)
    tl.store(at, dS, mask=inside)


@jit
def reader_gradient_kernel(
    k, G, y, u, s_in, dm, dx, T, N, LEVELS, R_X: tl.constexpr, HEADS: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, DECAY: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """(16) and (17) without j = i, for readers whose reads have gradient y. One program a chunk and reader."""
    index, n = tl.program_id(0).to(tl.int64), tl.program_id(0) % N
    x_row, row, t0 = index // N, index // N // R_X, n.to(tl.int64) * C
    i, j, c, zero = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, C), tl.arange(0, 1)
    dM = tl.zeros([C, C], tl.float32)
    for v0 in range(0, V, BV):
        Y, U = load(y, x_row, HEADS * R_X, t0, T, v0, V, C, BV), load(u, row, HEADS, t0, T, v0, V, C, BV)
        dM += tl.dot(Y, tl.trans(U), input_precision=PREC)
    tl.store(dm + index * C * C + i * C + j, dM)
    for k0 in range(0, K, BK):
        dX = tl.zeros([C, BK], tl.float32)
        for v0 in range(0, V, BV):
            at, inside = state_tile(s_in, row * N + n, k0, K, v0, V, BK, BV)
            S = tl.load(at, mask=inside, other=0.0)
            dX += tl.dot(load(y, x_row, HEADS * R_X, t0, T, v0, V, C, BV), tl.trans(S), input_precision=PREC)
        bk = load(k, row, HEADS, t0, T, k0, K, C, BK)
        if DECAY:
            dX *= decay(G, row, HEADS, N, t0, zero, c + 1, k0, K, C, BK)
            for level in range(LEVELS):
                start = c >> level << level
                left = bk * decay(G, row, HEADS, N, t0, c + 1, start + (1 << level), k0, K, C, BK)
                met = tl.dot(tl.where((i > j) & ((i ^ j) >> level == 1), dM, 0.0), left, input_precision=PREC)
                dX += met * decay(G, row, HEADS, N, t0, start, c + 1, k0, K, C, BK)
        else:
            dX += tl.dot(tl.where(i > j, dM, 0.0), bk, input_precision=PREC)
        store(dx, dX, x_row, HEADS * R_X, t0, T, k0, K, C, BK)


@jit
def through_pairs(
    bx, dm, index, G, row, N, t0, k0, LEVELS, HEADS: tl.constexpr, K: tl.constexpr, DECAY: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """The sum over i > j of (18) for one reader x."""
    i, j, c = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, C)
    dM_T = tl.load(dm + index * C * C + j * C + i)  # transposed by the load: see Hazards
    dK = tl.zeros([C, BK], tl.float32)
    if DECAY:
        for level in range(LEVELS):
            start = c >> level << level
            right = bx * decay(G, row, HEADS, N, t0, start, c + 1, k0, K, C, BK)
            met = tl.dot(tl.where((i < j) & ((i ^ j) >> level == 1), dM_T, 0.0), right, input_precision=PREC)
            dK += met * decay(G, row, HEADS, N, t0, c + 1, start + (1 << level), k0, K, C, BK)
    else:
        dK += tl.dot(tl.where(i < j, dM_T, 0.0), bx, input_precision=PREC)
    return dK


@jit
def key_gradient_kernel(
    q, e, k, G, u, s_in, ds_out, dp, dn, dq, de, dk, dg, T, N, LEVELS, R: tl.constexpr, HEADS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, DECAY: tl.constexpr, ERASE: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """(18), (19) and the j = i part of (17). One program a chunk, memory and block of BK channels; no atomics."""
    index, k0 = tl.program_id(0).to(tl.int64), tl.program_id(1) * BK
    row, n, c, zero = index // N, index % N, tl.arange(0, C), tl.arange(0, 1)
    t0 = n * C
    bk = load(k, row, HEADS, t0, T, k0, K, C, BK)
    dK, dG = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    kept = tl.zeros([BK], tl.float32)
    for v0 in range(0, V, BV):
        at, inside = state_tile(ds_out, index, k0, K, v0, V, BK, BV)
        dS = tl.load(at, mask=inside, other=0.0)
        dK += tl.dot(load(u, row, HEADS, t0, T, v0, V, C, BV), tl.trans(dS), input_precision=PREC)
        if DECAY:
            at, inside = state_tile(s_in, index, k0, K, v0, V, BK, BV)
            kept += tl.sum(dS * tl.load(at, mask=inside, other=0.0), 1)
    if DECAY:
        dK *= decay(G, row, HEADS, N, t0, c + 1, zero + C, k0, K, C, BK)
        left_chunk = bk * dK
    for r in range(R):
        q_row = row * R + r
        bq, dQ = (
            load(q, q_row, HEADS * R, t0, T, k0, K, C, BK),
            load(dq, q_row, HEADS * R, t0, T, k0, K, C, BK),
        )
        pairs = through_pairs(bq, dp, q_row * N + n, G, row, N, t0, k0, LEVELS, HEADS, K, DECAY, C, BK, PREC)
        own = tl.load(dp + (q_row * N + n) * C * C + c * C + c)[:, None]  # undecayed, hence not in dG
        store(dq, dQ + own * bk, q_row, HEADS * R, t0, T, k0, K, C, BK)
        dK += pairs + own * bq
        dG += bq * dQ - bk * pairs
    if ERASE:  # what e reads is subtracted
        be, dE = load(e, row, HEADS, t0, T, k0, K, C, BK), load(de, row, HEADS, t0, T, k0, K, C, BK)
        pairs = through_pairs(be, dn, index, G, row, N, t0, k0, LEVELS, HEADS, K, DECAY, C, BK, PREC)
        store(de, -dE, row, HEADS, t0, T, k0, K, C, BK)
        dK -= pairs
        dG -= be * dE - bk * pairs
    store(dk, dK, row, HEADS, t0, T, k0, K, C, BK)
    if DECAY:
        before = tl.where(c[None, :] < c[:, None], 1.0, 0.0)
        dg_t = tl.cumsum(dG, 0, reverse=True) + tl.dot(before, left_chunk, input_precision=EXACT)
        dg_t += kept[None, :] * decay(G, row, HEADS, N, t0, zero, zero + C, k0, K, C, BK)
        store(dg, dg_t, row, HEADS, t0, T, k0, K, C, BK)


KERNELS = (
    products_kernel, walk_kernel, read_kernel, read_back_kernel, walk_back_kernel, reader_gradient_kernel,
    key_gradient_kernel,
)  # fmt: skip

# ---------------------------------------------------------------------------- launching


def plan(
    R: int, HEADS: int, K: int, V: int, T: int, chunk: int, decay: bool, erase: bool, exact: bool
) -> dict:
    """Sizes, flags and precisions of all kernels: tiles [C, BK] and [C, BV]; a walk's program holds [WK, WV] of S."""
    C = max(16, min(chunk, 1 << (T - 1).bit_length(), 64 if K <= 128 else 32))  # tl.dot wants 16 or more
    WK, WV = (max(16, 1 << (d - 1).bit_length()) for d in (K, V))
    precision = dict(PREC="ieee", EXACT="ieee") if exact else dict(PREC="tf32", EXACT="tf32x3")
    sizes = dict(R=R, HEADS=HEADS, K=K, V=V, C=C, BK=min(32, WK), BV=min(32, WV), WK=WK, WV=min(16, WV))
    return dict(sizes, DECAY=decay, ERASE=erase, **precision)


def launch(kernel, grid: tuple, *args, **constants) -> None:
    """Run `kernel` with those of `constants` that it declares."""
    kernel[grid](*args, **{n: c for n, c in constants.items() if n in kernel.arg_names}, **LAUNCH)


class ChunkedDelta(torch.autograd.Function):
    """(6): contiguous (q, e, k, x, g, S0) -> (o, S), float32. e and g may be None."""

    @staticmethod
    def states(q, e, k, v, g, s0, m: dict) -> tuple:
        """What forward and backward both need: (8)-(10) and (12)."""
        (B, T, G, K), V, C, R = k.shape, v.shape[-1], m["C"], m["R"]
        N, new = -(-T // C), functools.partial(torch.empty, dtype=torch.float32, device=q.device)
        sums, x, q_in, e_in, k_out = (
            None,
            None,
            q,
            e,
            k,
        )  # undecayed, the readers are themselves anywhere in a chunk
        if g is not None:
            sums = F.pad(g.double(), (0, 0, 0, 0, 1, N * C - T)).cumsum(1)
            q_in, k_out, e_in = new(q.shape), new(k.shape), None if e is None else new(e.shape)
        p, u, s_in, s_end = new(B * G * R, N, C, C), new(v.shape), new(B * G, N, K, V), new(s0.shape)
        levels = C.bit_length() - 1
        launch(
            products_kernel,
            (B * G * R * N,),
            q,
            k,
            sums,
            p,
            q_in,
            k_out,
            T,
            N,
            levels,
            R_X=R,
            INVERT=False,
            **m,
        )
        if e is not None:
            x = new(B * G, N, C, C)
            launch(
                products_kernel,
                (B * G * N,),
                e,
                k,
                sums,
                x,
                e_in,
                k_out,
                T,
                N,
                levels,
                R_X=1,
                INVERT=True,
                **m,
            )
        launch(walk_kernel, (B * G, -(-V // m["WV"])), e_in, k_out, v, sums, x, s0, u, s_in, s_end, T, N, **m)
        return N, levels, sums, q_in, e_in, k_out, p, x, u, s_in, s_end

    @staticmethod
    def forward(ctx, q, e, k, v, g, s0, m):
        ctx.save_for_backward(q, e, k, v, g, s0)
        ctx.m = m
        N, _, _, q_in, _, _, p, _, u, s_in, s_end = ChunkedDelta.states(q, e, k, v, g, s0, m)
        (B, T, H, _), V = q.shape, v.shape[-1]
        o = u.new_empty(B, T, H, V)
        launch(read_kernel, (B * H * N, -(-V // m["BV"])), q_in, u, s_in, p, o, T, N, **m)
        return o, s_end

    @staticmethod
    @once_differentiable
    def backward(ctx, do, ds_end):
        (q, e, k, v, g, s0), m = ctx.saved_tensors, ctx.m
        do, ds_end = do.contiguous(), ds_end.contiguous()
        N, levels, sums, q_in, e_in, k_out, p, x, u, s_in, _ = ChunkedDelta.states(q, e, k, v, g, s0, m)
        (B, T, G, K), V, R = k.shape, v.shape[-1], m["R"]
        du, dr, ds_out, ds0, dp = (torch.empty_like(z) for z in (u, u, s_in, s0, p))
        launch(read_back_kernel, (B * G * N, -(-V // m["BV"])), p, do, du, T, N, **m)
        walk_args = q_in, e_in, k_out, sums, x, do, du, ds_end, dr, ds_out, ds0, T, N
        launch(walk_back_kernel, (B * G, -(-V // m["WV"])), *walk_args, **m)
        dq, de, dk, dg = (
            None if z is None else torch.empty_like(z, dtype=torch.float32) for z in (q, e, k, g)
        )
        dn = None if e is None else torch.empty_like(x)
        for readers, y, dm, dx in ((R, do, dp, dq), (1, dr, dn, de)):
            if dx is not None:
                args = k, sums, y, u, s_in, dm, dx, T, N, levels
                launch(reader_gradient_kernel, (B * G * readers * N,), *args, R_X=readers, **m)
        args = q, e, k, sums, u, s_in, ds_out, dp, dn, dq, de, dk, dg, T, N, levels
        launch(key_gradient_kernel, (B * G * N, -(-K // m["BK"])), *args, **m)
        grads = zip((dq, de, dk, dr, dg, ds0), (q, e, k, v, g, s0))
        return *(None if d is None else d.to(z.dtype) for d, z in grads), None


IMPLEMENTATIONS: dict[str, Callable] = {"recurrent": recurrent, "chunked": chunked}


@register(IMPLEMENTATIONS, "triton")
def triton_attention(q_bthk, k_btgk, v_btgv, log_decay=None, erase=None, write=None, state=None, chunk=64):
    """The kernels behind `chunked`'s interface, for tensors on a GPU (or anywhere with TRITON_INTERPRET=1)."""
    if triton is None:
        raise ValueError("impl='triton' needs the package triton; choose recurrent, chunked or auto")
    if not (q_bthk.is_cuda or INTERPRETED):
        raise ValueError(
            f"impl='triton' needs CUDA tensors, got {q_bthk.device}, or TRITON_INTERPRET=1 at import"
        )
    if q_bthk.dtype == torch.float64 or v_btgv.dtype == torch.float64 or q_bthk.shape[-1] > MAX_KEY_DIM:
        raise ValueError(
            f"impl='triton' has no float64 and no key dimension above {MAX_KEY_DIM}; use impl='chunked'"
        )
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


@functools.cache  # once for every choice
def announce(impl: str, why: str) -> None:
    print(f"linear_attention: {impl} ({why})")


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
    """Equation (1): arguments and results of `recurrent`, in the way that impl names.

    auto takes triton for CUDA tensors and chunked otherwise, and one token at a time is cheapest as the recurrence.
    Only a missing GPU or a missing Triton changes the choice, no error does. LINEAR_ATTN_VERBOSE=1 prints it once."""
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
        announce(impl, why)
    args = (q_bthk, k_btgk, v_btgv, log_decay, erase, write, state)
    return run(*args) if run is recurrent else run(*args, chunk=chunk)


# ---------------------------------------------------------------------------- check and time

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
    """Best CPU time of up to 3 runs within 3 s; on a GPU tests/gpu_check.py measures."""
    best = spent = 1e9
    for run in range(3):
        if run and spent > 3:
            break
        leaves = [None if z is None else z.detach().requires_grad_(backward) for z in args]
        start = time.process_time()
        out = fn(*leaves)
        if backward:
            out.sum().backward()
        spent = time.process_time() - start
        best = min(best, spent)
    return best


def main() -> None:
    """The two tables; --json FILE keeps them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--json")
    path = parser.parse_args().json
    torch.set_num_threads(1)
    triton_runs = torch.cuda.is_available() or INTERPRETED
    device = "cuda" if torch.cuda.is_available() else "cpu"
    errors, times = [], []
    print("largest relative error of outputs and all gradients against float64 autograd through `recurrent`")
    for rule in RULES:
        for impl in ("chunked", "triton") if triton_runs else ("chunked",):
            args = example(rule, device=device)
            got = gradients(functools.partial(linear_attention, impl=impl), args)
            worst = max(map(relative_error, got, gradients(recurrent, args, torch.float64)))
            errors.append(dict(rule=rule, impl=impl, error=worst))
            print(f"  {rule:9s}{impl:9s}{worst:.1e}")
    if not triton_runs:
        print("  (triton needs a GPU, or TRITON_INTERPRET=1)")
    print("\nCPU seconds on one core, batch 1, 8 heads of 64, float32, and how often chunked is faster")
    print("                 T  recurrent  chunked  kda chunked     sdpa | recurrent/chunked  sdpa/chunked")
    for backward in (False, True):
        for T in (512, 1024, 2048, 4096, 8192):
            args, kda = (example(rule, T=T, H=8, G=8, K=64, V=64)[:6] for rule in ("deltanet", "kda"))
            heads_first = [z.transpose(1, 2).contiguous() for z in args[:3]]
            row = dict(backward=backward, T=T, recurrent=None)
            if T <= (2048 if backward else 8192):  # its graph keeps every state: 4 GB at T = 8,192
                row["recurrent"] = seconds(lambda *a: recurrent(*a)[0], args, backward)
            row["chunked"] = seconds(lambda *a: chunked(*a)[0], args, backward)
            row["kda_chunked"] = seconds(lambda *a: chunked(*a)[0], kda, backward)
            row["sdpa"] = seconds(
                lambda *a: F.scaled_dot_product_attention(*a, is_causal=True), heads_first, backward
            )
            times.append(row)
            loop, ratio = "not run", ""
            if row["recurrent"]:
                loop, ratio = f"{row['recurrent']:.2f}", f"{row['recurrent'] / row['chunked']:.1f}"
            name = "forward+backward" if backward else "forward"
            print(
                f"{name:16s}{T:5d}{loop:>8s}{row['chunked']:10.3f}{row['kda_chunked']:10.3f}{row['sdpa']:12.3f}"
                f"{ratio:>14s}{row['sdpa'] / row['chunked']:18.2f}"
            )
    if path:
        versions = dict(torch=torch.__version__, triton=getattr(triton, "__version__", None))
        machine = f"{platform.machine()}, {os.cpu_count()} cores, one thread"
        result = dict(machine=machine, date=time.strftime("%Y-%m-%d"), **versions, errors=errors, times=times)
        with open(path + ".new", "w") as file:
            json.dump(result, file, indent=1)
        os.replace(path + ".new", path)


if __name__ == "__main__":
    main()
