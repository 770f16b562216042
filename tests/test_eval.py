"""eval.py: every figure is the one that its definition gives, and the commands write what they print."""

import ast
import contextlib
import csv
import dataclasses
import itertools
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import benchmarks
import hybrid  # noqa: F401  (its task is on the list of them)
import pytest
import torch
import torch.nn.functional as F
from conftest import saved_for_backward, tiny_model
from files import Progress, read_checked
from hypothesis import given
from hypothesis import strategies as st
from texts import begun
from tokenizers.processors import TemplateProcessing

import distill
import eval as evaluation  # before benchmarks: it says where that is
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


def bench(model, **kw):
    """A bench with the model's own rows."""
    about = dict(tokenizer=None, tokens=None, held_out=SEQUENCES, train=TrainConfig(seq_len=40), rows=())
    about |= dict(rows=("teacher", *model.controller.variants)) | kw
    return evaluation.Bench(model=model, **about)


def test_nll_kl_and_agreement_are_those_of_the_definition():
    model = stirred_model()
    rows = evaluation.measure_text(bench(model))[0]["rows"]
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
    result = benchmarks.measure_layers(bench(model, held_out=SEQUENCES[:1]))[0]["layer"]
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
    assert math.isclose(result[0]["linear"], (error.mean() / y.var(unbiased=False)).item(), rel_tol=1e-4)
    by_position = (error[0].mean(1) / y.var(unbiased=False)).view(8, 5).mean(1)
    # the first 8 tokens are exact: rounding errors, compared absolutely
    assert torch.allclose(torch.tensor(result[0]["position"]), by_position, rtol=1e-4, atol=1e-6)
    assert result.keys() == {0, 1} and result[1]["off"] > 0


