"""interventions.py: what is exact, what is in the memory, and what both make of it together."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import linear_attn as la
from eval import layer_bytes  # eval also registers the random router
from interventions import (
    ASK_THE_MEMORY,
    MERGES,
    ROUTERS,
    LinearizeConfig,
    LinearizedAttention,
    Pool,
    ShortConv,
    State,
    exact_attention,
    running_moments,
)

F64 = torch.float64


def qkv(T, seed=0, B=3, H=4, G=2, K=8, V=6, D=10, dtype=F64):
    torch.manual_seed(seed)
    return [torch.randn(B, T, *s, dtype=dtype) for s in ((H, K), (G, K), (G, V), (D,))]


def make_layer(seed=0, dtype=F64, V=6, **kw):
    """A layer whose parameters are away from their start."""
    torch.manual_seed(seed)
    layer = LinearizedAttention(LinearizeConfig(**kw), 10, 4, 2, 8, V)
    for p in layer.parameters():
        p.data += 0.2 * torch.randn_like(p)
    return layer.to(dtype)


def convolved(layer, q, k, v):
    """q, k, v as the memory of a whole sequence sees them."""
    if layer.conv_q is None:
        return q, k, v
    return layer.conv_q(q), layer.conv_k(k), layer.conv_v(v)


def routed(layer, *x, scale=8**-0.5):
    """The block loop, also for recency, which has a faster form of its own."""
    past = State()
    config, layer.config = layer.config, dataclasses.replace(layer.config, router="mass")
    q_memory, bank, rest = layer.enter(*x, past)
    layer.config = config
    return layer.routed(x[0], q_memory, bank, rest, 0, scale, None)[0]


def softmax_over(q, k, v, allowed_ts, scale, softcap=None):
    """The definition: softmax over an explicit (T, T) mask; o and log-sum-exp."""
    R = q.shape[2] // k.shape[2]
    score = torch.einsum("bthk,bshk->bhts", q, k.repeat_interleave(R, 2)) * scale
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    score = score.masked_fill(~allowed_ts, -torch.inf)
    p = score.softmax(-1).nan_to_num(0)
    return torch.einsum("bhts,bshv->bthv", p, v.repeat_interleave(R, 2)), score.logsumexp(-1).transpose(1, 2)


def exact_set(T, sinks, window):
    t, s = torch.arange(T)[:, None], torch.arange(T)[None]
    return (s <= t) & ((s < sinks) | (s > t - window))


@given(
    T=st.integers(1, 90),
    sinks=st.integers(0, 9),
    window=st.integers(0, 40),
    softcap=st.sampled_from([None, 2.0]),
    block=st.sampled_from([1, 16, 64]),
)
def test_exact_attention_is_softmax_over_sinks_and_window(T, sinks, window, softcap, block):
    q, k, v, _ = qkv(T)
    o, lse = exact_attention(q, k, v, sinks, window, 0.3, softcap, block)
    want, want_lse = softmax_over(q, k, v, exact_set(T, sinks, window), 0.3, softcap)
    assert torch.allclose(o, want, atol=1e-12)
    assert torch.allclose(lse, want_lse, atol=1e-12)


@given(T=st.integers(8, 60), sinks=st.integers(0, 4), window=st.integers(1, 6))
def test_two_softmax_parts_merged_by_their_log_sum_exp_are_softmax_over_everything(T, sinks, window):
    """Equation (22), exact: the split identity that the lse merge stands on."""
    q, k, v, _ = qkv(T)
    inside = exact_set(T, sinks, window)
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    (o_E, lse_E), (o_M, lse_M) = (softmax_over(q, k, v, m, 0.3) for m in (inside, causal & ~inside))
    m = torch.sigmoid(lse_E - lse_M)[..., None]
    assert torch.allclose(m * o_E + (1 - m) * o_M, softmax_over(q, k, v, causal, 0.3)[0], atol=1e-12)


@pytest.mark.parametrize("rule", la.RULES)
@pytest.mark.parametrize("memory_per", ["kv", "query"])
@pytest.mark.parametrize("conv", [0, 3])
def test_the_memory_read_is_q_times_the_state_of_tokens_s_to_t_minus_w(rule, memory_per, conv):
    """Equation (21) token by token, from the rule's own inputs: S_{s..t-w} built from scratch for every t."""
    T, s, w = 23, 3, 5
    layer = make_layer(rule=rule, merge="sum", sinks=s, window=w, memory_per=memory_per, conv=conv)
    q, k, v, hidden = qkv(T)
    read = layer(q, k, v, hidden) - exact_attention(q, k, v, s, w, 8**-0.5)[0]  # what the sum merge added
    q_c, k_c, v_c = convolved(layer, q, k, v)
    q_in, k_in, v_in, *gates = layer.rule(hidden, q_c, k_c, v_c)
    for t in range(s + w, T):
        part = slice(s, t - w + 1)
        seen = [None if x is None else x[:, part] for x in (k_in, v_in, *gates)]
        _, S = la.recurrent(q_in[:, part], *seen)
        o = torch.einsum("bgrk,bgkv->bgrv", q_in[:, t].unflatten(1, (S.shape[1], -1)), S).flatten(1, 2)
        assert torch.allclose(read[:, t], layer.rule.read(o), atol=1e-10)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("rule", la.RULES)
