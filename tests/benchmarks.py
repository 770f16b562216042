"""The benchmarks of eval.py, which loads this file: layers, MMLU, LAMBADA, retrieval, speed, ablation.

They are no part of the lesson: prompts, files and scores, as the published benchmarks have them. A task is a
function of an `eval.Bench` that returns its raw figures and a table; add one with `@register(TASKS, "name")`.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import functools
import io
import math
import random
import statistics
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from analysis import key_concentration, projection_residual
from files import peak_memory
from huggingface_hub import hf_hub_download
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

import distill
from distill import UserError, attention_modules, linear_layers, new_layer
from eval import TASKS, Bench, mean_and_error, measure_text, paired, read_texts, state_bytes
from interventions import LinearizeConfig
from linear_attn import RULES, exact_attention, register

# ----------------------------------------------------------------------------- layer by layer


@register(TASKS, "layers")
def measure_layers(bench: Bench) -> tuple[dict, str]:
    """On the teacher's own inputs, per layer: normalised MSE mean |y_teacher - y|^2 / Var(y_teacher) of "off"
    and "linear", the latter also by eighths of the sequence; the share of softmax's mass beyond the newest
    exact pairs, which is what a memory is for; and the paper's figures, key concentration and projection
    residual of the keys, with their rank correlation with the error: do they tell which layers are hard?"""
    model, N = bench.model, len(bench.held_out)
    names = ("off", "linear", "mass", "concentration", "residual")
    total = {i: dict.fromkeys((*names, "variance"), 0.0) for i in linear_layers(model)}

    def probe(module, teacher, student):
        row, layer, project = total[module.layer_idx], module.linear, distill.output_projection(module)
        y = project(teacher.flatten(2)).double().cpu()
        row["variance"] = row["variance"] + y.var(unbiased=False).item() / N
        for name in ("off", "linear"):
            answer = student(layer.variant(**model.controller.variants[name]))
            row[name] = row[name] + (project(answer.flatten(2)).double().cpu() - y).square().mean((0, 2)) / N
        q, k, scale, softcap = student(lambda q, k, v, hidden, scale, softcap: (q, k, scale, softcap))
        c, ones = layer.config, torch.ones_like(k[..., :1])
        near, all_ = (exact_attention(q, k, ones, sinks, window, scale, softcap)[1]
                      for sinks, window in ((c.sinks, c.reach), (0, k.shape[1])))  # fmt: skip
        row["mass"] += (1 - (near - all_).exp())[:, c.exact_pairs :].mean().item() / N
        row["concentration"] += key_concentration(k).mean().item() / N
        row["residual"] += projection_residual(k).mean().item() / N

    for ids in tqdm(bench.held_out, desc="layers", leave=False, disable=None):
        distill.probe_layers(model, ids[None], probe)
    for row in total.values():
        variance = row.pop("variance")
        row["position"] = [x.mean().item() / variance for x in row["linear"].tensor_split(8)]
        row |= {name: row[name].mean().item() / variance for name in ("off", "linear")}
    error = [row["linear"] for row in total.values()]
    correlation = {n: rank_correlation(error, [row[n] for row in total.values()]) for n in names[2:]}
    result = dict(layer=total, correlation=correlation)
    lines = ["layer" + "".join(f"{n:>14s}" for n in names) + "   linear by eighths of the sequence"]
    for i, row in total.items():
        eighths = " ".join(f"{x:.3f}" for x in row["position"])
        lines.append(f"{i:5d}" + "".join(f"{row[n]:14.4f}" for n in names) + "   " + eighths)
    lines += [
        f"rank correlation of linear's error with {n}: {x:+.2f}" for n, x in result["correlation"].items()
    ]
    return result, "\n".join(lines)


def rank_correlation(x: list[float], y: list[float]) -> float:
    """Spearman's: the correlation of ranks (no ties among real-valued measurements)."""
    ranks = torch.tensor([x, y], dtype=torch.float64).argsort(-1).argsort(-1).double()
    return torch.corrcoef(ranks)[0, 1].item() if len(x) > 2 else math.nan


