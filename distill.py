"""Freeze a pretrained model, replace its attention by a constant-size memory, train only what is new.

What you will learn here, in the order in which `python distill.py` does it (its command line is in eval.py)
    1. `load_teacher`: a hub id, a folder, a .gguf file or the tiny teacher in tests/teacher/
    2. `linearize`: the swap. The model's own code keeps doing projections, norms and RoPE; only softmax goes
    3. `LOSSES`: layer (each layer against the frozen teacher on the same inputs), ce (the paper's), kl
    4. `train_adapters`: AdamW on the new parameters; adapter and progress on disk at every save
On a first reading skip `TrainConfig` and the error lines of `linearize`.

How the swap works. transformers looks its attention function up by name at every call (AttentionInterface):
ours is registered once and switched on per model. The new parameters are a submodule `linear` of each
attention module: no name in the backbone's state dict changes, no model family needs code of its own. What
is about files, caches and processes is in tests/: adapters.py, hooks.py, processes.py.

What is trained, and on what. The paper trains end to end on next-token cross-entropy (`ce`). Cross-entropy
wants the text's own next token, so in few steps it learns the style of the text; `layer` asks each layer only
to answer as its teacher does, and `kl` asks the whole model to say what the teacher would have said. Neither
needs the teacher's training data, and both can start from a few hundred thousand tokens of any text.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

sys.path.append(str(Path(__file__).resolve().parent / "tests"))
from files import UserError, brief, digest, mean_over_processes, team, write_atomically  # noqa: F401

from interventions import OFF, LinearizeConfig, LinearizedAttention
from linear_attn import option, register, validate

# HAZARD: transformers asks whether a package named `kernels` is installed and would import *our* kernels.py.
# It asks once and remembers the answer: let it find nothing, then put our module back.
_ours, sys.modules["kernels"] = sys.modules.get("kernels"), None
import transformers as hf  # noqa: E402

hf.utils.is_kernels_available()
sys.modules["kernels"] = _ours
from hooks import by_rows, full_attention, padding_mask, prepare_inputs, recomputed  # noqa: E402
from lora import switch_lora  # noqa: E402

# The tiny teacher in tests/teacher/: 0.9 M parameters, made by tests/make_teacher.py, so that everything here
# can be run in minutes and without a network.
EMBEDDED = Path(__file__).resolve().parent / "tests" / "teacher"
NAME = "linear_memory"  # our attention's name inside transformers
DTYPES = ("auto", "float32", "float16", "bfloat16")
LOSSES: dict[str, Callable] = {}  # what is trained on, see section 3


@dataclass(frozen=True)
class TrainConfig:
    """Everything about one run except what the layer computes. Each field is a command-line option."""

    model: str = option("", "teacher: hub id, folder or .gguf file (default: the embedded tiny teacher)")
    data: tuple = option((), "training text: .txt, .json/.jsonl with a text field, or hub owner/name:file")
    eval_data: tuple = option((), "held-out text (default: the last 10%% of each training source)")
    loss: str = option("layer", "what is trained on", LOSSES)
    steps: int = option(40, "training steps; 0 only measures", low=0)
    seq_len: int = option(512, "tokens per sequence", low=2)
    begin: tuple = option((), "tokens that start every sequence (default: the tokenizer's, as BOS)", item=int)
    batch: int = option(4, "sequences per step", low=1)
    lr: float = option(1e-2, "peak learning rate", low=0.0)
    beta2: float = option(0.99, "Adam's second beta", low=0.0, high=0.9999)
    warmup: int = option(10, "warm-up steps, at most a tenth of all", low=0)
    floor: float = option(0.05, "end of the cosine as a part of the peak", low=0.0, high=1.0)
    recompute: int = option(0, "1: ce and kl keep one layer's activations, and run each layer twice", (0, 1))
    offsets: int = option(0, "training sequences begin at random positions up to this one", low=0)
    lora: int = option(0, "rank of LoRA on q, k, v, o beside the new parameters (peft); 0: frozen", low=0)
    clip: float = option(1.0, "gradient norm limit", low=0.0)
    seed: int = option(0, "seed of initialisation and data order", low=0)
    allocate: int = option(0, "sequences to measure which layers need the pairs; 0: all get the same", low=0)
    eval_tokens: int = option(16384, "held-out tokens to measure on", low=1)
    layers: tuple = option((), "layers to linearize, as 0 3 7 (default: all)", item=int)
    keep: str = option("", "layers that keep softmax: 0,7,15, or uniform:0.25, or hardest:0.25")
    dtype: str = option("auto", "of the backbone; auto: bfloat16 on CUDA, else float32", DTYPES)
    device: str = option("auto", "cpu, cuda, cuda:1, ...; auto is cuda if there is one")
    device_map: str = option("", "auto spreads the backbone over devices, main memory and disk (accelerate)")
    save_every: int = option(20, "steps between saves", low=1)

    def __post_init__(self):
        validate(self)
        if (self.lora or self.recompute) and self.loss == "layer":  # it takes q, k, v as given, and goes back
            raise ValueError("lora and recompute want --loss ce or kl")  # through one layer at a time anyway


# Where options start, else their defaults: "best" measured best here (README), "paper" is what the paper did.
PRESETS = {
    "best": dict(router="mix", window=64, budget=64, fade=256, allocate=4),
    # arXiv 2607.07706 to the letter; its length is --steps 2500 --seq-len 4096.
    "paper": dict(rule="kda", merge="sum", sinks=8, window=56, conv=8, conv_init="default", features="l2",
                  memory_per="query", rank=16, beta_bias=-1.0, decay_bias=1.0, loss="ce", lr=2e-3,
                  beta2=0.999, warmup=100, floor=0.0, clip=1.0, batch=1),
}  # fmt: skip

# ----------------------------------------------------------------------------- 1. the teacher
# Frozen means frozen: no parameter of the teacher ever has requires_grad, the optimizer is not given one, and
# `fingerprint` hashes every bit before and after a run.

def load_teacher(name: str = "", dtype: str = "auto", device: str = "auto", device_map: str = ""):
    """(frozen model, tokenizer) from a hub id, a folder or a .gguf file; "" is the embedded teacher.

    device_map: "" for one device; "auto", or JSON as {"model.layers.0": "cpu", ..., "": "disk"}, lets
    accelerate place the modules. The swap comes after loading, so it need not know of it."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    # bfloat16 halves the frozen weights; whatever is new stays float32, because its updates are tiny.
    dtype = ("bfloat16" if device.startswith("cuda") else "float32") if dtype == "auto" else dtype
    path = Path(name or EMBEDDED)
    source, kw, place = str(path) if path.exists() else name, {}, {}
    if path.suffix == ".gguf":
        source, kw = str(path.parent), dict(gguf_file=path.name)
    try:
        if device_map:
            where = json.loads(device_map) if device_map.startswith("{") else device_map
            folder = tempfile.TemporaryDirectory()
            place = dict(device_map=where, offload_folder=folder.name)
        tokenizer, load = hf.AutoTokenizer.from_pretrained(source, **kw), hf.AutoModelForCausalLM
        model = load.from_pretrained(source, dtype=getattr(torch, dtype), **kw, **place)
        if device_map:
            model.offload_folder = folder  # goes when the model goes: it may be as large
        elif team()[1] == 1:  # torchrun: spread later
            model = model.to(device)
    # No traceback for a typo: whatever went wrong in loading is one line for the user.
    except Exception as error:  # a dozen classes: network, JSON parser, no such device, no gguf package, ...
        why = brief(error) if path.exists() or name.count("/") < 2 else "no such file or folder"
        raise UserError(f"cannot load model {source!r} on {device}: {why}") from None
    if kw:
        model.is_quantized = False  # GGUF weights are dequantized on loading, but stay marked as quantized
    # eval: a dropout that some families have would make the teacher disagree with itself.
    return model.eval().requires_grad_(False), tokenizer


