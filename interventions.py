"""The three interventions, and the layer that composes them with a memory.

What you will learn here: which tokens stay exact, where the others go, how the two answers become one.
    1. sink tokens           the first `sinks` tokens stay exact for ever (much of softmax's mass is there)
    2. short convolutions    the memory's q, k, v see a few neighbours
    3. fixed-budget routing  of all others a fixed number stays exact: the newest (a window) and `budget` more
                             that a router chooses, by recency or content (`ROUTERS`)
`LinearizeConfig` says all of it, `LinearizedAttention` does it, a merge (`MERGES`) makes one answer of two.
Skip `exact_attention` (softmax over a band, in blocks) and `LinearizedAttention.routed` on a first reading.

Every token is at any time in exactly one place. With s sinks and the newest w exact, query t (from 0) sees
    (6)  exact:   tokens 0..s-1  and  t-w+1..t          softmax as the frozen model computes it
    (7)  memory:  tokens s..t-w                         the state of equation (1) of linear_attn.py
Token t-w leaves the window at step t and is written to the memory in the same step: the memory's part is the
unchanged recurrence on keys and values shifted by w, without the sinks. For T <= s + w it is empty, and the
layer is the teacher's, to rounding. A router by content replaces "the newest" by its choice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import linear_attention
from linear_attn import FEATURES, RULES, lookup, register, working_dtype

MERGES: dict[str, type[nn.Module]] = {}
ROUTERS: dict[str, Callable[[Pool], Tensor]] = {}
ASK_THE_MEMORY = ("error", "mix")  # routers that need one


def option(default, help: str, choices=None, low=None, high=None, item=str):
    """A dataclass field that knows its help and its legal values; the command line is made from it."""
    about = dict(help=help, choices=choices, low=low, high=high, item=item)  # item: type of a tuple's items
    return dataclasses.field(default=default, metadata=about)


def check_options(config) -> None:
    """Raise a ValueError with one clear line if a field is outside its choices or range."""
    for field in dataclasses.fields(config):
        value, m = getattr(config, field.name), field.metadata
        low, high = m["low"], math.inf if m["high"] is None else m["high"]
        if m["choices"] is not None:
            lookup(dict.fromkeys(m["choices"]), value, field.name)
        elif isinstance(field.default, (int, float)) and not isinstance(value, (int, type(field.default))):
            kind = "whole number" if isinstance(field.default, int) else "number"
            raise ValueError(f"{field.name} must be a {kind}, got {value!r}")
        elif low is not None and not low <= value <= high:
            top = "" if m["high"] is None else f" and at most {high}"
            raise ValueError(f"{field.name} must be at least {low}{top}, got {value}")


@dataclass(frozen=True)
class LinearizeConfig:
    """Everything that decides what a linearized layer computes. Saved with the adapter."""

    rule: str = option("gdn", "update rule of the memory", RULES)
    merge: str = option("lse", "how the exact part and the memory become one", MERGES)
    router: str = option("recency", "who of the tokens beyond the window stays exact", ROUTERS)
    sinks: int = option(4, "first tokens that stay exact for ever", low=0)
    window: int = option(128, "newest tokens that stay exact", low=0)
    budget: int = option(0, "further exact tokens, chosen by the router", low=0)
    block: int = option(32, "tokens between two choices of a router by content", low=1)
    conv: int = option(0, "width of the short convolutions on the memory's q, k, v; 0: none", low=0, high=64)
    conv_init: str = option("identity", "start of the convolutions", ("identity", "default"))
    features: str = option("silu", "feature map of the memory's q and k", FEATURES)
    feature_dim: int = option(0, "feature dimension; 0: the head dimension", low=0, high=4096)
    memory_per: str = option("kv", "one memory per kv head or per query head", ("kv", "query"))
    moments: str = option("diag", "covariance of the lse merge's mass estimate", ("mean", "diag", "full"))
    rank: int = option(16, "rank of the per-channel decay projection", low=1)
    beta_bias: float = option(-2.0, "write strength at the start, before the sigmoid", low=-20, high=20)
    decay_bias: float = option(6.0, "decay at the start, before the sigmoid", low=-20, high=20)
    chunk: int = option(64, "tokens per chunk of the memory's kernel", (16, 32, 64, 128, 256))
    impl: str = option("auto", "code of the recurrence", ("auto", "recurrent", "chunked", "triton"))

    def __post_init__(self):
        check_options(self)
        if self.router == "recency":
            return
        if self.window < self.block or self.window % self.block:
            want = f"window must be a multiple of block {self.block}, got {self.window}"
            raise ValueError(f"router {self.router}: {want}")
        if self.moments == "full":
            raise ValueError(f"router {self.router}: moments must be diag or mean, got full")
        if self.router in ASK_THE_MEMORY and not MERGES[self.merge].uses_memory:
            raise ValueError(f"router {self.router} asks the memory, and merge {self.merge} has none")

    @property
    def reach(self) -> int:
        """Newest exact tokens under recency: the routed ones are simply the next-newest."""
        return self.window + self.budget

    @property
    def exact_pairs(self) -> int:
        """The most key-value pairs that a query ever sees exactly, per kv head."""
        return self.sinks + self.reach


# ----------------------------------------------------------------------------- exact: sinks and window


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None):
    """Softmax attention over one set of keys: q (..., G, R, C, K), k (..., G, L, K), v (..., G, L, V).

    visible (..., 1 or G, C, L) -> o (..., G, R, C, V), log-sum-exp (..., G, R, C), p (..., G, R, C, L).
    HAZARD: scores need float32. Qwen's reach thousands before scaling, where bfloat16 has steps of 8.
    """
    (R, C), dtype = q.shape[-3:-1], working_dtype(q)
    score = (q.flatten(-3, -2).to(dtype) @ k.mT.to(dtype)).unflatten(-2, (R, C)) * scale
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    score = score.masked_fill(~visible[..., None, :, :], -torch.inf)
    lse = score.logsumexp(-1)
    p = (score - lse[..., None]).exp()
    return (p.to(v.dtype).flatten(-3, -2) @ v).unflatten(-2, (R, C)), lse, p


def exact_attention(
    q_bthk: Tensor, k_btgk: Tensor, v_btgv: Tensor, sinks: int, window: int, scale: float,
    softcap: float | None = None, block: int = 64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax over (6), in linear time: (o (B,T,H,V), log-sum-exp of its scores (B,T,H)).

    Queries go in blocks: a block of C queries needs the window-1+C keys that end with it. An empty exact set
    (s = w = 0) gives o = 0 and log-sum-exp -inf.
    """
    B, T, H, _ = q_bthk.shape
    G, V, device, C = k_btgk.shape[2], v_btgv.shape[-1], q_bthk.device, min(block, T)
    if T == 0 or sinks == window == 0:
        nothing = q_bthk.new_full((B, T, H), -torch.inf, dtype=working_dtype(q_bthk))
        return v_btgv.new_zeros(B, T, H, V), nothing
    N, L = -(-T // C), window - 1 + C
    q_bnchk = F.pad(q_bthk, (0, 0, 0, 0, 0, N * C - T)).unflatten(1, (N, C))
    at_nc1 = torch.arange(N * C, device=device).view(N, C, 1)
    keys, values, visible = [], [], []
    if sinks:  # a sink is visible from its own position on
        for x, parts in ((k_btgk, keys), (v_btgv, values)):
            parts.append(x[:, :sinks].transpose(1, 2)[:, None].expand(-1, N, -1, -1, -1))
        visible.append(torch.arange(min(sinks, T), device=device) <= at_nc1)
    if window:
        for x, parts in ((k_btgk, keys), (v_btgv, values)):
            parts.append(F.pad(x, (0, 0, 0, 0, window - 1, N * C - T)).unfold(1, L, C).mT)
        age_cl = torch.arange(C, device=device)[:, None] + window - 1 - torch.arange(L, device=device)
        visible.append((age_cl >= 0) & (age_cl < window) & (at_nc1 - age_cl >= sinks))  # sinks count once
    q_bngrck = q_bnchk.unflatten(3, (G, H // G)).permute(0, 1, 3, 4, 2, 5)
    seen_n1cl = torch.cat(visible, -1)[:, None]
    o, lse, _ = attend(q_bngrck, torch.cat(keys, -2), torch.cat(values, -2), seen_n1cl, scale, softcap)
    o_bthv = o.permute(0, 1, 4, 2, 3, 5).reshape(B, N * C, H, V)[:, :T]
    return o_bthv, lse.permute(0, 1, 4, 2, 3).reshape(B, N * C, H)[:, :T]


# ----------------------------------------------------------------------------- what the memory absorbed


def query_moments(q_bthk: Tensor, count: Tensor, origin: Tensor, offset: Tensor, square=None) -> dict:
    """What (9) needs: count, q.mu, q^T Sigma q (B,T,H), from the mean `offset` and mean square of k - origin.

    Second moments are taken around one key: Qwen's keys have biases of 100 and more, and E[k^2] - mu^2 would
    lose every digit of a variance of 1 in float32. Shapes (B, T or 1, G, K); `square` None: no Sigma.
    """
    q_btgrk = q_bthk.to(working_dtype(q_bthk)).unflatten(2, (offset.shape[2], -1))
    q_mean = torch.einsum("btgrk,btgk->btgr", q_btgrk, origin + offset).flatten(2)
    moments = {"count": count, "q_mean": q_mean}
    if square is not None:
        variance = square - offset.square()
        moments["q_cov_q"] = torch.einsum("btgrk,btgk->btgr", q_btgrk.square(), variance).flatten(2)
    return moments


def running_moments(q_bthk: Tensor, k_btgk: Tensor, kind: str) -> dict[str, Tensor]:
    """The moments of k_1..k_t for every q_t. "mean": no Sigma; "diag": one variance a channel;
    "full": K x K, where q^T (sum k k^T) q is equation (1) with v = k, read by q."""
    dtype = working_dtype(q_bthk)
    q, k, G = q_bthk.to(dtype), k_btgk.to(dtype), k_btgk.shape[2]
    count = torch.arange(1, k.shape[1] + 1, device=k.device, dtype=dtype)[None]
    origin, shifted = k[:, :1], k - k[:, :1]
    offset = shifted.cumsum(1) / count[..., None, None]
    square = shifted.square().cumsum(1) / count[..., None, None] if kind == "diag" else None
    moments = query_moments(q, count, origin, offset, square)
    if kind == "full":
        second = (linear_attention(q, shifted, shifted)[0] * q).sum(-1) / count[..., None]
        mean = torch.einsum("btgrk,btgk->btgr", q.unflatten(2, (G, -1)), offset).flatten(2)
        moments["q_cov_q"] = second - mean.square()
    return moments


# ----------------------------------------------------------------------------- short convolution


class ShortConv(nn.Module):
    """Depthwise causal convolution: y_t = bias + sum_j weight_j * x_{t-width+1+j}, per head and channel.

    No activation. "identity" starts as y = x, so that an untrained convolution changes nothing; "default" is
    torch's initialisation of a Conv1d. A few shifted products: 4x faster on a CPU than a depthwise conv1d.
    """

    def __init__(self, width: int, heads: int, dim: int, init: str):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, heads, dim))
        self.bias = nn.Parameter(torch.zeros(heads, dim))
        if init == "identity":
            self.weight.data[-1] = 1.0
        else:
            nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)
            nn.init.uniform_(self.bias, -(width**-0.5), width**-0.5)

    def forward(self, x_bthk: Tensor, tail_bthk: Tensor | None = None) -> Tensor:
        """tail: the width-1 tokens before x (None: zeros)."""
        width, T = self.weight.shape[0], x_bthk.shape[1]
        x = x_bthk.to(working_dtype(x_bthk))
        x = F.pad(x, (0, 0, 0, 0, width - 1, 0)) if tail_bthk is None else torch.cat([tail_bthk.to(x), x], 1)
        return sum((x[:, j : j + T] * self.weight[j].to(x) for j in range(width)), self.bias.to(x))


