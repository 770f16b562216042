"""The recurrence of linear_attn.py as Triton kernels, forward and backward. Entry point: `linear_attention`.

What you will learn here (read linear_attn.py first; its equations (1)-(5) go on here)
  1. How (1) becomes a few matrix products a chunk and one short loop over chunks: (6)-(12).
  2. How to differentiate that by hand: (13)-(19).
  3. The kernels, each citing its equations. They are tested against `recurrent`, the naive loop.
On a first reading skip (13)-(19) and their kernels, the backward pass. `python kernels.py` checks and times
what this machine can run, the kernels too with TRITON_INTERPRET=1.

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
run-time strides spill. Grid axis 1 ends at 65,535: what grows is on axis 0."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from linear_attn import chunked, empty_state, lookup, recurrent, register

try:
    import triton
    import triton.language as tl
    from triton.language import constexpr
except ImportError:  # the torch paths work without it, and so does reading the kernels
    triton = tl = constexpr = None

jit: Callable = triton.jit if triton else (lambda kernel: kernel)
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"  # fixed at import
LAUNCH = dict(num_warps=8, num_stages=1)  # of every kernel; tests/gpu_check.py compiles with them
# Three ways to run equation (1), each with the arguments and results of `recurrent`.
IMPLEMENTATIONS: dict[str, Callable] = {"recurrent": recurrent, "chunked": chunked}  # "triton" is below

# ---------------------------------------------------------------------------- tiles
# A kernel sees raw memory: a pointer, and arithmetic that finds an element. `tile` is the only place that
# does it; all kernels speak of tiles, in the terms of the equations above.
# rows = (row, heads, t0, T): time t0 and after, of the row-th (batch, head) pair of a (batch, T, heads, D)
# tensor. cols = (d0, D): channel d0 and after. A tile is [C, BD] of those. The index-th of many (K, V) states
# is such a tensor, K for the time and one head: rows = (index, 1, k0, K). So is one of many [C, C] matrices.


@jit
def tile(ptr, rows, c, cols, BD: constexpr):
    """The addresses of times t0 + c in a tile, and which of them exist.

    The corner is computed in 64 bits, row and t0 being int64, since it passes 2^31 in real training runs."""
    row, heads, t0, T = rows
    d, D = cols[0] + tl.arange(0, BD), cols[1]
    corner = ptr + ((row // heads * T + t0) * heads + row % heads) * D
    return corner + (c[:, None] * (heads * D) + d[None, :]), (c < T - t0)[:, None] & (d < D)[None, :]


@jit
def load(ptr, rows, cols, C: constexpr, BD: constexpr):
    """The tile in float32, 0 where nothing exists: a token beyond T has q = k = v = 0 and changes nothing."""
    at, exists = tile(ptr, rows, tl.arange(0, C), cols, BD)
    return tl.load(at, mask=exists, other=0.0).to(tl.float32)


@jit
def store(ptr, x, rows, cols, C: constexpr, BD: constexpr):
    """The inverse of `load`: what does not exist is not written."""
    at, exists = tile(ptr, rows, tl.arange(0, C), cols, BD)
    tl.store(at, x, mask=exists)


@jit
def load_transposed(ptr, index, C: constexpr):
    """The transpose of the index-th [C, C] matrix, made by its addresses: for tl.trans see Hazards."""
    return tl.load(ptr + index * C * C + tl.arange(0, C)[None, :] * C + tl.arange(0, C)[:, None])


@jit
def decay(G, rows, since, until, cols, DECAY: constexpr, BD: constexpr):
    """(9): exp(g_since + ... + g_{until-1}) for positions in the chunk at t0: 0 its start, C its end.

    G holds the sum over all tokens before a position, one position more than there are. No DECAY: 1."""
    factor = tl.full([1, 1], 1.0, tl.float32)
    if DECAY:
        at, exists = tile(G, rows, since, cols, BD)
        start = tl.load(at, mask=exists, other=0.0)
        at, exists = tile(G, rows, until, cols, BD)
        factor = tl.exp((tl.load(at, mask=exists, other=0.0) - start).to(tl.float32))
    return factor


@jit
def through_pairs(M, b, G, times, cols, LEVELS, TO_KEYS: constexpr, DECAY: constexpr, C: constexpr,
                  BK: constexpr, PREC: constexpr):  # fmt: skip
    """sum_{j<i} M_ij exp(G_i - G_j) b_j for all i, as in (17), or (TO_KEYS) the sum over i > j of (18).

    TO_KEYS: M comes transposed, b_i is a reader's, and the result is a key's."""
    c = tl.arange(0, C)
    i, j = (c[None, :], c[:, None]) if TO_KEYS else (c[:, None], c[None, :])
    total = tl.zeros([C, BK], tl.float32)
    for level in range(LEVELS):
        # Blocks of 2^level tokens come in pairs. `start` is where a position's block begins; a reader in the
        # right block decays from there, a key in the left one to its own block's end: the same border.
        start = c >> level << level
        reader, key = (start, c + 1), (c + 1, start + (1 << level))
        near, far = (key, reader) if TO_KEYS else (reader, key)
        # (i ^ j) >> level == 1: this is the highest bit in which i and j differ, so each pair meets once
        met = tl.where((i > j) & (((i ^ j) >> level == 1) | (not DECAY)), M, 0.0)
        met = tl.dot(met, b * decay(G, times, far[0], far[1], cols, DECAY, BK), input_precision=PREC)
        total += met * decay(G, times, near[0], near[1], cols, DECAY, BK)
    return total

# ---------------------------------------------------------------------------- kernels
# Forward: products (P, X for all chunks at once) -> walk (chunk after chunk, the only sequential part)
#          -> read (outputs of all chunks at once).
# Backward: read_back -> walk_back (last chunk to first) -> reader_gradient -> key_gradient.
# Only the walks need a chunk's predecessor; everything else fills the GPU with one program a chunk and head.
# A memory is a (batch, g) pair; its R query heads are neighbours. N chunks. z: a reader, q or e.
# `key` and `reader` are the rows of this chunk's keys and readers, `times` those of the decay sums G.


@jit
def products_kernel(z, k, G, out, z_in, k_out, T, N, LEVELS, R_Z: constexpr, HEADS: constexpr, K: constexpr,
                    DECAY: constexpr, INVERT: constexpr, C: constexpr, BK: constexpr,
                    PREC: constexpr):  # fmt: skip
    """(8) by (9): P, or (INVERT) X; and Q_in or E_in, K_out. One program a chunk and reader."""
    index, t0 = tl.program_id(0).to(tl.int64), (tl.program_id(0) % N).to(tl.int64) * C
    z_row, row = index // N, index // N // R_Z
    reader, key, times = (z_row, HEADS * R_Z, t0, T), (row, HEADS, t0, T), (row, HEADS, t0, N * C + 1)
    i, j, c, zero = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :], tl.arange(0, C), tl.arange(0, 1)
    M = tl.zeros([C, C], tl.float32)  # (8), of a query: P, or of an erase key: N
    for k0 in range(0, K, BK):  # M is a sum over channels: a block of them at a time
        cols = (k0, K)
        bz, bk = load(z, reader, cols, C, BK), load(k, key, cols, C, BK)
        for level in range(LEVELS):  # a run-time number: unrolled, the kernel spills
            start = c >> level << level
            right = bz * decay(G, times, start, c + 1, cols, DECAY, BK)
            left = bk * decay(G, times, c + 1, start + (1 << level), cols, DECAY, BK)
            met = tl.dot(right, tl.trans(left), input_precision=PREC)
            M += tl.where((i > j) & (((i ^ j) >> level == 1) | (not DECAY)), met, 0.0)
        if DECAY:  # what the walk and the read need of (10)-(12), made while z and k are at hand
            store(z_in, bz * decay(G, times, zero, c + 1, cols, DECAY, BK), reader, cols, C, BK)
            if z_row % R_Z == 0:  # the R query heads share their keys: one of them is enough
                store(k_out, bk * decay(G, times, c + 1, zero + C, cols, DECAY, BK), key, cols, C, BK)
        if not INVERT:
            M += tl.where(i == j, tl.sum(bz * bk, 1)[:, None], 0.0)
    if INVERT:  # X = (I + N)^-1 of (10)
        X = tl.where(i == j, 1.0, 0.0)
        for r in range(1, C):  # forward substitution: row r of X is the unit row minus (row r of N) X
            n_r = tl.sum(tl.where(i == r, M, 0.0), 0)
            X -= tl.where(i == r, tl.sum(n_r[:, None] * X, 0)[None, :], 0.0)
        M = X
    store(out, M, (index, 1, 0, C), (0, C), C, C)


@jit
def walk_kernel(e_in, k_out, v, G, x, s0, u, s_in, s_end, T, N, HEADS: constexpr, K: constexpr, V: constexpr,
                DECAY: constexpr, ERASE: constexpr, C: constexpr, WK: constexpr, WV: constexpr,
                PREC: constexpr):  # fmt: skip
    """(10), (12), first chunk to last: U and all entry states. One program a memory and WV columns."""
    row, zero, values = tl.program_id(0).to(tl.int64), tl.arange(0, 1), (tl.program_id(1) * WV, V)
    # A state's columns do not know of each other: a program carries WV of them, and S never leaves its
    # registers. What it writes are the states at chunk borders, for the read and for the backward pass.
    S = load(s0, (row, 1, 0, K), values, WK, WV)
    for n in range(N):
        index, t0 = row * N + n, tl.cast(n, tl.int64) * C
        here = (row, HEADS, t0, T)
        store(s_in, S, (index, 1, 0, K), values, WK, WV)
        U = load(v, here, values, C, WV)
        if ERASE:  # (10); without an erase key U is x itself
            U -= tl.dot(load(e_in, here, (0, K), C, WK), S, input_precision=PREC)
            U = tl.dot(load(x, (index, 1, 0, C), (0, C), C, C), U, input_precision=PREC)
        store(u, U, here, values, C, WV)
        # (12): the chunk's whole decay, then what its tokens add
        S *= tl.trans(decay(G, (row, HEADS, t0, N * C + 1), zero, zero + C, (0, K), DECAY, WK))
        S += tl.dot(tl.trans(load(k_out, here, (0, K), C, WK)), U, input_precision=PREC)
    store(s_end, S, (row, 1, 0, K), values, WK, WV)


@jit
def read_kernel(q_in, u, s_in, p, o, T, N, R: constexpr, HEADS: constexpr, K: constexpr, V: constexpr,
                C: constexpr, BK: constexpr, BV: constexpr, PREC: constexpr):  # fmt: skip
    """(11): one program a chunk, query head and block of BV columns of the output."""
    # HAZARD: int64 from the first line on: states of 64 x 64 numbers pass 2^31 at half a million chunks.
    index, n, values = tl.program_id(0).to(tl.int64), tl.program_id(0) % N, (tl.program_id(1) * BV, V)
    q_row, row, t0 = index // N, index // N // R, n.to(tl.int64) * C
    P, U = load(p, (index, 1, 0, C), (0, C), C, C), load(u, (row, HEADS, t0, T), values, C, BV)
    O = tl.dot(P, U, input_precision=PREC)  # from this chunk's own tokens
    for k0 in range(0, K, BK):  # from all before it, through the entry state
        S = load(s_in, (row * N + n, 1, k0, K), values, BK, BV)
        O += tl.dot(load(q_in, (q_row, HEADS * R, t0, T), (k0, K), C, BK), S, input_precision=PREC)
    store(o, O, (q_row, HEADS * R, t0, T), values, C, BV)


@jit
def read_back_kernel(p, do, du, T, N, R: constexpr, HEADS: constexpr, V: constexpr, C: constexpr,
                     BV: constexpr, PREC: constexpr):  # fmt: skip
    """The first term of (13): one program a chunk, memory and block of BV columns. In the walk it spills."""
    row, n, values = (tl.program_id(0) // N).to(tl.int64), tl.program_id(0) % N, (tl.program_id(1) * BV, V)
    dU, t0 = tl.zeros([C, BV], tl.float32), n.to(tl.int64) * C
    for r in range(R):
        dO = load(do, (row * R + r, HEADS * R, t0, T), values, C, BV)
        dU += tl.dot(load_transposed(p, (row * R + r) * N + n, C), dO, input_precision=PREC)
    store(du, dU, (row, HEADS, t0, T), values, C, BV)


@jit
def walk_back_kernel(q_in, e_in, k_out, G, x, do, du, ds_end, dr, ds_out, ds0, T, N, R: constexpr,
                     HEADS: constexpr, K: constexpr, V: constexpr, DECAY: constexpr, ERASE: constexpr,
                     C: constexpr, WK: constexpr, WV: constexpr, PREC: constexpr):  # fmt: skip
    """(13)-(15), last chunk to first; the programs are walk_kernel's."""
    row, zero, values = tl.program_id(0).to(tl.int64), tl.arange(0, 1), (tl.program_id(1) * WV, V)
    dS = load(ds_end, (row, 1, 0, K), values, WK, WV)
    for step in range(N):
        index = (row + 1) * N - 1 - step
        t0 = index % N * C
        here = (row, HEADS, t0, T)
        # dS is the gradient of this chunk's exit state: key_gradient_kernel will want it
        store(ds_out, dS, (index, 1, 0, K), values, WK, WV)
        dR = load(du, here, values, C, WV)
        dR += tl.dot(load(k_out, here, (0, K), C, WK), dS, input_precision=PREC)  # dU of (13)
        dS *= tl.trans(decay(G, (row, HEADS, t0, N * C + 1), zero, zero + C, (0, K), DECAY, WK))
        for r in range(R):  # (15), a term for each query head that read this memory
            reader = (row * R + r, HEADS * R, t0, T)
            dO = load(do, reader, values, C, WV)
            dS += tl.dot(tl.trans(load(q_in, reader, (0, K), C, WK)), dO, input_precision=PREC)
        if ERASE:  # (14): dU becomes dR, and what e read goes back into the entry state
            dR = tl.dot(load_transposed(x, index, C), dR, input_precision=PREC)
            dS -= tl.dot(tl.trans(load(e_in, here, (0, K), C, WK)), dR, input_precision=PREC)
        store(dr, dR, here, values, C, WV)
    store(ds0, dS, (row, 1, 0, K), values, WK, WV)


