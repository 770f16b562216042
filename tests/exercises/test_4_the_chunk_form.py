"""Exercise 4 (45 minutes): the chunk form of a gated memory, without a loop over tokens.

The rule here only forgets (no delta): S_t = exp(g_t) S_{t-1} + k_t v_t^T, o_t = S_t^T q_t, one g a token.
With G_t = g_1 + ... + g_t and the state S_0 at the start, unrolling gives

    o_t = exp(G_t) S_0^T q_t + sum_{j<=t} exp(G_t - G_j) (q_t . k_j) v_j
    S_T = exp(G_T) S_0 + sum_j exp(G_T - G_j) k_j v_j^T

Two traps. exp(-G_j) alone overflows: form the differences first. And for j > t the difference is positive:
mask it *before* the exponential, or infinity times zero will greet you. `chunked` in linear_attn.py is the
grown-up version; write your own.
"""

import time

import pytest
import torch

from linear_attn import recurrent


def chunk_form(q_tk, k_tk, v_tv, g_t, S_kv):
    """(o (T,V), S_T (K,V)); T is the length of one chunk."""
    raise NotImplementedError("exercise 4: return (o, S_T) by matrix products over all T tokens at once")


@pytest.mark.exercise
def test_4_the_chunk_form_equals_the_loop_is_stable_and_is_faster():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 300, 8, dtype=torch.float64)
    S = torch.randn(8, 8, dtype=torch.float64)
    for decay in (0.01, 30.0):  # 30 a token: exp(-G) would be exp(9,000)
        g = -decay * torch.rand(300, dtype=torch.float64)
        x = [y[None, :, None] for y in (q, k, v)]
        start = time.perf_counter()
        want_o, want_S = recurrent(*x, g[None, :, None], state=S[None, None])
        loop, start = time.perf_counter() - start, time.perf_counter()
        o, last = chunk_form(q, k, v, g, S)
        took = time.perf_counter() - start
        assert o.isfinite().all() and last.isfinite().all(), f"not finite at a decay of {decay} a token"
        assert torch.allclose(o, want_o[0, :, 0]), f"o is not that of the loop, at a decay of {decay} a token"
        assert torch.allclose(last, want_S[0, 0]), f"the last state is not that of the loop ({decay})"
    assert took < loop, f"{took:.4f} s, the loop takes {loop:.4f} s: is there still a loop over tokens?"
