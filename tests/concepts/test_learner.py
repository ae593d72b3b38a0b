"""The advantage that CONTRIBUTING adds as an example, and one per token, on a copy of the code from
the command line. python -m pytest -m slow tests/concepts/test_learner.py
"""

import pytest

from tiny_run import TINY, documented, metrics, program, python, write

pytestmark = pytest.mark.slow

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


def test_a_documented_advantage_trains(tmp_path, cold_start):
    code = program(tmp_path / "code", cold_start)
    for lines, line in (documented("An advantage, for example")[1], FADING):
        with_advantage(code, *lines.split("\n\n"))
        _, *command = line.split()
        name = command[command.index("--advantage") + 1]
        flags = [*TINY, "--steps", "2", "--warmup_steps", "0", "--output_dir", f"runs/{name}"]
        python(*command, *flags, cwd=code)
        assert all(record["grad_norm"] > 0 for record in metrics(code / "runs" / name))
    exact = ("import torch, advantages\n"
             "r = torch.tensor([.1] * 6 + [0.] * 6 + [1., 1, 1, 0, 0, 0]).double()\n"
             "assert advantages.maxrl(r, 6).tolist() == [0] * 12 + [1, 1, 1, -1, -1, -1]")
    python("-c", exact, cwd=code)
