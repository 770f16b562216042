"""kernels.py under Triton's interpreter, against float64 autograd through the naive recurrence.

The interpreter runs the kernels in numpy, about 0.1 ms an operation: shapes are small here, and
real sizes are tests/gpu_check.py's. float32 bound: 1e-5 of the largest value, some 80 roundings of 6e-8."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton decides at its first import

import functools  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

torch.set_num_threads(1)
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from gpu_check import relative_error  # noqa: E402

import kernels as M  # noqa: E402
from kernels import linear_attention, recurrent  # noqa: E402

triton_attention = functools.partial(linear_attention, impl="triton")


few = settings(max_examples=4, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


def inputs(T=20, H=1, G=1, K=16, V=16, decay="channel", delta=True, B=1, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=gen)

    g = {"": None, "head": -normal(B, T, G).abs(), "channel": -normal(B, T, G, K).abs()}[decay]
    b, w = (normal(B, T, G).sigmoid() for _ in range(2))
    k = F.normalize(normal(B, T, G, K), dim=-1)
    args = dict(q_bthk=normal(B, T, H, K) / K**0.5, k_btgk=k, v_btgv=normal(B, T, G, V), log_decay=g)
    return args | dict(erase=b if delta else None, write=w if delta else None, state=normal(B, G, K, V))


def errors(args, loss="both", chunk=16, fn=triton_attention):
    """name -> relative error, of o, S and the gradient of every tensor given."""
    results = []
    for run, dtype in ((functools.partial(fn, chunk=chunk), None), (recurrent, torch.float64)):
        leaves = {
            n: z.detach().to(dtype or z.dtype, copy=True).requires_grad_()
            for n, z in args.items()
            if z is not None
        }
        o, S = run(**leaves)
        gen = torch.Generator().manual_seed(1)
        wo, wS = torch.randn(o.shape, generator=gen), torch.randn(S.shape, generator=gen)
        total = (o.double() * wo).sum() * (loss != "state") + (S.double() * wS).sum() * (loss != "output")
        grads = torch.autograd.grad(total, list(leaves.values()))
        results.append(dict(o=o.detach(), S=S.detach(), **{"d" + n: d for n, d in zip(leaves, grads)}))
    return {n: relative_error(results[0][n], results[1][n]) for n in results[0]}


def assert_close(args, bound=1e-5, **kw):
    wrong = {n: e for n, e in errors(args, **kw).items() if not e <= bound}
    assert not wrong, wrong


@few
@given(
    T=st.integers(1, 40),
    chunk=st.sampled_from([16, 32, 64]),
    K=st.sampled_from([1, 8, 16, 24, 33]),
    V=st.sampled_from([1, 5, 16, 35]),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    decay=st.sampled_from(["", "head", "channel"]),
    delta=st.booleans(),
    twice=st.booleans(),
    state=st.booleans(),
    loss=st.sampled_from(["both", "output", "state"]),
)
def test_triton_equals_the_recurrence_in_outputs_and_all_gradients(
    T, chunk, K, V, heads, decay, delta, twice, state, loss
):
    args = inputs(T, *heads, K, V, decay, delta, seed=T)
    if delta and twice:  # erase up to 2: a reflection instead of a projection
        args["erase"] = 2 * args["erase"]
    assert_close(args if state else args | dict(state=None), chunk=chunk, loss=loss)


@pytest.mark.parametrize("decay", ["", "head", "channel"])
@pytest.mark.parametrize("heads", [(2, 1), pytest.param((2, 2), marks=pytest.mark.exhaustive)])
def test_delta_rule_over_three_chunks_equals_the_recurrence_in_all_gradients(decay, heads):
    assert_close(inputs(33, *heads, 16, 16, decay), chunk=16)


def test_gradients_of_log_decay_are_right_where_they_are_tiny():
    """(19) exists for this: next to exp(-20) terms are 1e-9 of the largest. Of each, float32 keeps 1e-4."""
    args, grads = hard_case("decay -20 a step"), []
    for run, dtype in ((triton_attention, torch.float32), (recurrent, torch.float64)):
        leaves = {n: z.detach().to(dtype, copy=True) for n, z in args.items()}
        g = leaves["log_decay"].requires_grad_()
        grads.append(torch.autograd.grad(run(**leaves)[0].sum(), g)[0].double()[:, 1:])
    assert (grads[0] - grads[1]).abs().le(1e-4 * grads[1].abs() + 1e-14).all()


@few
@given(
    T=st.integers(1, 70), chunk=st.sampled_from([1, 16, 64]), decay=st.sampled_from(["", "head", "channel"])
)
def test_auto_on_cpu_equals_the_recurrence(T, chunk, decay):
    args = inputs(T, 2, 1, 8, 5, decay)
    assert_close(args, fn=linear_attention, chunk=chunk)


def hard_case(name):
    args = inputs(T=33, decay="")
    k, b = args["k_btgk"], args["erase"]
    ones = torch.ones_like(b)
    if name == "identical keys, beta 1":
        args |= dict(k_btgk=k[:, :1].expand_as(k), erase=ones, write=ones)
    elif name == "near-identical keys, beta 1":
        near = F.normalize(
            k[:, :1] + 0.02 * torch.randn(k.shape, generator=torch.Generator().manual_seed(2)), dim=-1
        )
        args |= dict(k_btgk=near, erase=ones, write=ones)
    elif name == "zero keys":
        args |= dict(k_btgk=0 * k)
    elif name == "unnormalised keys":
        args |= dict(k_btgk=1.3 * k)
    elif name == "beta 0":
        args |= dict(erase=0 * ones, write=0 * ones)
    elif name == "beta 2, identical keys":
        args |= dict(k_btgk=k[:, :1].expand_as(k), erase=2 * ones, write=2 * ones)
    elif name == "decay -20 a step":
        args |= dict(log_decay=torch.full(k.shape, -20.0))
    elif name == "decay -1000 next to 0":
        args |= dict(
            log_decay=-1000.0 * (torch.rand(k.shape, generator=torch.Generator().manual_seed(3)) > 0.8)
        )
    return args


@pytest.mark.parametrize(
    "name",
    [
        "identical keys, beta 1",
        "near-identical keys, beta 1",
        "zero keys",
        "unnormalised keys",
        "beta 0",
        "beta 2, identical keys",
        "decay -20 a step",
        "decay -1000 next to 0",
    ],
)
def test_hard_case_equals_the_recurrence(name):
    assert_close(hard_case(name), chunk=32)


def test_127_tokens_equal_the_recurrence():
    assert_close(inputs(127, decay="", K=16), chunk=64)


def test_one_token_equals_the_recurrence():
    assert_close(inputs(1))


def test_no_tokens_return_the_state_and_pass_its_gradient():
    args = inputs(0, H=2)
    state = args["state"].requires_grad_()
    o, S = triton_attention(**args)
    assert o.shape == (1, 0, 2, 16) and torch.equal(S, state)
    assert torch.equal(torch.autograd.grad(S.sum(), state)[0], torch.ones_like(state))


def test_wide_keys_and_values_equal_the_recurrence():
    assert_close(inputs(3, K=200, V=130, decay=""))


def test_two_calls_with_a_carried_state_equal_one():
    args = inputs(30)
    whole_o, whole_S = triton_attention(**args, chunk=16)
    first, second = (
        {n: z if n == "state" else z[:, part] for n, z in args.items()} for part in (slice(13), slice(13, 30))
    )
    o1, S1 = triton_attention(**first, chunk=16)
    o2, S2 = triton_attention(**second | dict(state=S1), chunk=16)
    # two float32 evaluations of one number, in another order
    assert relative_error(torch.cat([o1, o2], 1), whole_o) < 1e-6 and relative_error(S2, whole_S) < 1e-6


@pytest.mark.parametrize("name", ["q_bthk", "k_btgk", "v_btgv", "log_decay", "erase", "write"])
def test_changing_an_input_leaves_earlier_outputs_bit_for_bit(name):
    args = inputs(20)
    before = triton_attention(**args, chunk=16)[0]
    changed = args[name].clone()
    changed[:, 10:] = changed[:, 10:] - 0.5
    after = triton_attention(**args | {name: changed}, chunk=16)[0]
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_no_decay_equals_decay_zero():
    args = inputs(20, decay="")
    o, S = triton_attention(**args)
    o0, S0 = triton_attention(**args | dict(log_decay=torch.zeros(1, 20, 1, 16)))
    assert relative_error(o0, o) < 1e-6 and relative_error(S0, S) < 1e-6  # other order of float32 sums


def test_non_contiguous_inputs_equal_contiguous_ones():
    args = inputs(18, H=2, G=2)
    strided = {n: z.transpose(0, -1).contiguous().transpose(0, -1) for n, z in args.items()}
    assert not strided["k_btgk"].is_contiguous()
    for got, want in zip(triton_attention(**strided), triton_attention(**args), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("delta", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_16_bit_inputs_lose_only_the_rounding_of_their_outputs(dtype, delta):
    """Tiles are float32 even here, so the one loss is the last rounding: eps/2 of the value. dk and dv sum
    two rounded terms when erase or write is given, hence eps. An interpreter that multiplied bfloat16 bit
    patterns would be off by orders of magnitude, one that truncates by up to eps a term."""
    args = inputs(20, decay="head", delta=delta)
    for name in ("q_bthk", "k_btgk", "v_btgv"):
        args[name] = args[name].to(dtype)
    assert_close(args, bound=torch.finfo(dtype).eps * (1.0 if delta else 0.51))
    o, S = triton_attention(**args)
    assert o.dtype == dtype and S.dtype == torch.float32


def test_70000_memories_fit_the_grid():
    """Every grid axis but the first ends at 65,535."""
    launches = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(M, "launch", lambda kernel, grid, *args, **constants: launches.append(grid))
        one = torch.zeros(70_000, 1, 1, 16)
        leaf = one.clone().requires_grad_()
        triton_attention(leaf, one, one, erase=one[..., 0])[0].sum().backward()
    assert len(launches) >= 9
    assert all(grid[0] >= 70_000 and (len(grid) == 1 or grid[1] <= 65_535) for grid in launches)


def test_an_unknown_impl_lists_the_choices():
    with pytest.raises(ValueError, match="chunked, recurrent, triton"):
        linear_attention(*inputs(2).values(), impl="cuda")


def test_float64_and_too_wide_keys_are_refused_by_triton():
    args = inputs(2)
    with pytest.raises(ValueError, match="float64"):
        triton_attention(**{n: z.double() for n, z in args.items()})
    with pytest.raises(ValueError, match="256"):
        triton_attention(**inputs(2, K=257))


def test_an_error_inside_triton_is_not_swallowed(monkeypatch):
    def broken(*args, **kw):
        raise RuntimeError("compiler says no")

    monkeypatch.setattr(M, "launch", broken)
    with pytest.raises(RuntimeError, match="compiler says no"):
        triton_attention(**inputs(2))


def python(code, **env):
    clean = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean | env, capture_output=True, text=True, timeout=600
    )


CALL = "import torch; from kernels import linear_attention as f; x = torch.ones(1, 3, 1, 4); "
CALL += "f(x, x, x{}); f(x, x, x{})"


def test_without_triton_auto_works_and_asking_for_triton_is_one_clear_error():
    missing = "import sys; sys.modules['triton'] = None; "
    out = python(missing + CALL.format("", "") + "; print('auto worked'); f(x, x, x, impl='triton')")
    assert out.stdout == "auto worked\n"
    assert out.stderr.splitlines()[-1].startswith("ValueError: impl='triton' needs the package triton")


def test_asking_for_triton_on_cpu_without_the_interpreter_is_one_clear_error():
    out = python(CALL.format("", ", impl='triton'"))
    assert out.stderr.splitlines()[-1].startswith("ValueError: impl='triton' needs CUDA tensors, got cpu")


def test_every_kernel_compiles_for_sm_80_and_sm_90_without_spills(compilation, capsys):
    """bfloat16, d = 64 and 128, chunk 64; the script fails on a stack or too much shared memory."""
    pytest.importorskip("triton.backends.nvidia", reason="this Triton cannot compile for NVIDIA")
    output, _ = compilation.communicate(timeout=900)
    with capsys.disabled():
        print("\n" + output)
    assert compilation.returncode == 0 and output.count("stack=0") == output.count("kernel=") >= 48
