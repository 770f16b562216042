"""tests/hybrid.py: which layers keep softmax, and what is left of the model then."""

import hybrid
import pytest
import torch
from conftest import tiny_model
from hybrid import HARDNESS, keep_softmax, layers_to_keep, softmax_in

import distill
import eval as evaluation
from distill import TrainConfig, linear_layers, linearize, new_parameters
from interventions import LinearizeConfig

CONFIG = LinearizeConfig(sinks=2, window=8)
TOKENS = torch.randint(1, 50, (2000,), generator=torch.Generator().manual_seed(1))
IDS = TOKENS[:40][None]


def train(keep):
    return TrainConfig(keep=keep, seq_len=40)


@pytest.mark.parametrize("keep, want", [("0,3", (0, 3)), ("uniform:0.5", (1, 3)), ("uniform:0.25", (2,))])
def test_layers_are_named_or_evenly_spaced(keep, want):
    model = linearize(tiny_model(layers=4), CONFIG)
    assert layers_to_keep(model, keep, lambda how: hybrid.hardness(model, how, TOKENS, train(keep))) == want


@pytest.mark.parametrize("how", HARDNESS)
def test_the_hardest_layer_is_the_one_with_the_largest_figure(how, monkeypatch):
    model = linearize(tiny_model(layers=4), CONFIG)
    figure = HARDNESS[how](model, IDS)
    assert figure.shape == (4,) and figure.isfinite().all() and len(set(figure.tolist())) == 4
    monkeypatch.setitem(HARDNESS, how, lambda model, ids: figure)
    measured = lambda how: hybrid.hardness(model, how, TOKENS, train(""))  # noqa: E731
    assert layers_to_keep(model, f"{how}:0.25", measured) == (figure.argmax().item(),)


def test_a_layer_with_all_its_pairs_costs_nothing_and_is_never_the_hardest():
    model = linearize(tiny_model(layers=4), CONFIG)
    layer = linear_layers(model)[2]
    layer.config = LinearizeConfig(sinks=2, window=40)
    figure = hybrid.effect(model, IDS)
    assert figure[2] < 1e-9 < figure[[0, 1, 3]].min()


def test_a_kept_layer_is_the_teachers_and_alone_has_a_cache_that_grows():
    model = linearize(tiny_model(layers=3), CONFIG)
    keep_softmax(model, TOKENS, train("1"))
    assert sorted(linear_layers(model)) == [0, 2]
    assert {name.split(".")[1] for name in new_parameters(model)} == {"0", "2"}
    with torch.no_grad():
        cache = model(input_ids=IDS, use_cache=True).cache
    assert cache.layers[1].keys.shape[2] == 40
    assert all(cache.layers[i].rows[0].exact["k"].shape[1] == CONFIG.exact_pairs for i in (0, 2))


def test_softmax_back_in_all_layers_is_the_teacher_and_outside_the_layers_are_there_again():
    model = linearize(tiny_model(layers=3), CONFIG)
    with torch.no_grad():
        before = model(input_ids=IDS).logits
        with softmax_in(model, (0, 1, 2)):
            got = model(input_ids=IDS).logits
        with distill.as_teacher(model):
            want = model(input_ids=IDS).logits
        assert torch.allclose(got, want, atol=1e-4, rtol=1e-4)  # as in test_distill.SAME
        assert torch.equal(model(input_ids=IDS).logits, before) and not torch.allclose(before, want, atol=0.1)


def test_a_hybrid_row_is_the_model_with_its_layers_back_and_pays_for_their_cache():
    model = linearize(tiny_model(layers=4), CONFIG)
    bench = evaluation.Bench(model, None, TOKENS, TOKENS[:80].view(2, 40), train(""), ("teacher", "linear"))
    result, table = hybrid.measure_hybrid(bench)
    alone = evaluation.measure_text(bench)[0]
    assert result["none:0"]["kl"] == alone["rows"]["linear"]["kl"]
    assert result["none:0"]["bytes"] == alone["bytes"]["linear"]
    row = result["uniform:0.5"]
    with softmax_in(model, row["layers"]):
        again = evaluation.measure_text(bench)[0]
    assert row["layers"] == (1, 3) and row["kl"] == again["rows"]["linear"]["kl"] != result["none:0"]["kl"]
    cache = 2 * 40 * 2 * 8 * 4  # keys and values of 40 tokens, two kv heads of 8, in float32
    assert row["bytes"] == result["none:0"]["bytes"] / 2 + 2 * cache
    assert table.count("\n") == 14 and sorted(linear_layers(model)) == [0, 1, 2, 3]


@pytest.mark.parametrize("keep, message", [("7", "the model has layers 0 to 2"), ("hardest:2", "some must"),
                                           ("hardest:x", "--keep wants layers, as 0,7,15, or HOW:PART"),
                                           ("oldest:0.5", "choose from: concentration, effect, hardest")])
def test_a_wrong_keep_is_one_clear_line(keep, message, tmp_path, capsys):  # fmt: skip
    assert evaluation.distill_main(["--keep", keep, "--steps", "0", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err.splitlines()
    assert message in err[-1] and err[-1].startswith("error: ")
