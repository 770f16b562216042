"""Adapter folders, and progress to resume a run from: what distill.py writes and reads."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import torch
from files import UserError, read_checked, write_atomically, write_checked
from lora import add_lora
from torch import Tensor
from transformers import PreTrainedModel

import distill  # its functions are looked up when they are called: distill itself loads this file
from interventions import LinearizeConfig


def some_weights(model: PreTrainedModel) -> list[float]:
    """One weight of every backbone tensor: tells models apart, whatever the dtype they were loaded in.
    What accelerate left on disk is unknown."""
    named = [p for name, p in sorted(model.named_parameters()) if ".linear." not in name]
    at = [i * 7919 % p.numel() for i, p in enumerate(named)]
    return [math.nan if p.is_meta else p.flatten()[i].item() for p, i in zip(named, at)]


def save_adapter(model: PreTrainedModel, folder: Path | str, train=None) -> None:
    """adapter_model.safetensors + adapter_config.json, the layout people know from peft.

    The first file is complete, and renamed into place: kill -9 at any moment leaves the old adapter or the
    new one. The second is a copy of its settings for readers (and for the hub); nothing reads it back.
    """
    about = dict(
        base_model=model.config._name_or_path,
        model_type=model.config.model_type,
        layers=sorted(distill.linear_layers(model)),
        lora=getattr(model, "lora", 0),
        linearize=dataclasses.asdict(model.linearize_config),
        worth=model.worth,
        train=train and dataclasses.asdict(train),
    )
    copy, about["weights"] = json.dumps(about, indent=1), model.some_weights
    write_checked(Path(folder, "adapter_model.safetensors"), distill.new_parameters(model), about)
    write_atomically(Path(folder, "adapter_config.json"), lambda p: p.write_text(copy))


def base_model(folder: Path | str) -> str:
    """The teacher an adapter was trained on, as --model was typed then; UserError if there is no adapter."""
    about = read_adapter(folder)[1]
    return about["train"]["model"] if about["train"] else about["base_model"]


def read_adapter(folder: Path | str) -> tuple[dict, dict]:
    """(new parameters by name, settings)"""
    return read_checked(Path(folder, "adapter_model.safetensors"), f"no adapter in {folder}")


def load_linearized(model: PreTrainedModel | str, folder: Path | str) -> PreTrainedModel:
    """Linearize `model`, or the teacher of that name, as the folder says; its new parameters bit for bit.

    UserError, one line: no adapter, a damaged one, another version, another base model."""
    tensors, about = read_adapter(folder)
    try:
        config = LinearizeConfig(**about["linearize"])
    except ValueError as error:
        raise UserError(f"{folder}: {error}; was it trained with a --plugin?") from None
    model = distill.load_teacher(model)[0] if isinstance(model, str) else model
    kind, was = model.config.model_type, f"{folder} was trained on {about['base_model'] or 'another model'}"
    if about["model_type"] != kind:
        raise UserError(f"{was}, a {about['model_type']} model; this one is {kind}")
    then, now = torch.tensor(about["weights"]), torch.tensor(some_weights(model))
    # 16 bits of precision move a weight by 0.1 % (rms of bfloat16's rounding); another model moves all of it
    if len(now) == len(then) and (then - now).nan_to_num(0.0).norm() > 0.01 * then.nan_to_num(0.0).norm():
        raise UserError(f"{was}; the weights of {model.config._name_or_path or 'this model'} are others")
    distill.linearize(model, config, about["layers"])
    model.worth = about.get("worth")
    add_lora(model, about.get("lora", 0))
    set_parameters(model, tensors, folder)
    model.trained = about["train"]
    return model


def set_parameters(model: PreTrainedModel, tensors: dict[str, Tensor], folder: Path) -> None:
    own = distill.new_parameters(model)
    if {k: v.shape for k, v in own.items()} != {k: v.shape for k, v in tensors.items()}:
        raise UserError(f"{folder} does not fit this model: other parameter names or shapes")
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(tensors[name])


def settings_of(model: PreTrainedModel, train: distill.TrainConfig) -> dict:
    """What must be equal for a run to go on, as JSON has it."""
    settings = dataclasses.asdict(train) | dataclasses.asdict(model.linearize_config)
    settings = {k: v for k, v in settings.items() if k not in ("eval_tokens", "save_every", "recompute")}
    return json.loads(json.dumps(settings))


def save_progress(model, optimizer, train: distill.TrainConfig, out: Path, records: list[dict]) -> None:
    """All that --resume needs in one file: its parts cannot disagree. Then metrics and the adapter."""
    state = {f"{name}.{i}": v for i, s in optimizer.state_dict()["state"].items() for name, v in s.items()}
    about = dict(settings=settings_of(model, train), records=records)
    write_checked(out / "progress.safetensors", state | distill.new_parameters(model), about)
    save_results(model, train, out, records)


def save_results(model, train: distill.TrainConfig, out: Path, records: list[dict]) -> None:
    """What others read: metrics and the adapter."""
    lines = "".join(json.dumps(record) + "\n" for record in records)
    write_atomically(out / "metrics.jsonl", lambda p: p.write_text(lines))
    save_adapter(model, out, train)


def load_progress(model, optimizer, train: distill.TrainConfig, out: Path) -> list[dict]:
    """Set model and optimizer as they were; return the records of the steps done. Metrics and the adapter are
    written anew: a kill may have come between the progress and these."""
    state, about = read_checked(out / "progress.safetensors", f"nothing to resume in {out}")
    now, then = settings_of(model, train), about["settings"]
    if changed := sorted(k for k in now if then.get(k) != now[k]):
        raise UserError(f"--resume needs the settings of the first run; changed: {', '.join(changed)}")
    set_parameters(model, {k: state.pop(k) for k in distill.new_parameters(model) if k in state}, out)
    numbers = {int(key.rsplit(".", 1)[1]) for key in state}
    moments = {i: {k.split(".")[0]: x for k, x in state.items() if k.endswith(f".{i}")} for i in numbers}
    optimizer.load_state_dict(dict(optimizer.state_dict(), state=moments))
    save_results(model, train, out, about["records"])
    return about["records"]
