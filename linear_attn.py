"""One recurrence, two ways to run it, six update rules, and why softmax looks like the delta rule.

What you will learn here (read this module first; it needs torch and nothing else)
  1. `softmax_attention`: what we replace.
  2. `recurrent` and `chunked`: the one recurrence behind every linear attention here, first as a loop over
     tokens that is obviously right, then as matrix products that are fast. Tests compare the two.
  3. `RULES`: hedgehog, gla, kgla, deltanet, gdn, kda. A rule only decides what goes *into* the recurrence.
  4. The analysis of arXiv 2607.07706: softmax subtracts the mean key, subtracting the mean is nearly a
     rank-1 orthogonal projection (here), the delta rule applies a product of such (tests/analysis.py).
On a first reading skip `decayed_products` (a numerical detail) and the bodies of the six rules.

Axis letters. A tensor's suffix names its axes and is its einsum string: `k_btgk` is (batch, time, head, key).
    b batch    t time    h query head    g memory head (a kv head; a query head if each has its own memory)
    r query heads per memory head (h = g*r)    n chunk    c position in chunk    k key    v value    d model
One layout everywhere: (batch, time, heads, dim).

The paper's symbols: S_t `S_bgkv`, alpha_t = exp g_t `log_decay`, beta_t `beta`, phi `FEATURES`, Pi the rank-1
projection in `softmax_projection_identity`, C_t and R_t in tests/analysis.py, s and w in interventions.py.
Its "GDN" is our `kda`; `gdn` is the original with one decay a head. Equations are numbered through all
modules: (1)-(5) here, (6)-(19) in kernels.py, (20)-(23) in interventions.py, (24) in eval.py.

The recurrence (the paper writes it once per mechanism), with a state S of shape (key, value) per head:
    (1)  S_t = (I - b_t k_t k_t^T) Diag(exp g_t) S_{t-1} + w_t k_t v_t^T        o_t = S_t^T q_t
    g_t <= 0 log decay, per head or channel    b_t erase, w_t write strength    (delta rule: b = w = beta)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def register(table: dict, name: str) -> Callable:
    """Decorator that files a class or function under `name`. Every seam of this repository is such a dict."""
    return lambda thing: table.update({name: thing}) or thing


def lookup(table: dict, name: str, what: str):
    """table[name], or a ValueError that lists the choices."""
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}; choose from: {', '.join(sorted(map(str, table)))}")
    return table[name]


def option(default, help: str, choices=None, low=None, high=None, item=str):
    """A dataclass field that knows its help and its legal values; the command line is made from it."""
    about = dict(help=help, choices=choices, low=low, high=high, item=item)  # item: type of a tuple's items
    return dataclasses.field(default=default, metadata=about)


def validate(config) -> None:
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

# ---------------------------------------------------------------------------- one recurrence

def softmax_attention(q_bthk: Tensor, k_btgk: Tensor, v_btgv: Tensor, scale: float | None = None) -> Tensor:
    """Causal softmax attention, the reference: q (B,T,H,K), k (B,T,G,K), v (B,T,G,V) -> (B,T,H,V).

    Head h reads key/value head h // (H/G). `scale` defaults to 1/sqrt(K). Time and memory grow with T^2.
    """
    (_, T, H, K), G = q_bthk.shape, k_btgk.shape[2]
    score_bgrts = torch.einsum("btgrk,bsgk->bgrts", q_bthk.unflatten(2, (G, H // G)), k_btgk)
    score_bgrts = score_bgrts * (K**-0.5 if scale is None else scale)
    future_ts = torch.ones(T, T, dtype=torch.bool, device=q_bthk.device).triu(1)
    p_bgrts = score_bgrts.masked_fill(future_ts, -torch.inf).softmax(-1)
    return torch.einsum("bgrts,bsgv->btgrv", p_bgrts, v_btgv).flatten(2, 3)


def working_dtype(x: Tensor) -> torch.dtype:
    """States sum over the whole past: never accumulate them in 16 bits. float64 stays (for tests)."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, softcap=None):
    """Softmax attention over one set of keys: q (..., G, R, C, K), k (..., G, L, K), v (..., G, L, V).

    visible (..., 1 or G, C, L), or None: all -> o (..., G, R, C, V), log-sum-exp (..., G, R, C), p (..., L).
    HAZARD: scores need float32. Qwen's reach thousands before scaling, where bfloat16 has steps of 8.
    """
    (R, C), dtype = q.shape[-3:-1], working_dtype(q)
    score = ((q.flatten(-3, -2).to(dtype) * scale) @ k.mT.to(dtype)).unflatten(-2, (R, C))
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    if visible is not None:
        score = score.masked_fill(~visible[..., None, :, :], -torch.inf)
    p = score.softmax(-1)
    lse = score.amax(-1) - p.amax(-1).log()  # the largest p is exp(max - lse); logsumexp has ten passes
    return (p.to(v.dtype).flatten(-3, -2) @ v).unflatten(-2, (R, C)), lse, p


