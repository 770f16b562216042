"""Hybrid models: `--keep` leaves softmax in some layers, where alone the cache grows then. In which?

    --keep 0,7,15            these
    --keep uniform:0.25      a quarter, evenly spaced
    --keep hardest:0.25      a quarter: those whose answer at the exact pairs costs the model most (`effect`)
    --keep concentration:0.25, residual:0.25     by the paper's two figures of the keys
`python eval.py --adapter DIR --tasks hybrid` compares the four choices at 10, 25 and 50 %.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from analysis import key_concentration, projection_residual
from torch import Tensor

import distill
from distill import TrainConfig, UserError, attention_modules, linear_layers
from eval import TASKS, Bench, mean_and_error, measure_budgets, measure_text, state_bytes
from linear_attn import lookup, register

HARDNESS: dict[str, Callable] = {}  # (model, ids) -> a number for every linearized layer, high is hard


@register(HARDNESS, "effect")
def effect(model, ids: Tensor) -> Tensor:
    """KL of the model if this layer had nothing but its exact pairs, equation (24) of eval.py."""
    c = model.linearize_config
    return measure_budgets(model, ids, [c.reach - c.window])[:, 0]


def of_keys(figure: Callable, sign: float, model, ids: Tensor) -> Tensor:
    """The mean of a figure of the teacher's keys, layer by layer."""
    found: list[Tensor] = []

    def probe(module, teacher, student):
        k = student(lambda q, k, v, *_: k)
        found.append(sign * figure(k).mean().cpu())

    distill.probe_layers(model, ids, probe)
    return torch.stack(found)


register(HARDNESS, "concentration")(functools.partial(of_keys, key_concentration, -1.0))
register(HARDNESS, "residual")(functools.partial(of_keys, projection_residual, 1.0))


def hardness(model, how: str, tokens: Tensor, train: TrainConfig) -> Tensor:
    """A figure of every layer on two training sequences."""
    measure = lookup(HARDNESS | dict(hardest=effect, uniform=None), how, "choice of --keep")
    sequences = distill.batches(tokens, dataclasses.replace(train, batch=1, steps=2, seed=train.seed + 1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(train.seed)
        return sum(measure(model, ids) for ids in sequences)


def layers_to_keep(model, keep: str, measured: Callable[[str], Tensor]) -> tuple[int, ...]:
    """What `keep` means for this model, all of whose layers are linearized now; measured(how): `hardness`."""
    every, (how, _, part) = sorted(linear_layers(model)), keep.partition(":")
    try:
        kept = () if part else tuple(int(x) for x in how.split(","))
        count = max(1, round(float(part) * len(every))) if part else len(kept)
    except ValueError:
        want = "layers, as 0,7,15, or HOW:PART, as hardest:0.25"
        raise UserError(f"--keep wants {want}; got {keep!r}") from None
    if not set(kept) <= set(every) or not 0 < count < len(every):
        raise UserError(f"--keep {keep}: the model has layers 0 to {every[-1]}, some must stay linearized")
    if part and how == "uniform":
        kept = [every[math.floor((i + 0.5) * len(every) / count)] for i in range(count)]
    elif part:
        kept = [every[i] for i in measured(how).topk(count).indices.tolist()]
    return tuple(sorted(kept))


def keep_softmax(model, tokens: Tensor, train: TrainConfig) -> None:
    """Between `linearize` and training: the model again, with softmax where --keep says."""
    measured = functools.partial(hardness, model, tokens=tokens, train=train)
    kept, config = layers_to_keep(model, train.keep, measured), model.linearize_config
    rest = [i for i in linear_layers(model) if i not in kept]
    distill.linearize(distill.delinearize(model), config, rest, train.seed)


@contextlib.contextmanager
def softmax_in(model, kept: Sequence[int]) -> Iterator[None]:
    """Inside, these layers are the teacher's."""
    layers = {m: m.linear for m in attention_modules(model) if m.layer_idx in kept}
    for module in layers:
        del module.linear
    try:
        yield
    finally:
        for module, layer in layers.items():
            module.linear = layer


@dataclasses.dataclass
class Hybrids(Bench):
    """Some rows of this bench keep softmax in layers of their own: {name of the row: layers}."""

    kept: dict[str, tuple] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def row(self, name: str):
        with super().row(name) as model, softmax_in(model, self.kept.get(name, ())):
            yield model


@register(TASKS, "hybrid")
def measure_hybrid(bench: Bench) -> tuple[dict, str]:
    """Perplexity and KL of the adapter with softmax back in some layers, chosen in four ways."""
    model, lines = bench.model, ["| kept | choice | layers | ppl | KL | bytes/sequence |", "|---" * 6 + "|"]
    # Once for all parts: `effect` is a backward pass through the teacher.
    measured = functools.cache(lambda how: hardness(model, how, bench.tokens, bench.train))
    kept = {f"{how}:{part}": layers_to_keep(model, f"{how}:{part}", measured)
            for part in (0.1, 0.25, 0.5) for how in ("uniform", *HARDNESS)}  # fmt: skip
    kept = {"none:0": ()} | kept
    model.controller.variants |= dict.fromkeys(kept, {})  # "linear" in all that they do not keep
    rows = measure_text(Hybrids(**vars(bench) | dict(rows=("teacher", *kept)), kept=kept))[0]["rows"]
    result: dict[str, dict] = {}
    for name, layers in kept.items():
        with softmax_in(model, layers):
            size = state_bytes(model, bench.held_out.shape[1], ["linear"])["linear"]
        result[name] = dict(layers=layers, bytes=size, **rows[name])
        (nll, _), (kl, error) = (mean_and_error(rows[name][m]) for m in ("nll", "kl"))
        (how, part), figures = name.split(":"), f"{math.exp(nll):.2f} | {kl:.4f} ± {error:.4f} | {size:,}"
        lines.append(f"| {float(part):.0%} | {how} | {' '.join(map(str, layers))} | {figures} |")
    return result, "\n".join(lines)
