"""experiments/: every committed result is whole and says what it must, verdicts follow the rules of
evidence, and figures come from results alone. python -m pytest tests/house/test_experiments.py"""

import ast
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import TINY

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))                # as when an experiment is the script
from shared import claim, drift, maps  # noqa: E402
import band_law                                                                         # noqa: E402
import sampler_noise                                                                    # noqa: E402
import stability_map                                                                    # noqa: E402
from experiments.shared.run_claims import CLAIMS, COLUMNS, MAPS                         # noqa: E402

RESULTS = sorted(name for name in CLAIMS if (ROOT / f"results/{name}.json").is_file())
NEW_MAPS = ("depth", "league", "pretrained", "length_duration", "family_flags")
DRAWN_FROM_RUNS = sorted(name for name in ("sampler_noise", "stability_map", "flip_depth", "band_law", "band_dose",
                                       "stale_sampler", *NEW_MAPS)
                         if (ROOT / f"results/{name}.json").is_file())


def read(name):
    return json.loads((ROOT / f"results/{name}.json").read_text())


@pytest.mark.parametrize("name", [*CLAIMS, "sampler_noise", "stability_map", "flip_depth", "band_law", "band_dose",
                                       "stale_sampler", *NEW_MAPS])
def test_every_claim_is_a_file_that_says_beforehand_what_would_refute_it(name):
    docstring = ast.get_docstring(ast.parse((ROOT / f"experiments/{name}.py").read_text()))
    assert all(word in docstring for word in ("beforehand", "confirmed ", "refuted "))
    assert re.search(r"\d{4}\.\d{5}|Rethinking GSPO|slides|blog|ours, no paper", docstring), "a source"


@pytest.mark.parametrize("name", [*RESULTS, *DRAWN_FROM_RUNS, "moe_stability"])
def test_committed_results_have_every_field_a_figure_and_a_verdict_of_enough_cold_starts(name):
    result = read(name)
    assert set(COLUMNS) <= set(result) and claim.is_verdict(result["verdict"]), result["verdict"]
    assert re.search(r"\d", result["measured"]) and re.search(r"\d", result["number"])
    least = 3 if name == "perplexity_identity" else 8        # an identity, or a mean over cold starts
    undecided = result["verdict"].startswith("undecided")
    assert undecided or result["seeds"] >= least, "no verdict on fewer"
    assert result["command"] == f"python experiments/{name}.py"
    assert result["figure"] == f"docs/figures/{name}.png"
    picture = (ROOT / result["figure"]).read_bytes()
    width = int.from_bytes(picture[16:20], "big")
    assert picture[:4] == b"\x89PNG" and 600 <= width <= 1300, "readable at README width"


def test_claims_json_is_the_results_side_by_side():
    rows = {row["claim"]: row for row in json.loads((ROOT / "results/claims.json").read_text())}
    assert all(set(row) == set(COLUMNS) for row in rows.values())
    for name in {*RESULTS, *DRAWN_FROM_RUNS, "moe_stability"} - {"family_rewards"}:       # a table, no claim
        result = read(name)
        assert {key: result[key] for key in COLUMNS} == rows[result["claim"]]
    assert not set(CLAIMS) & set(MAPS)


@pytest.mark.parametrize("name", RESULTS)
def test_a_committed_verdict_is_what_its_rule_says_of_its_data(name):
    result = read(name)
    measured, number, verdict = __import__(name).judge(result["data"])
    assert (measured, number, verdict) == tuple(result[k] for k in ("measured", "number", "verdict"))
    p = getattr(verdict, "p", None)
    assert result["p"] == (p if p is None else float(f"{p:.3g}")) and result["regime"]


