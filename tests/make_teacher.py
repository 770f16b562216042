"""Train the tests' tiny teacher: `python tests/make_teacher.py [--out DIR] [--seed 0] [--scale 1]`.

The teacher is a three-layer Qwen2 (870 k parameters) that knows the text of pydoc and, by attention alone,
repeats a five-digit pass key stated once up to 1,024 tokens earlier. Both skills must be real: a linearised
student can then lose the second and keep the first, which is what the tests look at.

It needs torch, transformers and tokenizers, no network and no other data: the text is the standard library's
`pydoc_data.topics`, first 90 % for training, last 10 % held out (for the tokenizer too).
"""

import argparse
import datetime
import json
import math
import platform
import random
import shutil
import time
from pathlib import Path
from pydoc_data.topics import topics

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

NEEDLE = "\nThe pass key{name} is {key}. Remember it.\n"
QUESTION = "\nWhat is the pass key{name}? The pass key{name} is "  # the five digits follow
REPETITIVE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
EVAL_KEYS = [f"{key:05d}" for key in random.Random(2024).sample(range(100_000), 5_000)]  # never trained on
HELD_KEYS = frozenset(EVAL_KEYS)
NAMES = [f" for {word}" for word in "apple river stone window garden paper silver mountain".split()]
VOCAB, IGNORE = 1024, -100

# (steps, tokens a step, sequence lengths to draw from, weight of the text loss); measured with seed 0.
STAGES = (
    # Recall only, short: the answers' loss is 1.9 over steps 26 to 50, 0.13 over steps 101 to 125.
    (150, 3072, (64,), 0.0),
    # The text comes in gently; held-out text at 4.9 nats a token after it.
    (150, 4096, (64, 128), 0.3),
    # Longer, with more keys in a sequence: 3.8 nats.
    (350, 4096, (128, 256), 1.0),
    # 3.4 nats; the rate falls from step 715 on.
    (250, 4096, (128, 256, 512), 1.0),
    # Up to 1,100, so that a prompt of 1,024 and its answer stay in the range trained: 3.2 nats.
    (400, 4400, (256, 512, 1100, 1100), 1.0),
)


def split_text() -> tuple[str, str]:
    """The text of pydoc's topics: the part to train on, and the held-out tail."""
    text = "\n".join(topics[k] for k in sorted(topics))
    cut = int(len(text) * 0.9)
    return text[:cut], text[cut:]


