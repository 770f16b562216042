"""Where text comes from: files, datasets of the hub, or Python's own help."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
from pathlib import Path
from pydoc_data.topics import topics

from files import UserError, brief
from huggingface_hub import hf_hub_download
from torch import Tensor


def begun(train, tokenizer):
    """A TrainConfig whose sequences start as the tokenizer starts a text: with a BOS token for Llama and
    Gemma, which hardly know any other start, with nothing for Qwen."""
    plain, whole = (tokenizer("a", add_special_tokens=x)["input_ids"] for x in (False, True))
    start = tuple(whole[: whole.index(plain[0])])
    return train if train.begin else dataclasses.replace(train, begin=start)


def tokenized(tokenizer, text: str) -> Tensor:
    """Its tokens (N,), no special ones. HAZARD: the C library keeps what tokenizing took, 230 MB for 2 MB of
    text, for later, and big tensors have no use for it: it is asked to give that back."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False, return_tensors="pt")["input_ids"][0]
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return ids


def read_texts(source: str) -> list[str]:
    """The documents of a .json or .jsonl file, or any other file as one; also of owner/name:file, a file in a
    dataset repository of the hub. "" is the help text that comes with every Python, 700 KB of English."""
    if not source:
        return ["\n".join(topics[key] for key in sorted(topics))]
    path = Path(source)
    try:
        if not path.exists() and source.count(":") == 1 and "/" in source.split(":")[0]:
            path = Path(hf_hub_download(*source.split(":"), repo_type="dataset"))
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return [row["text"] for row in json.loads(text)]
        lines = [line for line in text.split("\n") if line.strip()] if path.suffix == ".jsonl" else []
        return [json.loads(line)["text"] for line in lines] or [text]
    except (KeyError, TypeError, json.JSONDecodeError):
        raise UserError(f"{source}: want a list or lines of objects with a text field") from None
    except Exception as error:  # no such file, not UTF-8, or one of the hub's dozen classes
        raise UserError(f"cannot read {source}: {brief(error)}") from None
