"""The three interventions, and the layer that composes them with a memory.

What you will learn here: which tokens stay exact, where the others go, how the two answers become one.
    1. sink tokens           the first `sinks` tokens stay exact for ever (much of softmax's mass is there)
    2. short convolutions    the memory's q, k, v see a few neighbours
    3. fixed-budget routing  a fixed number of the others stays exact: the newest (a window) and `budget`
                             more that a router chooses, by recency or content (`ROUTERS`)
`LinearizeConfig` says all of it, `LinearizedAttention` does it, a merge (`MERGES`) makes one answer of two.
`State` is what a layer carries from one call to the next: generation in constant memory. On a first reading
take `shifted` for the layer's whole truth, and skip `routed`, `choose` and `recall_error`.

Every token is at any time in exactly one place. With s sinks and the newest w exact, query t (from 0) sees
    (20) exact:   tokens 0..s-1  and  t-w+1..t          softmax as the frozen model computes it
    (21) memory:  tokens s..t-w                         the state of equation (1) of linear_attn.py
Token t-w leaves the window at step t and is written to the memory in the same step: the memory's part is the
unchanged recurrence on keys and values shifted by w, without the sinks. For T <= s + w it is empty, and the
layer is the teacher's, to rounding. A router by content changes one thing: the order in which tokens leave.

The paper's symbols: s `sinks`, w `window`, I_t the tokens of (20), S_{s+1..t-w} the state of (21), whose
indices it counts from 1. The merge `lse`, the routers and everything about budgets are not in the paper.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels import linear_attention

from linear_attn import (  # isort: skip
    FEATURES, RULES, attend_tokens, exact_attention, joined, option, register, running_moments, take,
    validate, working_dtype
)

MERGES: dict[str, type[nn.Module]] = {}
ROUTERS: dict[str, Callable[[Pool], Tensor]] = {}
# Routers that need a memory, and who stands in for them where there is none: in a control without a memory,
# and before training, when layers are compared by their exact parts alone.
ASK_THE_MEMORY = dict(error="value", passage="value", mix="value")
OFF = dict(merge="off", router="recency")  # the control of a memory: the same pairs without it


@dataclass(frozen=True)
class LinearizeConfig:
    """Everything that decides what a linearized layer computes. Saved with the adapter.

    Which tokens are exact is no parameter: the same adapter runs with another router, window or budget. Rule,
    merge, features and convolutions are fixed by training. "best" in distill.PRESETS is what measured best;
    the defaults here are its plain sister, recency.
    """

    rule: str = option("gdn", "update rule of the memory", RULES)
    merge: str = option("lse", "how the exact part and the memory become one", MERGES)
    router: str = option("recency", "who of the tokens beyond the window stays exact", ROUTERS)
    sinks: int = option(4, "first tokens that stay exact for ever", low=0)
    window: int = option(128, "newest tokens that stay exact", low=0)
    budget: int = option(0, "further exact tokens, chosen by the router", low=0)
    budgets: tuple = option((), "the same, one number a layer (overrides --budget)", item=int)
    block: int = option(32, "tokens between two choices of a router by content", low=1)
    half_life: int = option(128, "tokens after which attention received counts half to a router", low=1)
    conv: int = option(0, "width of the short convolutions on the memory's q, k, v; 0: none", low=0, high=64)
    conv_init: str = option("identity", "start of the convolutions", ("identity", "default"))
    features: str = option("silu", "feature map of the memory's q and k", FEATURES)
    feature_dim: int = option(0, "feature dimension; 0: the head dimension", low=0, high=4096)
    fade: int = option(0, "tokens after which a key counts half in the memory's mass; 0: never", low=0)
    memory_per: str = option("kv", "one memory per kv head or per query head", ("kv", "query"))
    rank: int = option(16, "rank of the per-channel decay projection", low=1)
    beta_bias: float = option(-2.0, "write strength at the start, before the sigmoid", low=-20, high=20)
    decay_bias: float = option(6.0, "decay at the start, before the sigmoid", low=-20, high=20)
    chunk: int = option(64, "tokens per chunk of the memory's kernel", (16, 32, 64, 128, 256))
    impl: str = option("auto", "code of the recurrence", ("auto", "recurrent", "chunked", "triton"))
    state_bits: int = option(32, "of a number of the memory between calls; 16 is float16", (16, 32))

    def __post_init__(self):
        validate(self)
        object.__setattr__(self, "budgets", tuple(self.budgets))  # JSON has lists
        if any(b < 0 for b in self.budgets):
            raise ValueError(f"budgets must be at least 0, got {min(self.budgets)}")
        # A router judges what the window will have passed by the end of the block: tokens that are there.
        if self.router != "recency" and self.window < self.block:
            want = f"window must be at least the block of {self.block}, got {self.window}"
            raise ValueError(f"router {self.router}: {want}")
        # A delta rule's state is as large as values are; what only adds outgrows float16.
        if self.state_bits == 16 and (RULES[self.rule].sums or not RULES[self.rule].delta):
            raise ValueError(f"state_bits 16 wants a delta rule, got {self.rule}")
        if self.router in ASK_THE_MEMORY and not MERGES[self.merge].uses_memory:
            raise ValueError(f"router {self.router} asks the memory, and merge {self.merge} has none")

    @property
    def reach(self) -> int:
        """Newest exact tokens under recency, where routed ones are the next-newest; a mean over layers."""
        return self.window + (-(-sum(self.budgets) // len(self.budgets)) if self.budgets else self.budget)

    @property
    def exact_pairs(self) -> int:
        """The most key-value pairs that a query ever sees exactly, per kv head."""
        return self.sinks + self.reach

    def of_layer(self, n: int) -> LinearizeConfig:
        """What the n-th linearized layer computes.

        n counts linearized layers, not the model's: layers that keep softmax have no budget."""
        return dataclasses.replace(self, budget=self.budgets[n], budgets=()) if self.budgets else self