def batches(tokens: Tensor, train: TrainConfig, first_step: int = 0) -> Iterator[Tensor]:
    """Random crops (batch, seq_len). Each step has a seed of its own: a resumed run sees the same ones, and
    every process of torchrun draws the whole batch and takes its part."""
    head = tokens.new_tensor(train.begin)  # a BOS token for Llama, for Qwen nothing
    for step in range(first_step, train.steps):
        g = torch.Generator().manual_seed(train.seed * 1_000_003 + step)
        # Anywhere in the text: not only at multiples of seq_len, and documents may be cut.
        starts = torch.randint(0, len(tokens) - train.seq_len + 1, (train.batch,), generator=g)
        yield torch.stack([torch.cat([head, tokens[i : i + train.seq_len - len(head)]]) for i in starts])

# ----------------------------------------------------------------------------- 2. the swap
# One model object answers as teacher, as student and as every control: which one is decided at each call of
# attention, by name (`as_teacher`) or by the model's Controller. So rows of a table share their weights, a
# loss has its teacher at hand, and nothing is loaded twice.

@dataclass
class Controller:
    """One per model, shared by its layers: what attention answers right now.

    mode: a name in `variants`, the changes of config: "linear" none, "off" no memory, further controls from
    eval. Or "probe": what the teacher answers, so that every layer sees the teacher's inputs, and
    probe(module, teacher, student) is called: student(layer) is what a layer answers to the same inputs.
    """

    teacher_attention: str
    mode: str = "linear"
    probe: Callable | None = None
    offset: int = 0  # the position of a training sequence's first token
    variants: dict[str, dict] = dataclasses.field(default_factory=lambda: dict(linear={}, off=dict(OFF)))

    @contextlib.contextmanager
    def switch(self, mode: str, probe: Callable | None = None):
        before, (self.mode, self.probe) = (self.mode, self.probe), (mode, probe)
        try:
            yield
        finally:
            self.mode, self.probe = before


