"""linear_attn.py: the recurrence and its chunked form agree; every lemma holds as it is stated."""

import analysis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import linear_attn as la

F64 = torch.float64
EXACT = 1e-11  # float64 sums of a few hundred terms of size one: rounding is 1e-13, with room for long chunks


def relative(a, b):
    """max|a-b| / max|b|"""
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() if a.numel() else 0.0


def inputs(seed, T, decay=None, B=2, G=2, R=2, K=5, V=3, top=1.0, dtype=F64):
    """Random six inputs and a state; erase and write in [0, top]."""
    torch.manual_seed(seed)
    k = F.normalize(torch.randn(B, T, G, K, dtype=dtype), dim=-1)
    q, v = torch.randn(B, T, G * R, K, dtype=dtype), torch.randn(B, T, G, V, dtype=dtype)
    g = {
        None: None,
        "head": -torch.rand(B, T, G, dtype=dtype),
        "channel": -torch.rand(B, T, G, K, dtype=dtype),
    }[decay]
    erase, write = (top * torch.rand(B, T, G, dtype=dtype) for _ in range(2))
    return [q, k, v, g, erase, write, torch.randn(B, G, K, V, dtype=dtype)]


@given(
    seed=st.integers(0, 999),
    T=st.integers(0, 130),
    chunk=st.sampled_from([1, 2, 16, 64]),
    decay=st.sampled_from([None, "head", "channel"]),
    top=st.sampled_from([0.0, 1.0, 2.0]),
)
def test_chunked_equals_recurrent(seed, T, chunk, decay, top):
    args = inputs(seed, T, decay, top=top)
    for got, want in zip(la.chunked(*args, chunk=chunk), la.recurrent(*args)):
        assert got.shape == want.shape and got.dtype == want.dtype
        assert relative(got, want) < EXACT


@given(seed=st.integers(0, 999), cut=st.integers(0, 70), decay=st.sampled_from([None, "head", "channel"]))
def test_a_sequence_in_two_pieces_equals_one_call(seed, cut, decay):
    *args, state = inputs(seed, 70, decay)
    piece = lambda part: [None if x is None else x[:, part] for x in args]  # noqa: E731
    o_1, middle = la.chunked(*piece(slice(0, cut)), state, chunk=16)
    o_2, end = la.chunked(*piece(slice(cut, 70)), middle, chunk=32)
    o, want = la.chunked(*args, state, chunk=64)
    assert relative(torch.cat([o_1, o_2], 1), o) < EXACT and relative(end, want) < EXACT


@pytest.mark.parametrize("decay", [None, "head", "channel"])
@pytest.mark.parametrize("top", [0.0, 1.0])
def test_gradients_of_chunked_equal_those_of_recurrent(decay, top):
    grads = []
    for f in (la.recurrent, lambda *a: la.chunked(*a, chunk=16)):
        args = [None if x is None else x.requires_grad_() for x in inputs(3, 37, decay, top=top)]
        o, state = f(*args)
        torch.manual_seed(9)
        ((o * torch.randn(o.shape)).sum() + (state * torch.randn(state.shape)).sum()).backward()
        grads.append([x.grad for x in args if x is not None])
    for got, want in zip(*grads):
        assert relative(got, want) < EXACT


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_float32_keeps_its_digits_next_to_a_decay_of_minus_1000(decay):
    args = inputs(1, 100, decay)
    args[3] = torch.where(torch.rand_like(args[3]) < 0.2, -1000.0, args[3] * 0.1)
    low = [x.float() for x in args]
    # 1e-5: a few hundred float32 roundings; cumulative sums over the chunk would lose 1e-2 here
    assert relative(la.chunked(*low)[0].double(), la.recurrent(*args)[0]) < 1e-5
    assert torch.isfinite(la.chunked(*low)[1]).all()


