"""eval.py: every figure is the one that its definition gives, and the commands write what they print."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_model

import distill
import eval as evaluation
from distill import TrainConfig, as_teacher, linearize, new_parameters
from interventions import LinearizeConfig

SMALL = LinearizeConfig(sinks=2, window=6)
SEQUENCES = torch.randint(1, 50, (3, 40), generator=torch.Generator().manual_seed(0))


def stirred_model(config=SMALL, **kw):
    model = linearize(tiny_model(**kw), config)
    torch.manual_seed(5)
    for p in new_parameters(model).values():
        p.data += 0.3 * torch.randn_like(p)
    return model


def test_nll_kl_and_agreement_are_those_of_the_definition():
    model = stirred_model()
    rows = evaluation.measure_text(model, SEQUENCES)
    with torch.no_grad():
        with as_teacher(model):
            p = model(input_ids=SEQUENCES).logits[:, :-1].softmax(-1)
        q = model(input_ids=SEQUENCES).logits[:, :-1].softmax(-1)
    target = SEQUENCES[:, 1:, None]
    for row, x in (("teacher", p), ("linear", q)):
        want = -x.gather(2, target).log().mean((1, 2))
        assert torch.allclose(torch.tensor(rows[row]["nll"]), want, rtol=1e-4)
        want = (p * (p.log() - x.log())).sum(-1).mean(1)
        # float32 log-probabilities of size 10 to 100: 1e-5 absolute
        assert torch.allclose(torch.tensor(rows[row]["kl"]), want, rtol=1e-3, atol=1e-5)
    agree = (p.argmax(-1) == q.argmax(-1)).float().mean(1)
    assert torch.allclose(torch.tensor(rows["linear"]["top1"]), agree)
    assert rows["teacher"]["top1"] == [1.0, 1.0, 1.0]


def test_layer_error_is_normalised_mse_on_the_teachers_inputs():
    model = stirred_model()
    result = evaluation.measure_layers(model, SEQUENCES[:1], bins=8)
    captured = {}

    def keep(name):
        return lambda module, args, output: captured.__setitem__(name, output[0])

    first = distill.attention_modules(model)[0]
    for name, context in (("teacher", as_teacher(model)), ("linear", model.controller.switch("linear"))):
        handle = first.register_forward_hook(keep(name))
        with torch.no_grad(), context:
            model(input_ids=SEQUENCES[:1])
        handle.remove()
    y, error = captured["teacher"], (captured["linear"] - captured["teacher"]).square()
    assert math.isclose(
        result["linear"]["layer"][0], (error.mean() / y.var(unbiased=False)).item(), rel_tol=1e-4
    )
    by_position = (error[0].mean(1) / y.var(unbiased=False)).view(8, 5).mean(1)
    # the first 8 tokens are exact: rounding errors, compared absolutely
    assert torch.allclose(torch.tensor(result["linear"]["position"][0]), by_position, rtol=1e-4, atol=1e-6)
    assert result["off"]["layer"].keys() == {0, 1} and result["off"]["layer"][1] > 0


def test_state_is_constant_in_length_and_the_teachers_cache_is_not():
    model = stirred_model(LinearizeConfig(sinks=2, window=6, conv=3, rule="kda", memory_per="query"))
    a, b = (evaluation.state_bytes(model, T) for T in (1000, 100_000))
    assert a["linear"] == b["linear"] and a["off"] == b["off"] and b["teacher"] == 100 * a["teacher"]
    # per layer: 8 pairs of 2 kv heads x 8 in float32
    assert a["off"] == 2 * (8 * 2 * 2 * 8 * 4)
    state, moments = 4 * 8 * 8, 3 * 2 * 8  # 4 query heads; an origin and two sums of 2 kv heads
    waiting, tails = 8 * (16 + 4 + 2 * 8 + 2 * 8), 2 * (4 * 8 + 2 * 8 + 2 * 8)  # gates' code, convolved k, v
    assert a["linear"] - a["off"] == 2 * 4 * (state + moments + waiting + tails)


def test_comparison_trains_all_configs_as_if_alone():
    """One teacher pass for many students gives each what a run of its own gives."""
    model = linearize(tiny_model(), SMALL)
    train = TrainConfig(steps=4, seq_len=32, batch=2, warmup=0)
    tokens = torch.randint(1, 50, (500,), generator=torch.Generator().manual_seed(1))
    configs = evaluation.rule_configs(SMALL)
    together = evaluation.compare(model, tokens, SEQUENCES, train, configs)
    assert list(together) == ["memory off"] + [
        f"{rule} {merge}" for merge in ("sum", "sum, paper's", "lse") for rule in evaluation.RULES
    ]
    alone = evaluation.compare(model, tokens, SEQUENCES, train, {"kda lse": configs["kda lse"]})
    assert alone["kda lse"] == together["kda lse"]
    untrained = evaluation.compare(model, tokens, SEQUENCES, TrainConfig(steps=0, seq_len=32), configs)
    assert together["memory off"] == untrained["memory off"]
    assert sum(together["gdn lse"].values()) < sum(untrained["gdn lse"].values())
    assert "kda lse" in evaluation.rules_table(together)


def test_the_memory_off_row_of_the_comparison_is_the_layers_relative_error():
    model = linearize(tiny_model(), SMALL)
    config = evaluation.rule_configs(SMALL)
    got = evaluation.compare(model, SEQUENCES[0], SEQUENCES[:1], TrainConfig(steps=0, seq_len=32), config)
    captured = {}
    first = distill.attention_modules(model)[0]
    for name, context in (("teacher", as_teacher(model)), ("off", model.controller.switch("off"))):
        handle = first.o_proj.register_forward_hook(
            lambda m, a, out, name=name: captured.__setitem__(name, out)
        )
        with torch.no_grad(), context:
            model(input_ids=SEQUENCES[:1])
        handle.remove()
    want = (captured["off"] - captured["teacher"]).square().sum() / captured["teacher"].square().sum()
    assert math.isclose(got["memory off"][0], want.item(), rel_tol=1e-4)


def test_mean_and_error_are_the_textbooks():
    mean, error = evaluation.mean_and_error([1.0, 2.0, 4.0])
    assert math.isclose(mean, 7 / 3) and math.isclose(error, (7 / 3) ** 0.5 / 3**0.5)
    assert math.isnan(evaluation.mean_and_error([1.0])[1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run of the real command on the embedded teacher."""
    folder = tmp_path_factory.mktemp("run")
    args = ["--steps", "3", "--batch", "1", "--seq-len", "256", "--eval-tokens", "512", "--window", "28"]
    assert distill.main(evaluation.report, ["--out", str(folder / "out"), *args]) == 0
    return folder, args


