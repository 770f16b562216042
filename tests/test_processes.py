"""torchrun: several processes train what one would have trained."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import distill
import eval as evaluation
from distill import LOSSES

ROOT = Path(distill.__file__).parent


def arguments(loss, out):
    sizes = "--steps 4 --batch 2 --seq-len 96 --window 32 --budget 16 --eval-tokens 96 --allocate 1".split()
    return ["--loss", loss, *sizes, "--out", str(out)]


@pytest.mark.parametrize("loss", ["layer", pytest.param("kl", marks=pytest.mark.exhaustive)])
def test_two_processes_that_resume_a_run_of_one_end_where_one_would_have_ended(loss, tmp_path, monkeypatch):
    one, two, real, calls = tmp_path / "one", tmp_path / "two", LOSSES[loss], []
    assert evaluation.distill_main(arguments(loss, one)) == 0

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setitem(LOSSES, loss, interrupted)
    assert evaluation.distill_main(arguments(loss, two)) == 130
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, ROOT / "distill.py", *arguments(loss, two), "--resume"]
    command += ["--recompute", "1"] if loss == "kl" else []  # which changes no number, so it may be new
    done = subprocess.run(command, env=os.environ | dict(OMP_NUM_THREADS="1"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("backbone    unchanged") == 1  # one process alone speaks
    want, got = (load_file(folder / "adapter_model.safetensors") for folder in (one, two))
    # Adam divides by the root of squared gradients: where they are tiny, another order of sums shows. A step
    # is 1e-2 long; 1e-4 of four is far below what another seed or another half of the batch would give
    for name in want:
        assert torch.allclose(got[name], want[name], atol=1e-4), name


def test_a_batch_that_does_not_split_among_the_processes_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(distill, "team", lambda: (0, 3))
    model = distill.linearize(distill.load_teacher()[0], distill.LinearizeConfig())
    with pytest.raises(distill.UserError, match="--batch 4 does not split evenly among 3 processes"):
        distill.train_adapters(model, torch.arange(1000), distill.TrainConfig(), tmp_path)
