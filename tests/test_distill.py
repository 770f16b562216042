"""distill.py: the swap changes attention alone, training changes the new parameters alone."""

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import saved_for_backward, tiny_model
from files import brief
from options import configs_from, parser_for

import distill
import eval as evaluation
from distill import (
    LOSSES,
    TrainConfig,
    as_teacher,
    fingerprint,
    linear_layers,
    linearize,
    load_linearized,
    new_parameters,
    save_adapter,
    train_adapters,
)
from interventions import LinearizeConfig

ROOT = Path(distill.__file__).parent
SMALL = LinearizeConfig(sinks=2, window=6)
IDS = torch.randint(1, 50, (2, 40), generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(1, 50, (2000,), generator=torch.Generator().manual_seed(1))
# float32 logits of size ~30 after two layers: 1e-4 is 30 units in the last place
SAME = dict(atol=1e-4, rtol=1e-4)


def preset_config(preset, **more):
    """The layer's part of a preset, with changes."""
    names = LinearizeConfig.__dataclass_fields__
    values = {k: v for k, v in distill.PRESETS[preset].items() if k in names}
    if preset == "best":  # as many tokens as in a test
        values |= dict(block=4, budget=4)
    return LinearizeConfig(**(values | more))


def logits(model, ids=IDS, **kw):
    with torch.no_grad():
        return model(input_ids=ids, **kw).logits


def logits_and_cache(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=True).cache


def stir(model, size=0.3):
    """New parameters away from their start, so that nothing agrees by accident."""
    torch.manual_seed(5)
    for p in new_parameters(model).values():
        p.data += size * torch.randn_like(p)
    return model


# ----------------------------------------------------------------------------- the swap


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "phi"])
@pytest.mark.parametrize("preset", ["best", "paper"])
def test_within_sinks_plus_window_the_linearized_model_is_the_teacher(kind, preset):
    model = tiny_model(kind)
    want = logits(model)
    linearize(model, preset_config(preset, sinks=4, window=36))
    assert torch.allclose(logits(stir(model)), want, **SAME)
    model = linearize(tiny_model(kind), preset_config(preset, sinks=4, window=8))
    got = logits(stir(model))
    assert torch.allclose(got[:, :12], want[:, :12], **SAME) and not torch.allclose(got, want, atol=0.1)


def test_the_teacher_is_still_there_bit_for_bit():
    model = tiny_model()
    want = logits(model)
    linearize(model, SMALL)
    with as_teacher(model):
        assert torch.equal(logits(model), want)
    assert not torch.allclose(logits(model), want, atol=0.1)


def test_other_models_in_the_process_are_untouched():
    a, b = tiny_model(), tiny_model()
    want = logits(b)
    linearize(a, SMALL)
    assert torch.equal(logits(b), want)


def test_the_backbone_keeps_its_names_and_only_new_parameters_are_trainable():
    model = tiny_model()
    names, before = set(model.state_dict()), fingerprint(model)
    linearize(model, SMALL)
    assert {n for n in model.state_dict() if ".linear." not in n} == names and fingerprint(model) == before
    assert {id(p) for p in model.parameters() if p.requires_grad} == {
        id(p) for p in new_parameters(model).values()
    }


def test_fingerprint_sees_one_changed_bit():
    model = tiny_model()
    before = fingerprint(model)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data.view(torch.int32)[0, 0] ^= 1
    assert fingerprint(model) != before


def test_memory_off_is_sinks_and_window_alone():
    model = stir(linearize(tiny_model(), SMALL))
    with model.controller.switch("off"):
        got = logits(model)
    want = logits(linearize(tiny_model(), dataclasses.replace(SMALL, merge="off")))
    assert torch.equal(got, want) and not torch.allclose(got, logits(model), atol=1e-2)


