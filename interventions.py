"""The three interventions, and the layer that composes them with a memory.

What you will learn here: which tokens stay exact, where all the others go, and how the two answers become
one.
    1. sink tokens           the first `sinks` tokens stay exact for ever (much of softmax's mass is there)
    2. short convolutions    q, k, v of the memory see a few neighbours, as a softmax layer's neighbours do
    3. fixed-budget routing  of all other tokens a fixed number stays exact; here the newest: a sliding window
`LinearizeConfig` says all of it, `LinearizedAttention` does it, and a merge (`MERGES`) makes one answer of
two. On a first reading skip the body of `exact_attention`: it is softmax over a band, cut into blocks.

Every token is at any time in exactly one place. With s sinks and a window of w, query t (from 0) sees
    (6)  exact:   tokens 0..s-1  and  t-w+1..t          softmax as the frozen model computes it
    (7)  memory:  tokens s..t-w                         the state of equation (1) of linear_attn.py
Token t-w leaves the window at step t and is written to the memory in that same step. So the memory's part
is the unchanged recurrence on keys and values shifted by w, with g = b = w = 0 for the sinks. For T <= s +
w the memory is empty and the layer is the teacher's, to rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import linear_attention
from linear_attn import FEATURES, RULES, lookup, register, working_dtype

MERGES: dict[str, type[nn.Module]] = {}
ROUTERS: dict[str, str] = {"recency": "the newest `budget` tokens that left the window: a longer window"}


def option(default, help: str, choices=None, low=None, high=None, item=str):
    """A dataclass field that knows its help and its legal values; the command line is made from it."""
    about = dict(help=help, choices=choices, low=low, high=high, item=item)  # item: type of a tuple's items
    return dataclasses.field(default=default, metadata=about)


def check_options(config) -> None:
    """Raise a ValueError with one clear line if a field is outside its choices or range."""
    for field in dataclasses.fields(config):
        value, m = getattr(config, field.name), field.metadata
        if m["choices"] is not None:
            lookup(dict.fromkeys(m["choices"]), value, field.name)
        elif isinstance(field.default, (int, float)) and not isinstance(value, (int, float)):
            raise ValueError(f"{field.name} must be a number, got {value!r}")
        elif (m["low"] is not None and not value >= m["low"]) or (
            m["high"] is not None and not value <= m["high"]
        ):
            top = "" if m["high"] is None else f" and at most {m['high']}"
            raise ValueError(f"{field.name} must be at least {m['low']}{top}, got {value}")


@dataclass(frozen=True)
class LinearizeConfig:
    """Everything that decides what a linearized layer computes. Saved with the adapter."""

    rule: str = option("gdn", "update rule of the memory", RULES)
    merge: str = option("lse", "how the exact part and the memory become one", MERGES)
    router: str = option("recency", "which tokens keep a place in the exact budget", ROUTERS)
    sinks: int = option(4, "first tokens that stay exact for ever", low=0)
    window: int = option(128, "newest tokens that stay exact", low=0)
    budget: int = option(0, "further exact tokens, chosen by the router", low=0)
    conv: int = option(0, "width of the short convolutions on the memory's q, k, v; 0: none", low=0, high=64)
    conv_init: str = option(
        "identity", "start of the convolutions: pass-through, or torch's default", ("identity", "default")
    )
    features: str = option("silu", "feature map of the memory's q and k", FEATURES)
    feature_dim: int = option(0, "feature dimension; 0: the head dimension", low=0, high=4096)
    memory_per: str = option("kv", "one memory per kv head or per query head", ("kv", "query"))
    moments: str = option("diag", "covariance of the lse merge's mass estimate", ("mean", "diag", "full"))
    rank: int = option(16, "rank of the per-channel decay projection", low=1)
    beta_bias: float = option(-2.0, "write strength at the start, before the sigmoid", low=-20, high=20)
    decay_bias: float = option(6.0, "decay at the start, before the sigmoid", low=-20, high=20)
    chunk: int = option(64, "tokens per chunk of the memory's kernel", (16, 32, 64, 128, 256))
    impl: str = option("auto", "implementation of the recurrence", ("auto", "recurrent", "chunked", "triton"))

    def __post_init__(self):
        check_options(self)

    @property
    def reach(self) -> int:
        """Newest tokens that stay exact: under recency the routed tokens are simply the next-newest ones."""
        return self.window + self.budget

    @property
    def exact_pairs(self) -> int:
        return self.sinks + self.reach


# ----------------------------------------------------------------------------- exact: sinks and window


def exact_attention(
    q_bthk: Tensor,
    k_btgk: Tensor,
    v_btgv: Tensor,
    sinks: int,
    window: int,
    scale: float,
    softcap: float | None = None,
    block: int = 64,
) -> tuple[Tensor, Tensor]:
    """Softmax over (6): (o (B,T,H,V), log-sum-exp of its scores (B,T,H)), in linear time.

    q (B,T,H,K), k (B,T,G,K), v (B,T,G,V). Queries go in blocks: a block of C queries needs the window-1+C
    keys that end with it. Scores, cap and softmax as Hugging Face's eager attention has them: products in
    the model's dtype, softmax in float32. An empty exact set (s = w = 0) gives o = 0 and log-sum-exp -inf.
    """
    B, T, H, _ = q_bthk.shape
    G, V, device = k_btgk.shape[2], v_btgv.shape[-1], q_bthk.device
    C, L = min(block, T), window - 1 + min(block, T)
    N = -(-T // C)
    q_bnchk = F.pad(q_bthk, (0, 0, 0, 0, 0, N * C - T)).unflatten(1, (N, C))
    q_bngxk = (
        q_bnchk.unflatten(3, (G, H // G)).permute(0, 1, 3, 4, 2, 5).flatten(3, 4)
    )  # x: r and c in one product
    at_nc1 = torch.arange(N * C, device=device).view(N, C, 1)
    scores, visible, values = [], [], []
    if sinks:  # a sink is visible from its own position on
        sink_k, sink_v = k_btgk[:, :sinks], v_btgv[:, :sinks]
        scores.append(q_bngxk @ sink_k.permute(0, 2, 3, 1)[:, None])
        visible.append(torch.arange(sink_k.shape[1], device=device) <= at_nc1)
        values.append(sink_v.transpose(1, 2)[:, None])
    if window:
        around = (0, 0, 0, 0, window - 1, N * C - T)
        scores.append(q_bngxk @ F.pad(k_btgk, around).unfold(1, L, C))
        values.append(F.pad(v_btgv, around).unfold(1, L, C).mT)
        age_cl = torch.arange(C, device=device)[:, None] + window - 1 - torch.arange(L, device=device)
        visible.append(
            (age_cl >= 0) & (age_cl < window) & (at_nc1 - age_cl >= sinks)
        )  # sinks do not count twice
    if not scores:
        nothing = q_bthk.new_full((B, T, H), -torch.inf, dtype=working_dtype(q_bthk))
        return v_btgv.new_zeros(B, T, H, V), nothing
    score_bngxl = torch.cat(scores, -1)
    score_bngrcl = score_bngxl.to(working_dtype(score_bngxl)).unflatten(3, (-1, C)) * scale
    if softcap is not None:
        score_bngrcl = torch.tanh(score_bngrcl / softcap) * softcap
    score_bngrcl = score_bngrcl.masked_fill(~torch.cat(visible, -1)[:, None, None], -torch.inf)
    lse_bngrc = score_bngrcl.logsumexp(-1)
    p_bngxl = (score_bngrcl - lse_bngrc[..., None]).exp().to(v_btgv.dtype).flatten(3, 4)
    o_bngxv = sum(p @ v for p, v in zip(p_bngxl.split([v.shape[-2] for v in values], -1), values))
    o_bthv = o_bngxv.unflatten(3, (-1, C)).permute(0, 1, 4, 2, 3, 5).reshape(B, N * C, H, V)[:, :T]
    return o_bthv, lse_bngrc.permute(0, 1, 4, 2, 3).reshape(B, N * C, H)[:, :T]


def running_moments(q_bthk: Tensor, k_btgk: Tensor, kind: str) -> dict[str, Tensor]:
    """What (9) needs of k_1..k_t at every t: count (1,T); q.mu and, unless "mean", q^T Sigma q: (B,T,H).

    "diag" keeps a mean and a variance per channel: 2K numbers. "full" keeps K x K: q^T (sum k k^T) q is
    equation (1) with v = k, read by q. Second moments are taken around the first key: Qwen's keys have
    biases of 100 and more, and E[k^2] - mu^2 would lose every digit of a variance of 1.
    """
    dtype = working_dtype(q_bthk)
    q, k, G = q_bthk.to(dtype), k_btgk.to(dtype), k_btgk.shape[2]
    count = torch.arange(1, k.shape[1] + 1, device=k.device, dtype=dtype)[None]
    q_btgrk, origin = q.unflatten(2, (G, -1)), k[:, :1]
    offset_btgk = (k - origin).cumsum(1) / count[..., None, None]  # mu - origin

    def dot(x_btgk: Tensor) -> Tensor:
        return torch.einsum("btgrk,btgk->btgr", q_btgrk, x_btgk)

    moments = {"count": count, "q_mean": dot(origin + offset_btgk).flatten(2)}
    if kind == "diag":
        variance = (k - origin).square().cumsum(1) / count[..., None, None] - offset_btgk.square()
        moments["q_cov_q"] = torch.einsum("btgrk,btgk->btgr", q_btgrk.square(), variance).flatten(2)
    elif kind == "full":
        second = (
            linear_attention(q, k - origin, k - origin)[0].unflatten(2, (G, -1))
            / count[..., None, None, None]
        )
        moments["q_cov_q"] = ((second * q_btgrk).sum(-1) - dot(offset_btgk).square()).flatten(2)
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


# ----------------------------------------------------------------------------- the layer


class LinearizedAttention(nn.Module):
    """Sinks and window exact, the rest in a constant-size memory, one answer. Holds only the new parameters.

    forward takes what the frozen model computed: q (B,T,H,K), k (B,T,G,K), v (B,T,G,V) after RoPE, and the
    layer's input hidden (B,T,D) for the gates; it returns (B,T,H,V) in v's dtype. Parameters and state are
    float32.
    """

    def __init__(
        self, config: LinearizeConfig, d_model: int, heads: int, kv_heads: int, key_dim: int, value_dim: int
    ):
        super().__init__()
        self.config, self.heads, self.kv_heads, self.key_dim, self.value_dim = (
            config,
            heads,
            kv_heads,
            key_dim,
            value_dim,
        )
        self.merge = MERGES[config.merge](heads, key_dim)
        self.rule, self.conv_q, self.conv_k, self.conv_v = None, None, None, None
        if not self.merge.uses_memory:
            return
        self.rule = RULES[config.rule](
            d_model,
            heads,
            heads if config.memory_per == "query" else kv_heads,
            key_dim,
            features=config.features,
            feature_dim=config.feature_dim,
            rank=config.rank,
            beta_bias=config.beta_bias,
            decay_bias=config.decay_bias,
        )
        if config.conv:
            self.conv_q = ShortConv(config.conv, heads, key_dim, config.conv_init)
            self.conv_k = ShortConv(config.conv, kv_heads, key_dim, config.conv_init)
            self.conv_v = ShortConv(config.conv, kv_heads, value_dim, config.conv_init)

    def forward(
        self,
        q_bthk: Tensor,
        k_btgk: Tensor,
        v_btgv: Tensor,
        hidden_btd: Tensor,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """A whole sequence at once. `scale` defaults to 1/sqrt(K); `softcap` as in Gemma 2."""
        c, T = self.config, q_bthk.shape[1]
        scale = self.key_dim**-0.5 if scale is None else scale
        o_exact, lse_exact = exact_attention(q_bthk, k_btgk, v_btgv, c.sinks, c.reach, scale, softcap)
        if not self.merge.uses_memory or T <= c.exact_pairs:
            return o_exact
        read, moments = self.memory(q_bthk, k_btgk, v_btgv, hidden_btd)
        start = (
            c.exact_pairs
        )  # the first query with something in the memory; before it the layer is the teacher
        merged = self.merge(o_exact[:, start:], lse_exact[:, start:], read, q_bthk[:, start:], moments, scale)
        return torch.cat([o_exact[:, :start], merged], 1)

    def memory(self, q_bthk: Tensor, k_btgk: Tensor, v_btgv: Tensor, hidden_btd: Tensor):
        """(7) for queries t = s+w..T-1: token t-w is written, q_t reads. (read (B,T-s-w,H,V), moments)."""
        c, T = self.config, q_bthk.shape[1]
        written, reading = slice(c.sinks, T - c.reach), slice(c.exact_pairs, T)
        q, k, v = q_bthk, k_btgk, v_btgv
        if c.conv:
            q, k, v = self.conv_q(q), self.conv_k(k), self.conv_v(v)
        code_bte = self.rule.encode(hidden_btd[:, written])
        k_in, v_in, log_decay, erase, write = self.rule.writes(code_bte, k[:, written], v[:, written])
        q_in = self.rule.queries(q[:, reading])
        o, _ = linear_attention(q_in, k_in, v_in, log_decay, erase, write, chunk=c.chunk, impl=c.impl)
        read = self.rule.read(o)
        if not self.merge.uses_moments:
            return read, None
        moments = running_moments(q_bthk[:, reading], k_btgk[:, written], c.moments)
        if self.rule.sums:  # a sum of values, where the lse merge needs an average
            read = read / moments["count"][..., None, None]
        return read, moments

    def memory_bytes(self, itemsize: int) -> int:
        """Bytes per sequence beside the exact pairs: state, moments, convolution tails, waiting gates."""
        if not self.merge.uses_memory:
            return 0
        c, rule = self.config, self.rule
        floats = rule.memory_heads * rule.feature_dim * (self.value_dim + rule.normaliser)
        if self.merge.uses_moments:
            per_head = {"mean": 1, "diag": 2, "full": 1 + self.key_dim}[c.moments] * self.key_dim
            floats += 1 + self.kv_heads * per_head
        gates = (
            sum(getattr(rule, name).shape[1] for name in ("W_1", "W_beta") if hasattr(rule, name)) * c.reach
        )
        tail = max(c.conv - 1, 0) * (
            self.heads * self.key_dim + self.kv_heads * (self.key_dim + self.value_dim)
        )
        return 4 * (floats + gates) + itemsize * tail


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
    layer, order = getattr(module, "linear", None), None
    hidden = None if layer is None else layer.hidden
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