def test_identical_keys_with_beta_one_stay_finite_and_exact():
    args = inputs(2, 90)
    args[1] = args[1][:, :1].expand_as(args[1]).contiguous()
    args[4] = args[5] = torch.ones_like(args[4])
    assert relative(la.chunked(*args)[0], la.recurrent(*args)[0]) < EXACT
    assert (
        relative(
            la.chunked(*[x if x is None else x.float() for x in args])[0].double(), la.recurrent(*args)[0]
        )
        < 1e-5
    )


def test_none_means_no_decay_no_erase_full_write_and_an_empty_state():
    q, k, v, *_ = inputs(4, 20)
    zero, one = torch.zeros_like(v[..., 0]), torch.ones_like(v[..., 0])
    for f in (la.recurrent, la.chunked):
        got = f(q, k, v)
        want = f(q, k, v, zero, zero, one, torch.zeros(2, 2, 5, 3, dtype=F64))
        assert relative(got[0], want[0]) < EXACT and relative(got[1], want[1]) < EXACT


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_gives_half_precision_out_and_a_float32_state(dtype):
    args = [None if x is None else x.to(dtype) for x in inputs(5, 33, "head")]
    for f in (la.recurrent, la.chunked):
        o, state = f(*args)
        assert o.dtype == dtype and state.dtype == torch.float32
    wide = [None if x is None else x.double() for x in args]
    eps = torch.finfo(dtype).eps  # only the output is rounded: half a unit in its last place
    assert relative(la.chunked(*args)[0].double(), la.recurrent(*wide)[0]) < eps


def test_a_chunk_that_is_no_power_of_two_is_refused():
    with pytest.raises(ValueError, match="power of two"):
        la.chunked(*inputs(0, 5), chunk=48)


# ----------------------------------------------------------------------------- rules


def make_rule(name, dtype=F64, memory_heads=2, **kw):
    torch.manual_seed(0)
    rule = la.RULES[name](12, 4, memory_heads, 6, **kw).to(dtype)
    for p in rule.parameters():
        p.data += 0.3 * torch.randn_like(p)  # away from the zeros it starts with
    return rule


def rule_inputs(T=40, dtype=F64):
    torch.manual_seed(1)
    return [torch.randn(2, T, *s, dtype=dtype) for s in ((12,), (4, 6), (2, 6), (2, 5))]


@pytest.mark.parametrize("name", la.RULES)
@pytest.mark.parametrize("memory_heads", [2, 4])
def test_every_rule_is_chunked_equals_recurrent(name, memory_heads):
    rule = make_rule(name, memory_heads=memory_heads)
    six = rule(*rule_inputs())
    assert relative(rule.read(la.chunked(*six, chunk=16)[0]), rule.read(la.recurrent(*six)[0])) < EXACT


@pytest.mark.parametrize("name", la.RULES)
def test_every_rule_is_causal(name):
    rule, x = make_rule(name), rule_inputs()
    o = rule.read(la.chunked(*rule(*x), chunk=16)[0])
    changed = [torch.cat([y[:, :25], y[:, 25:] + 1.0], 1) for y in x]
    o_2 = rule.read(la.chunked(*rule(*changed), chunk=16)[0])
    assert torch.equal(o[:, :25], o_2[:, :25]) and not torch.allclose(o[:, 25:], o_2[:, 25:])


@pytest.mark.parametrize("name", la.RULES)
@pytest.mark.parametrize("features", ["l2", "silu"])
def test_every_rule_has_finite_gradients_in_float32(name, features):
    rule = make_rule(name, torch.float32, features=features)
    x = [y.requires_grad_() for y in rule_inputs(dtype=torch.float32)]
    x[2].data[:, 3:7] = 0  # zero keys
    rule.read(la.chunked(*rule(*x))[0]).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in rule.parameters())
    assert all(torch.isfinite(y.grad).all() for y in x[1:])


@pytest.mark.parametrize("name", la.RULES)
def test_every_rule_decays_and_never_grows(name):
    _, _, _, log_decay, erase, write = make_rule(name)(*rule_inputs())
    assert log_decay is None or (log_decay <= 0).all()
    assert erase is None or ((erase >= 0) & (erase <= 1)).all()
    assert ((write >= 0) & (write <= 1)).all()