@pytest.mark.parametrize("side", ["left", "right", "middle"])
@pytest.mark.parametrize("mode", ["linear", "off"])
@pytest.mark.parametrize("positions", [True, False])
def test_a_padded_batch_gives_each_row_its_own_logits(side, mode, positions):
    model, real = stir(linearize(tiny_model(), SMALL)), IDS[0, :25]
    gap = torch.zeros(15, dtype=torch.long)
    row = {"left": [gap, real], "right": [real, gap], "middle": [real[:11], gap, real[11:]]}[side]
    ids = torch.stack([torch.cat(row), IDS[1]])
    mask = torch.stack([torch.cat([torch.ones(len(x)) * (x is not gap) for x in row]), torch.ones(40)]).long()
    position = (mask.cumsum(1) - 1).clamp(min=0) if positions else None  # None: counted from the mask
    with model.controller.switch(mode):
        got = logits(model, ids, attention_mask=mask, position_ids=position)
        assert torch.allclose(got[0][mask[0].bool()], logits(model, real[None])[0], **SAME)
        assert torch.allclose(got[1], logits(model, IDS[1:])[0], **SAME)


def test_only_the_chosen_layers_are_replaced():
    model = linearize(tiny_model(layers=3), SMALL, layers=[0, 2])
    assert list(linear_layers(model)) == [0, 2]
    whole = linearize(tiny_model(layers=3), SMALL)
    assert not torch.allclose(logits(model), logits(whole), atol=0.1)
    none = linearize(tiny_model(layers=3), SMALL, layers=[])
    assert torch.allclose(logits(none), logits(tiny_model(layers=3)), **SAME)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_keep_float32_parameters_and_give_finite_logits(dtype):
    model = stir(linearize(tiny_model().to(dtype), SMALL))
    assert {p.dtype for p in new_parameters(model).values()} == {torch.float32}
    out = logits(model)
    assert out.dtype == dtype and torch.isfinite(out).all()


@pytest.mark.parametrize("preset", ["best", "paper"])
def test_logits_do_not_depend_on_the_implementation_of_the_recurrence(preset):
    ids, got = IDS[:1, :19], {}
    for impl in ("recurrent", "chunked", "triton"):  # triton: interpreted, see conftest.py
        config = preset_config(preset, sinks=2, window=8, impl=impl, chunk=16)
        got[impl] = logits(stir(linearize(tiny_model(layers=1), config)), ids)
    assert torch.allclose(got["chunked"], got["recurrent"], **SAME)
    assert torch.allclose(got["triton"], got["recurrent"], **SAME)


def test_generate_without_a_cache_equals_stepping_by_hand():
    model, ids = stir(linearize(tiny_model(), SMALL)), IDS[:1, :20]
    got = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0)
    for _ in range(8):
        scores = logits(model, ids)[:, -1]
        scores[:, model.generation_config.eos_token_id or 2] = -torch.inf  # min_new_tokens forbids the end
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], 1)
    assert torch.equal(got, ids)


def test_a_batch_with_left_padding_generates_what_its_rows_generate_alone():
    model, short = stir(linearize(tiny_model(), SMALL)), IDS[0, :15]
    ids = torch.stack([torch.cat([torch.zeros(10, dtype=torch.long), short]), IDS[1, :25]])
    mask = torch.tensor([[0] * 10 + [1] * 15, [1] * 25])
    options = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    together = model.generate(ids, attention_mask=mask, **options)[:, 25:]
    for row, prompt in zip(together, (short, IDS[1, :25])):
        assert torch.equal(model.generate(prompt[None], **options)[0, len(prompt) :], row)


def test_what_a_linearized_model_cannot_do_is_refused_in_one_line():
    model = linearize(tiny_model(), SMALL)
    foreign = logits_and_cache(tiny_model())
    with pytest.raises(ValueError, match="hold keys of another model"):
        model(input_ids=IDS, cache=foreign)
    with pytest.raises(ValueError, match="packed documents"):
        model(input_ids=IDS, position_ids=torch.arange(40).remainder(20)[None].expand(2, -1))
    with pytest.raises(ValueError, match="2-D padding mask"):
        model(input_ids=IDS, attention_mask=torch.ones(2, 1, 40, 40))
    with pytest.raises(ValueError, match="linearized already"):
        linearize(model, SMALL)
    with pytest.raises(ValueError, match="no layer 7"):
        linearize(tiny_model(), SMALL, layers=[7])
    sliding = linearize(tiny_model(use_sliding_window=True, sliding_window=8, max_window_layers=0), SMALL)
    with pytest.raises(ValueError, match="own sliding window"):
        sliding(input_ids=IDS)


