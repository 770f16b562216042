"""Does eval.py say what lm-evaluation-harness says? Question by question, teacher and linearized.

    pip install lm-eval          # 0.4.x; optional, nothing else here needs it. Without it: skipped, status 0
    python tests/lm_eval_check.py --adapter out --mmlu DIR --limit 5            --mmlu: the original CSV files
    ... --model M --subjects anatomy virology --batch-size 4

(i) a small multiple-choice task with answers of several tokens, against `benchmarks.continuations`;
(ii) MMLU, 5-shot, with the template and the descriptions that come with lm-eval, against `measure_mmlu`.
lm-eval reads right-padded batches without a cache, eval.py a shared prefix once and the rest from its state:
two ways to the same numbers. Status 1 if a log-probability differs by more than TOLERANCE, or a letter.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import io
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval shows four bars a task

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import distill  # noqa: E402  (before transformers, hence before lm-eval)
import eval as evaluation  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parent))
import benchmarks  # noqa: E402
from texts import begun  # noqa: E402

# float32 logits of size 30 over 30 layers in two orders of summation: about 1e-4; measure_mmlu rounds to 1e-4
TOLERANCE = 1e-3
ROWS = ("teacher", "linear")
SMALL_TASK = [  # (question, choices, right one)
    ("The opposite of hot is", ["cold", "a warm day", "yellow"], 0),
    ("A list in Python is written with", ["square brackets", "curly braces", "question marks"], 0),
    ("Two plus two is", ["three", "four", "twenty-two"], 1),
    ("A loop that never ends is called", ["a recursion", "a finite loop", "an infinite loop"], 2),
    ("Water is made of hydrogen and", ["oxygen", "old iron", "nothing else"], 0),
]


def installed() -> bool:
    return importlib.util.find_spec("lm_eval") is not None


def make_task(folder: Path, name: str, splits: dict[str, list[dict]], config: dict):
    """An lm-eval task on rows of our own: JSON files in `folder`, where the datasets' cache goes too."""
    from lm_eval.api.task import ConfigurableTask

    files = {}
    for split, rows in splits.items():
        files[split] = str(folder / f"{name}_{split}.json")
        Path(files[split]).write_text(json.dumps(rows))
    where = dict(
        dataset_path="json",
        dataset_name=None,
        dataset_kwargs=dict(data_files=files, cache_dir=str(folder / "cache")),
    )
    return ConfigurableTask(config=config | where | dict(task=name))


def harness(lm, task, name: str, limit: int = 0) -> list[list[float]]:
    """lm-eval's log-probabilities of each question's choices, through its front door."""
    from lm_eval import simple_evaluate

    result = simple_evaluate(model=lm, tasks=[task], limit=limit or None, bootstrap_iters=0)
    samples = sorted(result["samples"][name], key=lambda sample: sample["doc_id"])
    return [[float(x[0]) for x in sample["filtered_resps"]] for sample in samples]


def small_task(folder: Path):
    rows = [dict(question=q, choices=choices, answer=answer) for q, choices, answer in SMALL_TASK]
    config = dict(
        test_split="test",
        output_type="multiple_choice",
        doc_to_text="Question: {{question}}\nAnswer:",
        doc_to_choice="choices",
        doc_to_target="answer",
        num_fewshot=0,
        metric_list=[dict(metric="acc", aggregation="mean", higher_is_better=True)],
    )
    return make_task(folder, "small_task", dict(test=rows), config)


def small_task_here(bench: evaluation.Bench, name: str) -> list[list[float]]:
    """The same through `continuations`: the context once, then each choice from a copy of the state."""
    every = []
    for question, choices, _ in SMALL_TASK:
        context = f"Question: {question}\nAnswer:"
        ids = benchmarks.from_the_start(bench, context)
        answers = [benchmarks.from_the_start(bench, f"{context} {x}")[len(ids) :] for x in choices]
        with bench.row(name) as model:
            read = benchmarks.continuations(model, ids[:-1], [ids[-1:] + a[:-1] for a in answers])
            every.append(
                [
                    log_p.gather(1, torch.tensor(a)[:, None]).sum().item()
                    for (log_p, _), a in zip(read, answers)
                ]
            )
    return every


def read_csv(text: str) -> list[dict]:
    rows = list(csv.reader(io.StringIO(text)))
    return [dict(question=q, choices=choices, answer="ABCD".index(a)) for q, *choices, a in rows]