class ShortConv(nn.Module):
    """The second intervention: keys that have seen their neighbours tell repeated tokens apart.

    Depthwise causal convolution: y_t = bias + sum_j weight_j * x_{t-width+1+j}, per head and channel.

    No activation. "identity" starts as y = x, so that an untrained convolution changes nothing; "default" is
    torch's initialisation of a Conv1d. A few shifted products: 4x faster on a CPU than a depthwise conv1d.
    """

    def __init__(self, width: int, heads: int, dim: int, init: str):
        super().__init__()
        bound = 0.0 if init == "identity" else width**-0.5
        self.weight = nn.Parameter(torch.empty(width, heads, dim).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(heads, dim).uniform_(-bound, bound))
        if init == "identity":
            self.weight.data[-1] = 1.0

    def forward(self, x_bthk: Tensor, tail_bthk: Tensor | None = None) -> Tensor:
        """tail: the width-1 tokens before x (None: zeros)."""
        width, T = self.weight.shape[0], x_bthk.shape[1]
        x = x_bthk.to(working_dtype(x_bthk))
        # A sequence's own start, or where the last call ended: pieces see the same neighbours as one pass.
        x = F.pad(x, (0, 0, 0, 0, width - 1, 0)) if tail_bthk is None else torch.cat([tail_bthk.to(x), x], 1)
        return sum((x[:, j : j + T] * self.weight[j].to(x) for j in range(width)), self.bias.to(x))

# ----------------------------------------------------------------------------- merges

@register(MERGES, "off")
class MemoryOff(nn.Module):
    """The control: sinks and window alone. A memory counts only for what it adds to this.

    A merge gets the exact part's answer (B,T,H,V) and the log-sum-exp of its scores, the memory's read, the
    queries, moments of the keys in the memory, and the model's scale; it returns the layer's answer.
    uses_memory, uses_moments: what it looks at."""

    uses_memory, uses_moments = False, False

    def __init__(self, heads: int, key_dim: int):
        super().__init__()

    def forward(self, o_exact, lse_exact, read, q, moments, scale):
        return o_exact


