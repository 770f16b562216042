"""Files that are whole or not there, errors of one line: plumbing of distill.py, no part of the lesson."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

T = TypeVar("T")
FORMAT = 2  # version of the adapter folder


class UserError(ValueError):
    """Something the user can mend: shown as one line, without a traceback."""


def brief(error: Exception) -> str:
    """A foreign error's text on one line of bearable length."""
    text = " ".join(str(error).split())
    return text if len(text) <= 160 else text[:160].rpartition(". ")[0] or text[:160]  # whole sentences


def team() -> tuple[int, int]:
    """(own number, processes) under torchrun; else (0, 1)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def mean_over_processes(loss: float, params: list[torch.nn.Parameter]) -> float:
    """Gradients, in place, and the loss, as the mean over the processes of torchrun; alone: as they are. It
    is right because every loss is itself a mean over sequences (not a quotient of sums over them)."""
    if (processes := team()[1]) == 1:
        return loss
    mean = params[0].new_tensor(loss)
    for x in (mean, *(p.grad for p in params if p.grad is not None)):
        dist.all_reduce(x)
        x /= processes
    return mean.item()


def digest(tensors: dict[str, Tensor], about: str = "") -> str:
    """SHA-256 over names, dtypes, shapes and every bit: a flipped one is found. Of a tensor that torchrun
    spreads over processes this process's part counts; what accelerate keeps on disk cannot change."""
    sha = hashlib.sha256(about.encode())
    for name, x in sorted(tensors.items()):
        x = x.to_local() if hasattr(x, "to_local") else x
        sha.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        if not x.is_meta:
            sha.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return sha.hexdigest()


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Write under a temporary name, then rename: a reader sees the old file or the new one, never a half.
    Of several processes only the first writes."""
    if team()[0]:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    write(temporary)
    os.replace(temporary, path)


class Progress:
    """What an interrupted run has finished, item by item, in a file beside its results; `whose` tells that it
    was the same run. Without a path nothing is remembered."""

    def __init__(self, path: Path | None = None, whose: object = None) -> None:
        self.path, self.whose, self.done = path, json.loads(json.dumps(whose)), {}
        try:
            saved = json.loads(path.read_text())
            if saved["whose"] == self.whose:
                self.done = saved["done"]
                print(f"going on after {len(self.done)} finished items in {path}", file=sys.stderr)
        except (AttributeError, OSError, ValueError, LookupError, TypeError):
            pass  # none, or of something else: everything is measured

    def once(self, item: str, work: Callable[[], T]) -> T:
        """work(), a JSON value, unless the item is finished."""
        if self.path is None:
            return work()
        if item not in self.done:
            self.done[item] = work()
            text = json.dumps(dict(whose=self.whose, done=self.done))
            write_atomically(self.path, lambda p: p.write_text(text))
        return self.done[item]

    def finish(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def write_checked(path: Path, tensors: dict[str, Tensor], about: dict) -> None:
    """A safetensors file with all that is to be said about it as JSON, and a checksum over both."""
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    meta = dict(about=json.dumps(about | dict(format=FORMAT)))
    meta["sha256"] = digest(tensors, meta["about"])

    def write(temporary: Path) -> None:
        for stray in path.parent.glob(".tmp??????"):  # safetensors' own, of a process that was killed
            stray.unlink(missing_ok=True)
        save_file(tensors, temporary, metadata=meta)

    write_atomically(path, write)


def read_checked(path: Path, failure: str) -> tuple[dict[str, Tensor], dict]:
    """(tensors, about) as they were written, or a UserError that starts with `failure`."""
    try:
        with safe_open(path, "pt") as f:
            tensors, meta = {name: f.get_tensor(name) for name in f.keys()}, f.metadata() or {}
        about = json.loads(meta.get("about", "{}"))
        if about.get("format") != FORMAT:
            raise ValueError(f"adapter format {about.get('format')}, this code reads {FORMAT}")
        if digest(tensors, meta["about"]) != meta["sha256"]:
            raise ValueError("its checksum is wrong, the file is damaged")
        return tensors, about
    except Exception as error:  # missing, truncated or foreign files
        raise UserError(f"{failure}: {brief(error)}") from None


def peak_memory(device: torch.device, reset: bool = False) -> int:
    """Bytes of the largest memory in use since the last reset: of the device, or of this process; 0 where the
    system does not tell."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.max_memory_allocated(device)
    if not Path("/proc/self/status").exists():
        return 0
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