# ----------------------------------------------------------------------------- questions with answers


def continuations(model, prefix: list[int], rests: list[list[int]], last: int = 0) -> Iterator[tuple]:
    """For every rest: (log-probabilities of the token after each of its tokens, or after its last ones; the
    cache). The prefix is read once: a state of constant size is cheap to copy."""
    ids = [torch.tensor([x], device=model.device) for x in (prefix, *rests)]
    cache = model(input_ids=ids[0], use_cache=True, logits_to_keep=1).cache
    for rest in ids[1:]:
        own = copy.deepcopy(cache)
        out = model(input_ids=rest, use_cache=True, cache=own, logits_to_keep=last)
        yield out.logits[0].float().log_softmax(-1), own


def from_the_start(bench: Bench, text: str) -> list[int]:
    """Tokens of a text that comes first: after those that the tokenizer starts a text with."""
    return [*bench.train.begin, *bench.encode(text)]


def common_prefix(rows: list[list[int]]) -> int:
    """How many first tokens all rows share, leaving each at least one."""
    same = [len(set(column)) == 1 for column in zip(*rows)]
    return min(same.index(False) if False in same else len(same), min(map(len, rows)) - 1)


def mmlu_files(source: str) -> dict[str, str]:
    """{"dev/anatomy": csv text, ...} of a folder with dev/ and test/, or of data.tar of a hub dataset."""
    try:
        if Path(source).exists():
            paths = [p for part in ("dev", "test") for p in Path(source, part).glob("*.csv")]
            files = {f"{p.parent.name}/{p.stem}": p.read_text(encoding="utf-8") for p in paths}
        else:
            with tarfile.open(hf_hub_download(source, "data.tar", repo_type="dataset")) as tar:
                members = [
                    m for m in tar if m.name.endswith(".csv") and m.name.split("/")[-2] in ("dev", "test")
                ]
                files = {m.name[:-4].split("/", 1)[-1]: tar.extractfile(m).read().decode() for m in members}
    except Exception as error:
        raise UserError(f"cannot read MMLU from {source}: {distill.brief(error)}") from None
    files = {name.rsplit("_", 1)[0]: text for name, text in files.items()}
    if not any(name.startswith("test/") for name in files):
        raise UserError(f"{source}: want folders dev and test of SUBJECT_dev.csv and SUBJECT_test.csv")
    return files


def mmlu_question(row: list[str], with_answer: bool) -> str:
    question, *choices, letter = row
    lines = [question.strip(), *(f"{x}. {c}" for x, c in zip("ABCD", choices)), "Answer:"]
    return "\n".join(lines) + (f" {letter}" if with_answer else "")


@register(TASKS, "mmlu")
def measure_mmlu(bench: Bench) -> tuple[dict, str]:
    """MMLU, 5-shot, the standard prompt: log-probabilities of the four letters, question by question (hence
    independent of any batch size). Beside accuracy: the right letter's log-probability, agreement with the
    teacher's letter and KL over the four letters, which say more when the teacher itself is weak."""
    files = mmlu_files(bench.mmlu)
    rows: dict[str, list] = {name: [] for name in bench.rows}
    subjects, right = [], []
    names = sorted(n[5:] for n in files if n.startswith("test/"))
    for subject in tqdm(names, desc="mmlu", leave=False, disable=None):
        dev, test = (list(csv.reader(io.StringIO(files[f"{part}/{subject}"]))) for part in ("dev", "test"))
        test = test[: bench.limit or None]
        work = functools.partial(mmlu_subject, bench, subject, dev[:5], test)
        for name, scores in bench.progress.once(f"mmlu {subject}", work).items():
            rows[name] += scores
        right += ["ABCD".index(row[-1]) for row in test]
        subjects.append([subject, len(test)])
    result = dict(subjects=subjects, right=right, letters=rows)
    return result, mmlu_table(result)


