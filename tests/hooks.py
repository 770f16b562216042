"""Between transformers and a linearized layer: its cache, padding, rows that are not in step.

No part of the lesson: distill.attention_forward is, which calls `by_rows`. Import distill before this.
"""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor

from interventions import State
from linear_attn import attend_tokens


@contextlib.contextmanager
def recomputed(model, wanted: int = 1):
    """Inside, a layer forgets what it computed and computes it again when a gradient comes (gradient
    checkpointing): memory of one layer, not of all. transformers does so in training mode alone; a frozen
    model is the same in it unless it has dropout."""
    if not wanted or not model.supports_gradient_checkpointing:
        yield
        return
    model.activation_checkpointing_enable()
    model.train()
    try:
        yield
    finally:
        model.eval()
        model.activation_checkpointing_disable()


def padding_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, attention_mask=None, **_):
    """Hand on the 2-D padding mask, or None. HAZARD: without a mask function, padding is dropped silently."""
    return None if attention_mask is None or bool(attention_mask.bool().all()) else attention_mask


class MemoryCacheLayer(hf.cache_utils.CacheLayerMixin):
    """A linearized layer's place in transformers' cache: one `State` a row, and nothing that grows."""

    is_compileable = is_croppable = is_sliding = supports_early_init = False

    def __init__(self):
        super().__init__()
        self.rows, self.seen = [], 0

    def update(self, key, value, *args, kwargs=None, **_):
        """Called before attention: keeps nothing, and hands itself on to `attention_forward`."""
        self.seen, self.is_initialized, kwargs["memory"] = self.seen + key.shape[-2], True, self
        return key, value

    def get_seq_length(self) -> int:
        return self.seen  # columns, padding included: masks and positions count them

    def reorder_cache(self, beams: Tensor) -> None:
        self.rows = [self.rows[i] for i in torch.arange(len(self.rows))[beams.cpu()].tolist()]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.rows = [row for row in self.rows for _ in range(repeats)]

    def crop(self, length: int) -> None:
        raise ValueError("a memory cannot forget its last tokens: no assisted decoding, no cropped cache")

    batch_select_indices, reset, get_max_length = reorder_cache, __init__, lambda self: -1
    get_mask_sizes = lambda self, query_length: (self.seen + query_length, 0)  # noqa: E731
    lazy_initialization = offload = prefetch = lambda self, *_: None


def prepare_inputs(module, args, kwargs):
    """Pre-hook on the base model: constant-size cache layers for empty ones, positions from the mask."""
    from distill import NAME, linear_layers

    if module.config._attn_implementation != NAME:
        return  # the model is its own teacher now
    cache = kwargs.pop("cache", kwargs.pop("past_key_values", None))  # the new and the old name
    position, mask, use = (kwargs.get(name) for name in ("position_ids", "attention_mask", "use_cache"))
    if isinstance(mask, dict):  # one a kind of layer; ours are all the same
        mask = next((x for x in mask.values() if x is not None), None)
    mask = mask if mask is not None and mask.dim() == 2 else None
    if use is None:  # in training a carried state would only hold on to the graph
        use = kwargs["use_cache"] = module.config.use_cache and not torch.is_grad_enabled()
    ours = cache is not None and any(isinstance(x, MemoryCacheLayer) for x in cache.layers)
    if not ours and (use or cache is not None) and linear_layers(module):
        if cache is not None and cache.get_seq_length():
            raise ValueError("past_key_values hold keys of another model: start from an empty cache")
        fresh = hf.DynamicCache(config=module.config)  # layers that keep softmax keep their kind of cache
        for i in linear_layers(module):
            fresh.layers[i] = MemoryCacheLayer()
        if type(cache) is hf.DynamicCache:  # the caller's own object, to be used again in the next turn
            cache.layers, cache.layer_class_to_replicate = fresh.layers, None
        else:
            cache = fresh
    if cache is not None:
        kwargs["cache"] = cache
    if position is not None and position.shape[-1] > 1:
        restart = position[..., 1:] <= position[..., :-1]
        if mask is not None:  # positions of padding mean nothing
            real = mask[:, -position.shape[-1] :].bool()
            restart = restart & real[:, :-1] & real[:, 1:]
        if bool(restart.any()):
            raise ValueError("position_ids restart within a row: packed documents need rows of their own")
    elif position is None and mask is not None:
        # HAZARD: softmax does not mind a shift of RoPE, but phi(q) and phi(k) do.
        new = next(x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
        kwargs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
    return args, kwargs


def full_attention(q, k, v, mask_bt: Tensor | None, scale: float, softcap=None, window=None) -> Tensor:
    """The teacher's softmax, for layers that keep it, with their own window: T queries, last of all keys."""
    T, N = q.shape[1], k.shape[1]
    if softcap is None and mask_bt is None and T in (1, N) and N <= (window or N):
        x = (y.transpose(1, 2) for y in (q, k, v))
        out = F.scaled_dot_product_attention(*x, is_causal=T > 1, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)
    at = torch.arange(N, device=q.device)
    age = at[N - T :, None] - at
    visible = ((age >= 0) & (age < (window or N)))[None, None]
    if mask_bt is not None:
        visible = visible & mask_bt[:, None, None, -N:].bool()
    return attend_tokens(q, k, v, visible, scale, softcap)[0].nan_to_num(0.0)  # padding attends to nothing


def by_rows(layer, x, mask, memory: MemoryCacheLayer | None, scale: float, softcap: float | None) -> Tensor:
    """A layer's answer to x = (q, k, v, hidden), (B,T,...) each, with padding and with states of its rows."""
    B, T = x[0].shape[:2]
    if mask is None:
        return in_step(layer, x, [T] * B, memory, scale, softcap)
    # Real tokens first in each row: left, right and middle padding become trailing tokens, never read.
    real = mask[:, -T:].bool()
    order = (~real).int().argsort(dim=1, stable=True)
    x = [y.gather(1, order.view(B, T, *(1,) * (y.dim() - 2)).expand_as(y)) for y in x]
    out = in_step(layer, x, real.sum(1).tolist(), memory, scale, softcap)
    out = torch.zeros_like(out).scatter(1, order[:, :, None, None].expand_as(out), out)
    return out * real[:, :, None, None].to(out.dtype)


def in_step(layer, x, lengths: list[int], memory, scale: float, softcap: float | None) -> Tensor:
    """All rows at once, or with a `memory` those together that are in step: equally far, equally long."""
    if memory is None:
        return layer(*x, scale, softcap)
    alike: dict[tuple[int, int], list[int]] = {}
    memory.rows = memory.rows or [State() for _ in lengths]
    for b, row in enumerate(memory.rows):
        alike.setdefault((row.count, lengths[b]), []).append(b)
    if len(alike) == 1 and lengths[0] == x[0].shape[1]:  # all of them: no copies
        state = State.join(memory.rows)
        out = layer(*x, scale, softcap, state)
        memory.rows = [state.row(b) for b in range(len(lengths))]
        return out
    out = x[2].new_zeros(*x[0].shape[:3], x[2].shape[-1])
    for (_, length), rows in alike.items():
        if length:
            state = State.join([memory.rows[b] for b in rows])
            out[rows, :length] = layer(*(y[rows, :length] for y in x), scale, softcap, state)
            for i, b in enumerate(rows):
                memory.rows[b] = state.row(i)
    return out
