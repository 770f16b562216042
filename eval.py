"""Measure what a linearized model has lost, and what its memory adds to the exact pairs it keeps anyway.

What you will learn here
    1. Controls. Every figure stands beside those that could explain it away (`add_controls`). "teacher" is
       the same frozen model with its own attention; "off" has as many exact pairs, the newest, and no memory;
       "bytes" spends the memory's bytes on further exact pairs; "random" has the memory and a router that
       does not look. A design counts as better only if it beats "off" *and* "bytes": arXiv 2608.28444 found
       the off row above published linearizations.
    2. Paired differences. All rows see the same sequences, and what is compared is the difference sequence by
       sequence, with its standard error: texts differ far more among each other than designs do.
    3. Which layers need their exact pairs, before anything is trained (`measure_budgets`, equation (24)).
    4. What `python distill.py` does from beginning to end (`train`).
Skip `layer_bytes`, `further_pairs` and `at_budget` on a first reading: they count bytes.

    python eval.py --adapter out --tasks ppl,layers,retrieval,mmlu,lambada       (tests/benchmarks.py)
    python eval.py --model M --tasks ablation --layers 0 5        which part does how much, as markdown
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

import distill
from distill import TrainConfig, UserError, attention_modules, head_shape, linear_layers
from interventions import ASK_THE_MEMORY, OFF, ROUTERS, LinearizeConfig, LinearizedAttention, Pool, State
from linear_attn import register

# isort: split
# tests/, where command lines live, is on the path since distill was imported
from explain import explain
from files import Progress, peak_memory
from lora import add_lora
from options import check_writable, command_line, configs_from, distill_options, eval_options, load_adapter
from processes import spread, torchrun
from report import mean_and_error, paired, report, text_table  # noqa: F401
from texts import begun, read_texts, tokenized

# A task is a function of a Bench that returns (raw figures, a table of them). Add one with
# @register(TASKS, "name"); most live in tests/benchmarks.py.
TASKS: dict[str, Callable[[Bench], tuple[dict, str]]] = {}
KINDS = ("passkey", "prose", "uuid", "multikey", "multiquery", "multivalue", "tracking")  # of retrieval

# ----------------------------------------------------------------------------- what is measured, and on what

@dataclass
class Bench:
    """What a task is given. It returns its raw figures and a table of them.

    One model serves all rows: its controller says which of them it is (`row`)."""

    model: distill.hf.PreTrainedModel
    tokenizer: object
    tokens: Tensor  # training text, for tasks that train
    held_out: Tensor  # (N, T)
    train: TrainConfig
    rows: tuple[str, ...]  # "teacher" and names of the model's variants
    limit: int = 0  # questions a subject, passages, cases a kind; 0: all, or 8 cases
    kinds: tuple[str, ...] = KINDS
    mmlu: str = "cais/mmlu"  # or a folder of the original files
    lambada: str = "EleutherAI/lambada_openai:data/lambada_test_en.jsonl"
    plot: str = ""
    progress: Progress = Progress()  # a long task asks it for what it has finished before

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    @contextlib.contextmanager
    def row(self, name: str):
        """Inside, the model answers as the teacher or as one of its variants, without gradients."""
        as_row = distill.as_teacher(self.model) if name == "teacher" else self.model.controller.switch(name)
        with torch.no_grad(), as_row:
            yield self.model


def load_data(tokenizer, train: TrainConfig) -> tuple[Tensor, Tensor]:
    """(training tokens, held-out sequences (N, seq_len)). Held-out text never enters training.

    Without --eval-data the last tenth of every source is held out. Documents are joined, and sequences cut
    from the whole: a linearized model has to carry on across what it happens to be given.
    """
    # Cut by characters before tokenizing: no token knows of text on the other side.
    texts, held = (["\n\n".join(read_texts(x)) for x in xs] for xs in (train.data or ("",), train.eval_data))
    if not held:
        cuts = [len(text) * 9 // 10 for text in texts]
        texts, held = [t[:c] for t, c in zip(texts, cuts)], [t[c:] for t, c in zip(texts, cuts)]
    tokens, held_out = (tokenized(tokenizer, "\n\n".join(part)) for part in (texts, held))
    if min(len(tokens), len(held_out)) < train.seq_len:
        have = f"{len(tokens)} training and {len(held_out)} held-out tokens"
        raise UserError(f"too little text: {have} for --seq-len {train.seq_len}")
    count, head = min(len(held_out), train.eval_tokens) // train.seq_len, tokens.new_tensor(train.begin)
    # No special tokens within; but every sequence starts as the tokenizer would start it (`begun`).
    parts = held_out.split(train.seq_len - len(head))[: max(1, count)]
    return tokens, torch.stack([torch.cat([head, part]) for part in parts])


@register(ROUTERS, "random")
def route_at_random(pool: Pool) -> Tensor:
    """The control of every router: a hash of the position, so that a run can be repeated and split.

    Not torch.rand: it would choose others when the same text comes in two pieces."""
    return (torch.sin(pool.position.double() * 12.9898) * 43758.5453).remainder(1)


def layer_bytes(layer: LinearizedAttention, length: int, dtype: torch.dtype) -> int:
    """Bytes of a layer's state after `length` tokens of one row, counted on tensors without storage.

    Counted, not computed by a formula: what is kept is whatever the layer's own code puts into its `State`,
    so that a student's rule or router pays for what it keeps without telling anyone.
    """
    layer, state, c = copy.deepcopy(layer).to("meta"), State(), layer.config
    length = min(length, c.exact_pairs + 1)  # the state grows until the first token has left
    heads = (layer.heads, layer.key_dim), (layer.kv_heads, layer.key_dim), (layer.kv_heads, layer.value_dim)
    x = [torch.empty(1, length, *s, dtype=dtype, device="meta") for s in (*heads, (layer.d_model,))]
    layer(*x, state=state)
    return state.nbytes()


def further_pairs(model, budget: int) -> int:
    """How many more exact pairs the bytes of a layer's memory buy at this budget. The memory's bytes are more
    than its state: tokens that may be written later wait with their gates."""
    c, layer = model.linearize_config, next(iter(linear_layers(model).values()))
    at = dict(budget=budget)
    one = dict(window=c.window + 1) if c.router == "recency" else dict(budget=budget + 1)
    # With the memory, without it, and without it but one pair more: the last difference is a pair's price.
    changes = at, at | without_memory(c), at | without_memory(c) | one
    own, less, plus_one = (layer_bytes(layer.variant(**x), 10**6, model.dtype) for x in changes)
    return math.ceil((own - less) / (plus_one - less))


def without_memory(c: LinearizeConfig) -> dict:
    """The exact part alone, with the router nearest to c's that does not ask a memory."""
    return dict(merge="off", router=ASK_THE_MEMORY.get(c.router, c.router))