def test_unknown_names_list_the_choices():
    with pytest.raises(ValueError, match=", ".join(sorted(la.RULES))):
        la.lookup(la.RULES, "gdm", "rule")
    with pytest.raises(ValueError, match="l2, silu, softmax"):
        make_rule("gdn", features="relu")


def test_hedgehog_reads_a_weighted_mean_of_values():
    rule, (hidden, q, k, v) = make_rule("hedgehog"), rule_inputs()
    o = rule.read(la.recurrent(*rule(hidden, q, k, torch.ones_like(v)))[0])
    assert torch.allclose(o, torch.ones_like(o), atol=1e-4)  # 1e-6 in the denominator against sums of about 1


# ----------------------------------------------------------------------------- the analysis


@given(seed=st.integers(0, 10**6), t=st.integers(2, 200), size=st.floats(0.01, 3.0))
def test_lemma_1_remainder_is_at_most_half_the_squared_norm(seed, t, size):
    torch.manual_seed(seed)
    x = torch.randn(t, dtype=F64) * size
    first_order, bound = analysis.softmax_first_order(x)
    assert (x.softmax(0) - first_order).abs().max() <= bound


def test_lemma_1_as_printed_in_the_main_text_is_false():
    """(x_i - mean x + eps_i)/t with |eps_i| <= ||x||^2/2: one score of 3 among 512 breaks it."""
    x = torch.zeros(512, dtype=F64)
    x[0] = 3.0
    first_order, bound = analysis.softmax_first_order(x)
    assert 512 * (x.softmax(0) - first_order).abs().max() > bound


@given(seed=st.integers(0, 10**6), t=st.integers(1, 64), bias=st.floats(0.5, 5.0))
def test_softmax_projection_identity_is_exact_with_its_residual(seed, t, bias):
    torch.manual_seed(seed)
    k = F.normalize(torch.randn(t, 9, dtype=F64) + bias, dim=-1)
    centred, projected, residual = la.softmax_projection_identity(k)
    assert (centred - projected - residual).abs().max() < 1e-12
    m = k.mean(0)
    cos, length = k @ m / m.norm(), m.norm()
    assert torch.allclose(residual.norm(dim=-1), (cos - length).abs(), atol=1e-12)
    assert (residual.norm(dim=-1) <= (cos - 1).abs() + (1 - length).abs() + 1e-12).all()
    assert (projected @ m).abs().max() < 1e-12  # orthogonal to the mean: it is a projection


@given(seed=st.integers(0, 10**6), t=st.integers(1, 60), top=st.floats(0.001, 1.0), same=st.booleans())
def test_lemma_3_bound_holds_for_any_unit_keys(seed, t, top, same):
    torch.manual_seed(seed)
    k = F.normalize(torch.randn(t, 6, dtype=F64), dim=-1)
    k = k[:1].expand_as(k) if same else k
    beta = top * torch.rand(t, dtype=F64)
    product, first_order, bound = analysis.rank1_product(k, beta)
    assert torch.linalg.matrix_norm(product - first_order, 2) <= bound * (1 + 1e-9) + 1e-14


def test_lemma_3_error_of_identical_keys_grows_like_t_squared():
    """So the paper's C t beta_max^2 holds for no constant C."""
    k, beta = torch.zeros(400, 3, dtype=F64), torch.full((400,), 1e-4, dtype=F64)
    k[:, 0] = 1
    for t in (100, 400):
        product, first_order, _ = analysis.rank1_product(k[:t], beta[:t])
        ratio = torch.linalg.matrix_norm(product - first_order, 2) / (t**2 * 1e-8 / 2)
        assert 0.95 < ratio < 1.0  # t^2 b^2/2, up to terms of order t b = 0.04


