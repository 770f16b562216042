"""What is on disk survives: kill -9, a full or read-only disk, damaged files, losses that are not finite.

Children are forked from the test process (no import of torch for each); a patch made in a child is gone with
it. There are no tolerances: the CPU's kernels are deterministic at one thread, every comparison is exact.
"""

import errno
import functools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import files
import pytest
import torch
from conftest import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

import distill
import eval as evaluation
from distill import LOSSES, TrainConfig, linear_layers, linearize, load_linearized, new_parameters
from interventions import LinearizeConfig

SMALL = LinearizeConfig(sinks=2, window=6)
TOKENS = torch.randint(1, 50, (2000,), generator=torch.Generator().manual_seed(1))
FILES = ("progress.safetensors", "metrics.jsonl", "adapter_model.safetensors", "adapter_config.json")
MOMENTS = ("half written", "before its rename", "after its rename")


def train_config(**kw):
    return TrainConfig(**(dict(steps=3, seq_len=20, batch=1, save_every=1, lr=1e-2, warmup=0) | kw))


def run(folder, resume=False, **kw):
    """One training run; a resumed one starts from another seed, so that nothing agrees by accident."""
    model = linearize(tiny_model(), SMALL, seed=9 if resume else 0)
    distill.train_adapters(model, TOKENS, train_config(**kw), folder, resume)
    return model


def state(model):
    """Digest of every bit that was trained."""
    return distill.digest(new_parameters(model))


def outcome(folder):
    """All of a run but its speed: parameters and moments, the adapter as it is read, losses and rates."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    adapter = load_linearized(tiny_model(), folder)
    progress = distill.digest(load_file(folder / "progress.safetensors"))
    return progress, state(adapter), [(row["step"], row["loss"], row["lr"]) for row in rows]


def steps_saved(folder):
    with safe_open(folder / "progress.safetensors", "pt") as f:
        return len(json.loads(f.metadata()["about"])["records"])


def unbroken(folder, **kw):
    """A run to the end: the trained bits after each step, from 0. folder/1, folder/2, ... are its saves."""
    states, real = [state(linearize(tiny_model(), SMALL))], distill.save_progress

    def save(model, optimizer, train, out, records):
        real(model, optimizer, train, out, records)
        shutil.copytree(out, folder / str(len(states)))
        states.append(state(model))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill, "save_progress", save)
        run(folder / "now", **kw)
    return states


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Folder of an unbroken run of three steps: 1, 2, 3."""
    folder = tmp_path_factory.mktemp("whole")
    unbroken(folder)
    return folder


# ----------------------------------------------------------------------------- kill -9