# ----------------------------------------------------------------------------- merges


@register(MERGES, "off")
class MemoryOff(nn.Module):
    """The control: sinks and window alone. A memory counts only for what it adds to this."""

    uses_memory, uses_moments = False, False

    def __init__(self, heads: int, key_dim: int):
        super().__init__()

    def forward(self, o_exact, lse_exact, read, q, moments, scale):
        return o_exact


@register(MERGES, "sum")
class SumMerge(MemoryOff):
    """The paper's: y_t = q_t S_{s+1..t-w} + softmax_{I_t}. No mixing weight, no shared denominator."""

    uses_memory = True

    def forward(self, o_exact, lse_exact, read, q, moments, scale):
        return o_exact + read.to(o_exact.dtype)


@register(MERGES, "lse")
class LseMerge(nn.Module):
    """Softmax over everything, with the memory standing for the tokens it absorbed.

    Exact for any split of the tokens into E and M:
        (8)  softmax_all = m softmax_E + (1 - m) softmax_M,      m = sigmoid(lse_E - lse_M)
    The memory's read stands for softmax_M. Its log-mass is that of n keys with mean mu and covariance
    Sigma; for Gaussian keys log sum exp(q.k/sqrt d) is the cumulant series log n + q.mu/sqrt d + q^T Sigma
    q/(2d) + ...:
        (9)  lse_M(q) ~ log n + a1 q.mu/sqrt d + a2 q^T Sigma q/(2d) + u.q/sqrt d + c
    with a1 = 1, a2 = 1/2, u = 0, c = 0 learned per query head, and a gain on the read, 1 at the start.
    While nothing is in the memory (n = 0) the layer does not ask the merge: m = 1.
    """

    uses_memory, uses_moments = True, True

    def __init__(self, heads: int, key_dim: int):
        super().__init__()
        self.a1 = nn.Parameter(torch.ones(heads))
        self.a2 = nn.Parameter(torch.full((heads,), 0.5))
        self.u = nn.Parameter(torch.zeros(heads, key_dim))
        self.c = nn.Parameter(torch.zeros(heads))
        self.gain = nn.Parameter(torch.ones(heads))

    def log_mass(self, q_bthk: Tensor, moments: dict[str, Tensor], scale: float) -> Tensor:
        """Equation (9), (B,T,H); `scale` is the model's 1/sqrt(d)."""
        linear = self.a1 * moments["q_mean"] + torch.einsum("bthk,hk->bth", q_bthk.to(self.u.dtype), self.u)
        spread = self.a2 * moments["q_cov_q"] * (0.5 * scale**2) if "q_cov_q" in moments else 0.0
        return moments["count"].log()[..., None] + linear * scale + spread + self.c

    def forward(self, o_exact, lse_exact, read, q, moments, scale):
        m_bth1 = torch.sigmoid(lse_exact - self.log_mass(q, moments, scale))[..., None]
        return (m_bth1 * o_exact + (1 - m_bth1) * self.gain[:, None] * read).to(o_exact.dtype)