def keep_hidden(module, args, kwargs):
    """Pre-hook: the gates read the layer's input, which the attention function is not given.

    A layer that has lost its `linear` (tests/hybrid.py) is the teacher's for the time being."""
    if hasattr(module, "linear"):
        module.linear.hidden = args[0] if args else kwargs["hidden_states"]


def attention_forward(module, query, key, value, mask, scaling=None, softcap=None, memory=None, **options):
    """What transformers calls instead of softmax: q, k, v (B,H,T,K) after RoPE in, (B,T,H,V) out.

    memory: where the states of the rows are kept between calls (hooks.MemoryCacheLayer), or None.
    Errors: masks, windows, sinks and caches that a memory does not know are refused by name."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))  # to (batch, time, heads, dim)
    T, scale, own_window = q.shape[1], scaling or q.shape[-1] ** -0.5, options.get("sliding_window")
    layer = getattr(module, "linear", None)
    # What a memory cannot honour is refused here, at the call: only now is it known whether it matters.
    if mask is not None and mask.dim() != 2:
        raise ValueError("a linearized model takes a 2-D padding mask (batch, tokens) and no other mask")
    if options.get("s_aux") is not None or options.get("position_bias") is not None:
        raise ValueError(f"layer {module.layer_idx} has sink logits or a position bias")
    if layer is None:  # a layer that keeps softmax
        return full_attention(q, k, v, mask, scale, softcap, own_window), None
    if own_window is not None and own_window < (T if memory is None else memory.get_seq_length()):
        raise ValueError(f"layer {module.layer_idx} has its own sliding window of {own_window} tokens")
    if k.shape[1] != T:
        raise ValueError("a linearized layer was given past keys: pass past_key_values of the model itself")
    hidden, layer.hidden = layer.hidden, None  # kept longer, it would hold on to the graph
    # Under a probe the layer answers as the teacher, so that the next layer's input is the teacher's too.
    if layer.controller.mode == "probe":
        if mask is not None:
            raise ValueError("layers are compared on sequences without padding")
        out = full_attention(q, k, v, None, scale, softcap)
        layer.controller.probe(module, out, lambda other: other(q, k, v, hidden, scale, softcap))
        return out, None
    # "linear" changes nothing; a control is the same layer, with the same parameters, under another config.
    changes = layer.controller.variants[layer.controller.mode]
    layer = layer.variant(**changes) if changes else layer
    return by_rows(layer, (q, k, v, hidden), mask, memory, scale, softcap), None


REFUSED = {"gpt_oss": "learned sink logits in its softmax", "gpt_neox": "attention of an older design"}
hf.AttentionInterface.register(NAME, attention_forward)
hf.AttentionMaskInterface.register(NAME, padding_mask)


def attention_modules(model: hf.PreTrainedModel) -> list[nn.Module]:
    """The model's self-attention modules in layer order."""
    # By what they have, not by class: every family has its own class, all have these two.
    found = [m for m in model.modules() if hasattr(m, "layer_idx") and hasattr(m, "num_key_value_groups")]
    return sorted(found, key=lambda m: m.layer_idx)