@jit
def reader_gradient_kernel(k, G, y, u, s_in, dm, dz, T, N, LEVELS, R_Z: constexpr, HEADS: constexpr,
                           K: constexpr, V: constexpr, DECAY: constexpr, C: constexpr, BK: constexpr,
                           BV: constexpr, PREC: constexpr):  # fmt: skip
    """(16) and (17) without j = i, for readers with output gradient y. One program a chunk and reader."""
    index, n, zero = tl.program_id(0).to(tl.int64), tl.program_id(0) % N, tl.arange(0, 1)
    z_row, row, t0 = index // N, index // N // R_Z, n.to(tl.int64) * C
    reader, key, times = (z_row, HEADS * R_Z, t0, T), (row, HEADS, t0, T), (row, HEADS, t0, N * C + 1)
    dM = tl.zeros([C, C], tl.float32)  # (16); through_pairs masks what is not below the diagonal
    for v0 in range(0, V, BV):
        U = load(u, key, (v0, V), C, BV)
        dM += tl.dot(load(y, reader, (v0, V), C, BV), tl.trans(U), input_precision=PREC)
    store(dm, dM, (index, 1, 0, C), (0, C), C, C)
    for k0 in range(0, K, BK):
        cols, dZ = (k0, K), tl.zeros([C, BK], tl.float32)
        for v0 in range(0, V, BV):
            S = load(s_in, (row * N + n, 1, k0, K), (v0, V), BK, BV)
            dZ += tl.dot(load(y, reader, (v0, V), C, BV), tl.trans(S), input_precision=PREC)
        # (17): what came through the entry state, decayed from there; then pair by pair
        dZ *= decay(G, times, zero, tl.arange(0, C) + 1, cols, DECAY, BK)
        dZ += through_pairs(dM, load(k, key, cols, C, BK), G, times, cols, LEVELS, False, DECAY, C, BK, PREC)
        store(dz, dZ, reader, cols, C, BK)


