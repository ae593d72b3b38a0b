"""The README keeps its promises: python -m pytest tests/test_readme.py

Its tables agree with the code, its worked example of an objective works, its commands name files and flags that exist.
"""

import json
import re
import shlex
import sys
import types
from pathlib import Path

import pytest
import torch

from plumbing.arguments import PRESETS, TRL_LOSS, parse, trl_config
from losses import OBJECTIVES
from tiny_run import TINY, metrics

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def table(header):
    """Rows of the table whose header line begins so, as lists of cells."""
    lines = README[README.index(header):].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def commands():
    """Every command line of the README: indented lines that start with a program."""
    return [line.split("  #")[0].strip() for line in README.splitlines() if re.match(r"    (python|torchrun|pip) ", line)]


def test_family_table_is_the_code():
    rows = {row[0].strip("`"): row for row in table("| name | ratio |")}
    assert list(rows) == list(OBJECTIVES)
    for name, objective in OBJECTIVES.items():
        _, _, _, band, reduction, _, trl = rows[name]
        assert reduction == objective.reduction, name
        if objective.epsilon is not None:
            assert [float(x) for x in band.split(",")] == [objective.epsilon, objective.epsilon_high], name
        loss_type, level = TRL_LOSS.get(name, (None, None))
        if name not in ("ppo",) and loss_type:
            assert f'loss_type="{loss_type}"' in trl and (level == "token" or f'"{level}"' in trl), name
        else:
            assert "loss_type" not in trl, name


def test_worked_example_of_an_objective():
    diff = re.search(r"```diff\n( OBJECTIVES = \{.*?)```", README, re.S).group(1).splitlines()
    assert sum(line.startswith("+") for line in diff) < 10
    source = {"losses": (ROOT / "losses.py").read_text(), "arguments": (ROOT / "plumbing/arguments.py").read_text()}
    for anchor, *added in (part.split("\n+") for part in re.split(r"\n(?= )", "\n".join(diff))):
        name = next(n for n, text in source.items() if f"\n{anchor[1:]}" in text)
        anchor = anchor[1:] if not anchor.startswith(" def") else re.search(r"\ndef token_surrogate.*?\n    \"\"\".*?\"\"\"", source[name], re.S).group()[1:]
        source[name] = source[name].replace(anchor + "\n", "\n".join([anchor, *added]) + "\n", 1)
    patched = types.ModuleType("patched")
    sys.modules["patched"] = patched                        # dataclasses look their module up
    exec(compile(source["losses"].split('if __name__')[0], "losses", "exec"), patched.__dict__)
    logp = torch.full((2, 3), -1.0, requires_grad=True)
    mask, A = torch.tensor([[True] * 3, [True, True, False]]), torch.tensor([1.0, -1.0])
    grads = [torch.autograd.grad(patched.policy_loss(name, logp, logp.detach(), A, mask)[0], logp)[0] for name in ("tanh", "grpo")]
    assert torch.allclose(*grads) and '"tanh": dict(' in source["arguments"]


@pytest.mark.parametrize("command", commands())
def test_commands_name_what_exists(command):
    words = shlex.split(command.split("&&")[-1] if "&&" in command and "python" in command.split("&&")[-1] else command)
    if "train.py" in words:
        argv = words[words.index("train.py") + 1:]
        assert parse(argv), "flags that train.py takes, in a combination it accepts"
    for word in words:
        if word.endswith(".py") and "/" not in word.removeprefix("tests/").removeprefix("experiments/").removeprefix("benchmarks/"):
            assert (ROOT / word).is_file() or word == "mine.py", word


@pytest.mark.parametrize("command", [c for c in commands() if "train.py" in c and "torchrun" not in c])
def test_training_commands_run(command, workplace):
    """The README's line itself, and behind it what makes it small: of a flag given twice the last one counts."""
    import train
    argv = shlex.split(command.split("&&")[-1])[2:]
    small = [*TINY, "--steps", "1"]
    if "--model_name_or_path" in argv:
        train.main([*small, "--output_dir", "policy"])
        Path("mine.py").write_text("def reward(response, answer):\n    return float(response == answer)\n")
        Path("rows.jsonl").write_text("".join(json.dumps({"question": f"{a}+{a + 1}=", "answer": str(2 * a + 1)}) + "\n" for a in range(1, 9)))
        small += ["--model_name_or_path", "policy/checkpoints/step_1", "--dataset_name", "rows.jsonl", "--max_completion_length", "4"]
        if "--stop" in argv:                                 # the tiny policy's tokenizer has no line break
            at = argv.index("--stop")
            del argv[at:at + 2]
        if "--test_dataset_name" in argv:
            Path("other.jsonl").write_text(json.dumps({"question": "9+9=", "answer": "18"}) + "\n")
            small += ["--test_dataset_name", "other.jsonl"]
    train.main([*argv, *small, "--micro_batch_size", "8", "--output_dir", "run"])
    assert [record["step"] for record in metrics("run")] == [1]


def test_presets_of_the_readme_are_all_presets():
    named = set(re.findall(r"`(\w+)`", README)) | {name for name in OBJECTIVES}
    assert set(PRESETS) <= named


def test_line_counts_of_the_file_map():
    for row in table("| read | file |"):
        files = re.findall(r"`([\w/]+\.py)`", row[1])
        if row[2]:
            count = sum(len((ROOT / f).read_text().splitlines()) for f in files)
            assert abs(count - int(row[2])) <= 0.1 * count, f"{row[1]}: {count} lines now"


def test_measured_parts_are_the_committed_results():
    from experiments.readme import build
    assert build(README) == README, "python experiments/readme.py brings README.md up to date with results/"


def test_every_preset_has_a_trl_config_or_a_reason():
    for name in PRESETS:
        text = trl_config(parse(["--algorithm", name]))
        assert text.startswith("trl.GRPOConfig(") or text.startswith("no equivalent in trl.GRPOConfig: it has no "), name
