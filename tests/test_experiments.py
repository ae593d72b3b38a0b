"""experiments/: every committed result is whole and says what it must, and figures come from results alone. python -m pytest tests/test_experiments.py"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.run_claims import CLAIMS

ROOT = Path(__file__).parent.parent
FIELDS = {"claim", "source", "reported", "measured", "spread", "seeds", "verdict", "figure", "command"}
VERDICTS = {"held", "did not hold", "cannot be tested at this size"}
RESULTS = sorted(name for name in CLAIMS if (ROOT / f"results/{name}.json").is_file())


def read(name):
    return json.loads((ROOT / f"results/{name}.json").read_text())


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_is_a_file_that_says_beforehand_what_would_refute_it(name):
    source = (ROOT / f"experiments/{name}.py").read_text()
    docstring = ast.get_docstring(ast.parse(source))
    assert len(source.splitlines()) <= 110 and "beforehand" in docstring
    assert "confirmed " in docstring and "refuted " in docstring and re.search(r"\d{4}\.\d{5}|Rethinking GSPO|slides|blog", docstring)


@pytest.mark.parametrize("name", RESULTS)
def test_committed_results_have_every_field_and_a_figure(name):
    result = read(name)
    assert FIELDS <= set(result) and result["verdict"] in VERDICTS and result["seeds"] >= 1
    assert re.search(r"\d", result["measured"]), "a measured figure"
    assert result["command"] == f"python experiments/{name}.py" and result["figure"] == f"docs/figures/{name}.png"
    picture = (ROOT / result["figure"]).read_bytes()
    assert picture[:4] == b"\x89PNG" and 600 <= int.from_bytes(picture[16:20], "big") <= 1300, "readable at README width"


def test_claims_json_is_the_results_side_by_side():
    rows = {row["claim"]: row for row in json.loads((ROOT / "results/claims.json").read_text())}
    assert all(set(row) == FIELDS for row in rows.values())
    for name in RESULTS:
        result = read(name)
        assert {key: result[key] for key in FIELDS} == rows[result["claim"]]


def run(*argv):
    return subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in ("off_policyness", "variance_length") if n in RESULTS])
def test_a_figure_is_drawn_again_from_its_result_alone(name, tmp_path):
    figure = ROOT / f"docs/figures/{name}.png"
    before = figure.read_bytes()
    try:
        figure.unlink()
        done = run(f"experiments/{name}.py", "--draw")
        assert done.returncode == 0 and read(name)["measured"] in done.stdout, done.stderr
        assert figure.read_bytes()[:4] == b"\x89PNG"
    finally:
        figure.write_bytes(before)


@pytest.mark.parametrize("name", RESULTS)
def test_every_figure_can_be_drawn_from_its_committed_data(name, monkeypatch):
    sys.path.insert(0, str(ROOT / "experiments"))
    monkeypatch.setattr(sys, "path", sys.path[:])
    experiment = __import__(name)
    figure = experiment.draw(read(name)["data"])
    for axes in figure.axes:
        assert axes.get_title(loc="left") or axes.get_title()
        assert axes.get_xlabel() or axes.get_xticklabels()
    experiment.claim.style.pyplot().close(figure)


def test_a_missing_or_broken_result_is_one_line(tmp_path, capsys):
    sys.path.insert(0, str(ROOT / "experiments"))
    import claim
    with pytest.raises(ValueError, match="no such result; measure it first"):
        claim.read_result(tmp_path / "nothing.json")
    (tmp_path / "cut.json").write_text('{"claim": "x')
    with pytest.raises(ValueError, match="not whole JSON"):
        claim.read_result(tmp_path / "cut.json")


def test_small_sums():
    sys.path.insert(0, str(ROOT / "experiments"))
    import claim
    assert claim.slope([1, 2, 4, 8], [5, 2.5, 1.25, .625]) == pytest.approx(-1)
    middle, low, high = claim.interval([1.0, 2.0, 3.0])
    assert middle == 2 and high - middle == pytest.approx(4.303 / 3 ** .5) and middle - low == pytest.approx(high - middle)
    assert claim.interval([.5]) == (.5, .5, .5)
    assert claim.rounded({"a": [1.23456789, 7, "x"]}) == {"a": [1.2346, 7, "x"]}


def test_the_band_that_clips_a_given_share():
    sys.path.insert(0, str(ROOT / "experiments"))
    import length_band
    import torch
    log_s, A = torch.randn(4000, generator=torch.Generator().manual_seed(0)), torch.ones(4000)
    A[::2] = -1
    width = length_band.width_for(log_s, A, torch.ones(4000), .15)
    assert length_band.clipped(log_s, A, width).float().mean().item() == pytest.approx(.15, abs=.01)


def test_a_lab_steps_as_train_does_and_its_twin_changes_nothing():
    sys.path.insert(0, str(ROOT / "experiments"))
    import drift
    from plumbing import tasks
    import torch
    import train
    from plumbing.arguments import parse
    from moe import TinyMoE
    from plumbing.policy import tiny_config
    flags = "--min_terms 1 --max_terms 3 --hidden_size 16 --moe_intermediate_size 16 --num_hidden_layers 1 --prompts_per_step 4 --num_generations 4 --max_completion_length 6".split()
    args, tokenizer = parse(flags), tasks.builtin_tokenizer()
    torch.manual_seed(0)
    task = tasks.from_arguments(args)
    task.verify = drift.share_right
    lab = drift.Lab(0, *flags, loaded=(task, TinyMoE(tiny_config(args, tokenizer)), tokenizer))
    rollout, batch, routes = lab.rollout(1, routes=True)
    minis = list(lab.minibatches(1, rollout, batch, routes))
    assert sum(len(mini.mask) for mini, _, _ in minis) == len(rollout.mask) == 16 and len(minis) == 4
    assert torch.equal(torch.cat([part["old_logp"].sum(-1) for _, part, _ in minis]).sort().values, batch["old_logp"].sum(-1).sort().values)
    assert torch.allclose(lab.logp(rollout), batch["old_logp"], atol=1e-5), "nothing has changed yet"
    before = {name: p.clone() for name, p in lab.policy.named_parameters()}
    twin = lab.twin(*drift.GRPO)
    for mini, part, cut in minis:
        twin.update(mini, part, cut)
    assert all(torch.equal(p, before[name]) for name, p in lab.policy.named_parameters()) and not lab.optimizer.state
    assert (twin.args.objective, twin.args.epsilon_high) == ("grpo", .27)
    assert not torch.allclose(twin.logp(rollout), batch["old_logp"], atol=1e-5)
    stats = [lab.update(mini, part, cut) for mini, part, cut in minis]
    assert stats[0]["log_w_var"] < 1e-10 < stats[-1]["log_w_var"], "the first mini-batch is on-policy"


def test_share_right_counts_characters_in_their_places():
    sys.path.insert(0, str(ROOT / "experiments"))
    import drift
    from plumbing.tasks import Problem
    problem = Problem("1+2=", "0+1=1,1+2=3.")
    assert drift.share_right(problem.answer, problem) == 1
    assert drift.share_right("0+1=1,1+2=4.", problem) == pytest.approx(11 / 12)
    assert drift.share_right("", problem) == 0 and drift.share_right(problem.answer + problem.answer, problem) == .5