def output_projection(module: nn.Module) -> nn.Module | None:
    """W_o, under the two names that model families have for it."""
    return getattr(module, "o_proj", getattr(module, "dense", None))


def head_shape(model: hf.PreTrainedModel, module: nn.Module) -> tuple[int, int, int]:
    """(query heads, kv heads, head dim) of an attention module. Qwen3's head dim is not hidden/heads.

    R = query heads / kv heads of them share one memory, as they share their keys and values."""
    text, heads = model.config.get_text_config(), model.config.get_text_config().num_attention_heads
    dim = getattr(module, "head_dim", None) or text.hidden_size // heads
    return heads, heads // module.num_key_value_groups, dim


def linear_layers(model: hf.PreTrainedModel) -> dict[int, LinearizedAttention]:
    """The new layers by their number in the model; layers that keep softmax have none."""
    return {m.layer_idx: m.linear for m in attention_modules(model) if hasattr(m, "linear")}


def new_parameters(model: hf.PreTrainedModel) -> dict[str, nn.Parameter]:
    """Everything that is trained, under the names of the adapter file.

    The names hold the layer's number and no module path: they are the same for every model family."""
    new = {f"layers.{i}.{n}": p for i, m in linear_layers(model).items() for n, p in m.named_parameters()}
    return new | {name: p for name, p in model.named_parameters() if ".lora_" in name}


def new_layer(model: hf.PreTrainedModel, module: nn.Module, config: LinearizeConfig) -> LinearizedAttention:
    """A layer of this attention module's shapes, on its device, with float32 parameters."""
    heads, kv_heads, dim = head_shape(model, module)
    width = model.config.get_text_config().hidden_size
    hook = getattr(output_projection(module), "_hf_hook", None)  # accelerate's: it may run elsewhere
    device = getattr(hook, "execution_device", None)
    device = next(module.parameters()).device if device is None else device
    layer = LinearizedAttention(config, width, heads, kv_heads, dim, dim).to(device)
    layer.controller = model.controller
    return layer