@jit
def key_gradient_kernel(q, e, k, G, u, s_in, ds_out, dp, dn, dq, de, dk, dg, T, N, LEVELS, R: constexpr,
                        HEADS: constexpr, K: constexpr, V: constexpr, DECAY: constexpr, ERASE: constexpr,
                        C: constexpr, BK: constexpr, BV: constexpr, PREC: constexpr):  # fmt: skip
    """(18), (19) and j = i in (17). One program a chunk, memory and block of BK channels; no atomics."""
    index, k0, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BK, tl.arange(0, C)
    row, t0, cols, zero = index // N, index % N * C, (k0, K), tl.arange(0, 1)
    key, times = (row, HEADS, t0, T), (row, HEADS, t0, N * C + 1)
    dK, dG, kept = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32), tl.zeros([BK], tl.float32)
    bk = load(k, key, cols, C, BK)
    for v0 in range(0, V, BV):
        dS = load(ds_out, (index, 1, k0, K), (v0, V), BK, BV)
        dK += tl.dot(load(u, key, (v0, V), C, BV), tl.trans(dS), input_precision=PREC)
        if DECAY:
            kept += tl.sum(dS * load(s_in, (index, 1, k0, K), (v0, V), BK, BV), 1)
    dK *= decay(G, times, c + 1, zero + C, cols, DECAY, BK)  # so far only what left the chunk
    left_chunk = bk * dK  # the exit term of (19)
    # Each query head that reads this memory adds to its keys' gradients: summed here, in registers.
    for r in range(R):
        reader, at = (row * R + r, HEADS * R, t0, T), (row * R + r) * N + index % N
        bq, dQ, dP_T = load(q, reader, cols, C, BK), load(dq, reader, cols, C, BK), load_transposed(dp, at, C)
        pairs = through_pairs(dP_T, bq, G, times, cols, LEVELS, True, DECAY, C, BK, PREC)
        own = tl.load(dp + at * C * C + c * C + c)[:, None]  # undecayed, hence not in dG
        store(dq, dQ + own * bk, reader, cols, C, BK)
        dK += pairs + own * bq
        dG += bq * dQ - bk * pairs
    if ERASE:  # what e reads is subtracted
        be, dE, dN_T = load(e, key, cols, C, BK), load(de, key, cols, C, BK), load_transposed(dn, index, C)
        pairs = through_pairs(dN_T, be, G, times, cols, LEVELS, True, DECAY, C, BK, PREC)
        store(de, -dE, key, cols, C, BK)
        dK -= pairs
        dG -= be * dE - bk * pairs
    store(dk, dK, key, cols, C, BK)
    if DECAY:  # (19): a gate touches all readers at and after it, all keys that left, and the entry state
        EXACT: constexpr = "ieee" if PREC == "ieee" else "tf32x3"
        before = tl.where(c[None, :] < c[:, None], 1.0, 0.0)
        dg_t = tl.cumsum(dG, 0, reverse=True) + tl.dot(before, left_chunk, input_precision=EXACT)
        dg_t += kept[None, :] * decay(G, times, zero, zero + C, cols, DECAY, BK)
        store(dg, dg_t, key, cols, C, BK)