@pytest.mark.parametrize("kind", ["GptOss", "GPTNeoX"])
def test_families_that_do_not_fit_are_refused_by_name(kind):
    import transformers

    small = dict(vocab_size=50, hidden_size=32, intermediate_size=32)
    small |= dict(num_hidden_layers=2, num_attention_heads=4)
    if kind == "GptOss":
        small |= dict(num_key_value_heads=2, head_dim=8, num_local_experts=2)
    config = getattr(transformers, kind + "Config")(**small)
    model = getattr(transformers, kind + "ForCausalLM")(config)
    with pytest.raises(distill.UserError, match=f"cannot linearize {config.model_type}"):
        linearize(model, SMALL)


@pytest.mark.parametrize(
    "model,conv,millions",
    [("llama-3.1-8b", 0, 8.52), ("llama-3.1-8b", 8, 10.29), ("qwen3-0.6b", 8, 2.92), ("qwen3-32b", 8, 41.0)],
)
def test_new_parameter_counts_are_the_papers(model, conv, millions):
    """Built on the meta device from the published shapes: nothing is downloaded."""
    import transformers

    llama = dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8)
    shape = {
        "llama-3.1-8b": llama | dict(intermediate_size=14336),
        "qwen3-0.6b": dict(
            hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, intermediate_size=3072
        ),
        "qwen3-32b": dict(
            hidden_size=5120, num_hidden_layers=64, num_attention_heads=64, intermediate_size=25600
        ),
    }[model]
    family = "Llama" if model.startswith("llama") else "Qwen3"
    if family == "Qwen3":
        shape = shape | dict(head_dim=128, num_key_value_heads=8)
    with torch.device("meta"):
        config = getattr(transformers, family + "Config")(vocab_size=1000, **shape)
        net = getattr(transformers, family + "ForCausalLM")(config)
        linearize(net, preset_config("paper", conv=conv))
    count = sum(p.numel() for p in new_parameters(net).values())
    assert abs(count / 1e6 - millions) < 0.01 * millions


# ----------------------------------------------------------------------------- losses and training


def train_config(**kw):
    return TrainConfig(**(dict(steps=6, seq_len=32, batch=2, save_every=2, lr=1e-2, warmup=0) | kw))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains_new_parameters_only_and_goes_down(loss, tmp_path):
    model = linearize(tiny_model(), SMALL)
    before, old = fingerprint(model), {n: p.detach().clone() for n, p in new_parameters(model).items()}
    records = train_adapters(model, TOKENS[:32], train_config(loss=loss, steps=12, batch=1), tmp_path)
    assert records[-1]["loss"] < records[0]["loss"]
    assert fingerprint(model) == before
    changed = [n for n, p in new_parameters(model).items() if not torch.equal(p, old[n])]
    assert len(changed) == len(old)


def test_a_trained_model_can_be_copied():
    model = linearize(tiny_model(), SMALL)
    distill.cross_entropy_loss(model, IDS)
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))


def test_an_infinite_gradient_stops_the_run_before_it_spoils_a_parameter(tmp_path, monkeypatch):
    model = linearize(tiny_model(), SMALL)
    before = {n: p.detach().clone() for n, p in new_parameters(model).items()}

    def loss(model, ids):
        next(iter(new_parameters(model).values())).grad = torch.full((4,), torch.inf)
        return 1.0

    monkeypatch.setitem(LOSSES, "layer", loss)
    with pytest.raises(distill.UserError, match="a gradient not finite at step 0"):
        train_adapters(model, TOKENS, train_config(steps=1), tmp_path)
    assert all(torch.equal(p, before[n]) for n, p in new_parameters(model).items())
    assert not list(tmp_path.iterdir())