def mmlu_subject(bench: Bench, subject: str, dev: list, test: list) -> dict[str, list[list[float]]]:
    """Log-probabilities of the four letters, by row and question."""
    shots = [mmlu_question(row, True) for row in dev]
    topic = subject.replace("_", " ")
    about = f"The following are multiple choice questions (with answers) about {topic}.\n\n"
    prompts = [about + "\n\n".join([*shots, mmlu_question(row, False)]) for row in test]
    letters = [bench.encode(prompts[0] + f" {x}")[-1] for x in "ABCD"]
    ids = [from_the_start(bench, prompt) for prompt in prompts]
    shared, rows = common_prefix(ids), {}
    for name in bench.rows:
        with bench.row(name) as model:
            answers = continuations(model, ids[0][:shared], [x[shared:] for x in ids], last=1)
            rows[name] = [[round(x, 4) for x in log_p[-1, letters].tolist()] for log_p, _ in answers]
    return rows


def mmlu_answers(result: dict) -> dict[str, dict[str, list]]:
    """Of every row, question by question: is it right, is it the teacher's letter, KL over the letters."""
    letters = {name: torch.tensor(row).log_softmax(-1) for name, row in result["letters"].items()}
    teacher, right, made = letters["teacher"], torch.tensor(result["right"]), {}
    for name, own in letters.items():
        said = own.argmax(-1)
        made[name] = dict(
            hit=(said == right).double().tolist(),
            same=(said == teacher.argmax(-1)).tolist(),
            kl=(teacher.exp() * (teacher - own)).sum(-1).tolist(),
        )
    return made


def mmlu_table(result: dict) -> str:
    right, rows = result["right"], mmlu_answers(result)
    lines = ["MMLU         accuracy      - teacher ± s.e.   log p(right)   same letter   KL of letters"]
    for name, row in rows.items():
        gain, error = mean_and_error([x - y for x, y in zip(row["hit"], rows["teacher"]["hit"])])
        (hit, _), (same, _), (kl, kl_se) = (mean_and_error(row[key]) for key in ("hit", "same", "kl"))
        figures = f"{hit:8.3f}   {gain:+.3f} ± {error:.3f}"
        mass = torch.tensor(result["letters"][name])[range(len(right)), right].mean()
        lines.append(f"{name:10s}{figures:>31s}{mass:15.3f}{same:14.3f}    {kl:.4f} ± {kl_se:.4f}")
    return "\n".join(lines) + f"\n{len(right)} questions of {len(result['subjects'])} subjects, 5 shots"


@register(TASKS, "lambada")
def measure_lambada(bench: Bench) -> tuple[dict, str]:
    """LAMBADA: is the last word of a passage what greedy decoding says? And the word's log-probability."""
    passages = read_texts(bench.lambada)[: bench.limit or None]
    cut = [text.rstrip().rsplit(" ", 1)[0] for text in passages]
    ids = [from_the_start(bench, text.rstrip()) for text in passages]
    starts = [len(from_the_start(bench, text)) for text in cut]
    rows = {name: dict(hit=[0.0] * len(ids), log_p=[0.0] * len(ids)) for name in bench.rows}
    by_length = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    for start in tqdm(range(0, len(ids), 16), desc="lambada", leave=False, disable=None):
        part = by_length[start : start + 16]
        work = functools.partial(last_words, bench, [ids[i] for i in part], [starts[i] for i in part])
        for name, scores in bench.progress.once(f"lambada {start}", work).items():
            for i, (hit, log_p) in zip(part, scores):
                rows[name]["hit"][i], rows[name]["log_p"][i] = hit, log_p
    lines = ["LAMBADA      accuracy      - teacher ± s.e.   log p(word)"]
    for name, row in rows.items():
        gain, error = paired(rows, "hit", "teacher", name)
        hit, log_p = (mean_and_error(row[m])[0] for m in ("hit", "log_p"))
        lines.append(f"{name:10s}{hit:11.3f}   {gain:+.3f} ± {error:.3f}{log_p:14.3f}")
    return dict(rows=rows), "\n".join(lines) + f"\n{len(ids)} passages"


