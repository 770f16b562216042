"""Settings shared by all tests, and tiny random models."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels run in Python
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import torch
from hypothesis import HealthCheck, settings

import distill  # noqa: F401  (first, because it must be imported before transformers)

torch.set_num_threads(1)  # tiny tensors: 16x faster than with two threads

settings.register_profile(
    "default",
    max_examples=25,
    deadline=None,
    derandomize=True,  # the same examples in every run: a red test is red again
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("default")


FAMILIES = {  # the names of transformers' classes; beyond the common sizes, what each needs to be small
    "Llama": {},
    "Qwen2": {},
    "Qwen3": dict(head_dim=16),  # heads * head_dim is not hidden_size
    "Qwen3Moe": dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "Mistral": {},
    "Mixtral": dict(num_local_experts=4),
    "Phi": {},
    "Phi3": {},
    "Gemma2": {},
    "Gemma3Text": dict(layer_types=["sliding_attention", "full_attention"]),  # their own windows are 512 and
    "Gemma4Text": dict(  # more: longer than any sequence here. Two head dims, one a layer
        layer_types=["sliding_attention", "full_attention"],
        global_head_dim=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=50,
    ),
    "Olmo2": {},
    "Olmo3": dict(layer_types=["sliding_attention", "full_attention"]),
    "Granite": {},
    "SmolLM3": dict(no_rope_layers=[1, 0]),  # the second layer has no RoPE
    "Cohere2": dict(layer_types=["sliding_attention", "full_attention"], logit_scale=1.0),
    "Glm4": {},
    "Starcoder2": {},
    "StableLm": {},
}


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also tests marked exhaustive: a minute more")
    parser.addoption("--plugin", action="append", default=[], help="a file whose rules, ... are tested too")


def pytest_configure(config):
    from options import load_plugin

    import eval  # noqa: F401  (puts this folder on the path, and registers the router "random")

    for path in config.getoption("--plugin"):
        load_plugin(path)
    config.addinivalue_line("markers", "exhaustive: a further combination of what other tests check; --all")
    config.addinivalue_line("markers", "exercise: fails until you solve it; -m exercise")


def pytest_collection_modifyitems(config, items):
    further = [x for x in items if x.get_closest_marker("exhaustive") and not config.getoption("--all")]
    if "exercise" not in config.getoption("-m"):
        further += [x for x in items if x.get_closest_marker("exercise")]
    if further:
        config.hook.pytest_deselected(items=further)
        items[:] = [x for x in items if x not in set(further)]


def tiny_model(kind: str = "qwen2", layers: int = 2, vocab: int = 50, **kw):
    """A random model of a family. std 0.25: with the usual 0.02 attention is uniform and hides errors."""
    import transformers

    name = next(name for name in FAMILIES if name.lower() == kind.lower())
    sizes = dict(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        initializer_range=0.25,
        pad_token_id=0,
    )
    config = getattr(transformers, name + "Config")(**(sizes | FAMILIES[name] | kw))
    torch.manual_seed(0)
    return getattr(transformers, name.replace("Text", "") + "ForCausalLM")(config).eval()


@contextlib.contextmanager
def saved_for_backward():
    """A list, to whose only number every tensor that autograd keeps inside adds its bytes."""
    kept = [0]

    def pack(x):
        kept[0] += x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield kept


@pytest.fixture(scope="session", autouse=True)
def compilation(request):
    """Compiles the kernels for GPUs that are not here, on the second core, while the other tests run."""
    if not any("compiles_for_sm" in item.name for item in request.session.items):
        yield None
        return
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = [sys.executable, str(Path(__file__).parent / "gpu_check.py"), "--compile-only"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with subprocess.Popen(script, env=env, **pipes) as process:
        yield process
        process.kill()