@register(MERGES, "sum")
class SumMerge(MemoryOff):
    """The paper's: y_t = q_t S_{s+1..t-w} + softmax_{I_t}. No mixing weight, no shared denominator.

    HAZARD: the exact part alone has all of softmax's mass already, so whatever the memory reads is too much
    until it is trained to be small: its size at the start decides whether training begins far off."""

    uses_memory = True

    def forward(self, o_exact, lse_exact, read, q, moments, scale):
        return o_exact + read.to(o_exact.dtype)


@register(MERGES, "lse")
class LseMerge(nn.Module):
    """Softmax over everything, with the memory standing for the tokens it absorbed.

    Exact for any split of the tokens into E and M:
        (22)  softmax_all = m softmax_E + (1 - m) softmax_M,      m = sigmoid(lse_E - lse_M)
    The memory's read stands for softmax_M. Its log-mass is that of n keys (old ones count less: `fade`) with
    mean mu and covariance Sigma; for Gaussian keys log sum exp(q.k/sqrt d) is the cumulant series log n +
    q.mu/sqrt d + q^T Sigma q/(2d) + ...:
        (23) lse_M(q) ~ log n + a1 q.mu/sqrt d + a2 q^T Sigma q/(2d) + u.q/sqrt d + c
    with a1 = 1, a2 = 1/2, u = 0, c = 0 learned per query head, and a gain on the read, 1 at the start.
    While nothing is in the memory (n = 0) the layer does not ask the merge: m = 1.
    """

    uses_memory, uses_moments = True, True

    def __init__(self, heads: int, key_dim: int):
        super().__init__()
        # Few enough to print, and all at values under which (23) is the plain cumulant series.
        self.a1 = nn.Parameter(torch.ones(heads))
        self.a2 = nn.Parameter(torch.full((heads,), 0.5))
        self.u = nn.Parameter(torch.zeros(heads, key_dim))
        self.c = nn.Parameter(torch.zeros(heads))
        self.gain = nn.Parameter(torch.ones(heads))

    def log_mass(self, q_bthk: Tensor, moments: dict[str, Tensor], scale: float) -> Tensor:
        """Equation (23), (B,T,H); `scale` is the model's 1/sqrt(d). mean and variance of a kv head's keys,
        (B, T or 1, G, K), serve its R query heads."""
        mean_btg1k, variance_btg1k = (moments[name][..., None, :] for name in ("mean", "variance"))
        a1, a2, u = (x.unflatten(0, (mean_btg1k.shape[2], -1)) for x in (self.a1, self.a2, self.u))
        s_btgrk = q_bthk.to(u.dtype).unflatten(2, (len(u), -1)) * scale
        slope = a1[..., None] * mean_btg1k + u + s_btgrk * (0.5 * a2[..., None] * variance_btg1k)
        return (moments["count"].log()[..., None] + (s_btgrk * slope).sum(-1)).flatten(2) + self.c

    def forward(self, o_exact, lse_exact, read, q, moments, scale):
        m_bth1 = torch.sigmoid(lse_exact - self.log_mass(q, moments, scale))[..., None]
        return (m_bth1 * o_exact + (1 - m_bth1) * self.gain[:, None] * read).to(o_exact.dtype)

# ----------------------------------------------------------------------------- routers

@dataclass
class Pool:
    """What a router sees when it keeps `budget` of P tokens, per sequence and kv head: each (B,P,G)."""

    position: Tensor
    received: Tensor  # attention probability the exact branch gave the token, fading by `half_life`
    size: Tensor  # ||v||
    recall_error: Callable[[], Tensor]  # ||v - what the memory answers to k|| before the token is written
    budget: int