@pytest.mark.parametrize("name", DRAWN_FROM_RUNS)
def test_a_committed_map_is_what_its_rule_says_of_its_runs(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    result, experiment, runs = read(name), __import__(name), maps.read(maps.runs_of(name))
    expected = tuple(result[k] for k in ("measured", "number", "verdict", "seeds"))
    assert experiment.judge(runs) == expected
    assert len({maps.key(r) for r in runs}) == len(runs), "no run twice"
    claim.style.pyplot().close(experiment.draw(runs))


# ------------------------------------------------------------------------------ rules of evidence

def test_a_verdict_needs_enough_cold_starts_and_an_interval_that_clears_the_bar():
    above, wide = [.10, .11, .12, .10, .11, .12, .10, .11], [.5, -.4, .3, -.1, .6, -.2, .4, -.3]
    assert claim.verdict(above, held=(0, 1)) == "held"
    assert claim.verdict(above, held=(-1, 0)) == "refuted"
    assert claim.verdict(above[:7], held=(0, 1)) == "undecided (7 seeds)"
    assert claim.verdict(above[:1], held=(0, 1)) == "undecided (1 seed)"
    assert claim.verdict(wide, held=(0, 1)) == "undecided (8 seeds)", "the mean alone decides nothing"
    assert claim.verdict(above, held=(.2, 1), refuted=(-1, .05)) == "undecided (8 seeds)", "between"
    assert claim.all_of("held", "held") == "held"
    assert claim.all_of("held", "undecided (8 seeds)") == "undecided (8 seeds)"
    assert claim.all_of("undecided (8 seeds)", "refuted") == "refuted"
    for said in ("held", "refuted", "undecided (3 seeds)", claim.depends("the dose"),
                 "cannot be tested here: 4 layers, not 48"):
        assert claim.is_verdict(said)
    assert not any(map(claim.is_verdict, ("cannot be tested here", "did not hold", "undecided")))


def test_the_p_of_a_verdict_is_that_of_a_t_test_and_below_5_percent_where_the_interval_clears_the_bar():
    for df, critical in claim.T95.items():                   # the table of every book
        assert claim.t_tail(critical, df) == pytest.approx(.025, rel=2e-3)
    for t in (-2., .3, 1., 4.):                              # one and two degrees of freedom: closed forms
        assert claim.t_tail(t, 1) == pytest.approx(.5 - math.atan(t) / math.pi)
        assert claim.t_tail(t, 2) == pytest.approx(.5 - t / 2 / math.sqrt(2 + t * t))
    values = [.10, .31, .12, .10, -.11, .12, .10, .21]
    assert claim.verdict(values, held=(0, math.inf)) == "held"
    assert claim.verdict(values, held=(0, math.inf)).p == claim.p_beyond(values, 0, 1) < .05
    within = max(claim.p_beyond(values, -.3, 1), claim.p_beyond(values, .4, -1))     # both bounds must be cleared
    assert claim.verdict(values, held=(-.3, .4)).p == within
    assert claim.verdict(values, held=(.2, 1), refuted=(-1, .05)).p > .05
    assert not hasattr(claim.verdict(values[:7], held=(0, 1)), "p"), "too few for a verdict"
    held, refuted = claim.Verdict("held", .01), claim.Verdict("refuted", .02)
    assert claim.all_of(held, claim.Verdict("held", .03)).p == .03
    assert claim.all_of(held, refuted).p == .04, "either of two would have refuted it"


def test_holms_p_counts_all_rows_that_have_one():
    from experiments.shared.run_claims import holm
    assert holm([.01, None, .04, .03]) == pytest.approx([.03, None, .06, .06])
    assert holm([.5, .9]) == [1, 1] and holm([]) == []


# ---------------------------------------------- what a rule says is judged, and what is judged is shown

def test_the_speed_of_gspo_is_judged_against_both_baselines_of_the_rule():
    result = read("stability_map")
    runs = maps.read(ROOT / maps.runs_of("stability_map"))
    best = {arm: stability_map.best_rate(runs, arm) for arm in stability_map.MAIN}
    ends = {arm: stability_map.ends(runs, arm, best[arm], maps.REPORT) for arm in stability_map.MAIN}
    replay = claim.number(claim.differences(ends["gspo"], ends["grpo_replay"]), "{:+.3f}")
    grpo = claim.number(claim.differences(ends["gspo"], ends["grpo"]), "{:+.3f}")
    assert result["number"] == f"{grpo} against GRPO, {replay} against GRPO + replay" and len(ends["grpo_replay"]) == 8
    assert result["verdict"] == "refuted", "against the source's own baseline its interval lies below 0"
    wide = claim.number(claim.differences(ends["gspo_x100"], ends["gspo"]), "{:+.3f}")
    assert f"GSPO, 100× band minus GSPO {wide}" in result["measured"], "the band is judged on the fresh cold starts"
    assert f"GRPO {claim.mean(ends['grpo'].values()):.3f}" in result["takeaway"], "not the cold starts that chose"


def test_the_mixture_shows_its_parts_and_its_three_rates():
    result = read("moe_stability")
    assert "GSPO minus GRPO: held; replay: undecided; flips: undecided" in result["number"]
    assert "mean of the rates 0.0003, 0.0005, 0.0006 per cold start: +0.21 [+0.11, +0.31] (4 cold starts)" in result["measured"]


def test_the_share_of_flips_is_a_quotient_of_sums():
    import expert_flips
    data = dict(flips=[[[.1]]] * 8, first=[[[.1]]] * 8, native=[[1., 1., 98.]] * 8, replayed=[[.1, .1, 89.8]] * 8)
    _, number, verdict = expert_flips.judge(data)
    assert number.startswith("10% [10%, 10%]") and verdict == "refuted", "the median batch would say 90 %"


def test_a_run_that_learned_nothing_cannot_be_lost():
    import irreversible
    lost = dict(before=.5, after=.1, rates=[.5, .8, *[.3] * 6])
    data = dict(first=[lost] * 8, best=[1] * 8, back=[dict(after=.7)] * 8, on=[dict(after=.1)] * 8)
    assert irreversible.judge(data)[2] == "refuted"
    data["first"] = [lost] * 2 + [lost | {"rates": [.5, .55, *[.2] * 6]}] * 3 + [lost | {"rates": [.5, .8, *[.5] * 6]}] * 3
    assert irreversible.judge(data)[2] == "undecided (2 seeds)", "three had learned nothing, three did not collapse"


def test_what_the_regime_never_shows_is_not_refuted():
    import gradient_noise
    data = read("gradient_noise")["data"]
    assert gradient_noise.judge(data)[2].startswith("cannot be tested here: ")
    data["slopes"]["GRPO"] = [x + 1 for x in data["slopes"]["no ratio"]]
    assert gradient_noise.judge(data)[2] == "held", "as soon as ratios add noise, the rule judges it"


def test_the_unit_of_a_timing_is_a_session():
    assert read("replay_cost")["verdict"] == "undecided (2 sessions)" and claim.is_verdict("undecided (2 sessions)")


def test_every_row_names_its_regime_and_the_tables_theirs():
    for name in {*RESULTS, *DRAWN_FROM_RUNS, "moe_stability"}:
        assert "layers" in read(name)["regime"], name
    claims, readme = (ROOT / "docs/claims.md").read_text(), (ROOT / "README.md").read_text()
    assert claims.count("Measured with: ") == len(json.loads((ROOT / "results/claims.json").read_text()))
    header = next(line for line in readme.splitlines() if line.startswith("| question |"))
    assert claim.REGIME in header


def test_numbers_come_with_their_interval():
    assert claim.number([1.0, 2.0, 3.0], "{:.2f}", "m") == "2.00 [-0.48, 4.48] m"
    assert claim.number([.5], "{:.1f}") == "0.5"
    low, high = re.findall(r"[\d.]+", claim.log_number([1.0, 10.0, 100.0], "{:.4g}"))[1:]
    half = math.exp(4.303 * math.log(10) / 3 ** .5)
    assert float(low) == pytest.approx(10 / half, rel=1e-3)
    assert float(high) == pytest.approx(10 * half, rel=1e-3)


def test_the_verdict_on_trusting_the_sampler():
    held, refuted, unsure = claim.HELD, claim.REFUTED, claim.undecided(8)
    decide = lambda grpo, gspo: sampler_noise.decide(dict(zip("ab", grpo)), dict(zip("ab", gspo)), 8)
    assert decide((refuted, held), (held, held)) == held
    assert decide((refuted, held), (refuted, held)) == refuted
    assert decide((held, held), (refuted, held)) == refuted, "only GSPO suffers"
    assert decide((unsure, held), (unsure, refuted)) == refuted
    assert decide((refuted, refuted), (refuted, held)) == claim.depends("the dose")
    assert decide((unsure, held), (unsure, held)) == unsure


def test_the_verdict_on_learning_faster():
    up, down, none = ([x + s for x in (.01, .02, .03, .01, .02, .03, .01, .02)] for s in (.05, -.1, -.02))
    assert stability_map.decide(up, [up, up]) == claim.HELD
    assert stability_map.decide(down, [down, down]) == claim.REFUTED
    assert stability_map.decide(none, [none]) == claim.REFUTED, "equal within 0.03"
    assert stability_map.decide(none, [up, down]) == claim.depends("the learning rate")
    assert stability_map.decide(up[:4], [up[:4]]) == "undecided (4 seeds)"


# --------------------------------------------------------------------------------------- the maps

def test_a_map_goes_on_where_it_was_stopped_and_makes_no_run_twice(tmp_path):
    file, made = tmp_path / "runs.jsonl", []
    cells = [maps.cell("a", seed) for seed in range(4)]

    def make(c):
        made.append(c["seed"])
        return c | {"after": .5, "seconds": 1.0}
    maps.run_all(file, cells[:2], make)
    file.write_text(file.read_text() + '{"arm": "a", "se')   # killed while it wrote a line
    file.write_text(file.read_text() + "\n")
    maps.run_all(file, cells, make)
    assert made == [0, 1, 2, 3] and [r["seed"] for r in maps.read(file)] == [0, 1, 2, 3]
    parts = [tmp_path / f"{i}.jsonl" for i in (0, 1)]
    for i, part in enumerate(parts):
        maps.run_all(part, cells, make, (i, 2))
    assert sorted(r["seed"] for part in parts for r in maps.read(part)) == [0, 1, 2, 3]


def test_a_run_of_a_map_says_what_came_of_it(workplace, monkeypatch):
    monkeypatch.setattr(claim, "EVAL", "--eval_prompts 4 --eval_samples 2")
    tiny = " ".join(TINY).replace("--eval_samples 0", "").replace("--steps_per_generation 2", "")
    c = maps.cell("gspo", 0, bits="int4", minibatches=2, batches=2)
    record = maps.one_run(c, f"{tiny} --algorithm gspo")
    assert maps.key(record) == maps.key(c) and len(record["pass_rates"]) == 2
    assert 0 <= record["after"] <= 1 and record["mismatch_kl"] > 0 and record["stopped_at"] is None
    assert not list(Path("runs/maps").iterdir()), "its folder is gone"


def test_differences_are_paired_by_cold_start():
    runs = [dict(arm=arm, seed=seed, after=x, bits="int3", policy="moe", batches=16)
            for arm, ends in (("gspo", {0: .9, 1: .8, 2: .7}), ("gspo_trusted", {1: .5, 2: .6, 3: .1}))
            for seed, x in ends.items()]
    assert sampler_noise.lost(runs, "gspo", "int3") == pytest.approx([.3, .1])


def test_the_best_rate_is_chosen_on_its_own_cold_starts_and_the_frontier_ends_above_its_start():
    runs = [maps.cell("gspo", seed, rate=rate) | {"before": .5, "after": after + (.3 if seed > 3 else 0)}
            for rate, after in zip(stability_map.RATES, (.7, .8, .6, .2)) for seed in range(6)]
    assert stability_map.best_rate(runs, "gspo") == 4e-4 and stability_map.frontier(runs, "gspo") == 8e-4
    assert stability_map.best_rate([r for r in runs if r["seed"] != 2], "gspo") is None
    assert stability_map.frontier([], "gspo") is None
    cells = list(stability_map.fresh(runs))
    assert {(c["arm"], c["rate"]) for c in cells} == {("gspo", 4e-4)}
    assert {c["seed"] for c in cells} == set(maps.REPORT)


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
    experiment = __import__(name)
    figure = experiment.draw(read(name)["data"])
    for axes in figure.axes:
        assert axes.get_title(loc="left") or axes.get_title()
        assert axes.get_xlabel() or axes.get_xticklabels()
    experiment.claim.style.pyplot().close(figure)


def test_the_figure_of_the_band_explains_its_grey_band_and_faint_marks():
    """The grey band is the interval of ε / std(log s) with the highest mean pass@1 among the runs
    of the stability map, and the legend says what it and every kind of mark are."""
    earlier = maps.read(stability_map.FILE)
    points = [(width, run["after"]) for arm in band_law.EDGES for width, run in band_law.widths(earlier, arm)]
    means = {(low, high): claim.mean(after for width, after in points if low <= width < high)
             for low, high in zip(band_law.BINS, band_law.BINS[1:])}
    assert max(means, key=means.get) == band_law.READ_OFF
    runs = maps.read(band_law.FILE)
    assert {run["seed"] for run in runs} == set(band_law.SEEDS)
    assert not {run["seed"] for run in earlier} & set(band_law.SEEDS), "other cold starts"
    figure = band_law.draw(runs)
    legend = " ".join(text.get_text() for text in figure.legends[0].get_texts()).replace("\n", " ")
    for words in ("where pass@1 was highest in the faint runs: 1 to 3", "dark: a run of this experiment, "
                  "cold starts 17 to 24", "faint: a run of the stability map, earlier", "GRPO, mean of",
                  *(band_law.NAMES[arm] for arm in band_law.MARKERS)):
        assert words in legend
    claim.style.pyplot().close(figure)


def test_a_missing_or_broken_result_is_one_line(tmp_path, capsys):
    with pytest.raises(ValueError, match="no such result; measure it first"):
        claim.read_result(tmp_path / "nothing.json")
    (tmp_path / "cut.json").write_text('{"claim": "x')
    with pytest.raises(ValueError, match="not whole JSON"):
        claim.read_result(tmp_path / "cut.json")


def test_small_sums():
    assert claim.slope([1, 2, 4, 8], [5, 2.5, 1.25, .625]) == pytest.approx(-1)
    middle, low, high = claim.interval([1.0, 2.0, 3.0])
    assert middle == 2 and high - middle == pytest.approx(4.303 / 3 ** .5) and middle - low == pytest.approx(high - middle)
    assert claim.interval([.5]) == (.5, .5, .5)
    assert claim.rounded({"a": [1.23456789, 7, "x"]}) == {"a": [1.2346, 7, "x"]}


def test_the_band_that_clips_a_given_share():
    import length_band
    import torch
    log_s, A = torch.randn(4000, generator=torch.Generator().manual_seed(0)), torch.ones(4000)
    A[::2] = -1
    width = length_band.width_for(log_s, A, torch.ones(4000), .15)
    assert length_band.clipped(log_s, A, width).float().mean().item() == pytest.approx(.15, abs=.01)


def test_a_lab_steps_as_train_does_and_its_twin_changes_nothing():
    from plumbing.data import running_sum
    from plumbing.data import tasks
    import torch
    from plumbing.run.arguments import parse
    from moe import TinyMoE
    from plumbing.model.cold_start import tiny_config
    flags = "--min_terms 1 --max_terms 3 --hidden_size 16 --num_hidden_layers 1 --prompts_per_step 4 --num_generations 4 --max_completion_length 6".split()
    args, tokenizer = parse(flags), running_sum.builtin_tokenizer()
    torch.manual_seed(0)
    task = tasks.from_arguments(args)
    task.verify = drift.share_right
    lab = drift.Lab(0, *flags, loaded=(task, TinyMoE(tiny_config(args, tokenizer)), tokenizer))
    batch = lab.rollout(1, routes=True)
    rollout, minis = batch.rollout, list(lab.minibatches(1, batch))
    assert sum(len(mini.rollout.mask) for mini in minis) == len(rollout.mask) == 16 and len(minis) == 4
    assert torch.equal(torch.cat([mini.old_logp.sum(-1) for mini in minis]).sort().values, batch.old_logp.sum(-1).sort().values)
    assert torch.allclose(lab.logp(rollout), batch.old_logp, atol=1e-5), "nothing has changed yet"
    before = {name: p.clone() for name, p in lab.policy.named_parameters()}
    twin = lab.twin(*drift.GRPO)
    for mini in minis:
        twin.update(mini)
    assert all(torch.equal(p, before[name]) for name, p in lab.policy.named_parameters()) and not lab.learner.optimizer.state
    assert (twin.args.objective, twin.args.epsilon_high) == ("grpo", .27)
    assert not torch.allclose(twin.logp(rollout), batch.old_logp, atol=1e-5)
    stats = [lab.update(mini) for mini in minis]
    assert stats[0]["log_w_var"] < 1e-10 < stats[-1]["log_w_var"], "the first mini-batch is on-policy"


def test_share_right_counts_characters_in_their_places():
    from plumbing.data.datafiles import Problem
    problem = Problem("1+2=", "0+1=1,1+2=3.")
    assert drift.share_right(problem.answer, problem) == 1
    assert drift.share_right("0+1=1,1+2=4.", problem) == pytest.approx(11 / 12)
    assert drift.share_right("", problem) == 0 and drift.share_right(problem.answer + problem.answer, problem) == .5