def mmlu_task(folder: Path, subject: str, files: dict[str, str]):
    """lm-eval's own MMLU: its template and its description of the subject, on the local CSV files."""
    import lm_eval
    import yaml

    here = Path(lm_eval.__file__).parent / "tasks" / "mmlu" / "default"
    config = yaml.safe_load((here / "_default_template_yaml").read_text())
    config["description"] = yaml.safe_load((here / f"mmlu_{subject}.yaml").read_text())["description"]
    config["num_fewshot"] = 5
    splits = {part: read_csv(files[f"{part}/{subject}"]) for part in ("dev", "test")}
    return make_task(folder, f"mmlu_{subject}", splits, config)


def compare(what: str, ours: list[list[float]], theirs: list[list[float]]) -> bool:
    """Print one line; are they the same? A letter may differ where the two best are within the tolerance."""
    largest, other, close = 0.0, 0, 0
    for a, b in zip(map(Tensor, ours), map(Tensor, theirs), strict=True):
        largest = max(largest, (a - b).abs().max().item())
        if a.argmax() != b.argmax():
            near = b.topk(2).values.diff().abs().item() <= 2 * TOLERANCE
            close, other = close + near, other + (not near)
    good = largest <= TOLERANCE and not other
    letters = f"{len(ours) - other - close} of {len(ours)} letters the same"
    note = f", {close} differ between choices equal to {2 * TOLERANCE:g}" if close else ""
    print(
        f"{what:34s} largest difference {largest:.1e}, {letters}{note}: {'same' if good else 'NOT the same'}"
    )
    return good


def check(args: argparse.Namespace) -> int:
    from lm_eval.models.huggingface import HFLM

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model, tokenizer = distill.load_teacher(args.model, "float32", args.device)
    distill.load_linearized(model, args.adapter)
    files = benchmarks.mmlu_files(args.mmlu) if args.mmlu else {}
    every = sorted(name[5:] for name in files if name.startswith("test/"))
    if unknown := set(args.subjects) - set(every):
        raise distill.UserError(f"no subject {min(unknown)} in {args.mmlu}; there are {', '.join(every)}")
    subjects = sorted(args.subjects) or every[:: max(1, len(every) // 3)][:3]
    nothing = torch.zeros(0, dtype=torch.long)
    train = begun(evaluation.TrainConfig(), tokenizer)
    # eval.py never truncates; lm-eval does at max_length, by default the model's max_position_embeddings
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=args.batch_size, max_length=2**20)
    good = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("dev", "test"):  # only the chosen subjects, for measure_mmlu
            (folder / "mmlu" / part).mkdir(parents=True)
            for subject in subjects:
                text = files[f"{part}/{subject}"]
                (folder / "mmlu" / part / f"{subject}_{part}.csv").write_text(text, encoding="utf-8")
        mmlu = str(folder / "mmlu")
        bench = evaluation.Bench(model, tokenizer, nothing, nothing, train, ROWS, args.limit, mmlu=mmlu)
        small, tasks = small_task(folder), {s: mmlu_task(folder, s, files) for s in subjects}
        ours = benchmarks.measure_mmlu(bench)[0]["letters"] if subjects else {}
        for row in ROWS:
            with bench.row(row):
                theirs = harness(lm, small, "small_task")
            good.append(compare(f"{row}, small task", small_task_here(bench, row), theirs))
            start = 0
            for subject, task in tasks.items():
                with bench.row(row):
                    theirs = harness(lm, task, f"mmlu_{subject}", args.limit)
                mine = ours[row][start : start + len(theirs)]
                good.append(compare(f"{row}, {subject}", mine, theirs))
                start += len(theirs)
    return 0 if all(good) else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="teacher [embedded]")
    parser.add_argument("--adapter", required=True, help="folder that distill.py wrote")
    parser.add_argument("--mmlu", default="", help="folder of the original CSV files [only the small task]")
    parser.add_argument("--subjects", nargs="+", default=[], help="of MMLU [three]")
    parser.add_argument("--limit", type=int, default=0, help="questions a subject [all]")
    parser.add_argument("--batch-size", type=int, default=4, help="lm-eval's [4]")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... [auto]")
    args = parser.parse_args(argv)
    if not installed():
        print("skipped: lm-eval is not installed: pip install lm-eval")
        return 0
    try:
        return check(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