def fork(work):
    """Run work() in a child; its pid. The child never returns into pytest."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def killed_at_a_random_moment(folder, rng, step_time, resume):
    """Start or resume the run in `folder` and kill -9 it, as a rule after a save of its own. False: it ended
    before that."""

    def version():
        last = folder / FILES[-1]
        return (last.stat().st_ino, last.stat().st_mtime_ns) if last.exists() else None

    before, after_a_save = version(), not resume or rng.random() < 0.8
    pid = fork(functools.partial(run, folder, resume, steps=STEPS))
    try:
        while after_a_save and version() == before:
            time.sleep(0.001)
            if os.waitpid(pid, os.WNOHANG)[0]:
                raise AssertionError("the child ended without a save: its traceback is above")
        time.sleep(rng.uniform(0, 2 * step_time))
    finally:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert status == 0 or os.WIFSIGNALED(status), "the child failed: its traceback is above"
    return status != 0


STEPS = 60  # about what 20 kills take


def test_a_run_killed_20_times_at_random_moments_loads_each_time_and_ends_as_an_unbroken_one(tmp_path):
    start = time.time()
    states = unbroken(tmp_path / "whole", steps=STEPS)
    step_time, rng = (time.time() - start) / STEPS, random.Random(0)
    want, kills, runs, folder = outcome(tmp_path / "whole" / "now"), 0, 0, tmp_path / "0"
    while kills < 20:
        if killed_at_a_random_moment(folder, rng, step_time, resume=folder.exists()):
            kills, saved = kills + 1, steps_saved(folder)
            # progress is written before the adapter: the adapter is of the same save or of the one before
            assert state(load_linearized(tiny_model(), folder)) in states[max(saved - 1, 1) : saved + 1]
        else:  # a busy machine let it run to its end: go on with a new run
            assert outcome(folder) == want
            folder, runs = tmp_path / str(runs + 1), runs + 1
    if folder.exists():
        run(folder, resume=True, steps=STEPS)
        assert outcome(folder) == want
        assert sorted(p.name for p in folder.iterdir()) == sorted(FILES)


def sabotage(patch, name, moment, fail):
    """From now on writing `name` once more ends in fail(path), at one of MOMENTS. The first write passes."""

    def writer(real, position):
        def write(*args, **kw):
            real(*args, **kw)
            path = Path(args[position])
            if moment == MOMENTS[0] and path.name.startswith(name) and (path.parent / name).exists():
                os.truncate(path, path.stat().st_size // 2)
                fail(path)

        return write

    def rename(source, target, real=os.replace):
        ours = Path(target).name == name and Path(target).exists()
        if ours and moment == MOMENTS[1]:
            fail(target)
        real(source, target)
        if ours and moment == MOMENTS[2]:
            fail(target)

    patch.setattr(files, "save_file", writer(files.save_file, 1))
    patch.setattr(Path, "write_text", writer(Path.write_text, 0))
    patch.setattr(os, "replace", rename)


FIRST, FURTHER = FILES[:2], [pytest.param(name, marks=pytest.mark.exhaustive) for name in FILES[2:]]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", [*FIRST, *FURTHER])
def test_a_kill_at_any_point_of_a_save_leaves_an_adapter_and_a_run_to_resume(name, moment, whole, tmp_path):
    def work():
        sabotage(pytest.MonkeyPatch(), name, moment, lambda path: os.kill(os.getpid(), signal.SIGKILL))
        run(tmp_path)

    status = os.waitpid(fork(work), 0)[1]
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    done = FILES.index(name) + (moment == MOMENTS[2])  # files of the second save that were in place
    assert steps_saved(tmp_path) == (2 if done > 0 else 1)
    loaded = state(load_linearized(tiny_model(), tmp_path))
    assert loaded == state(load_linearized(tiny_model(), whole / ("2" if done > 2 else "1")))
    run(tmp_path, resume=True)
    assert outcome(tmp_path) == outcome(whole / "3")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("where", ["before", "after"])
def test_ctrl_c_around_an_update_is_resumed_exactly(where, whole, tmp_path, monkeypatch):
    """Ctrl-C saves; what it saves must not be the parameters of one step and the records of another."""
    real, calls = torch.optim.AdamW.step, []

    def step(optimizer, *args, **kw):
        calls.append(1)
        if len(calls) < 2 or where == "after":
            real(optimizer, *args, **kw)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    run(tmp_path, resume=True)
    assert outcome(tmp_path) == outcome(whole / "3")


# ----------------------------------------------------------------------------- damaged files


def test_only_safetensors_and_json_are_ever_read():
    for module in (distill, evaluation):
        assert not re.search(r"torch\.load|pickle|weights_only", Path(module.__file__).read_text())


@st.composite
def damage(draw):
    """A function of a file's bytes: cut off, or up to three flipped bytes; every other time in the header."""
    where, header = draw(st.floats(0, 1, exclude_max=True)), draw(st.booleans())
    masks = draw(st.lists(st.integers(1, 255), max_size=3))  # none: cut off
    gap = draw(st.integers(1, 200))

    def apply(good):
        end = min(len(good), 8 + int.from_bytes(good[:8], "little")) if header else len(good)
        at = int(where * end)
        if not masks:
            return good[:at]
        bad = bytearray(good)
        for i, mask in enumerate(masks):
            bad[(at + i * gap) % len(good)] ^= mask
        return bytes(bad)

    return apply


def one_line(error):
    return len(str(error.value).splitlines()) == 1


@pytest.fixture(scope="module")
def fuzzed(whole, tmp_path_factory):
    """(folder to spoil, the good files' bytes, the good adapter loaded, [a model that is not linearized])."""
    good = load_linearized(tiny_model(), whole / "3")
    folder = tmp_path_factory.mktemp("fuzzed")
    return folder, {name: (whole / "3" / name).read_bytes() for name in FILES[2:]}, good, [tiny_model()]


