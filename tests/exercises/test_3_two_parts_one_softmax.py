"""Exercise 3 (15 minutes): softmax over a split set of tokens, exactly.

Cut the tokens in two, E and M. Each part has its own softmax answer o and the log of its own denominator,
lse = log sum exp(scores). The answer over all tokens is

    o = m o_E + (1 - m) o_M          m = (mass of E) / (mass of both)

Find m as a function of lse_E and lse_M that never computes exp of either (scores of 1,000 exist: Qwen).
This is all that joins exact pairs and memory in interventions.py, where lse_M is an estimate.
"""

import pytest
import torch


def joined_softmax(o_e, lse_e, o_m, lse_m):
    """o_e, o_m (B,T,H,V); lse_e, lse_m (B,T,H) -> (B,T,H,V)."""
    raise NotImplementedError("exercise 3: return m o_E + (1 - m) o_M without overflow")


@pytest.mark.exercise
@pytest.mark.parametrize("size", [1.0, 1000.0])
def test_3_two_parts_make_the_softmax_of_the_whole(size):
    torch.manual_seed(0)
    score, v = size * torch.randn(1, 2, 3, 20), torch.randn(20, 5)
    halves = (score[..., :7], v[:7]), (score[..., 7:], v[7:])
    (o_e, lse_e), (o_m, lse_m) = ((x.softmax(-1) @ y, x.logsumexp(-1)) for x, y in halves)
    got = joined_softmax(o_e, lse_e, o_m, lse_m)
    assert got.isfinite().all(), "exp of a score of 1,000 overflows: only a difference is safe"
    want = score.softmax(-1) @ v
    assert torch.allclose(got, want, atol=1e-5), "not the softmax over all 20 tokens"
