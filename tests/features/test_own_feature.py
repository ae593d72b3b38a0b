"""What CONTRIBUTING.md has a reader write for a feature.

python -m pytest -m slow tests/features/test_own_feature.py
"""

import json
import re

import pytest

from tiny_run import TINY, documented, metrics, program, python


SECTION, (TEXT, LINES, COMMAND) = documented("A feature, for example")
# The first update of a run, again in float64 with a loop over responses and tokens. At ratio 1 the
# gradient of GSPO's loss is that of -Â/(N·|y|) · Σ log π.
AGAIN = """
import copy, json, sys
import torch
import train
from rollout import response_logp
inner, found = train.update, {}

def update(learner, mini):
    policy = copy.deepcopy(learner.policy).double()
    logp = response_logp(policy, mini.rollout).logp
    gspo, imitation, count = 0, 0, 0
    for i, row in enumerate(mini.rollout.mask):
        places = [t for t in range(len(row)) if row[t]]
        gspo = gspo - mini.advantages[i] * sum(logp[i, t] for t in places) / len(places)
        if mini.parts[i, 0] == 1:
            imitation = imitation - sum(logp[i, t] for t in places)
            count += len(places)
    term = learner.settings.imitation_coef * imitation / count
    (gspo / len(mini.rollout.mask) + term).backward()
    norm = sum(p.grad.square().sum() for p in policy.parameters() if p.grad is not None).sqrt()
    right = (mini.parts[:, 0] == 1).view(-1, mini.group_size).all(-1)
    stats = inner(learner, mini)
    if not found:
        found.update(term=[stats["imitation_loss"], term.item()], norm=[stats["grad_norm"],
                     norm.item()], groups=[int(right.sum()), len(right)])
    return stats
train.update = update
train.main(sys.argv[1:])
print(json.dumps(found))
"""


@pytest.fixture
def call(cold_start, tmp_path):
    """call(*words) runs Python in a copy of the program with the feature, in call.home."""
    home = program(tmp_path / "program", cold_start)
    name, = re.findall(r"One file, `(\S+)`", SECTION)
    assert len(LINES.splitlines()) == 2 and len(TEXT.splitlines()) <= 36
    (home / name).write_text(TEXT + "\n", encoding="utf-8")
    with open(home / "features/__init__.py", "a", encoding="utf-8") as listed:
        listed.write(f"\n{LINES}\n")

    def of(*words):
        return python(*words, cwd=home, code=None)
    of.home = home
    return of


@pytest.mark.slow
def test_a_documented_feature_trains_by_its_file_and_two_lines(call):
    _, *command = COMMAND.split()
    flag = command[1]
    done = call(*command, *TINY)
    assert done.returncode == 0, done.stderr
    terms = [record["imitation_loss"] for record in metrics(call.home / command[-1])]
    assert len(terms) == 3 and all(0 < term < 2 for term in terms)
    assert call("train.py", *TINY, "--steps", "3", "--output_dir", "without").returncode == 0
    assert "imitation_loss" not in metrics(call.home / "without")[0]
    help = " ".join(call("train.py", "--help").stdout.split())
    assert f"{flag} IMITATION_COEF coefficient of the cross-entropy" in help
    assert "imitation:" in help


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--plain", "--micro_batch_size 4"])
def test_its_term_is_that_of_all_right_responses_those_of_zero_variance_groups_too(more, call):
    shape = "--steps 1 --prompts_per_step 8 --num_generations 2 --steps_per_generation 1"
    done = call("-c", AGAIN, *TINY, *shape.split(), "--imitation_coef", "0.5", *more.split())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    equal, groups = found["groups"]
    assert 0 < equal < groups, "zero-variance groups with right responses, and others"
    for ours, loop in (found["term"], found["norm"]):
        assert ours == pytest.approx(loop, rel=1e-4)