def last_words(bench: Bench, ids: list[list[int]], starts: list[int]) -> dict[str, list[list[float]]]:
    """[is it what greedy decoding says, its log-probability] of every row and passage, one batch; `starts`:
    where the last words start."""
    rows, longest, device = {}, max(map(len, ids)), bench.model.device
    first = min(starts) - 1  # only logits from here on: the last words'
    batch = pad_sequence([torch.tensor(x) for x in ids], batch_first=True).to(device)
    mask = pad_sequence([torch.ones(len(x), dtype=torch.long) for x in ids], batch_first=True).to(device)
    for name in bench.rows:
        row = rows[name] = []
        with bench.row(name) as model:
            some = dict(input_ids=batch, attention_mask=mask, use_cache=False)
            every = model(**some, logits_to_keep=longest - first).logits
            for x, start, logits in zip(ids, starts, every):
                logits = logits[start - 1 - first : len(x) - 1 - first].float()
                target = torch.tensor(x[start:], device=logits.device)
                log_p = logits.log_softmax(-1).gather(1, target[:, None]).sum().item()
                row.append([float((logits.argmax(-1) == target).all()), round(log_p, 4)])
    return rows


# ----------------------------------------------------------------------------- retrieval

FACT, ASK = "\nThe pass key{} is {}. Remember it.\n", "\nWhat is the pass key{}? The pass key{} is"
NAMES = [f" for {word}" for word in "apple river stone window garden paper silver mountain".split()]
FILLER = "The sky is wide and the sea is deep. Birds pass over the hills. One day follows another. "