def train_tokenizer(text: str) -> FastTokenizer:
    """A byte-level BPE in which every digit is a token: a key is then five tokens wherever it stands."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(text.splitlines(keepends=True), trainer)
    end = "<|endoftext|>"
    return FastTokenizer(tokenizer_object=bpe, bos_token=end, eos_token=end, model_max_length=10**9)


def passkey_prompt(
    tokenizer: FastTokenizer, filler: list[int], length: int, depth: float, seed: int, pairs: int = 1
) -> tuple[str, str]:
    """A prompt of about `length` tokens asking for a key stated at `depth` (0 to 1) of the filler; the key.

    With more pairs, the keys have names (" for apple") and the others lie at random depths.
    """
    rng = random.Random(seed)
    names = rng.sample(NAMES, pairs) if pairs > 1 else [""]
    keys = rng.sample(EVAL_KEYS, pairs)
    facts = [NEEDLE.format(name=name, key=key) for name, key in zip(names, keys, strict=True)]
    question = QUESTION.format(name=names[0])
    room = length - sum(len(tokenizer.encode(part)) for part in [*facts, question])
    start = rng.randrange(len(filler) - room)
    end = start + room
    cuts = [start + int(room * d) for d in [depth, *(0.9 * rng.random() for _ in facts[1:])]]
    prompt = ""
    for cut, fact in sorted(zip(cuts, facts, strict=True)):
        prompt += tokenizer.decode(filler[start:cut]) + fact
        start = cut
    return prompt + tokenizer.decode(filler[start:end]) + question, keys[0]


class Samples:
    """Training sequences: filler from the training text, pass keys stated in it, and questions about them."""

    def __init__(self, tokenizer: FastTokenizer, text: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.encode = tokenizer.encode
        self.ids = tokenizer.encode(text)
        self.repetitive = tokenizer.encode(REPETITIVE * 60)
        words = {word for word in text.split() if word.isascii() and word.isalpha() and word.islower()}
        self.names = sorted(f" for {word}" for word in words if 2 < len(word) < 8)
        self.short_names = [name for name in self.names if len(self.encode(name)) == 2]

    def draw(self, length: int) -> tuple[list[int], list[int], list[int]]:
        """Token ids, targets of the text loss, targets of the answer loss (not shifted), `length` of each.

        Stated digits are random, so neither loss sees them; digits of answers are all the answer loss sees.
        Several pairs in a sequence make that loss dense, and dense targets are what makes recall emerge.
        """
        rng = self.rng
        pairs = 1 if rng.random() < 0.4 else rng.randint(1, min(8, max(1, length // 64)))
        names = rng.sample(self.short_names if rng.random() < 0.5 else self.names, pairs)
        if rng.random() < (0.7 if pairs == 1 else 0.3):
            names[0] = ""
        stop, facts, asks = self.encode(".\n"), [], []
        for name in names:
            while (key := f"{rng.randrange(100_000):05d}") in HELD_KEYS:
                pass
            digits, question = self.encode(key), self.encode(QUESTION.format(name=name))
            head, tail = (self.encode(s) for s in NEEDLE.format(name=name, key="|").split("|"))
            facts.append((head, digits, tail, False))
            asks.append((question, digits, stop, True))
        rng.shuffle(asks)
        room = length - sum(len(head) + 5 + len(tail) for head, _, tail, _ in facts + asks)
        cuts = sorted(int(0.97 * room * rng.random()) for _ in facts)
        last = cuts[-1] if rng.random() < 0.5 else room  # questions: after all facts, or all at the end
        cuts += sorted(rng.randint(last, room) for _ in asks)
        repetitive = rng.random() < 0.15
        source = self.repetitive if repetitive else self.ids
        start = rng.randrange(20 if repetitive else len(source) - room)
        ids, text, answer, done = [], [], [], 0
        for cut, (head, digits, tail, asked) in zip(cuts, facts + asks, strict=True):
            before = source[start + done : start + cut] + head
            ids += self.noisy(source[start + done : start + cut]) + head + digits + tail
            text += before + [IGNORE] * 5 + tail
            done = cut
            answer += [IGNORE] * len(before) + (digits if asked else [IGNORE] * 5) + [IGNORE] * len(tail)
        rest = source[start + done : start + room]
        return ids + self.noisy(rest), text + rest, answer + [IGNORE] * len(rest)

    def noisy(self, ids: list[int]) -> list[int]:
        """A tenth of the filler's inputs (not targets) at random: 148 k tokens are seen many times over.

        Held-out text ends at 3.22 nats; one run without it, with half the weight decay and slightly other
        stages, overfitted and ended at 3.59.
        """
        return [self.rng.randrange(1, VOCAB) if self.rng.random() < 0.1 else token for token in ids]


class Muon(torch.optim.Optimizer):
    """Momentum, each step the nearest orthogonal matrix (five Newton-Schulz iterations).

    Not torch.optim.Muon, because that iterates in bfloat16, which took more than half of each step's time on
    a CPU without AVX-512.
    """

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.lerp_(p.grad, 0.05)
            g = p.grad.lerp(momentum, 0.95)
            x = (g.T if g.shape[0] > g.shape[1] else g) / (g.norm() + 1e-7)
            for _ in range(5):
                a = x @ x.T
                x = 3.4445 * x + (2.0315 * a @ a - 4.775 * a) @ x
            x = x.T if g.shape[0] > g.shape[1] else x
            rate = self.param_groups[0]["lr"]
            p.mul_(1 - 0.1 * rate).add_(x, alpha=-rate * max(1.0, g.shape[0] / g.shape[1]) ** 0.5)


def train(tokenizer: FastTokenizer, text: str, held: list[int], seed: int, scale: float) -> Qwen2ForCausalLM:
    """All stages; `held` only serves the numbers printed after each."""
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    shape = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = Qwen2Config(**shape, **heads, max_position_embeddings=2048, rope_parameters=rope)
    config.initializer_range = 0.05  # 0.02 is meant for widths near 1,000
    config.bos_token_id = config.eos_token_id = tokenizer.eos_token_id
    model, samples = Qwen2ForCausalLM(config), Samples(tokenizer, text, seed)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    optimizers = [
        Muon(matrices, {"lr": 0.02}),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [opt.param_groups[0]["lr"] for opt in optimizers]
    stages = [(max(1, round(scale * steps)), *rest) for steps, *rest in STAGES]
    total, step, began = sum(stage[0] for stage in stages), 0, time.time()
    for number, (steps, tokens, lengths, text_weight) in enumerate(stages, 1):
        seen = []
        for at in range(1, steps + 1):
            step += 1
            length = samples.rng.choice(lengths)
            batch = torch.tensor([samples.draw(length) for _ in range(tokens // length)])
            ids, text_targets, answers = batch.unbind(1)
            for opt, rate in zip(optimizers, rates, strict=True):  # warm up, hold, fall linearly from 55 %
                opt.param_groups[0]["lr"] = rate * min(1, step / 50, (total - step + 1) / (0.45 * total))
            logits = model(ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            loss_answer = F.cross_entropy(logits, answers[:, 1:].flatten())
            loss_text = F.cross_entropy(logits, text_targets[:, 1:].flatten())
            (loss_answer + text_weight * loss_text).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in optimizers:
                opt.step()
                opt.zero_grad()
            seen.append((loss_text.item(), loss_answer.item()))
            if at % 25 == 0 or at == steps:
                means = " ".join(f"{sum(column) / len(seen):.3f}" for column in zip(*seen, strict=True))
                print(f"{time.time() - began:5.0f} s, step {step}/{total}: text, answer {means}", flush=True)
                seen = []
        recall = passkey_accuracy(model, tokenizer, held, lengths[-1], trials=20, pairs=1)
        loss = text_loss(model, held[:4097])
        print(f"stage {number}: held-out {loss:.3f} nats, pass key {recall:.2f}", flush=True)
    return model


@torch.no_grad()
def text_loss(model: Qwen2ForCausalLM, ids: list[int], window: int = 512) -> float:
    """Mean loss in nats a token, over windows that start afresh (the last partial one is left out)."""
    blocks = torch.tensor(ids[: (len(ids) - 1) // window * window + 1])
    rows = blocks[:-1].view(-1, window)
    losses = [
        F.cross_entropy(model(row[None], use_cache=False).logits[0].float(), target)
        for row, target in zip(rows, blocks[1:].view(-1, window), strict=True)
    ]
    return torch.stack(losses).mean().item()


def passkey_accuracy(
    model: Qwen2ForCausalLM, tokenizer: FastTokenizer, filler: list[int], length: int, trials: int, pairs: int
) -> float:
    """Share of keys whose five digits greedy decoding gets right, over depths spread from 0.05 to 0.9."""
    right = 0
    for trial in range(trials):
        depth = 0.05 + 0.85 * trial / (trials - 1)
        prompt, key = passkey_prompt(tokenizer, filler, length, depth, trial, pairs)
        ids = torch.tensor([tokenizer.encode(prompt)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        right += tokenizer.decode(out[0, ids.shape[1] :]) == key
    return right / trials


@torch.no_grad()
def sink_mass(model: Qwen2ForCausalLM, ids: list[int], window: int = 512) -> list[float]:
    """Mean attention, by layer, of the queries from position 64 on to the first four tokens."""
    rows = torch.tensor(ids[: 8 * window]).view(-1, window)
    attentions = model(rows, use_cache=False, output_attentions=True).attentions
    return [round(a[:, :, 64:, :4].sum(-1).mean().item(), 4) for a in attentions]


def evaluate(folder: Path, train_ids: list[int], held_text: str, trials: int) -> dict[str, object]:
    """What the saved folder scores: its bfloat16 weights in float32 arithmetic, AutoTokenizer's tokens.

    Those differ a little from training's: of every qwen2 folder transformers 5 makes a Qwen2Tokenizer with
    splitting rules of its own (147,650 tokens of the training text, not 147,568) and NFC normalisation, so
    text that is not NFC comes back normalised. PreTrainedTokenizerFast.from_pretrained keeps ours.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for sample in (held_text, "Zwölf Boxkämpfer\t½ ٣ 漢字 🙂\r\n  <a>  12345 .\n\n"):
        assert tokenizer.decode(tokenizer.encode(sample)) == sample, "the tokenizer loses text"
    held = tokenizer.encode(held_text)
    loss = text_loss(model, held)
    counts = torch.bincount(torch.tensor(train_ids), minlength=VOCAB) + 1.0  # unigrams, add-one smoothing
    unigram = -(counts / counts.sum()).log()[torch.tensor(held)].mean().item()
    single = {n: passkey_accuracy(model, tokenizer, held, n, trials, pairs=1) for n in (256, 512, 768, 1024)}
    named = {n: passkey_accuracy(model, tokenizer, held, n, trials, pairs=4) for n in (512, 1024)}
    return {
        "parameters": model.num_parameters(),
        "tokenizer_size": len(tokenizer),
        "train_tokens": len(train_ids),
        "held_out_tokens": len(held),
        "held_out_perplexity": round(math.exp(loss), 3),
        "unigram_perplexity": round(math.exp(unigram), 3),
        "bits_per_byte": round(loss / math.log(2) * len(held) / len(held_text.encode()), 4),
        "passkey_trials_each": trials,
        "passkey_exact": {n: round(share, 4) for n, share in single.items()},
        "named_passkey_of_4_exact": {n: round(share, 4) for n, share in named.items()},
        "sink_mass": sink_mass(model, held),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "teacher")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies every stage's steps")
    parser.add_argument("--trials", type=int, default=120, help="pass keys asked for, by length")
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums depend on the number of threads, so another one gives other weights
    torch.use_deterministic_algorithms(True)
    began = time.time()
    train_text, held_text = split_text()
    tokenizer = train_tokenizer(train_text)
    model = train(tokenizer, train_text, tokenizer.encode(held_text), args.seed, args.scale)
    minutes = (time.time() - began) / 60

    part = args.out.with_name(args.out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.generation_config.do_sample = False
    model.to(torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    metrics = {
        "seed": args.seed,
        "scale": args.scale,
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.system()} {platform.machine()}, 1 thread",
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}",
        "training_minutes": round(minutes, 1),
        **evaluate(part, tokenizer.encode(train_text), held_text, args.trials),
    }
    for file in part.iterdir():
        file.chmod(0o644)  # safetensors writes 0o600
    (part / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    shutil.rmtree(args.out, ignore_errors=True)
    part.rename(args.out)
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    main()