def test_layer_loss_is_each_layers_own_error_with_no_gradient_between_layers():
    model = stir(linearize(tiny_model(), SMALL))
    distill.layer_loss(model, IDS)
    together = {n: p.grad.clone() for n, p in new_parameters(model).items()}
    alone = linearize(tiny_model(), SMALL, layers=[1])
    for n, p in new_parameters(alone).items():
        p.data.copy_(new_parameters(model)[n].data)
    distill.layer_loss(alone, IDS)
    for n, p in new_parameters(alone).items():
        assert torch.allclose(p.grad, together[n], rtol=1e-4, atol=1e-7), n


@pytest.mark.parametrize("loss", distill.LOSSES)
def test_a_position_further_on_is_the_same_to_the_teacher_and_not_to_what_is_new(loss):
    """RoPE is relative: a loss cannot tell, as long as features only have their lengths set, u is 0 and the
    diagonal of Sigma, which is not the same in turned axes, does not count. With a `u` away from 0, which
    meets turned queries, it can: that is what --offsets trains away."""
    model = linearize(tiny_model(), dataclasses.replace(SMALL, features="l2", merge="lse"))
    at = {}
    for u in (0.0, 1.0):
        for layer in distill.linear_layers(model).values():
            layer.merge.u.data.fill_(u)
            layer.merge.a2.data.zero_()
        for offset in (0, 50):
            model.controller.offset = offset
            at[u, offset] = distill.LOSSES[loss](model, IDS)
    assert at[0.0, 0] == pytest.approx(at[0.0, 50], rel=1e-5)  # float32: the angles of another position
    assert at[1.0, 0] != pytest.approx(at[1.0, 50], rel=1e-4)


def test_gradient_checkpointing_changes_no_gradient():
    grads = []
    for checkpoint in (False, True):
        model = stir(linearize(tiny_model(), SMALL))
        if checkpoint:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
            model.train()
        distill.cross_entropy_loss(model, IDS)
        grads.append([p.grad for p in new_parameters(model).values()])
    for a, b in zip(*grads):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_recompute_keeps_the_activations_of_one_layer_and_ends_with_the_same_parameters(loss, tmp_path):
    def trained(layers, recompute):
        model = stir(linearize(tiny_model(layers=layers), SMALL))
        with saved_for_backward() as kept:
            train_adapters(model, TOKENS, train_config(loss=loss, steps=2, recompute=recompute), tmp_path)
        assert not any(m.training for name, m in model.named_modules() if ".linear" not in name)
        return new_parameters(model), kept[0]

    # What two layers more cost: their inputs, against all that they compute.
    (_, two), (lean, four) = trained(2, 1), trained(4, 1)
    (_, all_of_two), (full, all_of_four) = trained(2, 0), trained(4, 0)
    assert four - two < 0.25 * (all_of_four - all_of_two)
    for name, p in full.items():
        assert torch.equal(p, lean[name]), name