def linearize(
    model: hf.PreTrainedModel, config: LinearizeConfig, layers: Sequence[int] | None = None, seed: int = 0
) -> hf.PreTrainedModel:
    """Replace the softmax of `layers` (None: all) by config's attention, in place; freeze all that was there.

    Three things are added: a submodule `linear` an attention module, a hook that hands it the layer's input,
    and a hook on the model that puts constant-size layers into its cache. `delinearize` takes them away.
    Call it once, after loading. New parameters are float32, seeded, on their layer's device. The model keeps
    its class, its state-dict names, and its logits wherever T <= config.exact_pairs. Unfit models: UserError.
    """
    kind, modules, text = model.config.model_type, attention_modules(model), model.config.get_text_config()
    if kind in REFUSED:
        raise UserError(f"cannot linearize {kind}: {REFUSED[kind]}")
    # Better refused by name than wrong in silence: each of these would run, and mean something else.
    odd = getattr(text, "attention_chunk_size", None) or any(hasattr(m, "kv_lora_rank") for m in modules)
    odd = odd or any(getattr(m, "is_kv_shared_layer", False) for m in modules)  # no cache of their own
    if odd or sum(output_projection(m) is not None for m in modules) != text.num_hidden_layers:
        raise UserError(f"cannot linearize {kind}: its attention modules are not of a shape this code knows")
    if linear_layers(model):
        raise UserError("this model is linearized already")
    chosen = range(len(modules)) if layers is None else layers
    if bad := [i for i in chosen if not 0 <= i < len(modules)]:
        raise UserError(f"no layer {bad[0]}: the model has layers 0 to {len(modules) - 1}")
    if len(config.budgets) not in (0, len(chosen)):
        raise UserError(f"{len(config.budgets)} budgets for {len(chosen)} linearized layers")
    model.requires_grad_(False)  # whoever loaded it: from here on it is frozen
    model.controller, model.worth = Controller(model.config._attn_implementation), None
    model.some_weights = some_weights(model)  # for the adapter; now, while they are whole
    # Seeded on the side: linearizing must not move the caller's random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for m in (modules[i] for i in sorted(chosen)):
            m.linear = new_layer(model, m, config)
            m.register_forward_pre_hook(keep_hidden, with_kwargs=True)
    model.base_model.register_forward_pre_hook(prepare_inputs, with_kwargs=True)
    set_budgets(model, config)
    model.set_attn_implementation(NAME)  # from the next call on, softmax is not asked any more
    return model


def delinearize(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """The teacher again, bit for bit: it was never changed, and what `linearize` added is gone."""
    model.set_attn_implementation(model.controller.teacher_attention)
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook in (keep_hidden, prepare_inputs):
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]
        if isinstance(getattr(module, "linear", None), LinearizedAttention):
            del module.linear
    del model.controller, model.linearize_config, model.worth, model.some_weights
    return model


def set_budgets(model: hf.PreTrainedModel, config: LinearizeConfig) -> None:
    """Other exact pairs for the same parameters: what is trained does not depend on how many there are.

    Between training and measuring, or from one row of a table to the next."""
    model.linearize_config = config
    for n, layer in enumerate(linear_layers(model).values()):
        layer.number, layer.config = n, config.of_layer(n)


@contextlib.contextmanager
def as_teacher(model: hf.PreTrainedModel):
    """Inside, the model is its own frozen teacher: the same weights with their original attention.

    A switch of one name; no copy of a 32B model is needed to have both."""
    model.set_attn_implementation(model.controller.teacher_attention)
    switch_lora(model, False)  # --lora, the comparator that is not frozen; nothing happens without it
    try:
        yield
    finally:
        model.set_attn_implementation(NAME)
        switch_lora(model, True)


def fingerprint(model: hf.PreTrainedModel) -> str:
    """Digest of the backbone's bits: it changes if anything was not frozen, were it -0.0 for 0.0."""
    new = (".linear.", ".lora_")
    return digest({name: x for name, x in model.state_dict().items() if not any(n in name for n in new)})

# ----------------------------------------------------------------------------- 3. losses
# A loss takes (model, ids (B,T)), leaves gradients in the new parameters, and returns a number to print. Add
# one with @register(LOSSES, "name").

def relative_error(module: nn.Module, teacher: Tensor, student: Tensor) -> Tensor:
    """|W_o (student - teacher)|^2 / |W_o teacher|^2, the error of the layer's output, a mean over sequences.

    After W_o, because only what it lets through reaches the model; relative, because layers differ in size.
    W_o is applied by its own module, wherever its weight is (in parts, on disk); a bias is taken off again:
    the difference is formed before the product, because 16 bits would lose a small one after it."""
    W_o, zero = output_projection(module), 0.0
    if W_o.bias is not None:
        zero = W_o(torch.zeros_like(teacher[:1, :1].flatten(2)))
    # Not a quotient of sums over the batch: a mean of quotients is the same on one process and on many.
    error, size = (W_o(x.flatten(2)) - zero for x in (student - teacher, teacher))
    return (error.float().square().sum((1, 2)) / size.float().square().sum((1, 2))).mean()


