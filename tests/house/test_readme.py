"""The documents keep their promises: python -m pytest tests/house/test_readme.py

Figures are those of experiments/results/, tables agree with the code, the worked example of an objective works,
commands name files and flags that exist, links lead somewhere.
"""

import json
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import train
from experiments.fill import pages
from features.trackers import Trackers
from losses import OBJECTIVES
from plumbing.parallel import devices
from plumbing.run.arguments import ALGORITHMS, given_flags, parse
from tools.trl import trl_loss
from tiny_run import TINY, metrics

ROOT = Path(__file__).parents[2]
DOCUMENTS = {str(file.relative_to(ROOT)): file.read_text() for file in pages()}
README = DOCUMENTS["README.md"]


def table(document, header):
    """Rows of the table whose header line begins so, as lists of cells."""
    text = DOCUMENTS[document]
    lines = text[text.index(header):].split("\n\n")[0].splitlines()[2:]
    rows = [line for line in lines if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in rows]


def commands():
    """Every command line of the documents: indented lines that start with a program."""
    lines = [line for text in DOCUMENTS.values() for line in text.replace("\\\n", "").splitlines()]
    found = [line.split("  #")[0].strip() for line in lines if re.match(r"    (python|torchrun|pip) ", line)]
    return list(dict.fromkeys(command for command in found if " | " not in command and ";" not in command))


def test_what_a_benchmark_wrote_for_a_page_is_computed_from_what_it_measured():
    """In a process of its own: benchmarks/simulate.py comes before torch."""
    code = ("import json, sys; sys.path[:0] = ['benchmarks', '.']; import simulate\n"
            "for name in ('versus_trl', 'scaling', 'memory', 'bfloat16', 'engines', 'simulated'):\n"
            "    found = json.load(open(f'experiments/results/{name}.json'))\n"
            "    module = simulate if name == 'simulated' else __import__(name)\n"
            "    assert module.texts(found) == found['texts'], name")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_readme_takes_ten_minutes():
    seen = re.sub("<!--.*?-->", "", README)
    words = [word for word in seen.split() if re.search(r"\w", word)]       # not the bars of tables
    assert len(words) <= 1200 and len(README.splitlines()) <= 150
    assert max(map(len, seen.splitlines())) <= 125
    cells = [cell.strip() for line in seen.splitlines() if line.startswith("|")
             for cell in re.split(r"(?<!\\)\|", line)]
    assert max(map(len, cells)) <= 90, max(cells, key=len)
    order = [README.index(f"| {i} | ") for i in range(1, 6)]
    files = ["`ratios.py`", "`advantages.py`", "`losses.py`", "`rollout.py`", "`train.py`"]
    assert order == sorted(order) and all(f in README[at:at + 40] for f, at in zip(files, order))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", DOCUMENTS[name]):
        if not target.startswith("http"):
            assert ((ROOT / name).parent / target).exists(), target
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-")
                for line in DOCUMENTS["docs/evidence.md"].splitlines() if line.startswith("## ")}
    for anchor in re.findall(r"docs/evidence.md#([\w-]+)", DOCUMENTS[name]):
        assert anchor in headings, anchor


def test_family_table_is_the_code():
    rows = {row[0].strip("`"): row for row in table("docs/family.md", "| name | ratio |")}
    assert list(rows) == list(OBJECTIVES)
    for name, objective in OBJECTIVES.items():
        _, ratio, clip, band, constants, reduction, paper, _, trl = rows[name]
        assert (ratio, clip, reduction) == (objective.ratio, objective.clip, objective.reduction), name
        assert paper.startswith(objective.source or "–"), name
        assert all(f"`{key}={value:g}`" in constants for key, value in objective.constants.items()), name
        if objective.epsilon is not None:
            edges = [float(x) for x in band.split(",")]
            assert edges == [objective.epsilon, objective.epsilon_high], name
        loss_type, level = trl_loss(objective) or (None, None)
        if name != "ppo" and loss_type:
            assert f'loss_type="{loss_type}"' in trl and (level == "token" or f'"{level}"' in trl), name
        else:
            assert "loss_type" not in trl, name


def test_every_metric_of_a_run_is_explained(workplace):
    import train
    train.main([*TINY, "--steps", "1", "--mismatch", "token_truncate", "--eval_samples", "1", "--eval_steps", "1",
                "--output_dir", "run"])
    explained = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in table("docs/metrics.md", "| metric |"))))
    assert set(metrics("run")[0]) <= explained, set(metrics("run")[0]) - explained
    six = table("README.md", "| metric | healthy")
    assert len(six) == 6 and set(re.findall(r"`(\w+)`", " ".join(row[0] for row in six))) <= explained