def test_distill_writes_adapter_metrics_and_raw_results(trained):
    out = trained[0] / "out"
    names = {
        "adapter_model.safetensors",
        "adapter_config.json",
        "metrics.jsonl",
        "progress.safetensors",
        "results.json",
    }
    assert {p.name for p in out.iterdir()} == names
    result = json.loads((out / "results.json").read_text())
    assert {"command", "date", "machine", "torch", "fingerprint", "train", "linearize", "text"} <= set(result)
    assert (
        len(result["text"]["linear"]["nll"]) == 2
        and len((out / "metrics.jsonl").read_text().splitlines()) == 3
    )
    assert not list(out.glob("*.tmp"))


def test_eval_of_a_saved_adapter_gives_the_figures_of_the_training_run(trained, capsys):
    folder, args = trained
    to = folder / "again.json"
    done = evaluation.main(
        ["--adapter", str(folder / "out"), "--json", str(to), "--tasks", "text,layers", *args]
    )
    assert done == 0 and "memory off" in capsys.readouterr().out
    first, again = (json.loads(p.read_text()) for p in (folder / "out" / "results.json", to))
    assert first["text"] == again["text"] and first["fingerprint"] == again["fingerprint"]
    assert set(again["layers"]["linear"]["layer"]) == {"0", "1", "2"}


def test_resume_on_the_command_line_does_nothing_twice(trained, capsys):
    folder, args = trained
    before = (folder / "out" / "adapter_model.safetensors").read_bytes()
    assert distill.main(evaluation.report, ["--out", str(folder / "out"), "--resume", *args]) == 0
    assert (folder / "out" / "adapter_model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    "args,message",
    [
        (["--tasks", "txt"], "unknown task 'txt'; choose from: text, layers, rules"),
        (["--tasks", "text"], "need --adapter DIR"),
        (["--adapter", "nowhere"], "nowhere holds no adapter this code can read"),
        (["--json", "/proc/nothing/x.json"], "/proc/nothing"),
    ],
)
def test_bad_input_to_eval_gets_one_clear_line_and_status_2(args, message, tmp_path, capsys):
    assert evaluation.main(["--json", str(tmp_path / "x.json"), *args]) == 2
    assert message in capsys.readouterr().err


def test_the_embedded_teacher_recalls_and_reads(trained):
    """What tests/make_teacher.py measured when it made the teacher: the floor that its users rely on."""
    metrics = json.loads((distill.EMBEDDED / "metrics.json").read_text())
    assert all(metrics["passkey_exact"][n] >= 0.95 for n in ("512", "1024"))
    assert metrics["held_out_perplexity"] < metrics["unigram_perplexity"] / 4
    assert sum(p.stat().st_size for p in distill.EMBEDDED.iterdir()) < 3_000_000
    model, tokenizer = distill.load_teacher()
    _, held = distill.load_data(tokenizer, TrainConfig(seq_len=512, eval_tokens=4096))
    with torch.no_grad():
        logits = model(input_ids=held).logits[:, :-1]
    nll = F.cross_entropy(logits.flatten(0, 1), held[:, 1:].flatten())
    # the help topics differ a little between Python versions, and windows are shorter here
    assert nll.exp() < 1.5 * metrics["held_out_perplexity"]


def test_the_tables_of_the_readme_are_those_of_the_raw_results():
    import readme_tables

    text = (readme_tables.ROOT / "README.md").read_text()
    assert readme_tables.rewritten(text) == text