# ---------------------------------------------------------------------------- launching

def plan(R: int, HEADS: int, K: int, V: int, T: int, chunk: int, DECAY: bool, ERASE: bool, exact: bool):
    """What all kernels are compiled for. Tiles are [C, BK] and [C, BV]; a walk holds [WK, WV] of a state.

    exact: float32 inputs get float32 products. Else tf32, whose 10 bits are three more than bfloat16 has."""
    # Powers of two, as tl.arange wants; what is beyond T, K or V is masked in `tile`.
    # A longer chunk: fewer steps of the walks, more work inside; above K = 128 tiles of 64 are too large.
    C = max(16, min(chunk, 1 << (T - 1).bit_length(), 64 if K <= 128 else 32))  # tl.dot wants 16 or more
    WK, WV = (max(16, 1 << (d - 1).bit_length()) for d in (K, V))
    sizes = dict(R=R, HEADS=HEADS, K=K, V=V, C=C, BK=min(32, WK), BV=min(32, WV), WK=WK, WV=min(16, WV))
    return dict(sizes, DECAY=DECAY, ERASE=ERASE, PREC="ieee" if exact else "tf32")


def launch(kernel, grid: tuple, named: dict, **more) -> None:
    """Run `kernel` with those of the named values that are its parameters, on the GPU of its tensors."""
    named = named | more
    with torch.cuda.device_of(named["k"]):  # not always the current one
        kernel[grid](**{name: named[name] for name in kernel.arg_names}, **LAUNCH)


