"""What `python linear_attn.py` and `python interventions.py` print: seconds long, no part of the lesson."""

import torch
import torch.nn.functional as F

from linear_attn import recurrent, softmax_projection_identity
from tests.analysis import key_concentration


def linear_attn_demo() -> None:
    """The identity on concentrated keys; an overwrite that gating smears and the delta rule gets right."""
    torch.manual_seed(0)
    print("softmax-projection identity on 64 unit keys: concentration C, residual R = mean ||r_i||,")
    print("in brackets what is left of the exact identity: rounding")
    for spread in (0.1, 0.3, 1.0):
        k = F.normalize(torch.ones(64, 32) + spread * torch.randn(64, 32), dim=-1)
        centred, projected, residual = softmax_projection_identity(k)
        R, gap = residual.norm(dim=-1).mean(), (centred - projected - residual).abs().max()
        C = key_concentration(k[None, :, None])[0, -1, 0]
        print(f" spread {spread:3}: C = {C:.3f}  R = {R:.3f} ({gap:.0e})")
    print("\nwrite A->1, B->2, then overwrite A->9; read A and B back (exact answer 9 and 2)")
    a, b = F.normalize(torch.randn(2, 16), dim=-1)
    print(f"(cos(A, B) = {a @ b:.2f}: what is written at A moves B a little, under every rule)")
    k, v = torch.stack([a, b, a])[None, :, None], torch.tensor([1.0, 2.0, 9.0])[None, :, None, None]
    one = torch.ones_like(v[..., 0])
    for name, decay, beta in (("sum", one, None), ("gate 0.5", 0.5 * one, None), ("delta rule", one, one)):
        _, S = recurrent(k, k, v, decay.log(), beta, beta)
        print(f"  {name:10s}  A = {a @ S[0, 0, :, 0]:5.2f}   B = {b @ S[0, 0, :, 0]:5.2f}")


def interventions_demo() -> None:
    """Which tokens stay exact: the tiny teacher reads a text, and every router shows what it kept."""
    import distill
    import eval as evaluation  # noqa: F401  (registers the router "random", and knows where benchmarks is)
    from interventions import ROUTERS, LinearizeConfig
    from tests.benchmarks import FILLER

    model, tokenizer = distill.load_teacher()
    key = "48213"
    text = f"The pass key is {key}. Remember it. " + 2 * FILLER
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    print(f"{len(ids)} tokens; [exact] are 2 sinks, the newest 16 and 16 more, the rest is in the memory")
    print("(one kv head of the last layer; who keeps the key, before anybody has asked for it?)")
    for router in ROUTERS:
        config = LinearizeConfig(router=router, sinks=2, window=16, budget=16, block=8)
        distill.linearize(model, config)
        cache = model(input_ids=torch.tensor([ids]), use_cache=True).cache
        kept = cache.layers[-1].rows[0].exact
        newest = torch.arange(len(ids))[[*range(2), *range(len(ids) - config.reach, len(ids))]]
        positions = set((kept["position"][0, :, 0] if "position" in kept else newest).tolist())
        words = [tokenizer.decode([token]) for token in ids]
        shown = "".join(f"[{word}]" if i in positions else word for i, word in enumerate(words))
        kept_of_key = sum(words[i].strip() in set(key) for i in positions)
        print(f"\n{router}: {kept_of_key} of the {len(key)} digits of the key\n{shown.replace('][', '')}")
        distill.delinearize(model)
