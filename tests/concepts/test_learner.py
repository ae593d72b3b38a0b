"""What a learner changes in losses.py and advantages.py is noticed by the rest: a new objective,
clip, statistic and advantage, tried on a copy of the code from the command line.
python -m pytest -m "slow or not slow" tests/concepts/test_learner.py
"""

import pytest

from tiny_run import TINY, documented, metrics, program, python, write

pytestmark = pytest.mark.slow

ROW = '''OBJECTIVES = {
    "mine": Objective("token", "hard", 0.001, 0.001, "sequence-mean", constants=dict(slope=1.0)),
'''
CASE = '''    none = torch.zeros_like(mask)                               # [B, T]
    if clip == "hard":
        below, above = ratio < low, ratio > high
        return (constants["slope"] * ratio * A).masked_fill(below | above, 0.0), below, above
'''
STATISTIC = '''    far = (mask & ((ratio - 1).abs() > 0.001)).sum()
    stats["far"] = far / mask.sum().clamp(min=1)
    return loss, stats | ratio_stats(logp, old_logp, mask)
'''
ENTRY = '''STATISTICS = {
    "far": "tokens",
'''


def in_place_of(text, *replacements):
    """Each replacement's line in place of the text's line with the same beginning."""
    for new in replacements:
        first = new.splitlines()[-1 if new == STATISTIC else 0]
        old, = (line for line in text.splitlines() if line.startswith(first))
        text = text.replace(f"{old}\n", new, 1)
    return text


def copied(folder, cold_start, *replacements):
    """A copy of the code in which losses.py has these lines."""
    code = program(folder / "code", cold_start)
    losses = code / "losses.py"
    text = in_place_of(losses.read_text(encoding="utf-8"), *replacements)
    write(losses, text)
    return code


def refused(code, *words):
    """The one line in which a command ends with exit code 2."""
    said = python(*words, cwd=code, code=2).stderr
    assert said.count("\n") == 1, said
    return said


TRAIN = ["train.py", *TINY, *("--steps 1 --warmup_steps 0 --learning_rate 0.01 "
                              "--micro_batch_size 4 --algorithm mine --output_dir run").split()]


def test_a_new_hard_clip_reports_what_it_removed_and_a_new_statistic_is_recorded(
        tmp_path, cold_start):
    code = copied(tmp_path, cold_start, ROW, CASE, STATISTIC, ENTRY)
    python(*TRAIN, cwd=code)
    record, = metrics(code / "run")
    removed = record["clip_low"] + record["clip_high"]
    assert record["clip_low"] > 0 and record["clip_high"] > 0 and record["clip_signal"] > 0
    assert 0 < removed <= 1 and 0 < record["far"] <= 1


def test_a_new_row_alone_is_an_algorithm(tmp_path, cold_start):
    row = ROW.replace('"hard"', '"min"').replace(", constants=dict(slope=1.0)", ', "2600.00001"')
    code = copied(tmp_path, cold_start, row)
    python(*TRAIN, cwd=code)
    assert metrics(code / "run")[0]["clip_low"] > 0


def test_the_tests_of_the_losses_take_what_is_new_as_it_comes(tmp_path, cold_start):
    code = copied(tmp_path, cold_start, ROW, CASE, STATISTIC, ENTRY)
    words = "-m", "pytest", "-p", "no:cacheprovider", "-v", "tests/concepts/test_losses.py"
    assert "[mine" in python(*words, cwd=code).stdout


# ----------------------------------------------------------------------------------- an advantage

FADING = """def fading(rewards, group_size, scale, entropy):
    return group_advantages(rewards, group_size, scale)[:, None] * (-entropy).exp()

"fading": Advantage(fading, "token"),""", (
    "python train.py --advantage fading --algorithm gspo_token")


def with_advantage(code, function, row):
    """The copy of the code with a function and a row in advantages.py."""
    file = code / "advantages.py"
    text = file.read_text(encoding="utf-8")
    assert text.count("\nADVANTAGES = {\n") == 1
    write(file, text.replace("\nADVANTAGES = {\n",
                             f"\n{function}\n\n\nADVANTAGES = {{\n    {row}\n"))


def test_a_documented_advantage_trains_and_is_refused_where_it_cannot(tmp_path, cold_start):
    code = copied(tmp_path, cold_start)
    for lines, line in (documented("An advantage, for example")[1], FADING):
        with_advantage(code, *lines.split("\n\n"))
        _, *command = line.split()
        name = command[command.index("--advantage") + 1]
        flags = [*TINY, "--steps", "2", "--warmup_steps", "0", "--output_dir", f"runs/{name}"]
        python(*command, *flags, cwd=code)
        assert all(record["grad_norm"] > 0 for record in metrics(code / "runs" / name))
    said = refused(code, "train.py", "--advantage", "fading")
    assert "--advantage fading" in said and "[" not in said and "use --algorithm gspo_token" in said
    command = "train.py --advantage fading --algorithm gspo_token --old_logp sampler".split()
    assert "--old_logp sampler cannot be combined with --advantage fading: the entropies" in (
        refused(code, *command))
    listed = python("train.py", "--help", cwd=code).stdout
    assert "fading, over_median, group" in " ".join(listed.split())