def at_budget(model, name: str, budget: int) -> dict:
    """A row's changes with another budget, a mean over layers; "bytes" has the more that it buys there."""
    c, mode = model.linearize_config, model.controller.variants[name]
    if name == "bytes" and c.router == "recency":
        return mode | dict(budget=budget, window=c.window + further_pairs(model, budget))
    budget += further_pairs(model, budget) if name == "bytes" else 0
    shared_out = c.budgets and "budget" not in mode
    return mode | (dict(budgets=shares(model, budget)) if shared_out else dict(budget=budget))


def add_controls(model) -> None:
    """Variants beside "linear" and "off". If layers have budgets of their own, "off" is even.

    mass      the exact part alone, as many pairs by attention received
    bytes     the exact part as well as can be without a memory, in the memory's bytes
    random    the memory and a router that does not look
    recent    the newest in the layers' own numbers, if they have any
    """
    # A control changes as little as it can, so that a difference has one reason.
    c, modes = model.linearize_config, model.controller.variants
    mean = c.reach - c.window
    if c.router != "recency":
        modes |= {"mass": dict(merge="off", router="mass"), "random": dict(router="random")}
    if next(iter(linear_layers(model).values())).rule is not None:
        modes["bytes"] = without_memory(c)
        modes["bytes"] = at_budget(model, "bytes", mean)
    modes |= dict(off=OFF | dict(budget=mean, budgets=()), recent=dict(OFF)) if c.budgets else {}