@register(ROUTERS, "recency")
def route_by_recency(pool: Pool) -> Tensor:
    """The newest. A router returns scores (B,P,G); the `budget` highest stay exact, the rest is written.

    With it nothing has to be chosen at all: budget and window are one longer window (`shifted`)."""
    return pool.position.float()


@register(ROUTERS, "mass")
def route_by_mass(pool: Pool) -> Tensor:
    """Who was attended to lately (H2O's heavy hitters, with decay).

    Blind for what nobody has asked for yet: a pass key is first attended to when it is too late."""
    return pool.received


@register(ROUTERS, "value")
def route_by_value(pool: Pool) -> Tensor:
    """Whose value would be missed: p ||v||, the part of the answers that the token has been."""
    return pool.received * pool.size


def in_steps(score: Tensor) -> Tensor:
    """In 4,096 steps up to the highest: rounding must not decide between equals (a norm on v makes all errors
    equal while the memory is empty)."""
    return (score / score.amax(1, keepdim=True).clamp(min=1e-20) * 4096).round()


@register(ROUTERS, "error")
def route_by_error(pool: Pool) -> Tensor:
    """Whom the memory could not reproduce: finds what nobody has asked for yet, if its value is large."""
    return in_steps(pool.recall_error())


@register(ROUTERS, "passage")
def route_by_passage(pool: Pool) -> Tensor:
    """Where the memory is lost: its error as a part of ||v||, averaged over seven tokens of the pool.

    A fact is several tokens, and worth little if one is missing: `error` drops digits of a pass key whose
    values happen to be short. But text wants the single tokens of large error (README, routers)."""
    relative = (pool.recall_error() / pool.size.clamp(min=1e-6)).transpose(1, 2)
    return in_steps(F.avg_pool1d(relative, 7, 1, 3, count_include_pad=False).transpose(1, 2))