def test_the_share_of_softmaxs_mass_beyond_the_exact_pairs_is_that_of_the_definition():
    model, captured = stirred_model(), {}
    got = benchmarks.measure_layers(bench(model, held_out=SEQUENCES[:1]))[0]["layer"][0]["mass"]

    def probe(module, teacher, student):
        captured.setdefault("qk", student(lambda q, k, v, hidden, scale, softcap: (q, k, scale)))

    distill.probe_layers(model, SEQUENCES[:1], probe)
    q, k, scale = captured["qk"]
    score = torch.einsum("bthk,bshk->bhts", q, k.repeat_interleave(2, 2)) * scale
    p = score.masked_fill(torch.ones(40, 40, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    t, s = torch.arange(40)[:, None], torch.arange(40)[None]
    far = (s >= 2) & (s <= t - 6)
    assert math.isclose(got, (p * far).sum(-1)[:, :, 8:].mean().item(), rel_tol=1e-3)


def test_rank_correlation_is_spearmans():
    assert math.isclose(benchmarks.rank_correlation([1, 2, 3, 4], [10, 20, 40, 30]), 0.8)
    assert math.isnan(benchmarks.rank_correlation([1.0, 2.0], [1.0, 2.0]))


@pytest.mark.parametrize("router", ["recency", "mass", "mix"])
def test_controls_have_as_many_pairs_or_at_least_the_bytes_and_no_memory(router):
    config = LinearizeConfig(router=router, sinks=2, window=32, block=32, budget=4)
    model = stirred_model(config)
    evaluation.add_controls(model)
    modes = model.controller.variants
    size = evaluation.state_bytes(model, 100_000, modes)
    pairs = {name: dataclasses.replace(config, **modes[name]).exact_pairs for name in modes}
    assert pairs["off"] == pairs["linear"] == 38 and modes["off"] == dict(merge="off", router="recency")
    assert size["bytes"] >= size["linear"] > size["off"] and modes["bytes"]["merge"] == "off"
    per_pair = (size["bytes"] - size["off"]) / (pairs["bytes"] - pairs["off"])
    assert size["bytes"] - size["linear"] < 1.5 * per_pair, "no more than the memory's bytes, rounded up"
    content = {"mass", "random"} if router != "recency" else set()
    assert set(modes) == {"linear", "off", "bytes"} | content
    for name in set(modes) - {"linear", "random"}:
        assert not list(distill.linear_layers(model)[0].variant(**modes[name]).parameters())


def test_state_is_constant_in_length_and_the_teachers_cache_is_not():
    model = stirred_model(LinearizeConfig(sinks=2, window=6, conv=3, rule="kda", memory_per="query"))
    a, b = (evaluation.state_bytes(model, T, ("teacher", "linear", "off")) for T in (1000, 100_000))
    assert a["linear"] == b["linear"] and a["off"] == b["off"] and b["teacher"] == 100 * a["teacher"]
    # per layer: 8 pairs of 2 kv heads x 8 in float32
    assert a["off"] == 2 * (8 * 2 * 2 * 8 * 4)
    state, moments = 4 * 8 * 8, 2 * (3 * 8 + 1)  # 4 query heads; of 2 kv heads an origin, two sums, a count
    waiting, tails = 8 * (16 + 4 + 2 * 8 + 2 * 8), 2 * (4 * 8 + 2 * 8 + 2 * 8)  # gates' code, convolved k, v
    assert a["linear"] - a["off"] == 2 * 4 * (state + moments + waiting + tails)


def test_comparison_trains_all_configs_as_if_alone():
    """One teacher pass for many students gives each what a run of its own gives."""
    model = linearize(tiny_model(), SMALL)
    train = TrainConfig(steps=4, seq_len=32, batch=2, warmup=0)
    tokens = torch.randint(1, 50, (500,), generator=torch.Generator().manual_seed(1))
    configs, known = benchmarks.ladder(SMALL), dict(tokens=tokens, train=train)
    together, _ = benchmarks.compare(bench(model, **known), configs)
    assert list(together) == ["memory off", "pure", "+ window", "+ sinks", "+ conv"] + [
        f"{rule} {merge}" for merge in ("sum", "sum, paper's", "lse") for rule in benchmarks.RULES
    ]
    alone, _ = benchmarks.compare(bench(model, **known), {"kda lse": configs["kda lse"]})
    assert alone["kda lse"] == together["kda lse"]
    known["train"] = TrainConfig(steps=0, seq_len=32)
    untrained, _ = benchmarks.compare(bench(model, **known), configs)
    assert together["memory off"] == untrained["memory off"]
    assert sum(together["gdn lse"].values()) < sum(untrained["gdn lse"].values())


def test_the_memory_off_row_of_the_comparison_is_the_layers_relative_error():
    model = linearize(tiny_model(), SMALL)
    some = bench(model, held_out=SEQUENCES[:1], tokens=SEQUENCES[0], train=TrainConfig(steps=0, seq_len=32))
    got, _ = benchmarks.compare(some, {"memory off": benchmarks.ladder(SMALL)["memory off"]})
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


def test_the_ablation_measures_each_design_in_place_and_leaves_the_model_as_it_was(monkeypatch):
    # A base whose controls (a router and a window) do not fit the first rungs, which have no window.
    config = LinearizeConfig(router="mix", sinks=2, window=8, budget=8, block=4)
    model = stirred_model(config)
    evaluation.add_controls(model)
    train = TrainConfig(steps=1, seq_len=32, batch=1, warmup=0)
    tokens = torch.randint(1, 50, (500,), generator=torch.Generator().manual_seed(1))
    before = evaluation.measure_text(bench(model))[0]["rows"]
    whole = benchmarks.ladder(config)
    names = ("memory off", "pure", "+ routing", "kda lse")
    monkeypatch.setattr(benchmarks, "ladder", lambda base: {name: whole[name] for name in names})
    result, table = benchmarks.measure_ablation(bench(model, tokens=tokens, train=train))
    assert "+ routing" in result and "| memory off | 18 |" in table
    assert result["memory off"]["kl"] == before["off"]["kl"]
    assert evaluation.measure_text(bench(model))[0]["rows"] == before


def test_mean_and_error_are_the_textbooks():
    mean, error = evaluation.mean_and_error([1.0, 2.0, 4.0])
    assert math.isclose(mean, 7 / 3) and math.isclose(error, (7 / 3) ** 0.5 / 3**0.5)
    assert math.isnan(evaluation.mean_and_error([1.0])[1])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run of the real command on the embedded teacher."""
    folder = tmp_path_factory.mktemp("run")
    args = ["--steps", "3", "--batch", "1", "--seq-len", "160", "--eval-tokens", "320", "--window", "32"]
    args += ["--budget", "16"]
    assert evaluation.distill_main(["--out", str(folder / "out"), *args]) == 0
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
    assert {"command", "date", "machine", "torch", "fingerprint", "train", "linearize", "ppl"} <= set(result)
    assert set(result["ppl"]["rows"]) == {"teacher", "linear", "off", "mass", "random", "bytes", "recent"}
    assert len(result["ppl"]["rows"]["linear"]["nll"]) == 2
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 3
    assert not list(out.glob("*.tmp"))


def test_eval_of_a_saved_adapter_gives_the_figures_of_the_training_run(trained, capsys):
    folder, args = trained
    to = folder / "again.json"
    # the part of the training command that is not the adapter's own
    rest = ["--seq-len", "160", "--eval-tokens", "320", "--tasks", "ppl,layers", "--json", str(to)]
    assert evaluation.main(["--adapter", str(folder / "out"), *rest]) == 0
    assert "linear saves on off" in capsys.readouterr().out
    first, again = (json.loads(p.read_text()) for p in (folder / "out" / "results.json", to))
    assert first["ppl"] == again["ppl"] and first["fingerprint"] == again["fingerprint"]
    assert set(again["layers"]["layer"]) == {"0", "1", "2"}


def test_eval_changes_the_exact_part_of_an_adapter_and_nothing_that_has_parameters(trained, capsys):
    folder, to = trained[0], trained[0] / "other.json"
    run = ["--adapter", str(folder / "out"), "--seq-len", "256", "--eval-tokens", "256", "--json", str(to)]
    assert evaluation.main([*run, "--router", "mass", "--budget", "8", "--rows", "linear"]) == 0
    result = json.loads(to.read_text())
    assert result["linearize"]["router"] == "mass" and result["ppl"]["pairs"]["linear"] == 44
    assert set(result["ppl"]["rows"]) == {"teacher", "linear"}
    for option, value in (("rule", "kda"), ("keep", "0"), ("layers", "1")):
        assert evaluation.main([*run, f"--{option}", value]) == 2
        assert f"--{option} is fixed by the adapter; free are router, sinks" in capsys.readouterr().err


def test_a_run_goes_on_from_an_adapter_with_another_loss(trained):
    folder, args = trained
    to = ["--out", str(folder / "kl"), "--adapter", str(folder / "out"), "--loss", "kl", "--seq-len", "128"]
    assert evaluation.distill_main([*to, "--steps", "1", "--batch", "1", "--eval-tokens", "256"]) == 0
    about = json.loads((folder / "kl" / "adapter_config.json").read_text())
    assert about["linearize"]["budget"] == 16 and about["train"]["loss"] == "kl"


def test_generate_streams_text_and_says_what_it_took(trained, capsys):
    call = ["generate", "--adapter", str(trained[0] / "out"), "--max-new-tokens", "5", "--prompt"]
    assert evaluation.distill_main([*call, "The pass key is"]) == 0
    out, err = capsys.readouterr()
    assert len(out) > 5 and ", 52 exact pairs (a mean over layers), state " in err and "5 new tokens" in err
    other = ["--router", "recency", "--window", "8", "--budget", "0"]  # the same memory, other exact pairs
    assert evaluation.distill_main([*call, "The", *other]) == 0
    assert ", 12 exact pairs (a mean" in capsys.readouterr().err
    assert evaluation.distill_main([*call, ""]) == 2
    assert "the prompt is empty" in capsys.readouterr().err
    assert evaluation.distill_main(["generate", "--prompt", "x"]) == 2
    assert "generate needs --adapter DIR" in capsys.readouterr().err
    assert evaluation.distill_main(["plan", "--adapter", str(trained[0] / "out")]) == 2
    assert "plan knows models and options" in capsys.readouterr().err


def test_resume_on_the_command_line_does_nothing_twice(trained, capsys):
    folder, args = trained
    file = folder / "out" / "adapter_model.safetensors"
    tensors, about = read_checked(file, "")  # not its bytes: safetensors writes its keys in any order
    assert evaluation.distill_main(["--out", str(folder / "out"), "--resume", *args]) == 0
    again, about_again = read_checked(file, "")
    assert about == about_again and tensors.keys() == again.keys()
    assert all(torch.equal(x, again[name]) for name, x in tensors.items())


@pytest.mark.parametrize(
    "args,message",
    [
        (["--tasks", "txt"], "unknown task 'txt'; choose from: ablation, hybrid, lambada"),
        (["--tasks", "ppl"], "needs --adapter DIR"),
        (["--adapter", "nowhere"], "no adapter in nowhere"),
        (["--json", "/proc/nothing/x.json"], "/proc/nothing"),
    ],
)
def test_bad_input_to_eval_gets_one_clear_line_and_status_2(args, message, tmp_path, capsys):
    assert evaluation.main(["--json", str(tmp_path / "x.json"), *args]) == 2
    assert message in capsys.readouterr().err


# ----------------------------------------------------------------------------- benchmarks


@pytest.fixture(scope="module")
def embedded():
    """The embedded teacher, linearized with few pairs, untrained; its tokenizer."""
    model, tokenizer = distill.load_teacher()
    linearize(model, LinearizeConfig(router="mix", sinks=4, window=32, budget=16))
    evaluation.add_controls(model)
    return model, tokenizer


def test_mmlu_scores_letters_as_the_whole_prompt_does(embedded, tmp_path):
    """Sharing the few-shot prefix changes nothing; prompts are the standard ones."""
    model, tokenizer = embedded
    rows = [[f"What is {i} plus {i}?", str(i), str(2 * i), "7", "none", "B"] for i in range(1, 9)]
    for part, some in (("dev", rows[:5]), ("test", rows[5:])):
        (tmp_path / part).mkdir()
        with open(tmp_path / part / f"easy_sums_{part}.csv", "w", newline="") as f:
            csv.writer(f).writerows(some)
    run = bench(model, tokenizer=tokenizer, mmlu=str(tmp_path), rows=("teacher", "linear"))
    result, table = benchmarks.measure_mmlu(run)
    assert result["right"] == [1, 1, 1] and "3 questions of 1 subjects, 5 shots" in table
    shots = "\n\n".join(f"{r[0]}\nA. {r[1]}\nB. {r[2]}\nC. {r[3]}\nD. {r[4]}\nAnswer: B" for r in rows[:5])
    about = "The following are multiple choice questions (with answers) about easy sums.\n\n"
    last = "\n\nWhat is 6 plus 6?\nA. 6\nB. 12\nC. 7\nD. none\nAnswer:"
    ids = torch.tensor([run.encode(about + shots + last)])
    letters = [run.encode(f"Answer: {x}")[-1] for x in "ABCD"]
    for name in ("teacher", "linear"):
        with run.row(name):
            want = model(input_ids=ids, use_cache=False).logits[0, -1].log_softmax(-1)[letters]
        # float32 in two orders of summation, rounded to 4 digits
        assert torch.allclose(torch.tensor(result["letters"][name][0]), want, atol=2e-3)
    with pytest.raises(distill.UserError, match="want folders dev and test"):
        benchmarks.mmlu_files(str(tmp_path / "dev"))


def test_lambada_asks_for_the_last_word_whatever_the_batch(embedded, tmp_path):
    model, tokenizer = embedded
    texts = ["The value is returned by the function", "If the object is a string", "Use the class statement"]
    (tmp_path / "l.jsonl").write_text("\n".join(json.dumps(dict(text=x)) for x in texts * 7))
    run = bench(model, tokenizer=tokenizer, lambada=str(tmp_path / "l.jsonl"), rows=("teacher", "linear"))
    rows = benchmarks.measure_lambada(run)[0]["rows"]
    ids, start = run.encode(texts[0]), len(run.encode("The value is returned by the"))
    with run.row("teacher"):
        log_p = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
    want = sum(log_p[i - 1, ids[i]].item() for i in range(start, len(ids)))
    for i in (0, 3, 18):  # in other batches, beside other lengths
        assert abs(rows["teacher"]["log_p"][i] - want) < 2e-3
    assert rows["linear"]["log_p"] == pytest.approx(rows["teacher"]["log_p"], abs=2e-3), "short: exact"


def test_an_interrupted_evaluation_goes_on_where_it_was_and_never_with_anothers_answers(embedded, tmp_path):
    """Interrupted in every item, one after the other, it ends with the answers of an unbroken one."""
    model, tokenizer = embedded
    about = dict(tokenizer=tokenizer, train=TrainConfig(seq_len=150), kinds=("passkey", "uuid"), limit=3)
    about, path = about | dict(rows=("teacher", "linear")), tmp_path / "r.json.part"
    passes, allowed = 0, 10_000

    def count(*_):
        nonlocal passes
        passes += 1
        if passes > allowed:
            raise KeyboardInterrupt

    hook = model.register_forward_pre_hook(count)
    want = benchmarks.measure_retrieval(bench(model, **about))[0]
    allowed = passes // 3  # of six items, so that at least one is finished in a run
    runs, got = 0, None
    while got is None and runs < 20:
        passes, runs, progress = 0, runs + 1, Progress(path, ["this", 1])
        try:
            got = benchmarks.measure_retrieval(bench(model, progress=progress, **about))[0]
        except KeyboardInterrupt:
            assert path.exists()
    hook.remove()
    assert got == want and runs >= 3
    assert len(Progress(path, ["this", 1]).done) == 6 and not Progress(path, ["another", 1]).done
    path.write_text(path.read_text()[:50])  # of another program, or cut by a full disk
    assert not Progress(path, ["this", 1]).done
    progress.finish()
    assert not path.exists()


def test_every_sequence_starts_as_the_tokenizer_starts_a_text(tmp_path):
    """With a BOS token for Llama and Gemma, in training, in text, in questions; with nothing for Qwen."""
    tokenizer = distill.load_teacher()[1]
    plain = TrainConfig(seq_len=30, batch=3, steps=2, eval_tokens=100)
    assert begun(plain, tokenizer) == plain
    tokens, held = evaluation.load_data(tokenizer, plain)
    bos = tokenizer.bos_token_id
    start = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    tokenizer.backend_tokenizer.post_processor = start
    train = begun(plain, tokenizer)
    typed = dataclasses.replace(plain, begin=(7, 8))
    assert train.begin == (bos,) and begun(typed, tokenizer) == typed
    again, with_start = evaluation.load_data(tokenizer, train)
    assert torch.equal(again, tokens) and with_start.shape == held.shape == (3, 30)
    assert (with_start[:, 0] == bos).all()
    assert torch.equal(with_start[:, 1:].flatten(), held.flatten()[: 3 * 29]), "and nothing is left out"
    for ids, same in zip(distill.batches(tokens, train), distill.batches(tokens, plain), strict=True):
        assert (ids[:, 0] == bos).all() and torch.equal(ids[:, 1:], same[:, :-1])
    run = bench(stirred_model(), tokenizer=tokenizer, train=dataclasses.replace(train, seq_len=300))
    ids, _ = next(benchmarks.retrieval_cases(run, "passkey", 1))
    assert ids[0] == bos and bos not in ids[1:] and tokenizer("two words")["input_ids"] == (
        benchmarks.from_the_start(run, "two words"))  # fmt: skip


@pytest.mark.parametrize("kind", evaluation.KINDS)
def test_retrieval_prompts_hold_their_facts_and_only_questions_with_one_answer(kind, embedded):
    run = bench(embedded[0], tokenizer=embedded[1], train=TrainConfig(seq_len=400))
    depths = []
    for i, (ids, asks) in enumerate(benchmarks.retrieval_cases(run, kind, 4)):
        text = embedded[1].decode(ids)
        facts, again = benchmarks.facts_and_questions(kind, random.Random(f"0 {kind} {i}"))
        assert asks == again and all(fact in text for fact in facts)
        question = max(len(run.encode(q + a)) for q, a in asks)
        assert abs(len(ids) + question - 400) < 8
        depths.append(text.index(facts[0]) / len(text))
        for _, answer in asks:
            assert all(part in text for part in answer.split(" and "))
        if kind == "tracking":
            assert [text.index(fact) for fact in facts] == sorted(text.index(fact) for fact in facts)
    if kind != "tracking":
        assert depths == sorted(depths) and depths[0] < 0.15 and depths[-1] > 0.75


def test_the_teacher_finds_pass_keys_and_forced_and_greedy_answers_agree(embedded):
    kinds = ("passkey", "prose")
    train = TrainConfig(seq_len=300)
    about = dict(tokenizer=embedded[1], train=train, kinds=kinds, limit=4, rows=("teacher", "off"))
    run = bench(embedded[0], **about)
    rows = benchmarks.measure_retrieval(run)[0]["rows"]
    assert sum(rows["teacher"]["prose"]["greedy"]) >= 3, "trained to find them, .99 at 1,024 tokens"
    assert sum(rows["off"]["prose"]["greedy"]) <= 2, "52 newest tokens hold only late keys"
    for row in rows.values():
        for kind in kinds:
            assert row[kind]["forced"] == row[kind]["greedy"]


def test_the_embedded_teacher_recalls_and_reads(trained):
    """What tests/make_teacher.py measured when it made the teacher: the floor that its users rely on."""
    metrics = json.loads((distill.EMBEDDED / "metrics.json").read_text())
    assert all(metrics["passkey_exact"][n] >= 0.95 for n in ("512", "1024"))
    assert metrics["held_out_perplexity"] < metrics["unigram_perplexity"] / 4
    assert sum(p.stat().st_size for p in distill.EMBEDDED.iterdir()) < 3_000_000
    model, tokenizer = distill.load_teacher()
    _, held = evaluation.load_data(tokenizer, TrainConfig(seq_len=512, eval_tokens=4096))
    with torch.no_grad():
        logits = model(input_ids=held).logits[:, :-1]
    nll = F.cross_entropy(logits.flatten(0, 1), held[:, 1:].flatten())
    # the help topics differ a little between Python versions, and windows are shorter here
    assert nll.exp() < 1.5 * metrics["held_out_perplexity"]


def test_the_tables_of_the_readme_are_those_of_the_raw_results():
    import readme_tables

    text = (readme_tables.ROOT / "README.md").read_text()
    assert readme_tables.rewritten(text) == text
    assert (readme_tables.RESULTS / "figure.svg").read_text() == readme_tables.figure(readme_tables.load)


def test_between_35_and_50_percent_of_each_module_are_comment_and_no_function_is_too_long():
    import readme_tables

    for name in readme_tables.ORDER:
        path = readme_tables.ROOT / f"{name}.py"
        assert 0.35 <= readme_tables.comment_share(path) <= 0.5, name
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and name != "kernels":
                assert node.end_lineno - node.lineno < 60, node.name


# ----------------------------------------------------------------------------- budgets by layer


LAYERS = st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=4)


def test_what_pairs_are_worth_is_measured_in_the_memory_of_one_layer_and_equal_to_that_of_all(monkeypatch):
    """Gradient checkpointing: a layer more costs its inputs, not all that it computes; no figure changes."""

    def cost_and_bytes(layers):
        model = linearize(tiny_model(layers=layers), SMALL)
        torch.manual_seed(0)
        with saved_for_backward() as kept:
            cost = evaluation.measure_budgets(model, SEQUENCES[:1], (0, 4))
        assert not any(m.training for name, m in model.named_modules() if ".linear" not in name)
        return cost, kept[0]

    (_, two), (lean, six) = cost_and_bytes(2), cost_and_bytes(6)
    monkeypatch.setattr(distill, "recomputed", lambda model: contextlib.nullcontext())
    (_, all_of_two), (full, all_of_six) = cost_and_bytes(2), cost_and_bytes(6)
    assert torch.equal(lean, full)
    assert six - two < 0.25 * (all_of_six - all_of_two)


@given(LAYERS, st.integers(0, 12))
def test_shares_spend_the_total_and_none_is_better_for_convex_costs(drops, total):
    """Each layer's cost falls by less and less: then greedy is optimal, and all allocations can be tried."""
    rows = [[0.0, *itertools.accumulate(sorted(drop, reverse=True))] for drop in drops]
    cost = [[row[-1] - x for x in row] for row in rows]
    shares = evaluation.share_out(cost, (0, 1, 2, 3), total)
    beyond = max(0, total - 3 * len(cost)) // len(cost)  # of what was tried: as many more for all
    assert sum(shares) == min(total, 3 * len(cost)) + beyond * len(cost)
    shares = [s - beyond for s in shares]
    every = (s for s in itertools.product(range(4), repeat=len(cost)) if sum(s) == sum(shares))
    best = min(sum(row[n] for row, n in zip(cost, s)) for s in every)
    assert sum(row[n] for row, n in zip(cost, shares)) <= best + 1e-9  # sums in another order


def test_a_late_gain_is_reached_through_an_early_step_that_gains_nothing():
    assert evaluation.share_out([[1.0, 1.0, 0.0], [1.0, 0.9, 0.8]], (0, 4, 8), 8) == (8, 0)


def test_the_worth_of_pairs_predicts_the_measured_kl_of_a_layer():
    """The embedded teacher, one layer at a time: the estimate against KL itself, budget by budget."""
    model, tokenizer = distill.load_teacher()
    base = LinearizeConfig(router="mass", merge="off", window=32)
    layers = distill.linear_layers(linearize(model, base))
    tokens, _ = evaluation.load_data(tokenizer, TrainConfig(seq_len=256))
    ids, budgets = torch.stack([tokens[5000 * i :][:256] for i in range(4)]), (0, 32)
    torch.manual_seed(0)
    worth = evaluation.measure_budgets(model, ids, budgets)
    with torch.no_grad(), as_teacher(model):
        want = model(input_ids=ids).logits.log_softmax(-1)
    for i, n in itertools.product(layers, range(2)):
        for j, layer in layers.items():  # all but this one see everything
            changes = dict(budget=budgets[n]) if i == j else dict(window=256)
            layer.config = dataclasses.replace(base, **changes)
        with torch.no_grad():
            got = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        kl = (want.exp() * (want - got)).sum(-1).mean().item()
        # a quadratic form, one drawn label a token, no terms between tokens: within 1.8 of it, seeds 0 to 2
        assert kl / 3 < worth[i, n] < 3 * kl, (i, budgets[n], kl, worth[i, n])


def test_layers_with_budgets_of_their_own_are_what_one_budget_would_make_of_each():
    """And a save, a load, and a cache change nothing."""
    base = LinearizeConfig(router="mix", sinks=1, window=8, budget=4, block=4)
    own = dataclasses.replace(base, budgets=(0, 6))
    model = linearize(tiny_model(), own)
    assert [layer.config.budget for layer in distill.linear_layers(model).values()] == [0, 6]
    assert own.exact_pairs == 12 and LinearizeConfig(**json.loads(json.dumps(dataclasses.asdict(own)))) == own
    ids = torch.randint(1, 50, (1, 40), generator=torch.Generator().manual_seed(0))
    x = torch.randn(1, 40, 4, 8), torch.randn(1, 40, 2, 8), torch.randn(1, 40, 2, 8), torch.randn(1, 40, 32)
    for layer in distill.linear_layers(model).values():
        one = layer.variant()
        one.config = dataclasses.replace(base, budget=layer.config.budget)
        assert torch.equal(layer(*x), one(*x))
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        first = model(input_ids=ids[:, :17], use_cache=True)
        rest = model(input_ids=ids[:, 17:], use_cache=True, cache=first.cache).logits
    assert torch.allclose(torch.cat([first.logits, rest], 1), whole, atol=1e-5)  # float32 logits of size 10


def test_an_allocated_adapter_keeps_its_shares_and_shares_other_budgets_out_anew(trained, capsys):
    adapter = json.loads((trained[0] / "out" / "adapter_config.json").read_text())
    about = adapter["linearize"]
    assert len(about["budgets"]) == 3 and sum(about["budgets"]) == 3 * about["budget"] == 48
    to = trained[0] / "double.json"
    run = ["--adapter", str(trained[0] / "out"), "--seq-len", "256", "--eval-tokens", "256"]
    run += ["--json", str(to)]
    assert evaluation.main([*run, "--budget", "32", "--rows", "linear,off,bytes"]) == 0
    result = json.loads(to.read_text())
    further = result["ppl"]["pairs"]["bytes"] - 36
    shared = {mean: list(evaluation.share_out(*adapter["worth"], 3 * mean)) for mean in (16, 32, further)}
    assert result["linearize"]["budgets"] == shared[32] and about["budgets"] == shared[16]
    assert result["variants"]["bytes"]["budgets"] == shared[further]
    assert result["ppl"]["pairs"]["linear"] == result["ppl"]["pairs"]["off"] == 68
    assert result["ppl"]["bytes"]["bytes"] >= result["ppl"]["bytes"]["linear"]
    assert evaluation.main([*run, "--budgets", "1", "2", "3", "--rows", "linear"]) == 0
    assert json.loads(to.read_text())["linearize"]["budgets"] == [1, 2, 3]
    assert evaluation.main([*run, "--budgets", "1", "2", "3", "--budget", "8", "--rows", "linear"]) == 0
    assert json.loads(to.read_text())["linearize"]["budgets"] == [1, 2, 3]  # --budgets overrides --budget
    assert evaluation.main([*run, "--budgets", "1", "2", "3", "--rows", "linear@8"]) == 0
    assert json.loads(to.read_text())["variants"]["linear@8"]["budgets"] == [4, 8, 12]  # typed: in proportion


def test_a_wrong_number_of_budgets_is_refused_in_one_line():
    with pytest.raises(distill.UserError, match="3 budgets for 2 linearized layers"):
        linearize(tiny_model(), LinearizeConfig(router="mass", merge="off", budgets=(1, 2, 3)))
    with pytest.raises(ValueError, match="budgets must be at least 0, got -1"):
        LinearizeConfig(budgets=(2, -1))


@pytest.mark.parametrize("budgets", [(), (4, 12), (0, 16)])
def test_a_row_at_another_budget_has_that_many_pairs_and_bytes_its_lead(budgets):
    config = LinearizeConfig(router="mix", window=8, budget=8, block=4, budgets=budgets)
    model = linearize(tiny_model(), config)
    evaluation.add_controls(model)
    modes = model.controller.variants
    lead = dataclasses.replace(config, **modes["bytes"]).exact_pairs - config.exact_pairs
    for name in modes:
        changed = dataclasses.replace(config, **evaluation.at_budget(model, name, 16))
        want = 28 + (evaluation.further_pairs(model, 16) if name == "bytes" else 0)
        assert want <= changed.exact_pairs <= want + bool(budgets), name  # a share is rounded up
    size = evaluation.state_bytes(model, 200, modes)
    assert lead > 4 and size["bytes"] >= size["linear"]


# ----------------------------------------------------------------------------- plugins

PLUGIN = '''
from interventions import ROUTERS
from linear_attn import RULES, UpdateRule, register

@register(RULES, "forgetful")
class Forgetful(UpdateRule):
    """Delta rule that erases twice as much as it writes."""

    delta = True

    def strengths(self, k_btgk, log_decay, beta):
        return log_decay, beta, 0.5 * beta

@register(ROUTERS, "oldest")
def route_by_age(pool):
    return -pool.position.float()
'''


@pytest.fixture
def plugin(tmp_path):
    """A student's file; what it registers is gone after the test."""
    tables = {id(t): (t, dict(t)) for t in (evaluation.ROUTERS, benchmarks.RULES)}
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    yield path
    for table, before in tables.values():
        table.clear()
        table.update(before)


def test_a_plugin_adds_a_rule_and_a_router_to_both_commands(plugin, tmp_path, capsys):
    run = ["--plugin", str(plugin), "--seq-len", "160", "--eval-tokens", "160"]
    mine = ["--rule", "forgetful", "--router", "oldest", "--window", "32", "--budget", "16"]
    out = str(tmp_path / "out")
    assert evaluation.distill_main([*run, *mine, "--steps", "1", "--batch", "1", "--out", out]) == 0
    more = ["--adapter", out, "--rows", "linear", "--json", str(tmp_path / "again.json")]
    assert evaluation.main([*run, *more]) == 0
    assert json.loads((tmp_path / "again.json").read_text())["linearize"]["rule"] == "forgetful"


@pytest.mark.parametrize("text", ["1 / 0", "import nowhere_at_all", "def", None])
def test_a_broken_or_missing_plugin_is_one_clear_line(text, tmp_path, capsys):
    path = tmp_path / "broken.py"
    if text:
        path.write_text(text)
    assert evaluation.distill_main(["--plugin", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: plugin {path}: ") and err.count("\n") == 1


def test_an_error_in_a_plugin_names_its_line_and_one_of_ours_keeps_its_traceback(plugin, tmp_path, capsys):
    plugin.write_text(PLUGIN.replace("pool.position", "pool.age"))
    run = ["--seq-len", "160", "--eval-tokens", "160", "--allocate", "0", "--steps", "1", "--batch", "1"]
    mine = ["--plugin", str(plugin), "--router", "oldest", "--window", "32", "--budget", "16"]
    assert evaluation.distill_main([*run, *mine, "--out", str(tmp_path / "out")]) == 2
    error, text = capsys.readouterr().err.splitlines()[-1], "return -pool.age.float()"
    line = plugin.read_text().splitlines().index(f"    {text}") + 1
    assert error.startswith(f"error: {plugin}, line {line}, {text}: AttributeError: 'Pool' object has no")
    with pytest.raises(ZeroDivisionError):
        run = evaluation.command_line
        run(dict(train=lambda args: 1 / 0), lambda parser: None, ["--plugin", str(plugin)])


@pytest.mark.exhaustive
def test_what_a_plugin_registers_is_tested_like_the_rest(plugin):
    """And a router that looks into the future, or at nothing, could not pass: those tests are the same."""
    tests = Path(__file__).parent
    call = [sys.executable, "-m", "pytest", "-q", "--plugin", str(plugin), "-k", "forgetful or oldest"]
    done = subprocess.run([*call, str(tests / "test_linear_attn.py"), str(tests / "test_interventions.py")],
                          cwd=tests.parent, capture_output=True, text=True, timeout=600)  # fmt: skip
    assert done.returncode == 0 and int(done.stdout.split()[-4]) > 20, done.stdout[-2000:]