def state_bytes(model, length: int, rows: Sequence[str]) -> dict[str, int]:
    """Bytes that one sequence of `length` tokens keeps: the teacher's cache, and states of variants.

    Layers that keep softmax (--keep, --layers) count with their cache in every row."""
    modes, total = model.controller.variants, dict.fromkeys(rows, 0)
    size = functools.cache(lambda config, *_: layer_bytes(changed, length, model.dtype))
    for module in attention_modules(model):
        layer, shape = getattr(module, "linear", None), head_shape(model, module)
        cache = 2 * shape[1] * shape[2] * length * model.dtype.itemsize
        for row in total:
            changed = layer and row != "teacher" and layer.variant(**modes[row])
            total[row] += size(changed.config, *shape) if changed else cache
    return total

# ----------------------------------------------------------------------------- which layers need their pairs
# Layers are unlike: in some every query looks at its neighbours, in others at a token 800 positions back. The
# same number of exact pairs for all wastes them on the former. But a layer's own error does not say how much
# the model suffers from it. Equation (24) does, to second order, before a single parameter is trained.

def measure_budgets(model: distill.hf.PreTrainedModel, ids: Tensor, budgets: Sequence[int]) -> Tensor:
    """What each layer's exact pairs are worth: (layers, budgets), in nats of KL(teacher || model) a token.

    A layer whose answer is off by d moves the model's distribution by KL ~ d^T F d / 2, where F = E[g g^T] is
    the Fisher information, and g the gradient of log p(y) to that answer for labels y that the teacher draws.
    Between tokens F is taken as block-diagonal:
        (24)  KL ~ 1/2 sum_t (g_t . d_t)^2
    One backward pass through the teacher gives every layer's g, one probe every d, of the exact part alone.

    budgets: what to try in every layer. HAZARD: the labels have to be drawn from the teacher. With the text's
    own next tokens g would be the gradient of its surprise, which is large where the teacher is wrong.
    """
    answers: dict[torch.nn.Module, Tensor] = {}
    embedded = model.get_input_embeddings()(ids.to(model.device)).requires_grad_()
    # Nothing of the teacher requires a gradient, so its input has to, for autograd to reach the answers.
    keep = lambda module, teacher, student: answers.setdefault(module, teacher)  # noqa: E731
    with torch.enable_grad(), distill.recomputed(model), model.controller.switch("probe", keep):
        logits = model(inputs_embeds=embedded, use_cache=False).logits.flatten(0, 1).float()
        drawn = torch.cat([x.softmax(-1).multinomial(1)[:, 0] for x in logits.detach().split(128)])
        log_p = -F.cross_entropy(logits, drawn, reduction="sum")
        del logits  # as large as all layers together, for small models
        # Of the sum over tokens: g_t holds what the answer at t does to all later labels as well.
        gradients = iter(torch.autograd.grad(log_p, list(answers.values())))
    # The exact part alone stands for the layer: there is no trained memory yet; an untrained one is noise.
    blind, cost = without_memory(model.linearize_config), []

    def probe(module, teacher, student):
        g, answers = next(gradients), (student(module.linear.variant(**blind, budget=b)) for b in budgets)
        # (24), a token's error along its gradient; heads and channels of a layer are one answer
        off = [((x - teacher) * g).sum((2, 3)).float() for x in answers]
        cost.append([x.square().sum().item() / 2 / ids.numel() for x in off])

    distill.probe_layers(model, ids, probe)
    return torch.tensor(cost)


def shares(model, mean: int) -> tuple[int, ...]:
    """`mean` pairs a layer shared out among the layers: as they are worth, or in the proportions typed."""
    c, layers = model.linearize_config, len(linear_layers(model))
    if model.worth:
        return share_out(*model.worth, mean * layers)
    return tuple(math.ceil(b * mean / max(c.reach - c.window, 1)) for b in c.budgets)


