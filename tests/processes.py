"""`torchrun --nproc_per_node N distill.py ...`: one process a device, each with its part of every batch.

The frozen layers are spread (PyTorch's FSDP2): a process keeps 1/N of each and gathers a layer when it runs.
The new parameters are whole on every process; files.mean_over_processes averages their gradients. Embedding
and output projection stay whole as well.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from files import team
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distill import attention_modules, new_parameters


@contextlib.contextmanager
def torchrun() -> Iterator[None]:
    """Inside, the processes that torchrun started are a team, of which the first alone speaks and writes."""
    if "LOCAL_RANK" not in os.environ:
        yield
        return
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as stack:
        if team()[0]:
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        try:
            yield
        finally:
            dist.destroy_process_group()


def spread(model) -> None:
    """Every frozen layer over all processes; nothing if there is one. After `linearize`, before training."""
    if (processes := team()[1]) == 1:
        return
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (processes,))
    attention, new = set(attention_modules(model)), set(new_parameters(model).values())
    for layer in [m for m in model.modules() if attention.intersection(m.children())]:
        fully_shard(layer, mesh=mesh, ignored_params=new.intersection(layer.parameters()))
    model.to(mesh.device_type)
