"""tests/exercises: each fails and says what is to do, and its check accepts a right answer.

The answers are made here from the repository's own parts, in a temporary file: there is nothing to copy.
"""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import test_linear_attn

FOLDER = Path(__file__).parent / "exercises"
ANSWERS = {
    "test_1_decay_per_head": """
    from linear_attn import RULES
    rule = RULES["gdn"](*W_dh.shape, W_dh.shape[1], 4)
    rule.W_1.data, rule.b_alpha.data = W_dh, b_h
    return rule.gates(rule.encode(hidden_btd)[:, :, None].expand(-1, -1, W_dh.shape[1], -1))[0]""",
    "test_2_one_step_of_the_delta_rule": """
    from linear_attn import recurrent
    x, strength = [y[None, None, None] for y in (k_k, k_k, v_v)], v_v.new_full((1, 1, 1), b)
    return recurrent(*x, None, strength, strength, S_kv[None, None])[1][0, 0]""",
    "test_3_two_parts_one_softmax": """
    from interventions import MERGES
    merge = MERGES["lse"](o_e.shape[2], 1)
    merge.log_mass = lambda *_: lse_m
    return merge(o_e, lse_e, o_m, None, None, 1.0)""",
    "test_4_the_chunk_form": """
    from linear_attn import chunked
    o, S = chunked(*(x[None, :, None] for x in (q_tk, k_tk, v_tv, g_t)), state=S_kv[None, None], chunk=512)
    return o[0, :, 0], S[0, 0]""",
    "test_5_a_router": """
    return ROUTERS["error"](pool)""",
    "test_6_break_causality": """
        return log_decay, *[x.roll(-1, 1) for x in (beta, beta)]""",
}


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem + "_answered", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checked(path: Path, monkeypatch) -> None:
    """Run the test in this file, with whatever it asks for."""
    module = load(path)
    check = next(f for n, f in vars(module).items() if n.startswith("test_") and callable(f))
    wanted = inspect.signature(check).parameters
    for size in (1.0, 1000.0) if "size" in wanted else (None,):
        given = dict(size=size, monkeypatch=monkeypatch)
        check(**{name: given[name] for name in wanted})


@pytest.mark.parametrize("name", ANSWERS)
def test_the_check_of_an_exercise_accepts_a_right_answer(name, tmp_path, monkeypatch):
    source = (FOLDER / f"{name}.py").read_text()
    source, count = re.subn(r"\n +raise NotImplementedError\(.*\)", lambda _: ANSWERS[name], source)
    assert count == 1
    right = next(n for n in dir(test_linear_attn) if "causal" in n)
    (tmp_path / f"{name}.py").write_text(source.replace('CAUGHT_BY = ""', f'CAUGHT_BY = "{right}"'))
    checked(tmp_path / f"{name}.py", monkeypatch)


@pytest.mark.parametrize("number, name", list(enumerate(ANSWERS, 1)))
def test_an_exercise_without_an_answer_fails_and_says_what_to_do(number, name, monkeypatch):
    """That a plain `pytest` leaves exercises out, every run of these tests shows."""
    with pytest.raises(NotImplementedError, match=f"exercise {number}: return "):
        checked(FOLDER / f"{name}.py", monkeypatch)
