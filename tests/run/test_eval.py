"""eval.py: estimators against enumeration, the command lines on tiny runs.
python -m pytest tests/run/test_eval.py"""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

import eval
from tools import dashboard as pictures
from eval import bootstrap, pass_at_1, pass_at_k, reward_scores, with_interval
from plumbing.data.task import Task
from tiny_run import jsonl, write


# --------------------------------------------------------------------------- random numbers

def test_a_limit_does_not_change_the_numbers_before_it():
    """The task's own limit is drawn as ever; what lies beyond comes from a second generator."""
    def draw(length):
        task = Task("sums", [], [], None, max_completion_length=length, own_length=7)
        return task.draw_uniforms(torch.Generator().manual_seed(3), 5, 2)           # [5, 2, T]
    own = torch.rand(5, 2, 7, generator=torch.Generator().manual_seed(3))           # [5, 2, 7]
    longest = draw(40)
    assert torch.equal(draw(7), own)
    for length in (1, 6, 7, 8, 25, 40):
        assert draw(length).shape == (5, 2, length)
        assert torch.equal(draw(length), longest[..., :length])
    assert len(longest.unique()) > 395, "and none of them twice"


# ------------------------------------------------------------------------------- estimators

@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(n):
    for c in range(n + 1):
        right = [i < c for i in range(n)]
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(right, k))
            share = sum(map(any, subsets)) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_of_many_samples_does_not_overflow():
    assert pass_at_k(10_000, 1, 5_000) == pytest.approx(.5)
    assert pass_at_k(10_000, 10_000, 1) == 1 and pass_at_k(10_000, 0, 10_000) == 0


def test_bootstrap_covers_the_mean_of_a_known_distribution_about_95_times_in_100():
    generator, covered, trials = torch.Generator().manual_seed(0), 0, 300
    for trial in range(trials):                              # 80 problems of 4 samples
        rates = (torch.rand(80, 4, generator=generator) < .3).double().mean(-1)
        low, high = bootstrap(rates, draws=500, seed=trial)
        covered += low <= .3 <= high
    assert .91 <= covered / trials <= .98                    # binomial: one deviation is 1.3 %
    assert bootstrap([.25] * 7) == (.25, .25)


@pytest.mark.parametrize("n", [1, 14, 256])
def test_the_interval_of_equal_shares_is_clopper_and_pearsons_over_problems(n):
    mean, low, high = pass_at_1([[0, 0.9, 0, 0]] * n)        # none right; n counts, not 4 n answers
    assert mean == low == 0
    assert (1 - high) ** n == pytest.approx(.025), "at this share, n problems give none with 2.5 %"
    assert pass_at_1([[1, 1]] * n) == (1, pytest.approx(1 - high), 1)
    mean, low, high = with_interval([0.0] * n, (-1, 1))      # no problem differs
    assert mean == 0 and -low == high == pytest.approx(1 - .025 ** (1 / n))
    assert with_interval([3.0] * n) == (3, None, None), "without limits, others could be anything"


def test_the_mean_reward_has_no_interval_if_all_problems_are_equal():
    """64 problems: where none gets a reward, another one might, of a size that nobody knows."""
    task = Task("rare", [], [], lambda response, problem: 0.0)
    assert reward_scores(task, [[[0.0]]] * 64)["reward"] == (0, None, None)
    mean, low, high = reward_scores(task, [[[n % 2]] for n in range(64)])["reward"]
    assert mean == .5 and (low, high) == bootstrap(torch.arange(64) % 2.0)


# ------------------------------------------------------------------------------- command lines

@pytest.mark.slow
@pytest.mark.parametrize("line, code, said", [
    ("learning", 0, "UNDECIDED"),                            # others: tests/house/test_evidence.py
    ("counting", 0, "undecided"),                            # whose missing runs are not made
    ("no_such", 2, "no question is called no_such; known: identity"),
    ("reuse --only grop", 2, "reuse has no variant grop; it has GRPO, ")])
def test_claims_are_judged_by_the_table_of_questions(line, code, said, capfd):
    with pytest.raises(SystemExit) as stop:
        eval.main(["claims", *line.split()])
    assert stop.value.code == code and said in "".join(capfd.readouterr())


def write_run(folder, steps, tail=""):
    folder.mkdir()
    record = dict(pass_rate=.5, clip_low=.1, clip_high=.2, log_w_var=1e-3, log_s_var=1e-5,
                  length=20.0, entropy=.1, grad_norm=.2, perplexity_old=1.1, flip_rate=None,
                  zero_variance_groups=.1, seconds_rollout=.3, seconds_logp=.1, seconds_update=.6)
    file = jsonl(folder / "metrics.jsonl", [record | {"step": i + 1} for i in range(steps)])
    with open(file, "a", encoding="utf-8") as metrics:
        metrics.write(tail)
    return str(folder)