# ----------------------------------------------------------------------------- routers


@dataclass
class Pool:
    """What a router sees when it keeps `budget` of P tokens, per sequence and kv head: each (B,G,P)."""

    position: Tensor
    received: Tensor  # attention probability the exact branch gave the token, halved at every block
    recall_error: Callable[[], Tensor]  # ||v - what the memory answers to k|| before the token is written
    budget: int


@register(ROUTERS, "recency")
def route_by_recency(pool: Pool) -> Tensor:
    """The newest. A router returns scores (B,G,P); the `budget` highest stay exact, the rest is written."""
    return pool.position.float()


@register(ROUTERS, "mass")
def route_by_mass(pool: Pool) -> Tensor:
    """Who was attended to lately (H2O's heavy hitters, with decay)."""
    return pool.received


@register(ROUTERS, "error")
def route_by_error(pool: Pool) -> Tensor:
    """Whom the memory could not reproduce: finds a needle that nobody has asked for yet."""
    return pool.recall_error()


@register(ROUTERS, "mix")
def route_by_mix(pool: Pool) -> Tensor:
    """Half the budget by recall error, the other half by mass."""
    surprising = pool.recall_error().topk(pool.budget // 2, -1).indices
    return pool.received.scatter(-1, surprising, torch.inf)


@register(ROUTERS, "random")
def route_at_random(pool: Pool) -> Tensor:
    """The control: a hash of the position, so that a run can be repeated and split anywhere."""
    return (torch.sin(pool.position.double() * 12.9898) * 43758.5453).remainder(1)


def take(x_bgt: Tensor | None, index_bgl: Tensor) -> Tensor | None:
    """Tokens `index` of each head, from (B,G,T) or (B,G,T,K)."""
    if x_bgt is None or x_bgt.dim() == 3:
        return None if x_bgt is None else x_bgt.gather(2, index_bgl)
    return x_bgt.gather(2, index_bgl[..., None].expand(-1, -1, -1, x_bgt.shape[-1]))


# ----------------------------------------------------------------------------- the layer


class LinearizedAttention(nn.Module):
    """Sinks and window exact, the rest in a constant-size memory, one answer. Holds only the new parameters.

    forward takes what the frozen model computed, q (B,T,H,K), k (B,T,G,K), v (B,T,G,V) after RoPE, and the
    layer's input hidden (B,T,D) for the gates; it returns (B,T,H,V) in v's dtype. All of its own is float32.
    """

    def __init__(self, config: LinearizeConfig, d_model: int, heads: int, kv_heads: int, key_dim, value_dim):
        super().__init__()
        c, self.config, self.heads, self.kv_heads = config, config, heads, kv_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        self.merge = MERGES[c.merge](heads, key_dim)
        self.rule = self.conv_q = self.conv_k = self.conv_v = None
        if not self.merge.uses_memory:
            return
        self.rule = RULES[c.rule](
            d_model, heads, heads if c.memory_per == "query" else kv_heads, key_dim, features=c.features,
            feature_dim=c.feature_dim, rank=c.rank, beta_bias=c.beta_bias, decay_bias=c.decay_bias,
        )  # fmt: skip
        if c.conv:
            self.conv_q = ShortConv(c.conv, heads, key_dim, c.conv_init)
            self.conv_k = ShortConv(c.conv, kv_heads, key_dim, c.conv_init)
            self.conv_v = ShortConv(c.conv, kv_heads, value_dim, c.conv_init)

    def forward(self, q_bthk, k_btgk, v_btgv, hidden_btd, scale=None, softcap: float | None = None) -> Tensor:
        """A whole sequence at once. `scale` defaults to 1/sqrt(K); `softcap` as in Gemma 2."""
        c, T, scale = self.config, q_bthk.shape[1], self.key_dim**-0.5 if scale is None else scale
        if c.router != "recency":
            return self.routed(q_bthk, k_btgk, v_btgv, hidden_btd, scale, softcap)
        o_exact, lse_exact = exact_attention(q_bthk, k_btgk, v_btgv, c.sinks, c.reach, scale, softcap)
        if not self.merge.uses_memory or T <= c.exact_pairs:
            return o_exact
        read, moments = self.memory(q_bthk, k_btgk, v_btgv, hidden_btd)
        start = c.exact_pairs  # the first query with something in the memory; before it, the teacher
        merged = self.merge(o_exact[:, start:], lse_exact[:, start:], read, q_bthk[:, start:], moments, scale)
        return torch.cat([o_exact[:, :start], merged], 1)

    def convolved(self, q_bthk: Tensor, k_btgk: Tensor, v_btgv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as the memory sees them."""
        if self.conv_q is None:
            return q_bthk, k_btgk, v_btgv
        return self.conv_q(q_bthk), self.conv_k(k_btgk), self.conv_v(v_btgv)

    def memory(self, q_bthk: Tensor, k_btgk: Tensor, v_btgv: Tensor, hidden_btd: Tensor):
        """(7) for queries t = s+w..T-1: token t-w is written, q_t reads. (read (B,T-s-w,H,V), moments)."""
        c, T = self.config, q_bthk.shape[1]
        written, reading = slice(c.sinks, T - c.reach), slice(c.exact_pairs, T)
        q, k, v = self.convolved(q_bthk, k_btgk, v_btgv)
        writes = self.rule.writes(self.rule.encode(hidden_btd[:, written]), k[:, written], v[:, written])
        o, _ = linear_attention(self.rule.queries(q[:, reading]), *writes, chunk=c.chunk, impl=c.impl)
        moments = None
        if self.merge.uses_moments:
            moments = running_moments(q_bthk[:, reading], k_btgk[:, written], c.moments)
        return self.answer(o, moments), moments

    def answer(self, o_bthv: Tensor, moments: dict[str, Tensor] | None) -> Tensor:
        """The memory's read from o = S^T q. A merge with moments wants an average of values, not a sum."""
        read = self.rule.read(o_bthv)
        return read / moments["count"][..., None, None] if moments and self.rule.sums else read

    def routed(self, q_bthk, k_btgk, v_btgv, hidden_btd, scale: float, softcap: float | None) -> Tensor:
        """Blocks of queries; after each the router says who of the pool stays exact, and the rest is written.

        A query in the block from t0 on sees the sinks, `budget` routed tokens a kv head, and the window from
        t0 + block - window on: at most sinks + budget + window pairs. The pool is the routed tokens and the
        block that leaves the window. Every token is in one place, none is dropped or written twice. The
        choice carries no gradient and looks only backward.
        """
        c, (B, T, H, _), G = self.config, q_bthk.shape, self.kv_heads
        k_bgtk, v_bgtv = k_btgk.transpose(1, 2), v_btgv.transpose(1, 2)
        position = torch.arange(T, device=q_bthk.device)
        received = torch.zeros(B, G, T, device=q_bthk.device)
        routed = position[:0].expand(B, G, 0)
        if uses_memory := self.merge.uses_memory:
            q, k, v = self.convolved(q_bthk, k_btgk, v_btgv)
            q_in, writes = self.rule.queries(q), self.rule.writes(self.rule.encode(hidden_btd), k, v)
            writes = [None if x is None else x.transpose(1, 2) for x in writes]
            each = self.rule.memory_heads // G  # memories per kv head
            S, count = q_in.new_zeros(B, G * each, q_in.shape[-1], writes[1].shape[-1]), 0
            origin = k_bgtk[:, :, :1].to(working_dtype(k_bgtk))
            total = square = torch.zeros_like(origin)

        def recall_error() -> Tensor:
            key, value = (take(x, pool.repeat_interleave(each, 1)) for x in writes[:2])
            read = self.rule.read(key @ S) / (max(count, 1) if self.rule.sums else 1)
            return (value[..., : self.value_dim] - read).norm(dim=-1).unflatten(1, (G, each)).mean(2)

        outputs = []
        for t0 in range(0, T, c.block):
            t1, oldest = min(t0 + c.block, T), max(t0 + c.block - c.window, c.sinks)
            window = position[oldest:t1].expand(B, G, -1)
            seen = torch.cat([position[: min(c.sinks, t1)].expand(B, G, -1), routed, window], -1)
            visible = seen[:, :, None] <= position[t0:t1, None]
            q_now = q_bthk[:, t0:t1]
            q_bgrck = q_now.unflatten(2, (G, H // G)).permute(0, 2, 3, 1, 4)
            o, lse, p = attend(q_bgrck, take(k_bgtk, seen), take(v_bgtv, seen), visible, scale, softcap)
            out, lse = o.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3)
            received = (received * 0.5).scatter_add(2, seen, p.detach().to(received).sum((2, 3)))
            if uses_memory and count:
                moments = None
                if self.merge.uses_moments:
                    sums = (total, square) if c.moments == "diag" else (total,)
                    about = (x.transpose(1, 2) for x in (origin, *(x / count for x in sums)))
                    moments = query_moments(q_now, S.new_full((1, 1), count), *about)
                o_memory = torch.einsum("bcgrk,bgkv->bcgrv", q_in[:, t0:t1].unflatten(2, (G * each, -1)), S)
                read = self.answer(o_memory.flatten(2, 3), moments)
                out = self.merge(out, lse, read, q_now, moments, scale)
            outputs.append(out)
            left = position[oldest : max(oldest, t0 + 2 * c.block - c.window)]
            pool = torch.cat([routed, left.expand(B, G, -1)], -1)
            routed, evicted = pool, None
            if pool.shape[-1] > c.budget:
                with torch.no_grad():
                    score = ROUTERS[c.router](Pool(pool, received.gather(2, pool), recall_error, c.budget))
                order = score.argsort(dim=-1, descending=True, stable=True)
                parts = order.tensor_split([c.budget], -1)
                routed, evicted = (pool.gather(2, part).sort(-1).values for part in parts)
            if uses_memory and evicted is not None:  # written in position order
                shifted = take(k_bgtk, evicted).to(S.dtype) - origin
                total, square = total + shifted.sum(2, True), square + shifted.square().sum(2, True)
                args = [take(x, evicted.repeat_interleave(each, 1)) for x in writes]
                args = [None if x is None else x.transpose(1, 2) for x in args]
                _, S = linear_attention(args[0], *args, S, chunk=c.chunk, impl=c.impl)
                count += evicted.shape[-1]
        return torch.cat(outputs, 1)

    def memory_bytes(self, itemsize: int) -> int:
        """Bytes beside the exact pairs: state, moments (around a sink's key), conv tails, waiting gates."""
        if not self.merge.uses_memory:
            return 0
        c, rule = self.config, self.rule
        floats = rule.memory_heads * rule.feature_dim * (self.value_dim + rule.normaliser)
        if self.merge.uses_moments:
            per_head = {"mean": 1, "diag": 2, "full": 1 + self.key_dim}[c.moments] * self.key_dim
            floats += 1 + self.kv_heads * per_head
        gates = sum(getattr(rule, name).shape[1] for name in ("W_1", "W_beta") if hasattr(rule, name))
        per_token = self.heads * self.key_dim + self.kv_heads * (self.key_dim + self.value_dim)
        tail = max(c.conv - 1, 0) * per_token
        return 4 * (floats + gates * c.reach) + itemsize * tail


# ----------------------------------------------------------------------------- what transformers calls


@dataclass
class Controller:
    """One per model, shared by its layers: what attention answers right now.

    mode "linear"; "off": the same sinks and window, no memory; "probe": what the teacher answers, so that
    every layer sees the teacher's inputs, and probe(module, teacher, students) is called. The students are
    functions by mode, which run only if called; `linear` takes another layer in place of the module's own.
    """

    teacher_attention: str
    mode: str = "linear"
    probe: Callable | None = None

    @contextlib.contextmanager
    def switch(self, mode: str, probe: Callable | None = None):
        before, (self.mode, self.probe) = (self.mode, self.probe), (mode, probe)
        try:
            yield
        finally:
            self.mode, self.probe = before


def attention_forward(module, query, key, value, attention_mask, scaling=None, softcap=None, **options):
    """What transformers calls instead of softmax: q, k, v (B,H,T,K) after RoPE in, (B,T,H,V) out."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    T, scale, own_window = q.shape[1], scaling or q.shape[-1] ** -0.5, options.get("sliding_window")
    if k.shape[1] != T:
        raise ValueError("a linearized model was given past keys: call it with use_cache=False")
    if own_window is not None and own_window < T:
        raise ValueError(f"layer {module.layer_idx} has its own sliding window: {own_window} of {T} tokens")
    if options.get("s_aux") is not None or options.get("position_bias") is not None:
        raise ValueError(f"layer {module.layer_idx} has sink logits or a position bias")
    layer, order, hidden = getattr(module, "linear", None), None, None
    if layer is not None:
        hidden, layer.hidden = layer.hidden, None  # kept longer, it would hold on to the graph
    if attention_mask is not None:
        if attention_mask.dim() != 2:
            raise ValueError("a linearized model takes a 2-D padding mask (batch, tokens) and no other mask")
        # Real tokens first in each row: left, right and middle padding become trailing tokens, never read.
        order = (~attention_mask.bool()).int().argsort(dim=1, stable=True)[:, :, None]
        q, k, v = (x.gather(1, order[..., None].expand_as(x)) for x in (q, k, v))
        hidden = None if layer is None else hidden.gather(1, order.expand_as(hidden))

    def exact(sinks: int, window: int) -> Tensor:
        return exact_attention(q, k, v, sinks, window, scale, softcap)[0]

    mode = "full" if layer is None else layer.controller.mode  # a layer without a memory keeps its softmax
    students = dict(
        linear=lambda other=layer: other(q, k, v, hidden, scale, softcap),
        off=lambda: exact(layer.config.sinks, layer.config.reach),
    )
    if mode in students:
        out = students[mode]()
    elif softcap is None and order is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        out = out.transpose(1, 2)
    else:
        out = exact(0, T)
    if mode == "probe":
        layer.controller.probe(module, out, students)
    if order is not None:
        out = torch.zeros_like(out).scatter(1, order[..., None].expand_as(out), out)
        out = out * attention_mask[:, :, None, None].to(out.dtype)
    return out, None


def padding_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, attention_mask=None, **_):
    """Hand on the 2-D padding mask, or None. HAZARD: without a mask function, padding is dropped silently."""
    return None if attention_mask is None or bool(attention_mask.bool().all()) else attention_mask
