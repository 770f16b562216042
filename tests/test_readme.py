"""README.md: its links lead somewhere, its commands are commands, its Python runs.

Commands that need a real model, a network or a GPU are parsed and not run; `python distill.py` and `pytest`
are what CI runs anyway.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import tiny_model
from options import distill_options, eval_options, parser_for

import distill
import eval as evaluation
from distill import linearize, save_adapter
from interventions import LinearizeConfig

ROOT = Path(distill.__file__).parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, flags=re.S)


def commands():
    """Command lines of code blocks and of `code`, continued lines joined."""
    shell = "\n".join(body for kind, body in BLOCKS if kind == "").replace("\\\n", " ")
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.S)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    lines = [line.split("  #")[0].strip() for line in shell.splitlines()] + inline
    starts = ("python ", "pytest", "torchrun ")
    return sorted({line for line in lines if line.startswith(starts) and "…" not in line})


@pytest.mark.parametrize("line", commands())
def test_a_command_names_files_that_exist_and_options_that_are_known(line):
    words = shlex.split(line)
    if words[0] == "torchrun":  # its own options, then ours
        words = ["python", *words[next(i for i, word in enumerate(words) if word.endswith(".py")) :]]
    if words[0] == "pytest":
        for flag in (word for word in words[1:] if word.startswith("-")):
            assert flag.split("=")[0] in ("-k", "-m", "--all", "--plugin", "--tb"), flag
        for word in (word for word in words[1:] if "/" in word):
            assert (ROOT / word).exists(), word
        return
    assert (ROOT / words[1]).exists(), words[1]
    if words[1] in ("distill.py", "eval.py"):
        ours = words[1] == "distill.py"
        kinds = ("train", "generate", "plan") if ours else ("evaluate",)
        parser = parser_for(dict.fromkeys(kinds, None), distill_options if ours else eval_options)
        if "--help" not in words:
            parser.parse_args(words[2:])
    else:  # a tool: it, or the parser it borrows, knows the option
        known = "".join((ROOT / f).read_text() for f in (words[1], "tests/options.py", "tests/gpu_check.py"))
        fields = {f.replace("_", "-") for f in distill.TrainConfig.__dataclass_fields__}
        for flag in (word for word in words[2:] if word.startswith("--")):
            assert f'"{flag}"' in known or flag[2:] in fields, flag


def test_links_lead_to_files_and_headings_that_exist():
    titles = re.findall(r"^#+ (.*)$", TEXT, re.M)
    headings = {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert links
    for link in links:
        if link.startswith("#"):
            assert link[1:] in headings, link
        elif link.startswith("http"):  # needs a network: parsed only
            assert re.fullmatch(r"https://[\w.-]+/\S+", link), link
        else:
            assert (ROOT / link).exists(), link


def test_its_files_of_code_exist():
    for name in re.findall(r"`((?:tests/)?\w+\.py)`", TEXT):
        assert (ROOT / name).exists() or (ROOT / "tests" / name).exists() or name in ("mine.py",), name


def test_its_python_runs(tmp_path, monkeypatch, capsys):
    """The API example, on a tiny model of the same kind; the other blocks compile."""
    adapter = tmp_path / "run1"
    save_adapter(linearize(distill.load_teacher()[0], LinearizeConfig()), adapter)
    blocks = [body for kind, body in BLOCKS if kind == "python"]
    for body in blocks:
        compile(body, "README.md", "exec")
    example = next(body for body in blocks if "load_linearized" in body)
    monkeypatch.chdir(tmp_path)
    exec(example.replace("Qwen/Qwen2-0.5B", ""), {})
    assert (tmp_path / "run2" / "adapter_model.safetensors").exists()


def test_its_plugin_reaches_the_tests(tmp_path):
    """Word by word as it says: with a blank for the "=" pytest would take the file for one of tests."""
    line = next(c for c in commands() if c.startswith("pytest --plugin="))
    body = next(body for kind, body in BLOCKS if kind == "python" and "forgetful" in body)
    (tmp_path / "mine.py").write_text(body)
    words = shlex.split(line.replace("mine.py", str(tmp_path / "mine.py")))
    call = [sys.executable, "-m", *words, "-q", "--collect-only"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.count("forgetful") > 10 < done.stdout.count("older")


def test_the_plan_of_the_scaling_section_runs_without_a_network(tmp_path, capsys):
    tiny_model().config.save_pretrained(tmp_path)
    assert evaluation.distill_main(["plan", "--model", str(tmp_path), "--gpus", "1x80"]) == 0
    assert "generation  a state of" in capsys.readouterr().out
