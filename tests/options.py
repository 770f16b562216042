"""From the dataclasses of options to the command lines of distill.py and eval.py: no part of the lesson."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

import distill
from distill import TrainConfig
from interventions import LinearizeConfig
from linear_attn import lookup

EXACT_PART = ("router", "sinks", "window", "budget", "budgets", "block", "half_life", "fade", "chunk", "impl",
              "state_bits")  # fmt: skip


def add_options(parser: argparse.ArgumentParser, config: type) -> None:
    """One --option per dataclass field. Defaults stay None, so that a preset knows what the user typed."""
    group = parser.add_argument_group(config.__name__)
    for field in dataclasses.fields(config):
        kind, m = type(field.default), field.metadata
        choices = "" if m["choices"] is None else f" ({', '.join(map(str, m['choices']))})"
        default = distill.PRESETS["best"].get(field.name, field.default)
        shown = "" if default in ("", ()) else f" [{default}]"
        how = dict(nargs="+", type=m["item"]) if kind is tuple else dict(type=kind)
        group.add_argument(f"--{field.name.replace('_', '-')}", help=m["help"] + choices + shown, **how)


def configs_from(args: argparse.Namespace) -> tuple[LinearizeConfig | None, TrainConfig]:
    """The dataclasses' defaults, then the preset's values, then what the user typed.

    An adapter has its own LinearizeConfig: beside --adapter there is None."""
    values = dict(lookup(distill.PRESETS, args.preset, "preset"))
    if args.adapter:
        from adapters import base_model  # here, because distill and adapters load each other

        values["model"] = base_model(args.adapter)  # unless the user typed another
    values |= {k: tuple(v) if isinstance(v, list) else v for k, v in vars(args).items() if v is not None}
    config, train = ({f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
                     for cls in (LinearizeConfig, TrainConfig))  # fmt: skip
    return None if args.adapter else LinearizeConfig(**config), TrainConfig(**train)


def exact_part(args: argparse.Namespace) -> dict:
    """What the user typed of the options that may be changed after training; others are refused."""
    names = [*(f.name for f in dataclasses.fields(LinearizeConfig)), "layers", "keep", "lora"]
    typed = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if fixed := sorted(set(typed) - set(EXACT_PART)):
        raise distill.UserError(f"--{fixed[0]} is fixed by the adapter; free are {', '.join(EXACT_PART)}")
    return typed


def load_adapter(model, args: argparse.Namespace) -> None:
    """The folder of --adapter, with what the user typed of its exact part."""
    from eval import shares  # here, because it loads this file

    typed = exact_part(args)
    distill.load_linearized(model, args.adapter)
    c = model.linearize_config
    if "budgets" in typed:  # typed, not measured
        model.worth = None
    elif c.budgets and "budget" in typed:  # as many in all, shared out anew
        typed["budgets"] = shares(model, typed["budget"])
    distill.set_budgets(model, dataclasses.replace(c, **typed))


def check_writable(folder: Path) -> None:
    """Find out now, not after an hour of training, whether results can be written."""
    distill.write_atomically(folder / ".writable", Path.touch)
    (folder / ".writable").unlink(missing_ok=True)


def load_plugin(path: str) -> None:
    """Run a file that registers rules, merges, routers or losses of its own (README, "Add your own")."""
    try:
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:  # whatever a user's file can do
        raise distill.UserError(f"plugin {path}: {type(error).__name__}: {distill.brief(error)}") from None


def parser_for(commands: dict[str, Callable], describe: Callable) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter)
    first = next(iter(commands))
    parser.add_argument("command", nargs="?", default=first, choices=commands, help=f"what to do [{first}]")
    describe(parser)
    parser.add_argument("--adapter", help="folder that distill.py wrote")
    parser.add_argument("--plugin", action="append", help="a file of yours with further rules, routers, ...")
    choices = ", ".join(distill.PRESETS)
    parser.add_argument("--preset", default="best", help=f"where options start ({choices}) [best, as shown]")
    add_options(parser, TrainConfig)
    add_options(parser, LinearizeConfig)
    return parser


def command_line(commands: dict[str, Callable], describe: Callable, argv: list[str] | None) -> int:
    """Parse, run, return the exit status: 0 done; 2 one line says what to mend; 130 interrupted."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--plugin", action="append", default=[])
    plugins = early.parse_known_args(argv)[0].plugin
    try:
        for path in plugins:  # first: what it registers belongs to the choices
            load_plugin(path)
        args = parser_for(commands, describe).parse_args(argv)
        commands[args.command](args)
    except KeyboardInterrupt:
        print("\ninterrupted; what was saved so far is kept", file=sys.stderr)
        return 130
    except (ValueError, SafetensorError) as error:  # the latter: a full disk, for safetensors
        print(f"error: {error}", file=sys.stderr)
    except OSError as error:
        print(f"error: {error.strerror or error}: {error.filename or 'while writing'}", file=sys.stderr)
    except Exception as error:  # a bug: ours, or one of the user's file, who wants to know its line
        calls = [c for c in traceback.extract_tb(error.__traceback__) if c.filename in plugins]
        if not calls:
            raise
        where = f"{calls[-1].filename}, line {calls[-1].lineno}, {calls[-1].line}"
        print(f"error: {where}: {type(error).__name__}: {distill.brief(error)}", file=sys.stderr)
    else:
        return 0
    return 2


def distill_options(parser: argparse.ArgumentParser) -> None:
    parser.description = distill.__doc__.splitlines()[0]
    parser.add_argument("--out", default="out", help="folder for adapter, metrics and results [out]")
    parser.add_argument("--explain", action="store_true", help="say what each step of a run is for")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    parser.add_argument("--gpus", default="1x80", help="plan: devices x gigabytes of each [1x80]")
    parser.add_argument("--prompt", default="-", help="generate: text, or - for standard input [-]")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="generate: at most so many [200]")
    parser.add_argument("--temperature", type=float, default=0.0, help="generate: 0 is greedy [0]")


def eval_options(parser: argparse.ArgumentParser) -> None:
    from eval import KINDS, TASKS, Bench, __doc__

    parser.description = __doc__
    parser.add_argument("--tasks", default="ppl", help=f"some of {', '.join(TASKS)} [ppl]")
    parser.add_argument("--rows", help="rows to measure, linear@256 with another budget [all]")
    parser.add_argument("--limit", type=int, default=0, help="at most this many items of everything")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of retrieval [all]")
    parser.add_argument("--mmlu", default=Bench.mmlu, help="folder of the original CSV files, or hub dataset")
    parser.add_argument("--lambada", default=Bench.lambada, help="jsonl file, or owner/name:file of the hub")
    parser.add_argument("--plot", default="", help="speed: image to draw the ratios in, .png or .svg")
    parser.add_argument("--json", default="results.json", help="where everything goes raw [results.json]")
    parser.add_argument("--readme", action="store_true", help="rewrite README's tables from tests/results")