def placed(model: hf.PreTrainedModel, ids: Tensor) -> dict:
    """A model's arguments for training: ids at the positions that its controller says.

    The teacher answers alike at any position, to rounding (RoPE is relative), but what is new might not: its
    features and `u` see rotated q and k. Trained at random positions (--offsets) it has to."""
    at = model.controller.offset + torch.arange(ids.shape[1], device=model.device)[None]
    return dict(input_ids=ids.to(model.device), position_ids=at, use_cache=False)


def probe_layers(model: hf.PreTrainedModel, ids: Tensor, probe: Callable) -> None:
    """One teacher pass that calls probe(module, teacher's answer, student) at every linearized layer.

    student(layer) is what any layer answers to this module's q, k, v and hidden: the one in place, a control,
    a candidate of a comparison. Losses, budgets and diagnostics all are such a probe."""
    with torch.no_grad(), model.controller.switch("probe", probe):
        model.base_model(**placed(model, ids))  # no logits are computed


@register(LOSSES, "layer")
def layer_loss(model: hf.PreTrainedModel, ids: Tensor) -> float:
    """Every layer against the frozen teacher on the teacher's own inputs; no gradient between layers.

    One teacher pass for all: as it reaches a layer, that layer's branch runs with gradients on the same q, k,
    v and goes backward at once. Memory beyond the model: one layer's activations, whatever the depth.
    """
    losses = []

    # HAZARD: without the backward pass inside the probe, every layer's graph would live until the last layer.
    def probe(module, teacher, student):
        with torch.enable_grad():
            loss = relative_error(module, teacher, student(module.linear))
            loss.backward()
        losses.append(loss.detach())

    probe_layers(model, ids, probe)
    # The mean of relative errors: a layer with small outputs counts as much as one with large ones.
    each = torch.stack([loss.cpu() for loss in losses])  # layers may live on several devices
    for i, loss in zip(linear_layers(model), each):
        if not loss.isfinite():
            raise UserError(f"the loss of layer {i} is {loss}")
    return each.mean().item()


@register(LOSSES, "ce")
def cross_entropy_loss(model: hf.PreTrainedModel, ids: Tensor) -> float:
    """The paper's: next-token cross-entropy, end to end. Its memory grows with depth and vocabulary."""
    logits = model(**placed(model, ids)).logits[:, :-1].float()
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.item()


@register(LOSSES, "kl")
def kl_loss(model: hf.PreTrainedModel, ids: Tensor) -> float:
    """KL(teacher || linearized) of the next-token distributions, end to end, in nats a token.

    The teacher is the same model under its own attention: two passes, one set of weights. Of all logits, T x
    vocabulary x 4 bytes (1,024 tokens of Qwen's 152 k words: 0.6 GB), at most four tensors are alive."""
    logits = lambda: model(**placed(model, ids)).logits.float().flatten(0, 1)  # noqa: E731
    with torch.no_grad(), as_teacher(model):
        target = logits().softmax(-1)
    # Cross-entropy with the teacher, less the teacher's entropy: F.kl_div would keep half as much more.
    loss = F.cross_entropy(logits(), target) - torch.special.entr(target).sum(-1).mean()
    loss.backward()
    return loss.item()

# ----------------------------------------------------------------------------- 4. training
# Few parameters (about 1 % of the model), few steps, a high rate: 1e-2 where 2e-5 would be usual for a whole
# model. There is no weight decay, because parameters start at what the paper or the identity says.

