"""tests/scaling.py: what `plan` counts from a config alone is what a real model has."""

import pytest
import scaling
import torch
from conftest import tiny_model

import distill
import eval as evaluation
from distill import TrainConfig, linearize, new_parameters
from interventions import LinearizeConfig

CONFIG = LinearizeConfig(router="mix", sinks=2, window=8, budget=8, block=4)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3moe"])
def test_the_plan_counts_parameters_and_state_bytes_of_the_real_model(kind, tmp_path):
    real = tiny_model(kind)
    real.config.save_pretrained(tmp_path)
    frozen = sum(p.numel() for p in real.parameters())
    x = scaling.estimate(str(tmp_path), CONFIG, TrainConfig())
    linearize(real, CONFIG)
    assert x["parameters"] == frozen and x["weights"] == 4 * frozen
    assert x["new"] == sum(p.numel() for p in new_parameters(real).values())
    cache = real(input_ids=torch.ones(1, 63, dtype=torch.long), use_cache=True).cache  # the end of a block
    assert x["state"] == sum(layer.rows[0].nbytes() for layer in cache.layers)


def test_layer_training_does_not_grow_with_depth_and_devices_share_the_weights(tmp_path):
    rest = []
    for layers in (2, 4):
        tiny_model(layers=layers).config.save_pretrained(tmp_path)
        one, two = (scaling.estimate(str(tmp_path), CONFIG, TrainConfig(batch=n), n) for n in (1, 2))
        ends = 4 * 50 * 32 * (1 if tiny_model(layers=layers).config.tie_word_embeddings else 2)
        assert one["layer"] - two["layer"] == (one["weights"] - ends) / 2
        rest.append([one[loss] - one["weights"] - 16 * one["new"] for loss in ("layer", "end_to_end")])
    assert rest[0][0] == rest[1][0] and rest[0][1] < rest[1][1]


def test_the_arithmetic_of_the_docstring_is_that_of_the_plan_for_32b(tmp_path, capsys):
    """Its numbers, from the published shape of Qwen2.5-32B."""
    shape = dict(hidden_size=5120, intermediate_size=27648, num_hidden_layers=64, vocab_size=152064)
    heads = dict(num_attention_heads=40, num_key_value_heads=8, tie_word_embeddings=False)
    distill.hf.Qwen2Config(**shape, **heads).save_pretrained(tmp_path)
    train = TrainConfig(seq_len=4096, batch=1, dtype="bfloat16")
    x = scaling.estimate(str(tmp_path), LinearizeConfig(router="mix", window=64, budget=64), train)
    assert round(x["parameters"] / 1e9, 2) == 32.76 and round(x["weights"] / 1e9, 1) == 65.5
    assert round(16 * x["new"] / 1e9, 1) == 0.9 and round(x["layer"] / 1e9, 1) == 71.4
    eight = scaling.estimate(
        str(tmp_path),
        LinearizeConfig(router="mix", window=64, budget=64),
        TrainConfig(seq_len=4096, batch=8, dtype="bfloat16"),
        8,
    )
    assert round(eight["layer"] / 1e9, 1) == 16.8
    activations = x["layer"] - x["weights"] - 16 * x["new"] - scaling.PROCESS
    assert round(activations / 4096 / 1e6, 2) == 1.13 and round(activations / 1e9, 1) == 4.6
    args = ["plan", "--model", str(tmp_path), "--batch", "1", "--seq-len"]
    assert evaluation.distill_main([*args, "4096"]) == 0
    out = capsys.readouterr().out
    assert "--allocate     85.78 GB" in out and "the shares first" in out and "71.41 GB a device" in out
    assert evaluation.distill_main([*args, "1024"]) == 0
    out = capsys.readouterr().out
    assert "--allocate     70.87 GB" in out and "the shares first" not in out


def test_the_plan_is_printed_offline_and_bad_input_is_one_clear_line(tmp_path, capsys):
    assert evaluation.distill_main(["plan", "--gpus", "2x24"]) == 0
    out = capsys.readouterr().out
    assert "870,016 parameters" in out and out.count("fits 2 x 24 GB (estimate)") == 4
    for wrong, message in ((["--gpus", "80"], "--gpus wants NUMBERxGIGABYTES"),
                           (["--model", str(tmp_path / "none")], "cannot read the config of")):  # fmt: skip
        assert evaluation.distill_main(["plan", *wrong]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