@register(ROUTERS, "mix")
def route_by_mix(pool: Pool) -> Tensor:
    """A quarter of the budget by passage and a quarter by error, for what may be asked yet; the other half by
    value, for what is asked often."""
    score, error = route_by_value(pool), pool.recall_error()
    pool = dataclasses.replace(pool, recall_error=lambda: error)  # asked once for both
    for route in (route_by_passage, route_by_error):
        order = route(pool).masked_fill(score.isinf(), -1).argsort(dim=1, descending=True, stable=True)
        score = score.scatter(1, order[:, : pool.budget // 4], torch.inf)
    return score

# ----------------------------------------------------------------------------- the layer

def band(T: int, L: int, first: int, device) -> Tensor:
    """(1,1,T,L): the last T of L tokens ask; query i sees neither later ones nor the first i + `first`."""
    ahead = torch.arange(L, device=device) - torch.arange(T, device=device)[:, None]
    return ((ahead >= first) & (ahead <= L - T))[None, None]


@dataclass
class State:
    """What a layer carries of rows that have seen equally many tokens. Its size does not grow with them.

    exact   tokens that are exact, by name (B, L, ...): the next to leave (if a router chose them), sinks,
            routed ones, window. Beside k and v what they need later: gates' code, k and v as the memory will
            see them, position and attention received
    rest    by name (B, ...): the memory S (--state-bits), sums of the moments, a convolution's last tokens
    """

    count: int = 0  # tokens seen; those not among the exact ones are in the memory
    exact: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    rest: dict[str, Tensor] = dataclasses.field(default_factory=dict)

    def row(self, b: int) -> State:
        """The state of one row; rows part and join as their numbers of tokens do."""
        if len(next(iter(self.exact.values()))) == 1:
            return self
        return State(self.count, *({n: x[b : b + 1] for n, x in d.items()} for d in (self.exact, self.rest)))

    @staticmethod
    def join(rows: list[State]) -> State:
        """One state of several rows of equal count; never the same object as a row."""
        if len(rows) == 1:  # every step of decoding: share the tensors, which nobody changes in place
            return State(rows[0].count, dict(rows[0].exact), dict(rows[0].rest))
        # Rows that are equally far hold equally many tokens of every kind: their tensors simply stack.
        parts = ([getattr(row, name) for row in rows] for name in ("exact", "rest"))
        return State(rows[0].count, *({n: torch.cat([d[n] for d in ds]) for n in ds[0]} for ds in parts))

    def nbytes(self) -> int:
        """What a table's column bytes/seq counts, and the control of equal bytes spends."""
        return sum(x.nbytes for d in (self.exact, self.rest) for x in d.values())


class LinearizedAttention(nn.Module):
    """Sinks and window exact, the rest in a constant-size memory, one answer. Holds only the new parameters.

    forward takes what the frozen model computed, q (B,T,H,K), k (B,T,G,K), v (B,T,G,V) after RoPE, and the
    layer's input hidden (B,T,D) for the gates; it returns (B,T,H,V) in v's dtype. All of its own is float32.
    """

    def __init__(self, config: LinearizeConfig, d_model: int, heads: int, kv_heads: int, key_dim, value_dim):
        super().__init__()
        c, self.config, self.heads, self.kv_heads = config, config, heads, kv_heads
        self.number = 0  # among the linearized layers, for `budgets`; distill.set_budgets knows
        self.d_model, self.key_dim, self.value_dim = d_model, key_dim, value_dim
        self.merge = MERGES[c.merge](heads, key_dim)
        self.rule = self.conv_q = self.conv_k = self.conv_v = None
        if not self.merge.uses_memory:  # the control "off" has no parameters at all
            return
        self.rule = RULES[c.rule](
            d_model, heads, heads if c.memory_per == "query" else kv_heads, key_dim, features=c.features,
            feature_dim=c.feature_dim, rank=c.rank, beta_bias=c.beta_bias, decay_bias=c.decay_bias,
        )  # fmt: skip
        if c.conv:
            self.conv_q = ShortConv(c.conv, heads, key_dim, c.conv_init)
            self.conv_k = ShortConv(c.conv, kv_heads, key_dim, c.conv_init)
            self.conv_v = ShortConv(c.conv, kv_heads, value_dim, c.conv_init)

    def forward(self, q_bthk, k_btgk, v_btgv, hidden_btd, scale=None, softcap=None, state=None) -> Tensor:
        """A whole sequence or, with a `State`, the next piece of one; the state is brought forward. `scale`
        defaults to 1/sqrt(K); `softcap` as in Gemma 2."""
        if q_bthk.shape[1] == 0:
            return v_btgv.new_zeros(*q_bthk.shape[:3], self.value_dim)
        scale, past = self.key_dim**-0.5 if scale is None else scale, State() if state is None else state
        # Three steps, whatever the router: the bank (tokens held and new ones side by side), the answers by
        # one of two paths, which also says what of the bank stays exact, and the state of the next call.
        q_memory, bank, rest = self.enter(q_bthk, k_btgk, v_btgv, hidden_btd, past)
        # recency needs no choice: a longer window does, and has no loop
        path = self.shifted if self.config.router == "recency" else self.routed
        out, exact = path(q_bthk, q_memory, bank, rest, past.count, scale, softcap)
        if state is not None:  # HAZARD: a view would keep the whole prompt alive (one a little larger may)
            if self.config.state_bits == 16 and self.rule is not None:
                rest["S"] = rest["S"].half()
            state.count = past.count + q_bthk.shape[1]
            state.exact, state.rest = ({n: x.clone() if x.untyped_storage().nbytes() > 2 * x.nbytes else x
                                        for n, x in d.items()} for d in (exact, rest))  # fmt: skip
        return out

    def enter(self, q, k, v, hidden, past: State) -> tuple[Tensor, dict, dict]:
        """The memory's q; the bank of L held + T new tokens, by name (B, L+T, ...); the rest of the past.

        In the bank the last tokens held stand next to the new ones. That others between them and the sinks
        are in the memory by now makes no difference: a token's position is in its key (RoPE).
        """
        (B, T), G, c, rule = q.shape[:2], self.kv_heads, self.config, self.rule
        new, rest, q_memory = dict(k=k, v=v), dict(past.rest), q
        if rule is not None:
            new["code"] = rule.encode(hidden)
            if past.count == 0:  # an empty memory; moments are taken around the first key
                shape = B, rule.memory_heads, rule.feature_dim, self.value_dim + rule.normaliser
                rest["S"] = torch.zeros(shape, dtype=working_dtype(v), device=v.device)
                rest["origin"] = k[:, :1].to(rest["S"].dtype)
                rest["sums"] = rest["origin"].new_zeros(B, 1, G, 2 * self.key_dim + 1)
        if self.conv_q is not None:  # only what the memory sees is convolved: exact pairs stay the teacher's
            seen = {}
            for name, x in (("q", q), ("k", k), ("v", v)):
                tail = rest.get(f"tail_{name}", x.new_zeros(B, c.conv - 1, *x.shape[2:]))
                seen[name] = getattr(self, f"conv_{name}")(x, tail).to(x.dtype)
                rest[f"tail_{name}"] = torch.cat([tail, x], 1)[:, T:]
            q_memory, new["k_memory"], new["v_memory"] = seen.values()
        if c.router != "recency":  # each kv head keeps other tokens
            at = past.count + torch.arange(T, device=q.device, dtype=torch.int32)
            new["position"] = at[:, None].expand(B, T, G)
            new["received"] = torch.zeros(B, T, G, device=q.device)
            # A token that waits in the pool keeps its gates' few numbers, not the hundreds they come from.
            if rule is not None:
                new["code"] = new["code"][:, :, None].expand(-1, -1, G, -1)
        bank = {name: torch.cat([past.exact[name], x], 1) if past.count else x for name, x in new.items()}
        return q_memory, bank, rest

    def writes(self, tokens: dict[str, Tensor]) -> tuple:
        """The five inputs of equation (1) for tokens of the bank; convolved k and v, where there are any."""
        k, v = tokens.get("k_memory", tokens["k"]), tokens.get("v_memory", tokens["v"])
        return self.rule.writes(tokens["code"], k, v)

    def recall(self, out, lse, first: int, q_bthk, q_memory, left: dict, rest: dict, scale: float):
        """One answer of two: queries from `first` on have a memory; before, the exact part is the teacher's.

        left: the tokens that leave, one a query. HAZARD: (21) wants them in step.
        """
        c, q_in, writes = self.config, self.rule.queries(q_memory[:, first:]), self.writes(left)
        o, rest["S"] = linear_attention(q_in, *writes, rest["S"], chunk=c.chunk, impl=c.impl)
        moments, rest["sums"] = running_moments(left["k"], rest["origin"], rest["sums"], c.fade)
        read = self.rule.read(o)  # from S^T q to an estimate of a value, or a sum of them
        if self.rule.sums and self.merge.uses_moments:  # which wants an average of values, not a sum
            read = read / moments["count"].repeat_interleave(self.heads // self.kv_heads, 2)[..., None]
        merged = self.merge(out[:, first:], lse[:, first:], read, q_bthk[:, first:], moments, scale)
        return joined([out[:, :first], merged] if first else [merged])

    def shifted(self, q_bthk, q_memory, bank, rest: dict, n: int, scale: float, softcap: float | None):
        """Recency, in one call: (20) for the last T of the bank's N tokens, (21) for those that leave.

        The token that leaves at query t is t-w: queries from s+w on, and tokens from s on, go in step."""
        c, T, N = self.config, q_bthk.shape[1], bank["k"].shape[1]
        # The exact part needs no loop over tokens, nor does the memory: its tokens are the bank without the
        # sinks and the last w, its queries those that come w later. One slice makes the shift of (21).
        out, lse = exact_attention(q_bthk, bank["k"], bank["v"], c.sinks, c.reach, scale, softcap)
        first = max(c.exact_pairs - n, 0)  # the first query with a memory
        if self.rule is not None and first < T:
            left = {name: x[:, c.sinks : N - c.reach] for name, x in bank.items()}
            out = self.recall(out, lse, first, q_bthk, q_memory, left, rest, scale)
        if N > c.exact_pairs:  # what is neither sink nor in the window is in the memory now: let it go
            bank = {name: torch.cat([x[:, : c.sinks], x[:, N - c.reach :]], 1) for name, x in bank.items()}
        return out, bank

    def routed(self, q_bthk, q_memory, bank, rest: dict, n: int, scale: float, softcap: float | None):
        """As `shifted`, with the one difference that a router says in which order tokens leave.

        At every multiple of `block` it judges a pool: the routed tokens, and those that the window will pass
        within the block. `budget` of them stay, the others leave, one a query, in order of time: none before
        the window has passed it. So each query sees sinks + budget + window tokens, as under recency, and
        (21) holds for tokens in that order. Every token is in one place, none is dropped or written twice.

        Blocks begin at multiples of `block`, wherever a call begins: pieces equal one pass. Who stays depends
        on the attention that a block gave: hence a loop. The memory's answers are not in it.
        """
        c, (B, T), G, N = self.config, q_bthk.shape[:2], self.kv_heads, bank["k"].shape[1]
        gone = n - (N - T)  # tokens in the memory; a later one's place in the bank is its position - gone
        bank = {name: x.contiguous() for name, x in bank.items()}  # rows for `take`
        place = torch.arange(B * N * G, device=q_bthk.device).view(B, N, G)  # its rows
        # Held from earlier calls, in this order: tokens that leave in this block, sinks, routed ones, window.
        held = max(0, self.border(n) - max(n, c.exact_pairs))
        leaving, sinks = place[:, :held], place[:, held : held + c.sinks]
        routed = place[:, held + c.sinks : min(self.oldest(n), n) - gone]
        t, parts, known = n, [], dict(S=rest.get("S"), left=[], written=0)
        while t < n + T:
            border = self.border(t)
            end = min(border, n + T)
            if t == n:  # before the first choice of this call, the bank as it stands: decoding copies nothing
                seen, (k, v) = place[:, : end - gone], (bank[x][:, : end - gone] for x in "kv")
            else:
                window = place[:, self.oldest(t) - gone : end - gone]
                seen = torch.cat([leaving, sinks[:, :end], routed, window], 1)
                k, v = (take(bank[x], seen) for x in "kv")
            # The first columns leave one a query, the last of them at border - 1.
            E = leaving.shape[1]
            left_now = max(0, E - (border - end))
            if end - t == 1:
                visible, (seen, k, v) = None, (x[:, left_now:] for x in (seen, k, v))
            else:
                visible = band(end - t, seen.shape[1], t + 1 - border + E, k.device)
            *part, p = attend_tokens(q_bthk[:, t - n : end - n], k, v, visible, scale, softcap)
            parts.append(part)
            gain = p.detach().float().sum((2, 3)).transpose(1, 2)  # of all queries and all heads of a kv head
            bank["received"].view(-1).index_add_(0, seen.flatten(), gain.flatten())  # this call's own tensor
            known["left"].append(leaving[:, :left_now])
            leaving = leaving[:, left_now:]
            if end == border:  # the end of the block: who leaves in the next one?
                bank["received"] *= 0.5 ** (c.block / c.half_life)  # for all alike: no order changes
                pool = torch.cat([routed, place[:, self.oldest(t) - gone : self.oldest(border) - gone]], 1)
                routed, leaving = self.choose(bank, pool, known, max(0, border - c.exact_pairs))
            t = end
        (out, lse), first = (joined(x) for x in zip(*parts)), max(c.exact_pairs - n, 0)
        if self.rule is not None and first < T:
            # Places of who left, in that order; those of a single block stand in front as they are.
            order, one = joined(known["left"]), len(parts) == 1
            names = [x for x in bank if x not in ("position", "received")]
            left = {x: bank[x][:, : order.shape[1]] if one else take(bank[x], order) for x in names}
            out = self.recall(out, lse, first, q_bthk, q_memory, left, rest, scale)
        if n // c.block == t // c.block:
            bank = {name: x[:, held - leaving.shape[1] :] for name, x in bank.items()}
        else:
            kept = torch.cat([leaving, sinks[:, :t], routed, place[:, self.oldest(t) - gone :]], 1)
            bank = {name: take(x, kept) for name, x in bank.items()}
        return out, bank

    def border(self, t: int) -> int:
        """The first query after the block of query t."""
        return t - t % self.config.block + self.config.block

    def oldest(self, t: int) -> int:
        """The first of the tokens that the window has all through the block of query t."""
        return max(self.border(t) - self.config.window, self.config.sinks)

    # Who stays is decided without a gradient: a ranking has none. The router is in the training loop all the
    # same: what it lets go is what the memory learns to hold.
    @torch.no_grad()
    def choose(self, bank: dict, pool: Tensor, known: dict, count: int) -> tuple[Tensor, Tensor]:
        """(who stays exact, who leaves): places in the bank, each in order of time. No gradient."""
        budget = self.config.budget
        if pool.shape[1] <= budget:  # room for all of them
            return pool, pool[:, :0]
        position, received, value = (take(bank[name], pool) for name in ("position", "received", "v"))
        size = value.float().norm(dim=-1)
        # Called by routers that want it. No memory recalls nothing: there the error is all of the value.
        error = lambda: self.recall_error(bank, pool, known, count) if self.rule else size  # noqa: E731
        score = ROUTERS[self.config.router](Pool(position, received, size, error, budget))
        # Sinks are not in the pool: they cannot be voted out. Stable: among equals the older stays, in one
        # call and in pieces alike. Places go in order of time, and the memory is written in it.
        order = score.argsort(dim=1, descending=True, stable=True)
        return tuple(pool.gather(1, part).sort(1).values for part in order.tensor_split([budget], 1))

    def recall_error(self, bank: dict, pool: Tensor, known: dict, count: int) -> Tensor:
        """||v - what the memory, of `count` tokens, answers to k||, (B,P,G).

        Only a router that asks needs the memory's state within the loop: `known` has the last one asked for,
        who has left in this call, block by block, and how many of these blocks are written to that state."""
        if "writes" not in known:  # features and gates, once for all tokens
            known["writes"] = [None if x is None else x.contiguous() for x in self.writes(bank)]
        new, known["written"] = known["left"][known["written"] :], len(known["left"])
        if new and (left := joined(new)).shape[1]:
            tokens = (None if x is None else take(x, left) for x in known["writes"])
            _, known["S"] = linear_attention(None, *tokens, known["S"], self.config.chunk, self.config.impl)
        key, value = (take(x, pool) for x in known["writes"][:2])
        read = self.rule.read((key.transpose(1, 2) @ known["S"].to(key)).transpose(1, 2))
        read = read / max(count, 1) if self.rule.sums else read
        error = (value[..., : self.value_dim] - read).norm(dim=-1)
        return error.unflatten(2, (self.kv_heads, -1)).mean(3)

    def variant(self, **changes) -> LinearizedAttention:
        """The same parameters under another config: what a control is. `merge="off"`: no memory at all."""
        other = copy.copy(self)  # shares the parameters: what one learns, all variants know
        other._modules = dict(self._modules)
        other.config = dataclasses.replace(self.config, **changes).of_layer(self.number)
        if other.config.merge == "off":
            other.merge, other.rule, other.conv_q = MERGES["off"](self.heads, self.key_dim), None, None
        return other


if __name__ == "__main__":
    from tests.demos import interventions_demo
    interventions_demo()