def attend_tokens(q_bthk, k_blgk, v_blgv, visible: Tensor | None, scale: float, softcap: float | None = None):
    """`attend` in the layout of everything else: o (B,T,H,V), log-sum-exp (B,T,H), and p (B,G,R,T,L)."""
    q_bgrtk = q_bthk.unflatten(2, (k_blgk.shape[2], -1)).permute(0, 2, 3, 1, 4)
    o, lse, p = attend(q_bgrtk, k_blgk.transpose(1, 2), v_blgv.transpose(1, 2), visible, scale, softcap)
    return o.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3), p


def exact_attention(
    q_bthk: Tensor, k_btgk: Tensor, v_btgv: Tensor, sinks: int, window: int, scale: float,
    softcap: float | None = None, block: int = 64,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax over (20), in linear time: (o (B,T,H,V), log-sum-exp of its scores (B,T,H)).

    The T queries belong to the last T keys. They go in blocks: a block of C queries needs the window-1+C keys
    that end with it. An empty exact set (s = w = 0) gives o = 0 and log-sum-exp -inf.
    """
    B, T, H, _ = q_bthk.shape
    G, V, device, C = k_btgk.shape[2], v_btgv.shape[-1], q_bthk.device, min(block, T)
    if T == 0 or sinks == window == 0:
        nothing = q_bthk.new_full((B, T, H), -torch.inf, dtype=working_dtype(q_bthk))
        return v_btgv.new_zeros(B, T, H, V), nothing
    N, L, first = -(-T // C), window - 1 + C, k_btgk.shape[1] - T
    # Decoding: one query, one set of keys, all of them visible: none of what follows is needed.
    if T == 1:
        k, v = k_btgk, v_btgv
        if first >= sinks + window:
            k, v = (torch.cat([x[:, :sinks], x[:, first + 1 - window :]], 1) for x in (k, v))
        return attend_tokens(q_bthk, k, v, None, scale, softcap)[:2]
    # Blocks overlap in their keys: `unfold` cuts N pieces of window-1+C keys each from one tensor.
    q_bnchk = F.pad(q_bthk, (0, 0, 0, 0, 0, N * C - T)).unflatten(1, (N, C))
    at_nc1 = first + torch.arange(N * C, device=device).view(N, C, 1)
    keys, values, visible = [], [], []
    if sinks:  # a sink is visible from its own position on
        for x, parts in ((k_btgk, keys), (v_btgv, values)):
            parts.append(x[:, :sinks].transpose(1, 2)[:, None].expand(-1, N, -1, -1, -1))
        visible.append(torch.arange(min(sinks, first + T), device=device) <= at_nc1)
    if window:
        for x, parts in ((k_btgk, keys), (v_btgv, values)):
            parts.append(F.pad(x, (0, 0, 0, 0, window - 1 - first, N * C - T)).unfold(1, L, C).mT)
        age_cl = torch.arange(C, device=device)[:, None] + window - 1 - torch.arange(L, device=device)
        visible.append((age_cl >= 0) & (age_cl < window) & (at_nc1 - age_cl >= sinks))  # sinks count once
    q_bngrck = q_bnchk.unflatten(3, (G, H // G)).permute(0, 1, 3, 4, 2, 5)
    seen_n1cl = torch.cat(visible, -1)[:, None]
    o, lse, _ = attend(q_bngrck, torch.cat(keys, -2), torch.cat(values, -2), seen_n1cl, scale, softcap)
    o_bthv = o.permute(0, 1, 4, 2, 3, 5).reshape(B, N * C, H, V)[:, :T]
    return o_bthv, lse.permute(0, 1, 4, 2, 3).reshape(B, N * C, H)[:, :T]


def take(x: Tensor, rows_bpg: Tensor) -> Tensor:
    """Tokens of x (B,L,M,...), M a multiple of G: head g's are row (b L + t) G + g. Rows are copied, where
    `gather` would look up every number. Memories per query head, M > G, take their kv head's tokens."""
    (B, P, G), (_, L, M, *rest) = rows_bpg.shape, x.shape
    rows = x.reshape(B * L * G, M // G, *rest).index_select(0, rows_bpg.flatten())
    return rows.view(B, P, M, *rest)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Along time; a single part, the rule in decoding, is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def empty_state(k_btgk: Tensor, v_btgv: Tensor) -> Tensor:
    """S_0 = 0, shape (B, G, K, V)."""
    B, _, G, K = k_btgk.shape
    return k_btgk.new_zeros(B, G, K, v_btgv.shape[-1], dtype=working_dtype(v_btgv))


def recurrent(
    q_bthk: Tensor, k_btgk: Tensor, v_btgv: Tensor, log_decay: Tensor | None = None,
    erase: Tensor | None = None, write: Tensor | None = None, state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Equation (1), one token at a time. Slow, and the definition against which everything else is tested.

    q (B,T,H,K), k (B,T,G,K), v (B,T,G,V), G divides H; log_decay (B,T,G) or (B,T,G,K), <= 0; erase, write
    (B,T,G); state (B,G,K,V). None means: no decay, erase 0, write 1, state 0. Returns o (B,T,H,V) in v's
    dtype and the last state in float32 (float64 if v is float64).
    """
    (B, T, H, _), G, dtype = q_bthk.shape, k_btgk.shape[2], working_dtype(v_btgv)
    q_btgrk, k, v = q_bthk.unflatten(2, (G, H // G)).to(dtype), k_btgk.to(dtype), v_btgv.to(dtype)
    g, b = (torch.zeros_like(k[..., 0]) if x is None else x.to(dtype) for x in (log_decay, erase))
    g_btgk = g if g.dim() == 4 else g[..., None]  # one decay a head serves all its channels
    written_btgv = v if write is None else write[..., None].to(dtype) * v
    S = empty_state(k_btgk, v_btgv) if state is None else state.to(dtype)
    outputs = [v.new_zeros(B, 0, H, v.shape[-1])]  # so that T = 0 has an answer too
    for t in range(T):
        S = g_btgk[:, t, :, :, None].exp() * S
        # what the decayed memory already says about k_t is what gets erased
        k_bgk1 = k[:, t, :, :, None]
        recalled_bgv = (k_bgk1 * S).sum(-2)
        new_bgv = written_btgv[:, t] - b[:, t, :, None] * recalled_bgv
        S = S + k_bgk1 * new_bgv[..., None, :]
        outputs.append((q_btgrk[:, t] @ S).flatten(1, 2)[:, None])
    return torch.cat(outputs, 1).to(v_btgv.dtype), S


def sum_after(g: Tensor) -> Tensor:
    """g_{j+1} + ... + g_C for every position j of the axis before the last."""
    return F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def products(x: Tensor, y: Tensor) -> Tensor:
    """x (..., R, C, K) @ y (..., 1, K, D): the rows of all R in one product; matmul would copy y R times."""
    return (x.flatten(-3, -2) @ y.squeeze(-3)).unflatten(-2, x.shape[-3:-1])


def decayed_products(x: Tensor, k: Tensor, g: Tensor | None, diagonal: int) -> Tensor:
    """(2)  M_ij = sum_k x_ik k_jk exp(g_{j+1} + ... + g_i), j < i, else 0; if diagonal is 0 also j = i, where
    nothing decays, if -1 not. x (..., R, C, K), k (..., 1, C, K), g (..., 1, C, K|1).

    The obvious factorisation x exp(G) (k exp(-G))^T overflows, because exp(-G) grows without bound over a
    chunk. Halving avoids it: each half is a smaller problem of the same kind, and for i in the right and j in
    the left half the decay splits at the border into exp(border..i) and exp(j..border), both <= 1. Summing g
    from the border, not subtracting two long cumulative sums, keeps full precision next to a decay of -1000.
    """
    C = x.shape[-2]
    if g is None or C == 1:
        return products(x, k.mT).tril(diagonal)
    if g.shape[-1] == 1:  # one decay for all channels leaves the sum: its own sums, one a pair, are few
        decay = g.expand(*g.shape[:-1], C).tril(-1).cumsum(-2).exp().tril(diagonal)
        return products(x, k.mT) * decay
    # Halves, (..., 2, R, C/2, K): pairs within each by recursion, pairs across the border by one product.
    x, k, g = (z.unflatten(-2, (2, C // 2)).transpose(-4, -3) for z in (x, k, g))
    first, last = decayed_products(x, k, g, diagonal).unbind(-4)
    right = x[..., 1, :, :, :] * g[..., 1, :, :, :].cumsum(-2).exp()
    left = k[..., 0, :, :, :] * sum_after(g[..., 0, :, :, :]).exp()
    return torch.cat([F.pad(first, (0, C // 2)), torch.cat([products(right, left.mT), last], -1)], -2)


def chunked(q_bthk, k_btgk, v_btgv, log_decay=None, erase=None, write=None, state=None, chunk: int = 64):
    """Equation (1) in matrix products: same arguments and result as `recurrent`, any T >= 0, differentiable.

    Inside a chunk with entry state S0 write u_i = w_i v_i - b_i k_i^T(decayed S_{i-1}) for what token i
    really adds. Unrolling (1) inside the chunk, with A and P the products (2) of keys with keys and queries
    with keys (P includes j = i), and G_i = g_1 + ... + g_i:

    (3)  (I + Diag(b) A) U = Diag(w) V - Diag(b) (K * exp G) S0      one triangular solve for all chunks
    (4)  O  = (Q * exp G) S0 + P U
    (5)  S' = Diag(exp G_C) S0 + (K * exp(G_C - G))^T U

    U = U_v - U_k S0 is solved before S0 is known; what remains is a loop over chunks, two products each.
    Without queries (None) nothing is read: o is None.
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk must be a power of two, got {chunk}")
    (_, T, G, K), V, dtype = k_btgk.shape, v_btgv.shape[-1], working_dtype(v_btgv)
    S = empty_state(k_btgk, v_btgv) if state is None else state.to(dtype)
    if T == 0:
        return None if q_bthk is None else v_btgv.new_zeros(*q_bthk.shape[:3], V), S
    C = min(chunk, 1 << (T - 1).bit_length())  # a short input needs no long chunk

    def split(x: Tensor) -> Tensor:
        """(b, t, g*r, ...) -> (b, g, n, r, c, ...), r = 1 for all but queries. Padding with zeros is safe:
        b = w = g = 0 leaves the state alone."""
        x = F.pad(x.to(dtype), (0, 0) * (x.dim() - 2) + (0, -T % C))
        return x.unflatten(1, (-1, C)).unflatten(3, (G, -1)).movedim((3, 1, 4), (1, 2, 3)).contiguous()

    written_btgv = v_btgv if write is None else write[..., None].to(dtype) * v_btgv
    k, U_v, g, since_entry, kept = split(k_btgk), split(written_btgv), None, None, S.new_ones(1, 1)
    k_in = k_out = k
    if log_decay is not None:
        g = split(log_decay if log_decay.dim() == 4 else log_decay[..., None])
        since_entry = g.cumsum(-2).exp()
        k_in, k_out, kept = k * since_entry, k * sum_after(g).exp(), since_entry[..., -1:, :].mT
    U_k = torch.zeros_like(k)
    # (3): writes of a chunk depend on each other, because each erases what the earlier ones have written.
    if erase is not None:
        b = split(erase[..., None])
        A = b * decayed_products(k, k, g, -1)  # the unit diagonal is implied by the solver
        rhs = torch.cat([U_v, b * k_in], -1)
        U_v, U_k = torch.linalg.solve_triangular(A, rhs, upper=False, unitriangular=True).split([V, K], -1)
    # What is left to do one chunk after the other; the rest was done for all chunks at once.
    S_bg1kv, entries, added = S[:, :, None], [], []
    kept = kept.expand(*k.shape[:4], *kept.shape[-2:])  # (b, g, n, 1, K or 1, 1)
    for kept_n, k_out_n, U_v_n, U_k_n in zip(*(z.unbind(2) for z in (kept, k_out.mT, U_v, U_k))):  # (5)
        entries.append(S_bg1kv)
        added.append(U_v_n if erase is None else U_v_n - U_k_n @ S_bg1kv)
        S_bg1kv = kept_n * S_bg1kv + k_out_n @ added[-1]
    if q_bthk is None:
        return None, S_bg1kv[:, :, 0]
    q = split(q_bthk)
    P = decayed_products(q, k, g, 0)
    q_in = q if g is None else q * since_entry
    o_bgnrcv = products(q_in, torch.stack(entries, 2)) + products(P, torch.stack(added, 2))  # (4)
    o_bthv = o_bgnrcv.movedim((2, 4, 1), (1, 2, 3)).flatten(3, 4).flatten(1, 2)[:, :T]
    return o_bthv.to(v_btgv.dtype), S_bg1kv[:, :, 0]

# ---------------------------------------------------------------------------- moments of keys

def running_moments(k_btgk: Tensor, origin: Tensor, sums: Tensor, fade: int):
    """What (23) of interventions.py needs of the keys up to k_t, for every t: count (B,T,G), mean, variance
    (B,T,G,K); and the sums at the end. Sigma is diagonal: a full one was no better, and costs K x K.

    A key counts half after `fade` further ones (0: never): what is learned of the mass of a thousand tokens
    then holds for any number. sums (B,1,G,2K+1): of k - origin, its square, 1. HAZARD: moments are around one
    key, origin (B,1,G,K), as Qwen's have biases of 100: E[k^2] - mu^2 would lose a variance of 1."""
    shifted = k_btgk.to(origin.dtype) - origin
    one, kept = torch.ones_like(shifted[..., :1]), 0.5 ** (1 / fade) if fade else 1.0
    x = torch.cat([shifted, shifted.square(), one], -1)
    if x.shape[1] == 1:
        sums = kept * sums + x
    else:  # the recurrence (1) with one key channel, which is 1
        decay = one[..., 0] * math.log(kept) if fade else None
        sums = chunked(one, one, x, decay, state=sums.transpose(1, 2))[0]
    mean, square = (sums[..., :-1] / sums[..., -1:]).chunk(2, -1)
    return {"count": sums[..., -1], "mean": origin + mean, "variance": square - mean.square()}, sums[:, -1:]

# ---------------------------------------------------------------------------- six update rules

RULES: dict[str, type[UpdateRule]] = {}
FEATURES: dict[str, Callable] = {  # feature maps phi; all but "l2" see x W + b instead of x
    "l2": lambda x: F.normalize(x, dim=-1, eps=1e-4),
    "silu": lambda x: F.normalize(F.silu(x), dim=-1, eps=1e-4),
    "softmax": lambda x: torch.cat([x.softmax(-1), (-x).softmax(-1)], -1),
}


class UpdateRule(nn.Module):
    """What a rule adds to the frozen model; how it turns (hidden, q, k, v) into the inputs of equation (1).

    A subclass sets four class attributes, and overrides `strengths` if it is none of the usual shapes:
        decay      ""          g = 0
                   "head"      g = logsigmoid(h W_alpha + b_alpha), one number a head
                   "channel"   g = logsigmoid(h W_1 W_2 + b_alpha), one a key channel, through `rank` numbers
        delta      True: erase = write = beta = sigmoid(h W_beta + b_beta).   False: erase nothing, write 1
        normaliser True: the read is divided by the sum of its own weights (a column of ones appended to v)
        sums       True: the read is a sum over tokens, not an estimate of a value; a merge may average
    At step 0 the projections give zero, and the gates are the biases (paper: b_alpha = 1, b_beta = -1).

    Feature maps phi for q and k (`features`): "l2" unit length, no parameters (the paper's, after RoPE);
    "silu" L2norm(SiLU(x W + b)) with W = I + noise; "softmax" softmax(x W) (+) softmax(-x W), Hedgehog's.
    Gates and features are computed in float32: a decay of 0.998 a step is 1.0 in bfloat16.
    """

    decay, delta, normaliser, sums = "", False, False, False

    def __init__(
        self, d_model: int, heads: int, memory_heads: int, key_dim: int, features: str = "l2",
        feature_dim: int = 0, rank: int = 16, beta_bias: float = -1.0, decay_bias: float = 1.0,
    ):  # fmt: skip
        super().__init__()
        lookup(FEATURES, features, "features")
        size = feature_dim or key_dim
        if features == "l2" and size != key_dim or features == "softmax" and size % 2:
            raise ValueError(f"feature_dim {size}: l2 wants the key dimension {key_dim}, softmax an even one")
        self.features, self.memory_heads, self.feature_dim = features, memory_heads, size
        if features != "l2":
            width = size // 2 if features == "softmax" else size
            # Near the identity: at first the memory sees the teacher's own q and k, through SiLU or softmax.
            for name, n in (("q", heads), ("k", memory_heads)):
                noise = 0.02 * torch.randn(n, key_dim, width)
                setattr(self, f"W_{name}", nn.Parameter(torch.eye(key_dim, width) + noise))
                setattr(self, f"b_{name}", nn.Parameter(torch.zeros(n, width)))
        decays = memory_heads * (size if self.decay == "channel" else 1)
        if self.decay == "channel":
            self.W_1 = nn.Parameter(torch.randn(d_model, rank) * d_model**-0.5)
            self.W_2 = nn.Parameter(torch.zeros(rank, decays))
        elif self.decay == "head":
            self.W_1 = nn.Parameter(torch.zeros(d_model, decays))
        if self.decay:
            self.b_alpha = nn.Parameter(torch.full((decays,), float(decay_bias)))
        if self.delta:
            self.W_beta = nn.Parameter(torch.zeros(d_model, memory_heads))
            self.b_beta = nn.Parameter(torch.full((memory_heads,), float(beta_bias)))

    def encode(self, hidden_btd: Tensor) -> Tensor:
        """What a token's gates need, (B,T,E): few numbers, which can wait until the token is written."""
        # One product for all gates; what a gate has beyond it (W_2, biases, sigmoid) comes in `gates`.
        h = hidden_btd.to(working_dtype(hidden_btd))
        weights = [getattr(self, name).to(h) for name in ("W_1", "W_beta") if hasattr(self, name)]
        return h @ torch.cat(weights, 1) if weights else h[..., :0]

    def phi(self, x_bthk: Tensor, name: str) -> Tensor:
        """The features of queries (name "q") or keys ("k"), in float32: (B,T,H,K) -> (B,T,H,feature_dim)."""
        x = x_bthk.to(working_dtype(x_bthk))
        if self.features != "l2":
            W_hkf, b_hf = getattr(self, f"W_{name}").to(x), getattr(self, f"b_{name}").to(x)
            x = (x.transpose(1, 2) @ W_hkf).transpose(1, 2) + b_hf
        return FEATURES[self.features](x)

    def gates(self, code_bthe: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """(log_decay <= 0, beta in (0, 1)) of encoded tokens, a code a memory head; None where there is none.

        A code holds logits of all heads, because `encode` cannot know which head will write the token: head h
        takes number h of its code."""
        code, H, log_decay, beta = code_bthe, self.memory_heads, None, None
        if self.decay == "channel":
            W_2 = self.W_2.to(code).unflatten(1, (H, -1))
            logits = torch.einsum("bthr,rhk->bthk", code[..., : len(W_2)], W_2)
            log_decay = F.logsigmoid(logits + self.b_alpha.to(code).unflatten(0, (H, -1)))
        elif self.decay == "head":
            log_decay = F.logsigmoid(code[..., :H].diagonal(dim1=-2, dim2=-1) + self.b_alpha.to(code))
        if self.delta:
            beta = torch.sigmoid(code[..., -H:].diagonal(dim1=-2, dim2=-1) + self.b_beta.to(code))
        return log_decay, beta

    def strengths(self, k_btgk: Tensor, log_decay: Tensor | None, beta: Tensor | None):
        """(log_decay, erase, write) from the gates; the place for a rule whose decay looks at the key."""
        return log_decay, beta, beta

    def queries(self, q_bthk: Tensor) -> Tensor:
        return self.phi(q_bthk, "q")

    def writes(self, code_bte: Tensor, k_btgk: Tensor, v_btgv: Tensor):
        """(k, v, log_decay, erase, write) as equation (1) wants them, for tokens that enter the memory.

        k and v come per kv head and are repeated when every query head has a memory of its own; the code is
        one for all heads, (B,T,E), or one a kv head, (B,T,G,E), when each head takes other tokens."""
        repeat = self.memory_heads // k_btgk.shape[2]
        code = code_bte if code_bte.dim() == 4 else code_bte[:, :, None].expand(-1, -1, k_btgk.shape[2], -1)
        code, k, v = (x.repeat_interleave(repeat, 2) if repeat > 1 else x for x in (code, k_btgk, v_btgv))
        k, v = self.phi(k, "k"), v.to(working_dtype(v))  # values enter as they are: only keys have features
        if self.normaliser:
            v = F.pad(v, (0, 1), value=1.0)
        log_decay, erase, write = self.strengths(k, *self.gates(code))
        return k, v, log_decay, erase, torch.ones_like(v[..., 0]) if write is None else write

    def read(self, o_bthv: Tensor) -> Tensor:
        """The memory's answer from o = S^T q: for a normalising rule, numerator over denominator."""
        return o_bthv[..., :-1] / (o_bthv[..., -1:] + 1e-6) if self.normaliser else o_bthv

    def forward(self, hidden_btd: Tensor, q_bthk: Tensor, k_btgk: Tensor, v_btgv: Tensor):
        """(q, k, v, log_decay, erase, write): the six inputs of `recurrent` and `chunked`."""
        return self.queries(q_bthk), *self.writes(self.encode(hidden_btd), k_btgk, v_btgv)


@register(RULES, "hedgehog")
class Hedgehog(UpdateRule):
    """Normalised accumulation of learned softmax features: no forgetting at all."""

    normaliser = True

    def __init__(self, *args, features: str = "softmax", **kw):
        super().__init__(*args, features="softmax", **kw)  # its read needs positive features


@register(RULES, "gla")
class GLA(UpdateRule):
    """Gated linear attention: every channel forgets at its own rate, whatever the new key is."""

    decay, sums = "channel", True


@register(RULES, "kgla")
class KeyGLA(UpdateRule):
    """GLA whose decay sees the key: the diagonal of the delta rule's I - beta k k^T, and no more."""

    decay, delta, sums = "channel", True, True

    def strengths(self, k_btgk, log_decay, beta):
        return log_decay + torch.log1p(-(beta[..., None] * k_btgk**2).clamp(max=1 - 1e-6)), None, None


@register(RULES, "deltanet")
class DeltaNet(UpdateRule):
    """The delta rule alone: replace what the memory says about k_t by v_t, touch nothing else."""

    delta = True


@register(RULES, "gdn")
class GatedDeltaNet(UpdateRule):
    """Delta rule with one decay a head (the original Gated DeltaNet)."""

    decay, delta = "head", True


@register(RULES, "kda")
class KimiDelta(UpdateRule):
    """Delta rule with a decay per channel (Kimi's form; the paper's "GDN")."""

    decay, delta = "channel", True

# ---------------------------------------------------------------------------- the analysis

def softmax_projection_identity(k_tk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lemma 2, the softmax-projection identity: k_i - m = (I - m m^T/||m||^2) k_i + r_i, m = mean of unit k.

    Left: what softmax does to keys at first order. Right: a rank-1 orthogonal projection. The residual is
    exact, r_i = m (cos a_i / ||m|| - 1) with a_i the angle between k_i and m, hence ||r_i|| = |cos a_i -
    ||m|||: small when the keys are concentrated. Returns (centred, projected, residual), each (t, K).
    """
    mean, length = k_tk.mean(0), k_tk.mean(0).norm()
    cos = k_tk @ mean / length  # of the angle between each key and the mean
    projected = k_tk - cos[:, None] * (mean / length)
    return k_tk - mean, projected, (cos / length - 1)[:, None] * mean


if __name__ == "__main__":
    from tests.demos import linear_attn_demo
    linear_attn_demo()