def test_up_to_sinks_plus_window_tokens_the_layer_is_softmax_attention(merge, rule):
    layer = make_layer(rule=rule, merge=merge, sinks=3, window=9, conv=4)
    for T in (1, 2, 11, 12):
        q, k, v, hidden = qkv(T)
        assert torch.allclose(layer(q, k, v, hidden), la.softmax_attention(q, k, v), atol=1e-12)
    q, k, v, hidden = qkv(30)
    assert torch.allclose(layer(q, k, v, hidden)[:, :12], la.softmax_attention(q, k, v)[:, :12], atol=1e-12)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("sinks,window,budget", [(2, 5, 0), (0, 4, 3), (3, 0, 0), (0, 0, 0)])
def test_every_merge_is_causal_for_any_exact_set(merge, sinks, window, budget):
    layer = make_layer(merge=merge, sinks=sinks, window=window, budget=budget, conv=3)
    x = qkv(31)
    changed = [torch.cat([y[:, :20], y[:, 20:] + 1.0], 1) for y in x]
    before, after = layer(*x), layer(*changed)
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-12)
    sees_nothing = merge == "off" and layer.config.exact_pairs == 0
    assert sees_nothing == torch.allclose(before[:, 20:], after[:, 20:], atol=1e-3)
    assert torch.isfinite(before).all()


def test_recency_budget_is_a_longer_window():
    x = qkv(40)
    a, b = make_layer(window=8, budget=0), make_layer(window=5, budget=3)
    assert torch.equal(a(*x), b(*x)) and a.config.exact_pairs == b.config.exact_pairs


def test_a_layer_with_its_memory_off_is_its_exact_part():
    q, k, v, hidden = qkv(40)
    want = exact_attention(q, k, v, 3, 6, 8**-0.5)[0]
    assert torch.equal(make_layer(merge="off", sinks=3, window=6)(q, k, v, hidden), want)


def moments_of(k, fade=0):
    """Moments of k_1..k_t for every t of one whole sequence."""
    origin = k[:, :1]
    return running_moments(k, origin, origin.new_zeros(*origin.shape[:3], 2 * k.shape[-1] + 1), fade)[0]


def test_running_moments_are_count_mean_and_variances_of_the_keys_so_far():
    _, k, _, _ = qkv(33)
    moments = moments_of(k)
    for t in (0, 1, 32):
        seen = k[:, : t + 1]
        assert torch.allclose(moments["count"][:, t], torch.tensor(t + 1.0, dtype=F64))
        assert torch.allclose(moments["mean"][:, t], seen.mean(1))
        assert torch.allclose(moments["variance"][:, t], seen.var(1, unbiased=False), atol=1e-10)


def test_moments_that_fade_are_weighted_by_halves():
    _, k, _, _ = qkv(33)
    moments = moments_of(k, fade=5)
    for t in (0, 1, 32):
        weight = 0.5 ** ((t - torch.arange(t + 1, dtype=F64)) / 5)[:, None, None]
        mean = (weight * k[:, : t + 1]).sum(1) / weight.sum()
        variance = (weight * (k[:, : t + 1] - mean[:, None]).square()).sum(1) / weight.sum()
        assert torch.allclose(moments["count"][:, t], weight.sum())
        assert torch.allclose(moments["mean"][:, t], mean)
        assert torch.allclose(moments["variance"][:, t], variance, atol=1e-10)