def share_out(cost: list[list[float]], budgets: Sequence[int], total: int) -> tuple[int, ...]:
    """`total` pairs for the layers, to whom they are worth most. cost (layers, budgets): equation (24).

    Greedy by gain a pair. Where the next step gains less than the one after it both count as one, which makes
    every layer's curve convex, and greedy optimal up to the last step."""
    # A step (gain a pair, layer, pairs) leads from one budget to the best next one: the steepest way down.
    steps, given = [], [budgets[0]] * len(cost)
    for n, row in enumerate(cost):
        at = 0
        while rest := range(at + 1, len(budgets)):
            gains = [(row[at] - row[to]) / (budgets[to] - budgets[at]) for to in rest]
            to = rest[gains.index(max(gains))]
            steps.append((max(gains), n, budgets[to] - budgets[at]))
            at = to
    # All layers' steps, best first: a layer's own come in their order, because its curve is convex now.
    for _, n, pairs in sorted(steps, reverse=True):
        given[n] += min(pairs, total - sum(given))
    return tuple(x + (total - sum(given)) // len(given) for x in given)  # beyond what was tried: evenly


def allocate_budgets(model, config: LinearizeConfig, tokens: Tensor, train: TrainConfig) -> None:
    """Share out as many pairs as `budget` gives all layers, measured on some training sequences.

    The sequences are not those of training (another seed), and never held-out ones. What comes out is part of
    the layers' config: it is saved with the adapter, and no parameter depends on it.
    """
    # From none to all there are: at larger budgets few layers take nearly all of what is added.
    n, times = train.allocate, (0, 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    budgets = sorted({min(round(config.budget * x), train.seq_len) for x in times})
    sequences = distill.batches(tokens, dataclasses.replace(train, batch=1, steps=n, seed=train.seed + 1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(train.seed)
        costs = [measure_budgets(model, ids, budgets) for ids in tqdm(sequences, "allocate", n, disable=None)]
    model.worth = (sum(costs) / n).tolist(), budgets  # in the adapter too: other budgets are shared out anew
    distill.set_budgets(model, dataclasses.replace(config, budgets=shares(model, config.budget)))

# ----------------------------------------------------------------------------- language modelling

@register(TASKS, "ppl")
def measure_text(bench: Bench) -> tuple[dict, str]:
    """Every row on (N, T) held-out tokens: per sequence, in nats a token, `nll` and `kl`, KL(teacher || row);
    `top1` is the share of positions with the teacher's most likely token."""
    # KL rather than perplexity is the goal: a student may beat its teacher's perplexity by learning the style
    # of the text, and no longer be that teacher.
    rows = {name: dict(nll=[], kl=[], top1=[]) for name in bench.rows}
    for ids in tqdm(bench.held_out, desc="ppl", leave=False, disable=None):
        ids, teacher = ids[None].to(bench.model.device), None
        for name, row in rows.items():
            # Rows take turns sequence by sequence: only the teacher's logits have to be kept beside a row's.
            with bench.row(name) as model:
                logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            teacher, sums = logits if teacher is None else teacher, [0.0, 0.0, 0.0]
            # 128 positions at a time: a copy of all logits is 600 MB for Qwen's vocabulary at T = 1,024
            for *both, target in zip(logits.split(128), teacher.split(128), ids[0, 1:].split(128)):
                log_p, log_t = (x.float().log_softmax(-1) for x in both)
                sums[0] -= log_p.gather(1, target[:, None]).sum().item()
                sums[1] += F.kl_div(log_p, log_t, log_target=True, reduction="sum").item()
                sums[2] += (log_p.argmax(-1) == log_t.argmax(-1)).sum().item()
            for metric, total in zip(row.values(), sums):
                metric.append(total / len(logits))
    T, variants, c = bench.held_out.shape[1], bench.model.controller.variants, bench.model.linearize_config
    # Pairs that a query can see at most; with fewer tokens than that, all of them.
    configs = {n: dataclasses.replace(c, **variants[n]) for n in rows if n != "teacher"}
    pairs = {n: min(T, configs[n].exact_pairs) if n in configs else T for n in rows}
    result = dict(rows=rows, bytes=state_bytes(bench.model, T, rows), pairs=pairs, seq_len=T)
    return result, text_table(result)

# ----------------------------------------------------------------------------- the command lines

def train(args: argparse.Namespace) -> None:
    """`python distill.py`: freeze, replace, train, measure. With --explain it says what each step is for.

    The order matters: what can fail for a reason that the user can mend fails before an hour of training.
    """
    (config, train), out = configs_from(args), Path(args.out)
    tell = functools.partial(explain, wanted=args.explain)
    check_writable(out)
    tell("teacher")
    model, tokenizer = distill.load_teacher(train.model, train.dtype, train.device, train.device_map)
    frozen = sum(p.numel() for p in model.parameters())
    print(f"teacher     {train.model or 'embedded'}: {frozen:,} parameters, all frozen")
    tell("text")
    tokens, held_out = load_data(tokenizer, train := begun(train, tokenizer))
    print(f"text        {len(tokens):,} training tokens, {held_out.numel():,} held out, T = {train.seq_len}")
    tell("linearize")
    if args.adapter:  # go on from there, with another loss for example; its layers and shares come with it
        load_adapter(model, args)
    else:
        distill.linearize(model, config, train.layers or None, train.seed)
        if train.keep:
            from hybrid import keep_softmax  # it imports this module
            keep_softmax(model, tokens, train)
        add_lora(model, train.lora)  # nothing happens without it
    if train.seq_len <= (pairs := model.linearize_config.exact_pairs):
        raise UserError(f"--seq-len {train.seq_len} must exceed sinks + window + budget = {pairs}")
    spread(model)  # over the processes of torchrun; nothing happens without it
    # The hash is taken after the swap and before training: of all of the backbone, of nothing that is new.
    before, config = distill.fingerprint(model), model.linearize_config
    new, layers = sum(p.numel() for p in distill.new_parameters(model).values()), linear_layers(model)
    kept = " ".join(str(m.layer_idx) for m in attention_modules(model) if m.layer_idx not in layers)
    softmax = f"; softmax in {kept}" if kept else ""
    print(f"linearized  {len(layers)} layers, {new:,} new parameters ({new / frozen:.2%}){softmax}")
    # Only now, because it looks at what the layers can do with the pairs that they will have.
    if args.adapter and args.allocate:  # measure anew, for longer sequences for example
        config = dataclasses.replace(config, budget=config.reach - config.window, budgets=())
    if (args.allocate if args.adapter else train.allocate) and config.budget and not config.budgets:
        tell("allocate")
        allocate_budgets(model, config, tokens, train)
    print("budgets     " + " ".join(str(layer.config.budget) for layer in layers.values()))
    if train.steps and new:
        tell("train")
        steps = distill.train_adapters(model, tokens, train, out, args.resume)
        model.training_cost = steps[-1] | dict(peak_bytes=peak_memory(model.device))  # for the report
        print(f"trained     {len(steps)} steps: loss {steps[0]['loss']:.4f} to {steps[-1]['loss']:.4f}")
    # Frozen is what the whole method promises, so it is checked and not assumed.
    if distill.fingerprint(model) != before:
        raise RuntimeError("a frozen weight has changed: a bug in this program")
    print(f"backbone    unchanged, bit for bit (sha256 {before[:16]}); results in {out}/\n")
    tell("measure")  # on held-out text, with every control there is
    add_controls(model)
    bench = Bench(model, tokenizer, tokens, held_out, train, ("teacher", *model.controller.variants))
    report(bench, out / "results.json", before, dict(ppl=measure_text))


def distill_main(argv: list[str] | None = None) -> int:
    from commands import generate
    from scaling import plan

    with torchrun():
        return command_line(dict(train=train, generate=generate, plan=plan), distill_options, argv)


def main(argv: list[str] | None = None) -> int:
    from commands import evaluate
    return command_line(dict(evaluate=evaluate), eval_options, argv)


if __name__ == "__main__":
    sys.modules["eval"] = sys.modules["__main__"]
    import benchmarks  # noqa: F401  (fills TASKS)
    import hybrid  # noqa: F401

    sys.exit(main())