def facts_and_questions(kind: str, rng: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
    """What is hidden, in this order, and (question, answer) pairs; a case is solved if all answers are right.

    passkey, prose, uuid: one key, in repeated filler or in a text; uuid: of 32 hex digits. multikey: four
    named keys, one is asked for; multiquery: two are; multivalue: one name has two keys; tracking: a chain.
    """
    keys, names = [str(rng.randrange(10_000, 100_000)) for _ in range(4)], rng.sample(NAMES, 4)
    if kind == "uuid":
        keys[0] = uuid.UUID(int=rng.getrandbits(128)).hex
    if kind in ("passkey", "prose", "uuid"):
        names = [""]
    facts = [FACT.format(name, key) for name, key in zip(names, keys)]
    asks = [(ASK.format(name, name), f" {key}") for name, key in zip(names, keys)]
    if kind == "multivalue":
        a, b = facts[0], FACT.format(names[0], keys[1])
        return [a, b], [
            (asks[0][0].replace("key", "keys").replace(" is", " are"), f" {keys[0]} and {keys[1]}")
        ]
    if kind == "tracking":
        chain = [f"\nThe pass key{n} is the pass key{m}. Remember it.\n" for m, n in zip(names, names[1:])]
        return [facts[0], *chain[:2]], [(asks[2][0], f" {keys[0]}")]
    return facts, asks[: 2 if kind == "multiquery" else 1]


def retrieval_cases(bench: Bench, kind: str, count: int) -> Iterator[tuple[list[int], list[tuple[str, str]]]]:
    """(about --seq-len tokens, questions): the first fact at depths from 5 to 90 %, the others anywhere."""
    texts = (text for source in bench.train.eval_data or ("",) for text in read_texts(source))
    text = FILLER * 10_000 if kind == "passkey" else "\n\n".join(texts)
    hay = bench.encode(text[: 40 * bench.train.seq_len * (1 + count // 8)])
    for i in range(count):
        rng = random.Random(f"{bench.train.seed} {kind} {i}")
        facts, asks = facts_and_questions(kind, rng)
        depths = [0.05 + 0.85 * i / max(1, count - 1), *(0.9 * rng.random() for _ in facts[1:])]
        facts = [bench.encode(fact) for fact in facts]
        begin = list(bench.train.begin)
        longest = max(len(bench.encode(q + a)) for q, a in asks)
        room = bench.train.seq_len - sum(map(len, (begin, *facts))) - longest
        start = rng.randrange(max(1, len(hay) - room))
        ids, at = begin, start
        # a chain has to be told in order; else every fact keeps its own depth
        order = sorted(depths) if kind == "tracking" else depths
        for depth, fact in sorted(zip(order, facts)):
            cut = start + int(room * depth)
            ids, at = ids + hay[at:cut] + fact, cut
        yield ids + hay[at : start + room], asks


def decode(model, log_p: Tensor, cache, answer: list[int]) -> list[int]:
    """Greedy decoding from there, up to the answer's length or the first token that is not the answer's."""
    said = [log_p[-1].argmax().item()]
    while len(said) < len(answer) and said == answer[: len(said)]:
        step = torch.tensor([said[-1:]], device=model.device)
        said.append(model(input_ids=step, cache=cache, use_cache=True).logits[0, -1].argmax().item())
    return said


@register(TASKS, "retrieval")
def measure_retrieval(bench: Bench) -> tuple[dict, str]:
    """Exact matches of every kind at --seq-len tokens, --limit cases each, by teacher forcing (every token of
    the answer is the likeliest after the true ones before it) and by greedy decoding through the cache."""
    rows = {name: {kind: dict(forced=[], greedy=[]) for kind in bench.kinds} for name in bench.rows}
    for kind in bench.kinds:
        cases = retrieval_cases(bench, kind, bench.limit or 8)
        for i, case in enumerate(tqdm(cases, desc=kind, leave=False, disable=None)):
            work = functools.partial(found, bench, *case)
            for name, (forced, greedy) in bench.progress.once(f"{kind} {i}", work).items():
                rows[name][kind]["forced"].append(forced)
                rows[name][kind]["greedy"].append(greedy)
    lines = [
        f"exact match, T = {bench.train.seq_len}".ljust(24) + "".join(f"{kind:>12s}" for kind in bench.kinds)
    ]
    for name, row in rows.items():
        for how in ("forced", "greedy"):
            lines.append(
                f"{name} {how}".ljust(24)
                + "".join(f"{mean_and_error(row[k][how])[0]:12.2f}" for k in bench.kinds)
            )
    return dict(rows=rows, seq_len=bench.train.seq_len), "\n".join(lines)


def found(bench: Bench, ids: list[int], asks: list[tuple[str, str]]) -> dict[str, list[float]]:
    """[forced, greedy] of every row: are all answers right?"""
    questions, rows = [bench.encode(q) for q, _ in asks], {}
    answers = [bench.encode(q + a)[len(x) :] for (q, a), x in zip(asks, questions)]
    forced_too = [q + a[:-1] for q, a in zip(questions, answers)]
    for name in bench.rows:
        with bench.row(name) as model:
            read = list(continuations(model, ids, forced_too + questions))
            forced = [log_p[-len(a) :].argmax(-1).tolist() == a for (log_p, _), a in zip(read, answers)]
            greedy = [decode(model, *asked, a) == a for asked, a in zip(read[len(answers) :], answers)]
        rows[name] = [float(all(forced)), float(all(greedy))]
    return rows


# ----------------------------------------------------------------------------- speed


def timed(model, work: Callable) -> tuple[float, object]:
    """(seconds of wall time, result)."""
    wait = torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    result = work()
    wait()
    return time.perf_counter() - start, result


@register(TASKS, "speed")
def measure_speed(bench: Bench) -> tuple[dict, str]:
    """Prefill and decoding at 1k, 2k, ... --seq-len tokens (--limit: so many of the longest): medians of
    three interleaved prefills, and of 24 tokens, of every row in one run. Ratios to the teacher are what to
    read: times are this machine's."""
    tokens, longest = bench.held_out.flatten(), bench.train.seq_len
    lengths = ([n for n in (2**i for i in range(10, 21)) if n <= longest] or [longest])[-bench.limit :]
    ids = tokens.repeat(-(-longest // len(tokens)))[None].to(bench.model.device)
    result = {}
    for length in lengths:
        rows = result[length] = {name: dict(prefill=[], decode=[], peak=[]) for name in bench.rows}
        for _ in tqdm(range(3), desc=f"speed {length}", leave=False, disable=None):
            for name, row in rows.items():
                with bench.row(name) as model:
                    peak_memory(model.device, reset=True)
                    some = dict(input_ids=ids[:, :length], use_cache=True, logits_to_keep=1)
                    read = functools.partial(model, **some)
                    seconds, out = timed(model, read)
                    row["prefill"].append(seconds)
                    token = out.logits[:, -1:].argmax(-1)
                    for _ in range(8):
                        step = functools.partial(model, input_ids=token, cache=out.cache, use_cache=True)
                        seconds, _ = timed(model, step)
                        row["decode"].append(seconds)
                    row["peak"].append(peak_memory(model.device))
                    del out, step, read
        size = state_bytes(bench.model, length, rows)
        for name, row in rows.items():
            row |= {key: statistics.median(row[key]) for key in ("prefill", "decode", "peak")}
            row["bytes"] = size[name]
    if bench.plot:
        draw_speed(result, bench.plot)
    return dict(lengths=result), speed_table(result)


def draw_speed(result: dict, path: str) -> None:
    """Ratios to the teacher over the length, prefill and decoding, as an image."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(8, 3), layout="constrained")
    for axes, key in zip(figure.subplots(1, 2, sharex=True), ("prefill", "decode")):
        for name in next(iter(result.values())):
            ratio = [rows[name][key] / rows["teacher"][key] for rows in result.values()]
            axes.plot(list(map(int, result)), ratio, "o-", label=name)
        axes.set(xscale="log", xlabel="tokens", title=f"{key}: time, teacher = 1", ylim=(0, None))
    axes.legend()
    suffix = Path(path).suffix[1:] or "png"
    distill.write_atomically(Path(path), lambda p: figure.savefig(p, format=suffix))


def speed_table(result: dict) -> str:
    """Times, ratios to the teacher of the same run, and a bar a ratio: ten marks are the teacher's time."""
    head = ("T", "row", "prefill ms/token", "x", "decode ms/token", "x", "peak MiB", "state bytes")
    lines = ["{:>7s} {:10s}{:>18s}{:>7s}{:>17s}{:>7s}{:>10s}{:>15s}".format(*head)]
    for length, rows in result.items():
        for name, row in rows.items():
            prefill, decoded = (row[k] / rows["teacher"][k] for k in ("prefill", "decode"))
            left = f"{int(length):7,d} {name:10s}{1e3 * row['prefill'] / int(length):18.3f}{prefill:7.2f}"
            right = f"{1e3 * row['decode']:17.1f}{decoded:7.2f}{row['peak'] / 2**20:10.0f}{row['bytes']:15,d}"
            lines.append(left + right + "  " + "#" * max(1, round(10 * decoded)))
    return "\n".join(lines) + "\nbars: time to decode a token, ten marks are the teacher's"


# ----------------------------------------------------------------------------- which part does how much


def compare(bench: Bench, configs: dict[str, LinearizeConfig]) -> tuple[dict, dict]:
    """Train a layer of every config on the same teacher passes: (held-out relative MSE, the layers).

    All students of a layer see the same q, k, v and steps, so that differences are the configs' alone: one
    teacher pass feeds them all. The model must be linearized (any config) on the layers of interest.
    """
    model, train, students = bench.model, bench.train, {}
    for name, config in configs.items():
        for i in linear_layers(model):
            torch.manual_seed(train.seed)
            students[name, i] = new_layer(model, attention_modules(model)[i], config)
    trainable = {key: list(s.parameters()) for key, s in students.items() if list(s.parameters())}
    params = [p for some in trainable.values() for p in some] or [torch.zeros(1)]  # AdamW wants one
    optimizer = torch.optim.AdamW(params, train.lr, (0.9, train.beta2), weight_decay=0.0)
    totals: dict[tuple, float] = {}

    def probe(module, teacher, student):
        for name in configs:
            key = name, module.layer_idx
            with torch.set_grad_enabled(learning and key in trainable):
                loss = distill.relative_error(module, teacher, student(students[key]))
                if loss.requires_grad:
                    loss.backward()
            totals[key] = totals.get(key, 0.0) + loss.item()

    learning, batches = True, distill.batches(bench.tokens, train)
    for step, ids in enumerate(tqdm(batches, total=train.steps, desc="train", leave=False, disable=None)):
        distill.probe_layers(model, ids, probe)
        for params in trainable.values():
            torch.nn.utils.clip_grad_norm_(params, train.clip)
        optimizer.param_groups[0]["lr"] = distill.learning_rate(step, train)
        optimizer.step()
        optimizer.zero_grad()
    learning = False
    totals.clear()
    for ids in tqdm(bench.held_out, desc="test", leave=False, disable=None):
        distill.probe_layers(model, ids[None], probe)
    error = {
        name: {i: totals[name, i] / len(bench.held_out) for n, i in totals if n == name} for name in configs
    }
    return error, students


def ladder(base: LinearizeConfig) -> dict[str, LinearizeConfig]:
    """The paper's ladder, one step at a time; then every rule under both merges, all else as in `base`. "sum"
    also with the features, heads and biases of the paper: a read that is only added needs the right size."""
    at = functools.partial(dataclasses.replace, base, router="recency", budget=0, window=base.reach)
    half = base.reach // 2 // base.block * base.block
    made = {"memory off": at(merge="off"), "pure": at(sinks=0, window=0, conv=0),
            "+ window": at(sinks=0, conv=0), "+ sinks": at(conv=0),
            "+ conv": at(conv=base.conv or 4)}  # fmt: skip
    if half:
        made["+ routing"] = at(conv=base.conv or 4, router="mix", window=half, budget=base.reach - half)
    paper = {n: distill.PRESETS["paper"][n] for n in ("features", "memory_per", "beta_bias", "decay_bias")}
    for merge, more, note in (("sum", {}, ""), ("sum", paper, ", paper's"), ("lse", {}, "")):
        for rule in RULES:
            made[f"{rule} {merge}{note}"] = at(rule=rule, merge=merge, **more)
    return made


@register(TASKS, "ablation")
def measure_ablation(bench: Bench) -> tuple[dict, str]:
    """The ladder and the rules: layer error, perplexity and KL of the model with those layers in place."""
    configs = ladder(bench.model.linearize_config)
    error, students = compare(bench, configs)
    mine, result = linear_layers(bench.model), {}
    lines = ["| design | exact pairs | relative MSE | ppl | KL |", "|---|---|---|---|---|"]
    for name, config in configs.items():
        for i in mine:
            attention_modules(bench.model)[i].linear = students[name, i]
            students[name, i].controller = bench.model.controller
        rows = measure_text(dataclasses.replace(bench, rows=("teacher", "linear")))[0]["rows"]["linear"]
        result[name] = dict(layer=error[name], pairs=config.exact_pairs, nll=rows["nll"], kl=rows["kl"])
        (nll, _), (kl, kl_se) = (mean_and_error(rows[m]) for m in ("nll", "kl"))
        mse = sum(error[name].values()) / len(error[name])
        lines.append(
            f"| {name} | {config.exact_pairs} | {mse:.4f} | {math.exp(nll):.2f} | {kl:.4f} ± {kl_se:.4f} |"
        )
    for i, layer in mine.items():
        attention_modules(bench.model)[i].linear = layer
    return result, "\n".join(lines)