@settings(max_examples=200)
@given(name=st.sampled_from(FILES[2:3] * 3 + FILES[3:]), damage=damage())
def test_a_damaged_adapter_is_refused_in_one_line_or_loads_exactly(name, damage, fuzzed):
    folder, files, good, spare = fuzzed
    for other, content in files.items():
        (folder / other).write_bytes(damage(content) if other == name else content)
    try:
        model = load_linearized(spare[0], folder)
    except distill.UserError as error:
        assert len(str(error).splitlines()) == 1
        assert name != "adapter_config.json", "nothing reads it back"
        assert not linear_layers(spare[0]), "a refused folder must leave the model alone"
        return
    spare[0] = tiny_model()
    assert state(model) == state(good) and list(linear_layers(model)) == list(linear_layers(good))
    assert model.linearize_config == good.linearize_config == SMALL and model.trained == good.trained


@settings(max_examples=40)
@given(damage=damage())
def test_damaged_progress_is_refused_in_one_line_or_resumes_exactly(damage, whole, tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    shutil.copytree(whole / "2", folder, dirs_exist_ok=True)
    good = (folder / FILES[0]).read_bytes()
    (folder / FILES[0]).write_bytes(damage(good))
    try:
        run(folder, resume=True)
    except distill.UserError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert outcome(folder) == outcome(whole / "3")


def test_resume_completes_a_last_save_that_was_cut_short_and_sweeps_up(whole, tmp_path):
    """Killed after the progress of the last step, before its adapter, and within safetensors' own writing."""
    shutil.copytree(whole / "3", tmp_path / "cut")
    for name in FILES[1:]:
        shutil.copy(whole / "2" / name, tmp_path / "cut" / name)
    (tmp_path / "cut" / ".tmpAbc123").write_bytes(b"half")
    run(tmp_path / "cut", resume=True)
    assert outcome(tmp_path / "cut") == outcome(whole / "3")
    assert sorted(p.name for p in (tmp_path / "cut").iterdir()) == sorted(FILES)


# ----------------------------------------------------------------------------- a full or read-only disk


def no_space(path):
    """What a full disk raises: OSError from Python's writes, safetensors' own class from its save_file."""
    if ".safetensors" in Path(path).name and Path(path).suffix == ".tmp":
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # no file name, as from a write or a flush


@pytest.mark.parametrize("moment", MOMENTS[:2])
@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_leaves_every_file_of_the_last_save_or_of_this_one(
    name, moment, whole, tmp_path, monkeypatch
):
    before, real = [], distill.save_progress

    def save(*args):
        before.append({p.name: p.read_bytes() for p in tmp_path.iterdir()})
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(distill, "save_progress", save)
        sabotage(patch, name, moment, no_space)
        with pytest.raises((OSError, ValueError, SafetensorError), match="No space left on device"):
            run(tmp_path)
    assert len(before) == 2
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert {n for n in after if not n.endswith(".tmp")} == set(FILES)
    position = FILES.index(name)
    assert all(after[n] == before[1][n] for n in FILES[position:])
    saved = "1" if position < 3 else "2"  # the third file is the adapter, the fourth a copy of its settings
    assert state(load_linearized(tiny_model(), tmp_path)) == state(
        load_linearized(tiny_model(), whole / saved)
    )
    assert steps_saved(tmp_path) == (1 if position == 0 else 2)
    run(tmp_path, resume=True)
    assert outcome(tmp_path) == outcome(whole / "3")


@pytest.fixture
def command(monkeypatch):
    """`python distill.py` on a tiny model and random tokens: (folder) -> exit status."""
    tokenizer = lambda *_, **kw: dict(input_ids=[1])  # noqa: E731
    monkeypatch.setattr(distill, "load_teacher", lambda *_: (tiny_model(), tokenizer))
    monkeypatch.setattr(evaluation, "load_data", lambda *_: (TOKENS, TOKENS[:40].view(2, 20)))
    options = (
        "--router recency --budget 0 --sinks 2 --window 6 --seq-len 20 --batch 1 --steps 3 --save-every 1"
    )
    return lambda folder: evaluation.distill_main([*options.split(), "--out", str(folder)])


def only_error(text):
    lines = text.splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 1 and "Traceback" not in text
    return lines[-1]


@pytest.mark.parametrize("name", [*FILES, "results.json"])
def test_a_full_disk_is_one_line_and_status_2_at_the_command_line(
    name, command, tmp_path, capsys, monkeypatch
):
    if name == "results.json":
        (tmp_path / name).write_text("old\n")
    sabotage(monkeypatch, name, MOMENTS[0], no_space)
    assert command(tmp_path) == 2
    assert re.match("error: .*No space left on device", only_error(capsys.readouterr().err))
    if name == "results.json":
        assert (tmp_path / name).read_text() == "old\n"


def test_a_write_that_the_kernel_refuses_is_one_line_and_status_2_at_the_command_line(command, tmp_path):
    """No mock: files may not be longer than 2,000 bytes (RLIMIT_FSIZE), and the adapter's are."""
    log, out = tmp_path / "log", tmp_path / "out"
    log.touch()

    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        read, write = os.pipe()  # the log file is short of the limit, but a traceback might not be
        os.dup2(write, 2)
        sys.stderr = os.fdopen(write, "w", closefd=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        try:
            status = command(out)
        except BaseException:
            status = 1
            traceback.print_exc()
        sys.stderr.flush()
        os.set_blocking(read, False)
        log.write_bytes(os.read(read, 1900))
        os._exit(status)

    status = os.waitstatus_to_exitcode(os.waitpid(fork(work), 0)[1])
    assert re.match("error: .*File too large", only_error(log.read_text()))
    assert status == 2
    assert not [p.name for p in out.iterdir() if p.name in FILES]


def refuse_to_train(*_):
    raise AssertionError("nothing may be loaded or trained before the folder is known to be writable")


@pytest.fixture
def before_training(command, monkeypatch):
    """The same command, which fails if it comes as far as the model."""
    monkeypatch.setattr(distill, "load_teacher", refuse_to_train)
    return command


def test_a_folder_that_refuses_files_is_one_line_and_status_2_before_any_training(
    before_training, tmp_path, capsys, monkeypatch
):
    def touch(path, *_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "touch", touch)
    assert before_training(tmp_path / "out") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: Permission denied: {tmp_path}")


def test_a_read_only_folder_is_one_line_and_status_2_before_any_training(before_training, capsys):
    with tempfile.TemporaryDirectory() as parent:
        out = Path(parent, "out")
        out.mkdir(mode=0o555)
        if os.access(out, os.W_OK):
            pytest.skip("this user (root) may write to a read-only folder; the test above simulates it")
        assert before_training(out) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"error: Permission denied: {out}")


def test_a_file_in_place_of_the_folder_is_one_line_and_status_2_before_any_training(
    before_training, tmp_path, capsys
):
    (tmp_path / "out").touch()
    assert before_training(tmp_path / "out") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and str(tmp_path / "out") in lines[0]


# ----------------------------------------------------------------------------- losses that are not finite


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_a_loss_of_inf_or_nan_names_its_step_and_the_run_can_go_on_from_the_last_save(
    loss, value, tmp_path, monkeypatch
):
    real, calls = LOSSES[loss], []
    unbroken(tmp_path / "whole", loss=loss, steps=2)

    def breaks_in_its_second_step(model, ids):
        calls.append(real(model, ids))
        return value if len(calls) == 2 else calls[-1]

    with monkeypatch.context() as patch:
        patch.setitem(LOSSES, loss, breaks_in_its_second_step)
        with pytest.raises(distill.UserError, match=rf"the loss is {value}\b.* at step 1; .*lower --lr"):
            run(tmp_path / "out", loss=loss, steps=2)
    first = load_linearized(tiny_model(), tmp_path / "whole" / "1")
    assert state(load_linearized(tiny_model(), tmp_path / "out")) == state(first)
    run(tmp_path / "out", resume=True, loss=loss, steps=2)
    assert outcome(tmp_path / "out") == outcome(tmp_path / "whole" / "now")


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_layer_loss_that_is_not_finite_names_that_layer_and_step(value, whole, tmp_path, monkeypatch):
    real, passes = distill.relative_error, []

    def second_layer_breaks_in_the_third_step(module, teacher, student):
        passes.append(module.layer_idx)
        return real(module, teacher, student) * (value if len(passes) == 6 else 1)

    monkeypatch.setattr(distill, "relative_error", second_layer_breaks_in_the_third_step)
    with pytest.raises(distill.UserError, match=rf"the loss of layer 1 is {value}\b.* at step 2") as error:
        run(tmp_path)
    assert one_line(error)
    assert steps_saved(tmp_path) == 2
    assert state(load_linearized(tiny_model(), tmp_path)) == state(load_linearized(tiny_model(), whole / "2"))