def test_dashboard_draws_a_panel_per_metric_and_a_line_per_run():
    """Metrics that are null or absent leave an empty panel; a logarithmic axis survives zeros."""
    whole = [dict(step=i, reward=i / 4, pass_rate=.5, grad_norm=norm, entropy=None)
             for i, norm in enumerate([0.0, .1, 0.0, .01])]
    figure = pictures.draw({"run": whole, "other": whole[:1]})
    figure.canvas.draw()
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert tuple(panels) == pictures.CURVES
    first, second = panels["reward"].get_lines()
    assert first.get_xydata().tolist() == [[0, 0], [1, .25], [2, .5], [3, .75]]
    assert second.get_xydata().tolist() == [[0, 0]] and second.get_marker() == "o"
    assert panels["grad_norm"].get_yscale() == "log" and panels["reward"].get_yscale() == "linear"
    assert not any(len(line.get_ydata()) for line in panels["entropy"].get_lines())
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["run", "other"]


def test_a_run_of_an_older_version_is_resumed_drawn_and_viewed(run):
    first, = run("--save_tokens true")
    file = Path("run/metrics.jsonl")
    text = file.read_text(encoding="utf-8").replace("zero_variance_groups", "dead_groups")
    write(file, text)
    run("--resume --steps 2")
    one, two = pictures.read_metrics(Path("run"))
    assert one["zero_variance_groups"] == first["zero_variance_groups"] and "dead_groups" not in one
    assert "zero_variance_groups" in pictures.CURVES and "zero_variance_groups" in two
    for command in ("dashboard", "view"):
        eval.main([command, "run"])


def test_the_dashboard_draws_held_out_figures(tmp_path):
    """Those of --eval_steps, and those before and after the run."""
    jsonl(tmp_path / "metrics.jsonl", [
        {"step": 1, "pass_rate": .25}, {"step": 2, "pass_rate": .5, "pass_at_1": [.75, .5, 1]}])
    summary = dict(steps=2, pass_at_1_before=.125, reward_before=0, pass_at_1_after=1,
                   reward_after=0)
    write(tmp_path / "summary.json", json.dumps(summary))
    records = pictures.read_metrics(tmp_path) + pictures.read_summary(tmp_path)
    figure = pictures.draw({"run": records})
    panel = next(axes for axes in figure.axes if axes.get_title(loc="left") == "pass_rate")
    training, held_out = panel.get_lines()
    assert training.get_xydata().tolist() == [[1, .25], [2, .5]]
    assert held_out.get_xydata().tolist() == [[0, .125], [2, .75], [2, 1]]


def test_a_dashboard_of_two_runs_uses_what_is_whole_and_says_what_it_skipped(tmp_path, capsys):
    runs = [write_run(tmp_path / "cut", 3, tail='[1]\n{"step": 5, "pass_r'),
            write_run(tmp_path / "short", 1)]
    file = tmp_path / "both"
    eval.main(["dashboard", *runs, "--output", str(file)])
    assert file.read_bytes()[:4] == b"\x89PNG" and file.stat().st_size > 20_000
    assert "skipped 2 line(s) that are incomplete or not metrics: 4, 5" in capsys.readouterr().err


REFUSED = {                                                  # the line of eval.py: what it says
    "dashboard gsop": "there is no run folder gsop",
    "dashboard hollow": "has no metrics.jsonl",
    "dashboard empty": "has no complete line",
    "dashboard cut": "cut/summary.json: Expecting",
    "dashboard": "arguments are required: RUN",
    "dashboard gspo --output cut/summary.json/x.png": "summary.json is a file, or read-only",
    "view gspo --output .": "--output . is a folder",
    "pass": "pass is not a command; the commands are ask, passk, claims, dashboard",
    "ask gspo": "required: PROMPT",
    "ask gspo 3+8= --n 0": "--n 0: it must be at least 1",
    "ask gspo 3+8= --learning_rate 1": "ask: --learning_rate affects training only",
    **{f"passk --{flag} 1": f"passk: --{flag} affects training only, not an evaluation"
       for flag in ("steps", "algorithm", "output_dir", "beta", "use_peft", "shard")},
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_refused(line, refused, tmp_path):
    write_run(tmp_path / "gspo", 2)
    (tmp_path / "hollow").mkdir()
    write_run(tmp_path / "empty", 0)
    write_run(tmp_path / "cut", 1)
    write(tmp_path / "cut/summary.json", "{")
    said = refused(line, main=eval.main)
    assert re.search(".*".join(REFUSED[line].split(" … ")), said), said