def with_readmes_objective(source):
    """The text of losses.py with the README's worked example in it, as a reader would type it."""
    diff = re.search(r"```diff\n( OBJECTIVES = \{.*?)```", README, re.S).group(1).rstrip()
    assert sum(line.startswith("+") for line in diff.splitlines()) < 10
    for anchor, *added in (part.split("\n+") for part in re.split(r"\n(?= )", diff)):
        line = re.search(rf"\n{re.escape(anchor[1:])}.*?\n", source).group()
        source = source.replace(line, line + "".join(f"{text}\n" for text in added), 1)
    return source


def test_worked_example_of_an_objective():
    patched = types.ModuleType("patched")
    sys.modules["patched"] = patched                        # dataclasses look their module up
    source = with_readmes_objective((ROOT / "losses.py").read_text())
    exec(compile(source.split("if __name__")[0], "losses", "exec"), patched.__dict__)
    logp = torch.full((2, 3), -1.0, requires_grad=True)
    mask, A = torch.tensor([[True] * 3, [True, True, False]]), torch.tensor([1.0, -1.0])
    grads = [torch.autograd.grad(patched.policy_loss(name, logp, logp.detach(), A, mask)[0], logp)[0] for name in ("tanh", "grpo")]
    assert torch.allclose(*grads)


@pytest.mark.parametrize("command", [command for command in commands() if "…" not in command])     # test_blocks.py runs them
def test_commands_name_what_exists(command, monkeypatch):
    monkeypatch.setitem(devices.THERE, "mps", lambda: True)  # a Mac's command
    if "--sampler vllm" in command:                          # vLLM needs an environment of its own
        monkeypatch.syspath_prepend(str(ROOT / "tests/engines/fake"))
    if "--report_to tensorboard" in command:                 # a stand-in where it is not installed
        monkeypatch.setattr(Trackers, "check", lambda settings: None)
    words = shlex.split(command.split("&&")[-1] if "&&" in command and "python" in command.split("&&")[-1] else command)
    if "train.py" in words:
        argv = words[words.index("train.py") + 1:]
        assert parse(argv), "flags that train.py takes, in a combination it accepts"
    for word in words:
        if word.endswith(".py") and "/" not in word.removeprefix("tests/").removeprefix("experiments/").removeprefix("benchmarks/"):
            shown = any(f"`{word}`:" in file.read_text() for file in (ROOT / "docs").glob("*.md"))
            assert (ROOT / word).is_file() or word == "mine.py" or shown, word


def test_presets_of_the_documents_are_all_presets():
    """Every algorithm that sets flags or has another row's objective, with exactly what it sets."""
    shown = {}
    for names, objective, filled in table("docs/family.md", "| --algorithm |"):
        for name in re.findall(r"`(\w+)`", names):
            given = given_flags(shlex.split(filled.strip("`")))
            own = name if objective == "the same" else objective.strip("`")
            shown[name] = {"objective": own} | given
    assert shown == {name: preset for name, preset in ALGORITHMS.items()
                     if preset != {"objective": name}}


def limits(page, metric):
    """(lowest, highest) of the column "normal" of a metric: `below X`, `above X` or `X to Y`."""
    row, = [line for line in page.splitlines() if line.startswith("|") and f"`{metric}`" in line.split("|")[1]]
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)]
    normal = cells[-3]
    number = r"([\d.]+(?: %)?)"
    value = lambda text: float(text.removesuffix(" %")) / (100 if text.endswith("%") else 1)
    if found := re.search(f"(below|above) {number}", normal):
        return (0.0, value(found[2])) if found[1] == "below" else (value(found[2]), float("inf"))
    low, high = re.search(f"{number} to {number}", normal).groups()
    return value(low), value(high)


@pytest.mark.slow
def test_the_default_run_stays_in_the_ranges_that_the_pages_call_normal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.main("--device cpu --eval_samples 0 --save_tokens false --output_dir run".split())
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    pages = {"docs/metrics.md": ("epsilon_over_std", "log_w_var", "grad_norm", "flip_rate", "ratio_max"),
             "README.md": ("log_w_var", "grad_norm")}
    for page, metrics in pages.items():
        for metric in metrics:
            low, high = limits((ROOT / page).read_text(), metric)
            values = [record[metric] for record in records if record[metric] is not None]
            assert low <= min(values) and max(values) <= high, (page, metric, min(values), max(values))
