"""Exercise 2 (15 minutes): one step of the delta rule, and what it does that a gate cannot.

A state S (K,V) answers a query q with S^T q. To store v under the unit key k with strength b:

    S' = (I - b k k^T) S + b k v^T          equation (1) of linear_attn.py with g = 0 and b = w

Never build I - b k k^T: what the memory says about k is the vector r = S^T k. Write S' with r in one line.
"""

import pytest
import torch
import torch.nn.functional as F


def delta_step(S_kv, k_k, v_v, b: float):
    raise NotImplementedError("exercise 2: return S', from r = S^T k and one outer product")


@pytest.mark.exercise
def test_2_a_step_replaces_what_is_under_its_key_and_touches_nothing_else():
    torch.manual_seed(0)
    S, v = torch.randn(6, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    k, other = F.normalize(torch.randn(2, 6, dtype=torch.float64), dim=-1)
    after = delta_step(S, k, v, 1.0)
    assert torch.allclose(after.T @ k, v), "with b = 1 the memory must answer k with v, whatever was there"
    apart = F.normalize(other - (other @ k) * k, dim=-1)
    assert torch.allclose(after.T @ apart, S.T @ apart), "a key at right angles must not notice"
    half = delta_step(S, k, v, 0.5)
    assert torch.allclose(half.T @ k, 0.5 * (S.T @ k + v)), "b = 1/2: half of the old answer, half of v"
    assert torch.allclose(delta_step(after, k, v, 1.0), after), "writing the same twice changes nothing"