def states(q, e, k, v, g, s0, m: dict) -> dict:
    """What forward and backward both need, (8)-(10) and (12): everything by the names that kernels use.

    It is computed twice: kept for the backward pass, U, P, X and a state a chunk (64 x 64 numbers each, for
    64 tokens of 64 channels) would be as large again as q, k and v."""
    (B, T, G, K), V, C, R = k.shape, v.shape[-1], m["C"], m["R"]
    N, new = -(-T // C), functools.partial(torch.empty, dtype=torch.float32, device=k.device)
    a = dict(m, q=q, e=e, k=k, v=v, s0=s0, T=T, N=N, G=None, LEVELS=1, q_in=q, e_in=e, k_out=k, x=None)
    a |= dict(p=new(B * G * R, N, C, C), u=new(v.shape), s_in=new(B * G, N, K, V), s_end=new(s0.shape))
    if g is not None:  # without decay q, e and k are right as they are
        a |= dict(q_in=new(q.shape), k_out=new(k.shape), e_in=None if e is None else new(e.shape))
        a |= dict(G=F.pad(g.double(), (0, 0, 0, 0, 1, N * C - T)).cumsum(1), LEVELS=C.bit_length() - 1)
    launch(products_kernel, (B * G * R * N,), a, z=q, z_in=a["q_in"], out=a["p"], R_Z=R, INVERT=False)
    if e is not None:
        a["x"] = new(B * G, N, C, C)
        launch(products_kernel, (B * G * N,), a, z=e, z_in=a["e_in"], out=a["x"], R_Z=1, INVERT=True)
    launch(walk_kernel, (B * G, -(-V // m["WV"])), a)
    return a


class ChunkedDelta(torch.autograd.Function):
    """(6): contiguous (q, e, k, x, g, S0) -> (o, S), float32. e and g may be None."""

    @staticmethod
    def forward(ctx, q, e, k, v, g, s0, m):
        ctx.save_for_backward(q, e, k, v, g, s0)
        ctx.m, a = m, states(q, e, k, v, g, s0, m)
        a["o"] = a["u"].new_empty(*q.shape[:3], v.shape[-1])
        launch(read_kernel, (a["p"].shape[:2].numel(), -(-v.shape[-1] // m["BV"])), a)
        return a["o"], a["s_end"]

    # Second derivatives would need kernels of their own: better an error than silence.
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, do, ds_end):
        inputs, m = ctx.saved_tensors, ctx.m
        # A gradient's name is its input's with a d; kernels find their arguments by name (`launch`).
        a = states(*inputs, m) | dict(do=do.contiguous(), ds_end=ds_end.contiguous())
        names = ("dq", "de", "dk", "dr", "dg", "ds0")  # the inputs' gradients: dx is dR
        like = dict(zip(names, inputs), du=a["u"], ds_out=a["s_in"], dp=a["p"], dn=a["x"])
        a |= {name: z if z is None else torch.empty_like(z, dtype=torch.float32) for name, z in like.items()}
        (B, _, G, K), V, R, chunks = a["k"].shape, a["v"].shape[-1], m["R"], a["s_in"].shape[:2].numel()
        launch(read_back_kernel, (chunks, -(-V // m["BV"])), a)
        launch(walk_back_kernel, (B * G, -(-V // m["WV"])), a)
        # The same kernel for both readers of (17): queries with dO, erase keys with dR.
        launch(reader_gradient_kernel, (chunks * R,), a, y=a["do"], dm=a["dp"], dz=a["dq"], R_Z=R)
        if a["e"] is not None:
            launch(reader_gradient_kernel, (chunks,), a, y=a["dr"], dm=a["dn"], dz=a["de"], R_Z=1)
        launch(key_gradient_kernel, (chunks, -(-K // m["BK"])), a)
        return *(z if z is None else a[name].to(z.dtype) for name, z in zip(names, inputs)), None


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
    # b and w go into e and x here, in PyTorch: autograd differentiates them, and the kernels need not know.
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


def linear_attention(q_bthk: Tensor | None, k_btgk: Tensor, v_btgv: Tensor, log_decay: Tensor | None = None,
                     erase: Tensor | None = None, write: Tensor | None = None, state: Tensor | None = None,
                     chunk: int = 64, impl: str = "auto") -> tuple[Tensor, Tensor]:  # fmt: skip
    """Equation (1): arguments and results of `recurrent`, in the way that impl names.

    auto: triton for CUDA tensors, else chunked; there one token goes through the cheaper recurrence. Only a
    missing GPU or Triton changes the choice, no error does. Without queries only the state is of interest."""
    # On a CPU the kernels could only be interpreted, which is for tests and not for use.
    if impl == "auto":
        impl = "triton" if k_btgk.is_cuda and triton is not None else "chunked"
    if impl == "chunked" and k_btgk.shape[1] == 1:
        impl = "recurrent"
    q_bthk = k_btgk if q_bthk is None and impl != "chunked" else q_bthk
    run = lookup(IMPLEMENTATIONS, impl, "implementation")
    args = (q_bthk, k_btgk, v_btgv, log_decay, erase, write, state)
    return run(*args) if run is recurrent else run(*args, chunk=chunk)


if __name__ == "__main__":
    from tests.gpu_check import cpu_tables  # how correct and how fast; measuring is no part of the lesson
    cpu_tables()
