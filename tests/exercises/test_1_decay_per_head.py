"""Exercise 1 (10 minutes): a decay per head, and why it is computed in float32.

A gate forgets by a factor exp(g) in (0, 1), one number a head and token, from the layer's input h:

    g = logsigmoid(h W + b)          h (B,T,D), W (D,H), b (H)  ->  g (B,T,H), float32, never positive

A memory that should last 500 tokens has exp(g) = 0.998. What is that in bfloat16, which has 8 bits? Read
"HAZARD" and "float32" in linear_attn.py, fill in the function, then:
    pytest tests/exercises -m exercise -k test_1
"""

import pytest
import torch


def log_decay_per_head(hidden_btd, W_dh, b_h):
    raise NotImplementedError("exercise 1: return logsigmoid(h W + b), computed in float32")


@pytest.mark.exercise
def test_1_the_decay_is_the_formula_never_positive_and_float32():
    torch.manual_seed(0)
    hidden, W, b = torch.randn(2, 5, 8), torch.randn(8, 3), torch.tensor([6.0, 0.0, -2.0])
    got = log_decay_per_head(hidden, W, b)
    assert got.shape == (2, 5, 3), f"a number a token and head was wanted, (2, 5, 3), not {tuple(got.shape)}"
    assert (got <= 0).all(), "exp(g) above 1: this memory grows instead of forgetting"
    kept = 1 / (1 + (-(hidden @ W + b)).exp())
    assert torch.allclose(got.exp(), kept, atol=1e-6), "exp(g) is not sigmoid(h W + b)"
    slow = log_decay_per_head(torch.zeros(1, 1, 8, dtype=torch.bfloat16), W, b)
    assert slow.dtype == torch.float32, "a half-precision input still wants a float32 gate"
    assert 0.99 < slow[0, 0, 0].exp() < 1, "0.998 became 1.0: computed in bfloat16, this gate never forgets"