def test_moments_survive_keys_with_a_large_bias_in_float32():
    """Qwen2's keys: bias 100, spread 1. E[k^2] - mean^2 in float32 would be off by whole units."""
    k = qkv(2000, dtype=torch.float32)[1] + 100.0
    got = moments_of(k)["variance"].double()
    want = moments_of(k.double())["variance"]
    assert ((got - want).abs().max() / want.abs().max()) < 1e-4  # 2,000 float32 additions


def test_log_mass_is_exact_for_gaussian_keys():
    """(23) with a1 = a2 = 1 is the log-mass of n Gaussian keys; sampling error 3/sqrt(n) of a log."""
    torch.manual_seed(0)
    n, d = 50_000, 8
    k = 0.7 * torch.randn(1, n, 1, d, dtype=F64) + 0.3
    q = torch.randn(1, n, 1, d, dtype=F64)
    layer = LinearizedAttention(LinearizeConfig(), 10, 1, 1, d, d).double()
    layer.merge.a2.data.fill_(1.0)
    moments = moments_of(k)
    got = layer.merge.log_mass(q, moments, d**-0.5)[0, -1, 0]
    want = (k[0, :, 0] @ q[0, -1, 0] * d**-0.5).logsumexp(0)
    assert abs(got - want) < 3 * n**-0.5


# ----------------------------------------------------------------------------- routers