@given(seed=st.integers(0, 10**6), t=st.integers(1, 40))
def test_softmax_is_a_delta_rule_in_function_space(seed, t):
    torch.manual_seed(seed)
    q, k, v = torch.randn(4, dtype=F64), torch.randn(t, 4, dtype=F64), torch.randn(t, 3, dtype=F64)
    want = la.softmax_attention(q.expand(1, t, 1, 4), k[None, :, None], v[None, :, None], 0.7)[0, :, 0]
    assert (analysis.softmax_as_delta_rule(q, k, v, 0.7) - want).abs().max() < 1e-12


@given(seed=st.integers(0, 10**6), t=st.integers(2, 30))
def test_softmax_jacobian_is_a_projection_between_two_diagonals(seed, t):
    """diag p - p p^T = D^1/2 (I - u u^T) D^1/2 with D = diag p, u = sqrt p, ||u|| = 1: softmax differentiates
    into a rank-1 orthogonal projection between two diagonals."""
    torch.manual_seed(seed)
    x = torch.randn(t, dtype=F64)
    want = torch.autograd.functional.jacobian(lambda y: y.softmax(0), x)
    p, u = x.softmax(0), x.softmax(0).sqrt()
    assert u.norm() == pytest.approx(1)
    factored = u[:, None] * (torch.eye(t) - torch.outer(u, u)) * u
    assert (torch.diag(p) - torch.outer(p, p) - want).abs().max() < 1e-12
    assert (factored - want).abs().max() < 1e-12


def test_sharp_softmax_over_orthonormal_keys_is_the_delta_rule():
    """With beta_t = 1/(times key k_t was seen so far), in the limit of sharp scores."""
    torch.manual_seed(0)
    which = torch.randint(0, 5, (40,))
    k, v = torch.eye(5, dtype=F64)[which], torch.randn(40, 3, dtype=F64)
    beta = 1 / torch.stack([(which[: t + 1] == which[t]).sum() for t in range(40)]).double()
    args = [x[None, :, None] for x in (k, k, v)]
    o, _ = la.recurrent(*args, None, beta[None, :, None], beta[None, :, None])
    assert (o - la.softmax_attention(*args, scale=200.0)).abs().max() < 1e-12


def mean_residual(k_bthk):
    """The paper's R_t, the mean over i <= t of ||r_i|| = |cos a_i - ||m_t|||, from all pairs; (B,T,H)."""
    mean_bthk = k_bthk.cumsum(1) / torch.arange(1, k_bthk.shape[1] + 1)[:, None, None]
    cos_bths = torch.einsum("bthk,bshk->bths", F.normalize(mean_bthk, dim=-1), k_bthk)
    seen_ts = torch.ones(2 * k_bthk.shape[1:2], dtype=F64).tril()[:, None]
    return ((cos_bths - mean_bthk.norm(dim=-1)[..., None]).abs() * seen_ts).sum(-1) / seen_ts.sum(-1)


def test_diagnostics_are_those_of_the_definition_at_every_t():
    torch.manual_seed(0)
    k = F.normalize(torch.randn(1, 30, 2, 5, dtype=F64) + 0.5, dim=-1)
    C, mean, rms = analysis.key_concentration(k), mean_residual(k), analysis.projection_residual(k)
    for t in (1, 7, 29):
        for h in range(2):
            seen = k[0, : t + 1, h]
            _, _, r = la.softmax_projection_identity(seen)
            assert torch.isclose(C[0, t, h], F.cosine_similarity(seen[-1], seen.mean(0), dim=0))
            assert torch.isclose(mean[0, t, h], r.norm(dim=-1).mean())
            assert torch.isclose(
                rms[0, t, h], r.norm(dim=-1).square().mean().sqrt(), atol=1e-7
            )  # sqrt(1e-16)
    assert (mean <= rms + 1e-12).all()


@pytest.mark.parametrize("H", [2, 4])
def test_softmax_attention_equals_torch(H):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 17, H, 8), torch.randn(2, 17, 2, 8), torch.randn(2, 17, 2, 8)
    want = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    assert torch.allclose(la.softmax_attention(q, k, v), want.transpose(1, 2), atol=1e-5)