def learning_rate(step: int, train: TrainConfig) -> float:
    """Linear warm-up, at most a tenth of the run, then a cosine down to floor * lr.

    A function of the step, not a scheduler object: there is no state that a save could forget."""
    warmup = min(train.warmup, train.steps // 10)  # a short run must not spend itself on warming up
    if step < warmup:
        return train.lr * (step + 1) / warmup
    progress = (step - warmup) / max(1, train.steps - warmup)
    return train.lr * (train.floor + (1 - train.floor) * 0.5 * (1 + math.cos(math.pi * progress)))


def train_adapters(model, tokens: Tensor, train: TrainConfig, out: Path, resume: bool = False) -> list[dict]:
    """AdamW, no weight decay, on the new parameters; saved every `save_every` steps and at Ctrl-C.

    Under torchrun every process takes its part of each step's sequences and gradients are averaged: all
    processes keep equal parameters, those of one process with the same batch, to rounding.
    """
    params = list(new_parameters(model).values())  # and nothing else
    # HAZARD: Adam's usual beta2 of 0.999 remembers a thousand steps, ten times a whole run here.
    optimizer = torch.optim.AdamW(params, lr=train.lr, betas=(0.9, train.beta2), weight_decay=0.0)
    records = load_progress(model, optimizer, train, out) if resume else []
    # --resume: model, optimizer and data go on as if nothing had happened; tests compare the bits.
    # The layer loss is as many problems as there are layers: one's large gradient must not clip another's.
    layers = [list(layer.parameters()) for layer in linear_layers(model).values()]
    clip_groups = layers if train.loss == "layer" else [params]
    (rank, processes), first, start, whole = team(), len(records), time.time(), True
    if train.batch % processes:
        raise UserError(f"--batch {train.batch} does not split evenly among {processes} processes")
    # A save must not mix two steps: between an optimizer step and its record Ctrl-C saves nothing.
    bar = tqdm(batches(tokens, train, first), total=train.steps, initial=first, desc=train.loss, disable=None)
    try:
        for step, ids in enumerate(bar, first):
            # The rate depends on the step alone, so that a resumed run has the same one.
            for group in optimizer.param_groups:
                group["lr"] = lr = learning_rate(step, train)
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(step)  # as `batches`: a resumed run has the same ones
            model.controller.offset = int(torch.randint(0, train.offsets + 1, (), generator=generator))
            try:
                with recomputed(model, train.recompute):
                    loss = LOSSES[train.loss](model, ids[rank::processes].to(params[0].device))
                loss = mean_over_processes(loss, params)
                # Clipped after averaging: all processes clip alike.
                norms = [nn.utils.clip_grad_norm_(group, train.clip) for group in clip_groups]
                # Before the optimizer sees it: one step with a nan, and every parameter is lost.
                if not all(map(math.isfinite, (loss, *norms))):
                    raise UserError(f"the loss is {loss}, a gradient not finite")
            except UserError as error:
                raise UserError(f"{error} at step {step}; the last save stays; try a lower --lr") from None
            whole = False  # from here
            optimizer.step()
            rate = (step + 1 - first) * ids.numel() / (time.time() - start)
            records.append(dict(step=step, loss=loss, lr=lr, tokens_per_second=rate))
            whole = True  # to here
            bar.set_postfix(loss=f"{loss:.4f}", tok_s=f"{rate:.0f}")
            if (step + 1) % train.save_every == 0 or step + 1 == train.steps:
                save_progress(model, optimizer, train, out, records)
    except KeyboardInterrupt:  # Ctrl-C keeps what was trained; --resume goes on from there
        if whole:
            save_progress(model, optimizer, train, out, records)
        raise
    finally:
        bar.close()
        model.controller.offset = 0
    return records


sys.modules.setdefault("distill", sys.modules[__name__])  # run as a script, this is the only copy
from adapters import load_linearized, load_progress, save_adapter, save_progress, some_weights  # noqa: E402, F401

if __name__ == "__main__":
    from eval import distill_main

    sys.exit(distill_main())
