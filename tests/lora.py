"""`--lora RANK`: the paper's comparator, low-rank changes of q, k, v and o beside the new parameters.

What "frozen" costs or saves can only be judged against a run that is not. Needs peft (pip install peft), and
an end-to-end loss: the layer loss compares answers to the same q, k, v, which LoRA changes. Frozen weights
stay as they are; LoRA's matrices are trained, saved and loaded with the new parameters, off in the teacher.
"""

from __future__ import annotations

from files import UserError


def add_lora(model, rank: int) -> None:
    """Adapters of this rank, 0: none, with alpha = 2 rank (paper: 8, 16) on every attention projection."""
    if not rank:
        return
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise UserError("--lora needs peft: pip install peft") from None
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets), model)
    for name, p in model.named_parameters():  # peft has frozen whatever is not its own
        p.requires_grad_(name in trained or ".lora_" in name)
    model.lora = rank


def switch_lora(model, on: bool) -> None:
    """Off: the projections are the teacher's."""
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module._disable_adapters = not on
