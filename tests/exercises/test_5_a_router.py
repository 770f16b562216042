"""Exercise 5 (30 minutes): a router that finds what nobody has asked for yet.

After every block a router says who of the pool stays exact: `budget` tokens a kv head, the highest scores.
A 5-digit pass key is hidden in 480 tokens of filler and asked for at the end. Recency has lost it by then.
Attention received does not help (nobody looked at the key before the question). What does the memory know
about a token that is unlike everything it has seen? The fields of `Pool` are in interventions.py.

    pool.position, pool.received, pool.size (B,P,G); pool.recall_error() (B,P,G); pool.budget

The teacher is the embedded one; nothing is trained. When it passes, try `--plugin` with it (README).
"""

import pytest
import torch
from benchmarks import measure_retrieval

import distill
import eval as evaluation
from interventions import ROUTERS, LinearizeConfig


def my_router(pool):
    raise NotImplementedError("exercise 5: return a score for every token of the pool, (B,P,G)")


@pytest.mark.exercise
def test_5_the_router_beats_recency_on_the_pass_key(monkeypatch):
    monkeypatch.setitem(ROUTERS, "mine", my_router)
    model, tokenizer = distill.load_teacher()
    distill.linearize(model, LinearizeConfig(router="mine", window=32, budget=32))
    evaluation.add_controls(model)
    train, rows = distill.TrainConfig(seq_len=480), ("teacher", "linear", "off")
    bench = evaluation.Bench(model, tokenizer, torch.zeros(0), None, train, rows, 4, ("passkey",))
    found = {n: sum(x["passkey"]["greedy"]) for n, x in measure_retrieval(bench)[0]["rows"].items()}
    assert found["teacher"] == 4, "the teacher itself must find all four keys"
    said = f"your router found {found['linear']:.0f} of 4 keys, recency {found['off']:.0f}"
    assert found["linear"] >= found["off"] + 2, said