def slow_routed(layer, q, k, v, hidden, scale):
    """Routing token by token and head by head with Python sets, batch size 1. Returns o, and who was where.

    The state is rebuilt from the list of evicted tokens at every read: nothing is carried but that list."""
    c, T, G = layer.config, q.shape[1], k.shape[2]
    memory = layer.merge.uses_memory
    outs = torch.zeros(1, T, q.shape[2], v.shape[-1], dtype=q.dtype)
    places = []
    if memory:
        q_in, k_in, v_in, g, b, w = layer.rule(hidden, *convolved(layer, q, k, v))
        M = k_in.shape[2]
    for head in range(G):
        mine = range(head * q.shape[2] // G, (head + 1) * q.shape[2] // G)
        routed, leaving, evicted, received = [], [], [], dict.fromkeys(range(T), 0.0)

        def state(m, evicted=evicted):
            pick = [None if x is None else x[:, evicted][:, :, [m]] for x in (k_in, v_in, g, b, w)]
            return la.recurrent(pick[0], *pick)[1][0, 0]

        def error(i, m, evicted=evicted):
            read = layer.rule.read(k_in[0, i, m] @ state(m)) if evicted else 0.0
            read = read / max(len(evicted), 1) if layer.rule.sums else read
            return (v_in[0, i, m, : v.shape[-1]] - read).norm()

        for t in range(T):
            start = t - t % c.block
            if t == start > 0:  # who leaves during this block?
                received = {i: x * 0.5 ** (c.block / c.half_life) for i, x in received.items()}
                passed = range(start - c.window, start - c.window + c.block)  # by the window, until its end
                pool = routed + [i for i in passed if c.sinks <= i < start]
                routed, leaving = pool, []
                if len(pool) > c.budget:
                    at = torch.tensor(pool)[None, :, None]
                    mass = torch.tensor([received[i] for i in pool], dtype=q.dtype)[None, :, None]
                    size = v[:, pool, head].float().norm(dim=-1)[..., None]  # float32, as the layer has it
                    of_head = range(head * M // G, (head + 1) * M // G) if memory else ()
                    errors = [torch.stack([error(i, m) for m in of_head]).mean() for i in pool if memory]
                    errors = torch.stack(errors)[None, :, None].detach() if memory else None
                    known = Pool(at, mass, size, lambda e=errors: e, c.budget)
                    score = ROUTERS[c.router](known)[0, :, 0]
                    order = score.argsort(descending=True, stable=True).tolist()
                    parts = order[: c.budget], order[c.budget :]
                    routed, leaving = (sorted(pool[i] for i in part) for part in parts)
            if t >= c.exact_pairs:  # full: one comes, one goes
                evicted.append(leaving.pop(0))
            window = leaving + [i for i in range(max(start + c.block - c.window, c.sinks), t + 1)]
            sinks = [i for i in range(min(c.sinks, t + 1))]
            seen = sinks + routed + window
            places.append((t, head, sinks, list(routed), window, list(evicted)))
            for h in mine:
                x = k[0, seen, head] @ q[0, t, h] * scale
                p, o = x.softmax(0), x.softmax(0) @ v[0, seen, head]
                for i, share in zip(seen, p):
                    received[i] += share.item()
                if memory and evicted:
                    m = h * M // q.shape[2]
                    read = layer.rule.read(q_in[0, t, h] @ state(m))
                    keys = k[0, evicted, head]
                    weight = torch.ones(len(evicted), 1, dtype=q.dtype)
                    if c.fade:
                        weight = 0.5 ** (torch.arange(len(evicted)).flip(0)[:, None].to(q) / c.fade)
                    count = weight.sum()
                    moments = dict(count=torch.ones(1, 1, G, dtype=q.dtype) * count)
                    mean = (weight * keys).sum(0) / count
                    variance = (weight * (keys - mean).square()).sum(0) / count
                    for name, of in (("mean", mean), ("variance", variance)):
                        moments[name] = torch.zeros(1, 1, *k.shape[2:], dtype=q.dtype)
                        moments[name][0, 0, head] = of
                    if layer.rule.sums and layer.merge.uses_moments:
                        read = read / count
                    o_all, lse_all = (
                        torch.zeros_like(outs[:, :1]),
                        torch.zeros(1, 1, q.shape[2], dtype=q.dtype),
                    )
                    read_all = torch.zeros_like(o_all)
                    o_all[0, 0, h], lse_all[0, 0, h], read_all[0, 0, h] = o, x.logsumexp(0), read
                    o = layer.merge(o_all, lse_all, read_all, q[:, t : t + 1], moments, scale)[0, 0, h]
                outs[0, t, h] = o
    return outs, places


ROUTED = dict(sinks=2, window=8, block=4, budget=5, half_life=4)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize(
    "more", [{}, dict(memory_per="query", conv=3, fade=6), dict(budget=0), dict(merge="sum", sinks=0)]
)
def test_routing_in_blocks_equals_routing_token_by_token(router, more):
    layer = make_layer(**(ROUTED | dict(router=router) | more))
    x = qkv(27, B=1)
    want, _ = slow_routed(layer, *x, 0.4)
    assert torch.allclose(routed(layer, *x, scale=0.4), want, atol=1e-10)


@pytest.mark.parametrize("rule", la.RULES)
def test_routing_by_error_asks_every_rule_what_it_recalls(rule):
    layer = make_layer(rule=rule, router="error", **ROUTED)
    x = qkv(23, B=1)
    assert torch.allclose(routed(layer, *x, scale=0.4), slow_routed(layer, *x, 0.4)[0], atol=1e-10)


@settings(max_examples=12)
@given(
    T=st.integers(1, 26),
    router=st.sampled_from(sorted(ROUTERS)),
    budget=st.integers(0, 9),
    sinks=st.integers(0, 6),
)
def test_every_token_is_in_exactly_one_place_and_the_budget_is_kept(T, router, budget, sinks):
    """On the slow reference, which the fast one equals."""
    layer = make_layer(sinks=sinks, window=8, block=4, budget=budget, router=router)
    x = qkv(T, B=1)
    want, places = slow_routed(layer, *x, 0.4)
    for t, _, *four in places:
        assert sorted(sum(four, [])) == list(range(t + 1))
        assert len(four[1]) <= budget
        assert sum(map(len, four[:3])) == min(t + 1, layer.config.exact_pairs), "as many as under recency"
    assert torch.allclose(routed(layer, *x, scale=0.4), want, atol=1e-10)


@pytest.mark.parametrize("merge", ["sum", "lse"])
@pytest.mark.parametrize("budget", [0, 6])
@pytest.mark.parametrize("block", [1, 4])
def test_recency_in_blocks_equals_the_shifted_one_call_form(merge, budget, block):
    layer = make_layer(merge=merge, sinks=2, window=5, budget=budget, block=block, conv=3)
    x = qkv(40)
    assert torch.allclose(routed(layer, *x), layer(*x), atol=1e-10)


@pytest.mark.parametrize("router", [r for r in ROUTERS if r != "recency"])
def test_routers_are_causal_row_by_row_and_equal_the_teacher_while_nothing_is_evicted(router):
    layer = make_layer(router=router, **ROUTED)
    x = qkv(38)
    o = layer(*x)
    changed = [torch.cat([y[:, :21], y[:, 21:] + 1.0], 1) for y in x]
    assert torch.allclose(layer(*changed)[:, :21], o[:, :21], atol=1e-12)
    assert torch.allclose(layer(*[y[1:] for y in x]), o[1:], atol=1e-12)
    full = layer.config.exact_pairs
    assert torch.allclose(o[:, :full], la.softmax_attention(*x[:3])[:, :full], atol=1e-12)


def test_a_router_may_ask_for_the_recall_error_twice(monkeypatch):
    x, layer = qkv(40), make_layer(router="error", **ROUTED)
    want, once = layer(*x), ROUTERS["error"]
    monkeypatch.setitem(ROUTERS, "error", lambda pool: (pool.recall_error(), once(pool))[1])
    assert torch.equal(layer(*x), want)


def test_of_equal_tokens_the_older_stay():
    layer = make_layer(router="mass", **ROUTED)
    q, k, v, hidden = qkv(37, B=1)
    q = torch.zeros_like(q)  # all scores equal: the tokens of a block receive the same mass
    want, places = slow_routed(layer, q, k, v, hidden, 0.4)
    assert torch.allclose(routed(layer, q, k, v, hidden, scale=0.4), want, atol=1e-10)
    kept, evicted = places[15][3], places[15][5]  # the first choice: tokens 2..7 compete for 5 places
    assert (kept, evicted) == ([2, 3, 4, 5, 6], [7])


def test_the_choice_of_a_router_carries_no_gradient_but_the_memory_does():
    layer = make_layer(router="mix", dtype=torch.float32, **ROUTED)
    layer(*qkv(40, dtype=torch.float32)).square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all() and p.grad.abs().max() > 0, name


def test_a_surprising_token_is_kept_by_error_and_written_by_mass():
    """Twenty tokens say the same; one, that no query looks at, says something else."""
    torch.manual_seed(0)
    T, needle = 28, 9
    k = F.normalize(torch.randn(1, 1, 1, 8, dtype=F64), dim=-1).expand(1, T, 2, 8).clone()
    v = torch.ones(1, T, 2, 6, dtype=F64)
    k[:, needle], v[:, needle] = F.normalize(torch.randn(2, 8, dtype=F64), dim=-1), -5.0
    q = 5 * k[:, needle - 1, :1][:, None].expand(1, T, 4, 8)
    hidden = torch.zeros(1, T, 10, dtype=F64)
    for router, kept in (("error", True), ("mass", False)):
        torch.manual_seed(0)
        config = LinearizeConfig(router=router, sinks=1, window=8, block=4, budget=4, beta_bias=3.0)
        layer = LinearizedAttention(config, 10, 4, 2, 8, 6).double()
        want, places = slow_routed(layer, q, k, v, hidden, 1.0)
        assert torch.allclose(routed(layer, q, k, v, hidden, scale=1.0), want, atol=1e-10)
        assert (needle in places[T - 1][3]) == kept


# ----------------------------------------------------------------------------- the carried state


def in_pieces(layer, x, cuts):
    """The same sequence, given piece by piece to one state."""
    state, T = State(), x[0].shape[1]
    borders = [0, *sorted(cuts), T]
    pieces = [layer(*(y[:, a:b] for y in x), state=state) for a, b in zip(borders, borders[1:])]
    assert state.count == T
    return torch.cat(pieces, 1), state


@pytest.mark.parametrize("rule", la.RULES)
@pytest.mark.parametrize("router", ROUTERS)
@settings(max_examples=4)
@given(
    T=st.integers(1, 45),
    cuts=st.lists(st.integers(0, 45), max_size=4),
    merge=st.sampled_from(["off", "sum", "lse"]),
    memory_per=st.sampled_from(["kv", "query"]),
    conv=st.sampled_from([0, 3]),
    sinks=st.sampled_from([0, 2]),
    budget=st.sampled_from([0, 5]),
)
def test_any_split_of_a_sequence_equals_one_pass(
    rule, router, T, cuts, merge, memory_per, conv, sinks, budget
):  # fmt: skip
    if merge == "off" and router in ASK_THE_MEMORY:
        merge = "lse"
    layer = make_layer(
        rule=rule, router=router, merge=merge, memory_per=memory_per, conv=conv, sinks=sinks, window=8,
        block=4, budget=budget,
    )  # fmt: skip
    x = qkv(T)
    got, _ = in_pieces(layer, x, [c for c in cuts if c <= T])
    assert torch.allclose(got, layer(*x), atol=1e-9)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("merge,conv", [("sum", 3), ("lse", 0)])
def test_one_token_at_a_time_equals_one_pass_and_the_state_stops_growing(router, merge, conv):
    layer = make_layer(router=router, merge=merge, conv=conv, **ROUTED)
    x, state, sizes, outs = qkv(60), State(), [], []
    for t in range(60):
        outs.append(layer(*(y[:, t : t + 1] for y in x), state=state))
        sizes.append(state.nbytes())
    assert torch.allclose(torch.cat(outs, 1), layer(*x), atol=1e-9)
    assert len(set(sizes[layer.config.exact_pairs :])) == 1  # one comes, one goes


@pytest.mark.parametrize("router", ["recency", "mix"])
def test_a_state_in_16_bits_takes_half_the_bytes_and_stays_near(router):
    x = qkv(60, dtype=torch.float32)
    layer = make_layer(router=router, dtype=torch.float32, **ROUTED)
    half = layer.variant(state_bits=16)
    want, whole = in_pieces(layer, x, range(60))
    got, state = in_pieces(half, x, range(60))
    assert state.rest["S"].dtype == torch.float16
    assert whole.nbytes() - state.nbytes() == whole.rest["S"].nbytes // 2
    if router == "recency":  # a rounding may turn a router's choice
        # float16 rounds at 2^-11 of a number, once a step; a write of about a tenth fades what came before
        assert 0 < (got - want).norm() / want.norm() < 10 * 2**-11
    assert torch.isfinite(got).all()


def test_rows_of_a_batch_can_be_taken_apart_and_joined():
    layer = make_layer(router="mix", **ROUTED)
    x = qkv(50)
    state = State()
    layer(*(y[:, :30] for y in x), state=state)
    apart = [state.row(2), state.row(1), state.row(0)]
    joined = State.join(apart)
    want = layer(*x)[:, 30:]
    assert torch.allclose(layer(*(y[:, 30:].flip(0) for y in x), state=joined), want.flip(0), atol=1e-10)
    assert apart[0].count == 30, "joining rows leaves them as they were"


@pytest.mark.parametrize("router", ["recency", "mix"])
def test_state_bytes_are_those_of_a_real_state(router):
    layer = make_layer(router=router, conv=3, dtype=torch.float32, **ROUTED)
    for T in (1, 5, 16, 19, 200):
        state = State()
        T_real = min(T, 19)  # more than all exact pairs: the state has its full size
        layer(*(y[:1] for y in qkv(T_real, dtype=torch.float32)), state=state)
        assert layer_bytes(layer, T, torch.float32) == state.nbytes()


def test_a_variant_shares_the_parameters_and_changes_nothing_else():
    layer = make_layer(router="mix", **ROUTED)
    x, before = qkv(40), None
    before = layer(*x)
    off = layer.variant(merge="off", router="recency")
    want = exact_attention(*x[:3], 2, 13, 8**-0.5)[0]
    assert torch.equal(off(*x), want)
    assert not list(off.parameters()) and torch.equal(layer.variant()(*x), before)
    assert {id(p) for p in layer.variant(router="random").parameters()} == {id(p) for p in layer.parameters()}
    assert torch.equal(layer(*x), before)


# ----------------------------------------------------------------------------- convolution, dtypes, options


@pytest.mark.parametrize("init", ["identity", "default"])
def test_short_convolution_equals_conv1d(init):
    torch.manual_seed(0)
    conv, x = ShortConv(8, 3, 4, init).double(), torch.randn(2, 20, 3, 4, dtype=F64)
    weight = conv.weight.permute(1, 2, 0).reshape(12, 1, 8)
    want = F.conv1d(F.pad(x.flatten(2).mT, (7, 0)), weight, conv.bias.flatten(), groups=12).mT.reshape(
        x.shape
    )
    assert torch.allclose(conv(x), want)
    assert init == "default" or torch.equal(conv(x), x)
    tail = F.pad(x[:, :5], (0, 0, 0, 0, 2, 0))  # two pieces, the second with what came before it
    assert torch.allclose(torch.cat([conv(x[:, :5]), conv(x[:, 5:], tail)], 1), want)


@pytest.mark.parametrize("impl", ["recurrent", "chunked"])
def test_the_layer_does_not_depend_on_the_implementation(impl):
    x = qkv(50)
    want = make_layer(conv=3)(*x)
    assert torch.allclose(make_layer(conv=3, impl=impl)(*x), want, atol=1e-10)


@pytest.mark.parametrize("rule", la.RULES)
@pytest.mark.parametrize("merge", ["sum", "lse"])
def test_every_new_parameter_gets_a_finite_gradient(rule, merge):
    layer = make_layer(rule=rule, merge=merge, sinks=2, window=4, conv=3, dtype=torch.float32)
    layer(*qkv(40, dtype=torch.float32)).square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all(), name
        assert p.grad.abs().max() > 0, name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_model_gets_half_precision_outputs_close_to_float64(dtype):
    layer = make_layer(sinks=2, window=6, conv=3, dtype=torch.float32)
    x = [y.to(dtype) for y in qkv(50)]
    out = layer(*x)
    want = make_layer(sinks=2, window=6, conv=3)(*[y.double() for y in x])
    assert out.dtype == dtype
    # scores of size ~3 are products in the model's dtype: some units in the last place of p and output
    assert (out.double() - want).abs().max() / want.abs().max() < 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_thousands_lose_no_digit_in_half_precision(dtype):
    """Qwen2's keys have biases of 100 and more: bfloat16 products of that size are off by whole units."""
    q, k, v, _ = (y.to(dtype) for y in qkv(40))
    k = k + 60 * torch.sign(k[:, :1])
    o, lse = exact_attention(q, k, v, 2, 8, 0.35)
    want, want_lse = softmax_over(q.double(), k.double(), v.double(), exact_set(40, 2, 8), 0.35)
    # p is rounded before, o after the product with v: two roundings of numbers up to max|v| ~ 3
    assert (o.double() - want).abs().max() < 4 * torch.finfo(dtype).eps
    assert (lse.double() - want_lse).abs().max() < 1e-3  # float32 scores of 300


def test_a_layer_takes_a_sequence_of_no_tokens():
    layer = make_layer(sinks=1, window=3)
    assert layer(*qkv(0)).shape == (3, 0, 4, 6)


def test_key_and_value_dimensions_may_differ_and_heads_may_not_be_grouped():
    torch.manual_seed(0)
    layer = LinearizedAttention(LinearizeConfig(sinks=1, window=3), 10, 3, 3, 8, 5)
    q, k, v, h = (torch.randn(1, 17, *s) for s in ((3, 8), (3, 8), (3, 5), (10,)))
    assert layer(q, k, v, h).shape == (1, 17, 3, 5)


@pytest.mark.parametrize(
    "wrong,message",
    [
        (dict(rule="gdm"), "unknown rule 'gdm'; choose from: deltanet"),
        (dict(merge="mean"), "unknown merge 'mean'; choose from: lse, off, sum"),
        (dict(router="mas"), "unknown router 'mas'; choose from: error, mass, mix, passage, random, recency"),
        (dict(router="mass", window=30, block=32), "window must be at least the block of 32, got 30"),
        (dict(router="error", merge="off"), "router error asks the memory"),
        (dict(rule="gla", state_bits=16), "state_bits 16 wants a delta rule, got gla"),
        (dict(state_bits=8), "unknown state_bits 8"),
        (dict(sinks=-1), "sinks must be at least 0, got -1"),
        (dict(conv=100), "conv must be at least 0 and at most 64, got 100"),
        (dict(chunk=48), "unknown chunk"),
        (dict(window="many"), "window must be a whole number, got 'many'"),
        (dict(window=6.5), "window must be a whole number, got 6.5"),
        (dict(beta_bias="low"), "beta_bias must be a number, got 'low'"),
    ],
)
def test_a_wrong_configuration_is_refused_in_one_line(wrong, message):
    with pytest.raises(ValueError, match=message) as error:
        LinearizeConfig(**wrong)
    assert "\n" not in str(error.value)


def test_the_configuration_is_frozen_and_survives_json():
    import json

    config = LinearizeConfig(rule="kda", sinks=8)
    assert LinearizeConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.sinks = 1


def test_the_demonstration_shows_what_every_router_keeps():
    script = Path(la.__file__).with_name("interventions.py")
    env = os.environ | dict(OMP_NUM_THREADS="1")  # tiny tensors: threads would wait for each other
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for router in ("recency", "mass", "value", "error", "passage", "mix"):
        assert re.search(rf"\n{router}: \d of the 5 digits of the key\n\[The", done.stdout), router
