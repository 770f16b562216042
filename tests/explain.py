"""`python distill.py --explain`: what each step of a run does, told while it happens."""

import textwrap

STEPS = {
    "teacher": """
        1. The teacher. A pretrained transformer is loaded, and every one of its weights is frozen: the
        optimizer never sees them, and a SHA-256 over all their bits is taken now and compared at the
        end. Its softmax attention remembers everything: for T tokens it keeps T keys and values in
        every layer, and compares each new token with all of them. (distill.load_teacher)""",
    "text": """
        2. The text. Without --eval-data the last tenth of every text is held out before anything is cut:
        training never sees it. The teacher's own training text is not needed: it is only asked what it
        answers. (eval.load_data)""",
    "linearize": """
        3. The swap. Projections, norms, RoPE and MLPs stay the model's own code; only softmax over all
        tokens goes. In its place each layer keeps a fixed number of exact pairs (the first tokens,
        "sinks"; the newest, the "window"; some more that a router chooses) and puts every other token
        into a matrix S of constant size by the delta rule: what S already says about a key is replaced
        by its value. New parameters: features of q and k, two gates, and how the two answers are
        weighed; the next line says how many. (distill.linearize, interventions.LinearizedAttention)""",
    "allocate": """
        4. Who needs the pairs? Layers are unlike. On a few training sequences one backward pass through
        the teacher says how much an error in each layer's answer would move the model's output; layers
        get their share of the pairs by what the pairs are worth there. (eval.measure_budgets)""",
    "train": """
        5. Training. With --loss layer each layer is compared with the frozen teacher's layer on the
        teacher's own inputs, and goes backward at once: no more memory than one layer's activations.
        Then AdamW moves the new parameters. (distill.layer_loss, distill.train_adapters)""",
    "measure": """
        6. The measurement, on held-out text. `nll` is the mean negative log-likelihood a token, `ppl` =
        exp(nll); `KL` is how far the distribution of the next token is from the teacher's, top-1 how
        often both prefer the same token; `pairs` is the most keys a query sees exactly, a mean over the
        layers where they differ; `bytes/seq` is what a sequence keeps. Rows:
            teacher  the frozen model with its own softmax
            linear   the linearized model
            off      as many exact pairs, the newest, no memory: what windows alone can do
            recent   the same, with the layers' own numbers of pairs
            mass     as many pairs, chosen by the attention they received, no memory
            random   the memory, with a router that does not look
            bytes    the memory's bytes spent on further exact pairs instead
        The memory has earned its place only if `linear` is better than `off` *and* `bytes`: the last
        lines say by how much, sequence by sequence, with the standard error. "Its gap" is what that
        row loses on the teacher: 100 % of it would be all there is to win.""",
}


def explain(step: str, wanted: bool) -> None:
    if wanted:
        print("\n" + textwrap.dedent(STEPS[step]).strip() + "\n", flush=True)
