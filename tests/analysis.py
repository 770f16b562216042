"""The paper's other two lemmas, softmax as an exact delta rule, and two figures of how concentrated keys are.

Beside `linear_attn.softmax_projection_identity` (Lemma 2); used by the tests and by `eval.py --tasks layers`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from linear_attn import chunked, recurrent, working_dtype


def softmax_first_order(x_t: Tensor) -> tuple[Tensor, Tensor]:
    """Lemma 1: softmax_i(x) = 1/t + (x_i - mean x)/t + R_i. Returns (first order, bound): |R_i| <= ||x||^2/2.

    The paper's main text prints the remainder inside the bracket, (x_i - mean x + eps_i)/t with the same
    bound on eps; one score of 3 among 512 breaks that form. Its appendix form, this one, holds.
    """
    t = x_t.shape[-1]
    return (1 + x_t - x_t.mean(-1, keepdim=True)) / t, 0.5 * x_t.square().sum(-1)


def rank1_product(k_tk: Tensor, beta_t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lemma 3: prod_j (I - b_j k_j k_j^T) = I - sum_j b_j k_j k_j^T + E -> (product, first order, bound).

    The product is what equation (1) makes of the state I if nothing is written. The paper's C t b_max^2 fails
    for identical keys, where ||E|| grows like t^2 b^2/2. Expanding the product gives a bound that holds for
    unit keys: ||E|| <= (1 + b_max)^t - 1 - t b_max.
    """
    k, eye, t, b = k_tk[None, :, None], torch.eye(k_tk.shape[1]).to(k_tk), len(beta_t), beta_t.max()
    _, product = recurrent(k, k, torch.zeros_like(k), None, beta_t[None, :, None], None, eye[None, None])
    return product[0, 0], eye - torch.einsum("t,tk,tl->kl", beta_t, k_tk, k_tk), (1 + b) ** t - 1 - t * b


def key_concentration(k_bthk: Tensor) -> Tensor:
    """C_t = cos(k_t, mean of k_1..k_t), all t in linear time. (B,T,H,K) -> (B,T,H) in [-1, 1]."""
    k = F.normalize(k_bthk.to(working_dtype(k_bthk)), dim=-1)
    return F.cosine_similarity(k, k.cumsum(1), dim=-1)  # a sum points where its mean does


def projection_residual(k_bthk: Tensor) -> Tensor:
    """R_t, how far centring is from projecting: the root mean square of Lemma 2's ||r_i|| over i <= t.

    (B,T,H,K) -> (B,T,H), >= 0. ||r_i|| = |cos a_i - ||m_t||| and ||m_t|| is the mean of cos a_i, so R_t is a
    standard deviation, sqrt(u^T Cov_t u) with u = m_t/||m_t||. It bounds the paper's R_t from above, the mean
    of ||r_i||, which needs all pairs (i, t); u^T (sum k k^T) u is equation (1) with q = u and v = k.
    """
    k = F.normalize(k_bthk.to(working_dtype(k_bthk)), dim=-1)
    steps = torch.arange(1, k.shape[1] + 1).to(k)[:, None]
    mean = k.cumsum(1) / steps[..., None]
    u = F.normalize(mean, dim=-1)
    return ((chunked(u, k, k)[0] * u).sum(-1) / steps - mean.square().sum(-1)).clamp(min=0).sqrt()


def softmax_as_delta_rule(q_k: Tensor, k_tk: Tensor, v_tv: Tensor, scale: float) -> Tensor:
    """Softmax attention is a delta rule in function space, exactly: for every query q,

        o_t(q) = o_{t-1}(q) + a_t(q) (v_t - o_{t-1}(q)),    a_t(q) = exp(q.k_t) / sum_{i<=t} exp(q.k_i)

    which is equation (1) with b_t = w_t = a_t and one key, the number 1. A gate forgets by a factor that
    knows neither q nor k_t; softmax and the delta rule forget only where k_t points. Returns all o_t(q).
    """
    score_t = k_tk @ q_k * scale
    a_bth = (score_t - score_t.logcumsumexp(0)).exp()[None, :, None]
    one_bthk = torch.ones_like(a_bth)[..., None]
    return recurrent(one_bthk, one_bthk, v_tv[None, :, None], None, a_bth, a_bth)[0][0, :, 0]