def test_a_resumed_run_ends_exactly_where_an_unbroken_one_does(tmp_path):
    config = train_config()
    whole = linearize(tiny_model(), SMALL)
    train_adapters(whole, TOKENS, config, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        stop_after(linearize(tiny_model(), SMALL), config, tmp_path / "broken", steps=3)
    resumed = linearize(tiny_model(), SMALL, seed=9)
    records = train_adapters(resumed, TOKENS, config, tmp_path / "broken", resume=True)
    assert [r["step"] for r in records] == list(range(6))
    for a, b in zip(new_parameters(whole).values(), new_parameters(resumed).values()):
        assert torch.equal(a, b)


def stop_after(model, config, out, steps):
    """Train, and press Ctrl-C in step `steps`."""
    real, calls = LOSSES["layer"], []

    def loss(model, ids):
        calls.append(1)
        if len(calls) > steps:
            raise KeyboardInterrupt
        return real(model, ids)

    LOSSES["layer"] = loss
    out.mkdir()
    try:
        train_adapters(model, TOKENS, config, out)
    finally:
        LOSSES["layer"] = real


def test_an_interrupt_keeps_the_adapter_trained_so_far(tmp_path):
    model = linearize(tiny_model(), SMALL)
    with pytest.raises(KeyboardInterrupt):
        stop_after(model, train_config(save_every=100), tmp_path / "out", steps=3)
    loaded = load_linearized(tiny_model(), tmp_path / "out")
    for a, b in zip(new_parameters(model).values(), new_parameters(loaded).values()):
        assert torch.equal(a, b)
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 3


def test_resuming_with_other_settings_is_refused(tmp_path):
    train_adapters(linearize(tiny_model(), SMALL), TOKENS, train_config(steps=2), tmp_path)
    with pytest.raises(distill.UserError, match="changed: lr"):
        train_adapters(
            linearize(tiny_model(), SMALL), TOKENS, train_config(steps=2, lr=0.5), tmp_path, resume=True
        )
    with pytest.raises(distill.UserError, match="nothing to resume"):
        train_adapters(linearize(tiny_model(), SMALL), TOKENS, train_config(), tmp_path / "no", resume=True)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_save(tmp_path):
    model = linearize(tiny_model(), SMALL)
    train_adapters(model, TOKENS, train_config(steps=2), tmp_path)
    kept = (tmp_path / "adapter_model.safetensors").read_bytes()
    next(iter(new_parameters(model).values())).data.fill_(torch.nan)
    with pytest.raises(distill.UserError, match="the loss of layer 0 is nan at step 0"):
        train_adapters(model, TOKENS, train_config(), tmp_path)
    assert (tmp_path / "adapter_model.safetensors").read_bytes() == kept


def test_learning_rate_warms_up_and_ends_at_its_floor():
    config = train_config(steps=100, lr=1.0, warmup=10, floor=0.05)
    rates = [distill.learning_rate(i, config) for i in range(100)]
    assert rates[0] == 0.1 and rates[9] == rates[10] == 1.0 and max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and 0.05 <= rates[-1] < 0.051


# ----------------------------------------------------------------------------- files and text


@pytest.mark.parametrize("preset", ["best", "paper"])
def test_a_saved_adapter_is_reloaded_bit_for_bit(preset, tmp_path):
    model = stir(linearize(tiny_model(), preset_config(preset, sinks=2, window=8)))
    save_adapter(model, tmp_path)
    loaded = load_linearized(tiny_model(), tmp_path)
    assert torch.equal(logits(loaded), logits(model))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_broken_and_foreign_adapter_folders_are_refused_in_one_line(tmp_path):
    save_adapter(linearize(tiny_model(), SMALL), tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    good = weights.read_bytes()
    refused = pytest.raises(distill.UserError)
    with pytest.raises(distill.UserError, match="a qwen2 model; this one is llama"):
        load_linearized(tiny_model("llama"), tmp_path)
    with refused:
        load_linearized(tiny_model(), tmp_path / "nowhere")
    other = tiny_model()
    other.model.layers[0].mlp.up_proj.weight.data.add_(0.1)
    with pytest.raises(distill.UserError, match="the weights of this model are others"):
        load_linearized(other, tmp_path)
    for bad in (
        b"",
        b"{}",
        good[:-8],
        good.replace(b'\\"format\\": 2', b'\\"format\\": 3'),
        good[:-1] + b"?",
    ):
        assert bad != good
        weights.write_bytes(bad)
        with refused as error:
            load_linearized(tiny_model(), tmp_path)
        assert "\n" not in str(error.value)
    weights.write_bytes(good)
    load_linearized(tiny_model(), tmp_path)
    load_linearized(tiny_model().bfloat16(), tmp_path)  # the same weights, to 16 bits


def test_held_out_text_is_never_trained_on(tmp_path):
    _, tokenizer = distill.load_teacher()
    text = " ".join(f"word{i}" for i in range(3000))
    (tmp_path / "a.txt").write_text(text)
    config = TrainConfig(data=(str(tmp_path / "a.txt"),), seq_len=64)
    tokens, held = evaluation.load_data(tokenizer, config)
    assert tokenizer.decode(tokens) == text[: len(text) * 9 // 10]
    assert tokenizer.decode(held.flatten()) in text[len(text) * 9 // 10 :]


def test_text_comes_from_txt_json_and_jsonl(tmp_path):
    rows = [dict(text="one"), dict(text="two", id=3)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    every = (evaluation.read_texts(str(tmp_path / f"a.{end}")) for end in ("json", "jsonl", "txt"))
    read = ["\n\n".join(texts) for texts in every]
    assert read == ["one\n\ntwo"] * 3
    for bad in ('{"a": 1}', '[{"a": 1}]', "[1]", "nothing"):
        (tmp_path / "b.json").write_text(bad)
        with pytest.raises(distill.UserError, match="text field"):
            evaluation.read_texts(str(tmp_path / "b.json"))


def test_our_kernels_module_does_not_confuse_transformers():
    """transformers probes for a package named kernels; it must neither import ours nor lose it for us."""
    code = (
        "import distill, kernels; from transformers.utils import is_kernels_available as f; assert not f();"
    )
    code += "assert kernels.linear_attention; from transformers.models.qwen2 import modeling_qwen2"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ----------------------------------------------------------------------------- the command line


def test_every_option_is_in_the_help_with_its_choices(capsys):
    with pytest.raises(SystemExit) as done:
        evaluation.distill_main(["--help"])
    assert done.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for cls in (LinearizeConfig, TrainConfig):
        for field in dataclasses.fields(cls):
            assert f"--{field.name.replace('_', '-')}" in text
    assert "deltanet" in text and "best, paper" in text
    # what a user gets who types nothing: the preset's values, not the dataclass's
    assert ") [mix]" in text and "further exact tokens, chosen by the router [64]" in text


def test_an_adapter_names_its_model_unless_the_user_does(tmp_path):
    parser = parser_for(dict(train=None), lambda parser: None)
    model, own = linearize(tiny_model(), LinearizeConfig()), ["--adapter", str(tmp_path)]
    for train, want in ((None, model.config._name_or_path), (TrainConfig(model="some/model"), "some/model")):
        save_adapter(model, tmp_path, train)
        assert configs_from(parser.parse_args(own))[1].model == want
    assert configs_from(parser.parse_args([*own, "--model", "typed"]))[1].model == "typed"


def test_a_foreign_error_of_many_sentences_is_cut_between_two():
    assert brief(ValueError("One line.\nAnother. " + 80 * "And on ")) == "One line. Another"
    assert brief(ValueError(300 * "x")) == 160 * "x" and brief(ValueError("a\n b")) == "a b"


@pytest.mark.parametrize(
    "args,message",
    [
        (["--rule", "gdm"], "unknown rule 'gdm'; choose from: deltanet, "),
        (["--merge", "mean"], "unknown merge 'mean'"),
        (["--preset", "bst"], "unknown preset 'bst'; choose from: best, paper"),
        (["--data", "nowhere.txt"], "cannot read nowhere.txt: [Errno 2] No such file or directory"),
        (["--model", "nobody/no-model"], "cannot load model 'nobody/no-model'"),
        (["--model", "/nowhere/model"], "cannot load model '/nowhere/model' on cpu: no such file or folder"),
        (["--seq-len", "100"], "--seq-len 100 must exceed sinks + window + budget = 132"),
        (["--seq-len", "1000000"], "too little text"),
        (["--out", "/proc/nothing/here"], "/proc/nothing"),
        (["--layers", "0", "9"], "no layer 9: the model has layers 0 to"),
        (["--device", "cuda:99"], "on cuda:99: "),
        (["--steps", "-1"], "steps must be at least 0, got -1"),
    ],
)
def test_bad_input_gets_one_clear_line_and_status_2(args, message, tmp_path, capsys):
    assert evaluation.distill_main(["--out", str(tmp_path / "out"), *args]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len([x for x in errors if x.startswith("error:") and message in x]) == 1
    assert not any("Traceback" in x for x in errors)


# ----------------------------------------------------------------------------- options of end-to-end losses


NEEDS = (("--lora 8", "want --loss ce or kl"), ("--recompute 1", "want --loss ce or kl"),
         ("--lora 8 --loss kl", "--lora needs peft: pip install peft"))  # fmt: skip


@pytest.mark.parametrize("options, message", NEEDS)
def test_what_an_option_needs_is_said_in_one_line(options, message, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)  # as where it is not installed
    assert evaluation.distill_main([*options.split(), "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("error: ") and message in err[-1]
