"""The evidence: verdicts are what the rules say of the runs, pages what fill.py writes, commands what the table says.
python -m pytest tests/house/test_evidence.py"""

import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_run import TINY

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "experiments"))                # as when run.py is the script
import fill  # noqa: E402
import intervals  # noqa: E402
import run  # noqa: E402
from plumbing.run.arguments import parse  # noqa: E402
from questions import QUESTIONS, Part, Question, Rule, rates  # noqa: E402

UP = [.10, .11, .12, .10, .11, .12, .10, .11]
WIDE = [.5, -.4, .3, -.1, .6, -.2, .4, -.3]


# ------------------------------------------------------------------ verdicts, figures, tables, commands

def test_every_verdict_and_number_is_what_the_rules_say_of_the_runs():
    assert json.loads(json.dumps(run.summary())) == json.loads((ROOT / "experiments/results/numbers.json").read_text()), "run python experiments/run.py"


@pytest.mark.parametrize("page", fill.pages(), ids=lambda page: page.name)
def test_every_figure_of_a_page_is_what_fill_writes(page):
    assert fill.fill(page.read_text(), fill.texts()) == page.read_text(), "run python experiments/fill.py"


def test_an_unknown_name_and_a_stale_figure_are_noticed():
    assert fill.fill("<!-- =bands -->600<!-- / --> times", fill.texts()) == "<!-- =bands -->667<!-- / --> times"
    with pytest.raises(ValueError, match="no such"):
        fill.fill("<!-- =no such -->1<!-- / -->", {})


def test_every_claim_keeps_its_line():
    page = (ROOT / "docs/evidence.md").read_text()
    assert all(f"| {question.claim} |" in page for question in QUESTIONS.values() if question.decides)
    for gone in ("Gradient noise", "collapse cannot be undone", "Perplexity falls", "hides a large move", "Deeper mixtures", "Routing replay costs"):
        assert re.search(rf"\| [^|]*{gone}", page), gone


@pytest.mark.parametrize("name", [name for name, question in QUESTIONS.items() if not question.measure])
def test_a_recorded_command_is_that_of_the_table_and_is_accepted(name):
    question = QUESTIONS[name]
    seen = 0
    for (arm, cell), of in run.read(name).items():
        made = next(iter(of.values()))
        if made.get("command") and "not_repeatable" not in made and "teacher" not in made["command"] and "checkpoints/" not in made["command"]:
            settings = parse(made["command"].split())
            if arm in question.arms and cell in question.ladder(arm) | question.further:
                planned = parse(run.command(question, arm, cell, made["seed"]).split())
                differ = {key: (getattr(settings, key), value) for key, value in vars(planned).items()
                          if getattr(settings, key) != value and key not in ("given", "sampler_dtype")}
                assert not differ, (arm, cell, differ)
                seen += 1
    assert seen or not run.read(name) or name in ("sixteen", "smollm2")


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_run_that_a_plan_asks_for_is_a_command(name):
    question = QUESTIONS[name]
    for arm in question.arms:
        cells = [*question.ladder(arm), *question.further]
        words = run.command(question, arm, cells[0], 0)
        assert words.startswith(("--device cpu --seed 0", "python experiments/measures.py"))
    for part in question.plan:
        assert set(part.arms) <= set(question.arms), part.arms
        for wanted in part.cells:
            word, _, group = wanted.partition(" ")
            known = run.group_of(question, part.arms[0], group) if word in ("all", "best", "edge") else [wanted]
            assert known and set(known) <= set(question.ladder(part.arms[0]) | question.further), wanted
    assert set(question.decides) <= set(question.rules)


# --------------------------------------------------------------------------------- rules of evidence

def test_a_verdict_needs_enough_starts_and_an_interval_that_clears_the_bound():
    decide = intervals.decide
    assert decide(UP, (0, 1)) == "held" and decide(UP, (-1, 0)) == "refuted"
    assert decide(UP[:7], (0, 1)) == "undecided (7 starts)" and decide(UP[:1], (0, 1)) == "undecided (1 start)"
    assert decide(WIDE, (0, 1)) == "undecided (8 starts)", "the mean alone decides nothing"
    assert decide(UP, (.2, 1), (-1, .05)) == "undecided (8 starts)", "between"
    assert decide([x / 20 for x in UP], (0, 1), (-1, 0), nothing=.03) == "refuted", "equal"
    held, refuted = intervals.Verdict("held", .01), intervals.Verdict("refuted", .02)
    assert intervals.all_of([held, intervals.Verdict("held", .03)]).p == .03
    assert intervals.all_of([held, refuted]) == "refuted" and intervals.all_of([held, refuted]).p == .04
    assert intervals.all_of([held, decide(WIDE, (0, 1))]) == "undecided (8 starts)"


def test_the_p_of_a_verdict_is_below_5_percent_where_the_interval_clears_the_bound():
    values = [.10, .31, .12, .10, -.11, .12, .10, .21]
    assert intervals.decide(values, (0, math.inf)).p == intervals.p_beyond(values, 0, 1) < .05
    within = max(intervals.p_beyond(values, -.3, 1), intervals.p_beyond(values, .4, -1))      # both bounds must be cleared
    assert intervals.decide(values, (-.3, .4)).p == within
    assert intervals.decide(values, (.2, 1), (-1, .05)).p > .05
    low = intervals.interval(values)[1]
    assert intervals.p_beyond(values, low, 1) == pytest.approx(.05), "a bound at the interval's end"


def test_holms_p_counts_all_rows_that_have_one():
    assert intervals.holm([.01, None, .04, .03]) == pytest.approx([.03, None, .06, .06])
    assert intervals.holm([.5, .9]) == [1, 1] and intervals.holm([]) == []


def test_ranks_have_intervals_under_resampled_starts():
    tied = {"a": dict.fromkeys(range(8), .5), "b": {s: .5 + (.1 if s % 2 else -.1) for s in range(8)}, "c": dict.fromkeys(range(8), .1)}
    found = intervals.ranks(tied)
    assert found["a"][1:] == (1, 2) == found["b"][1:] and found["c"] == (3, 3, 3)


# -------------------------------------------------------------------------------------- the runner

def made(arm, cell, seed, after, **more):
    return dict(arm=arm, cell=cell, seed=seed, figures=dict(after=after, before=.5, **more), seconds=1.,
                machine="a", versions="b", commit="c")


def index(lines):
    runs = {}
    for line in lines:
        runs.setdefault((line["arm"], line["cell"]), {})[line["seed"]] = line
    return runs


STARTS = range(10, 14)
ASKED = Question(
    claim="B is ahead", source="ours", reported="–", regime="tiny", flags="", arms={"A": "", "B": ""},
    cells=rates(1e-4, 2e-4), further=rates(5e-5, 4e-4), choose=range(2), choices=2, starts=STARTS,
    plan=(Part(("A", "B"), ("all",), range(2)), Part(("A", "B"), ("edge",), range(2)), Part(("A", "B"), ("best",), STARTS)),
    rules={"ahead": Rule("B@best - A@best", least=4)}, decides=("ahead",))


def chosen():
    """Runs with which A's best rate is 4e-4, after the grid was extended, and B's 1e-4, with 5e-5 tried."""
    ends = {("A", "0.0001"): .5, ("A", "0.0002"): .6, ("A", "0.0004"): .7, ("B", "0.0001"): .8, ("B", "0.0002"): .6, ("B", "5e-05"): .7}
    return [made(arm, cell, seed, after) for (arm, cell), after in ends.items() for seed in range(2)]


def test_a_grid_that_ends_at_its_best_is_extended_once_and_the_fresh_starts_follow():
    lines = [line for line in chosen() if line["cell"] in ASKED.cells]
    assert list(run.missing(ASKED, index(lines)))[:4] == [("A", "0.0004", 0), ("B", "5e-05", 0), ("A", "0.0004", 1), ("B", "5e-05", 1)]
    assert next(run.missing(ASKED, index(lines[1:]))) == ("A", "0.0001", 0), "a deleted run is made again"
    rest = list(run.missing(ASKED, index(chosen())))
    assert rest == [place for seed in STARTS for place in (("A", "0.0004", seed), ("B", "0.0001", seed))]


def test_differences_are_paired_by_start_within_one_machine_and_commit():
    fresh = [made(arm, cell, seed, after + seed / 100) for arm, cell, after in (("A", "0.0004", .5), ("B", "0.0001", .6)) for seed in STARTS]
    runs = index(chosen() + fresh)
    assert list(run.contrast(ASKED, runs, "B@best - A@best", STARTS).values()) == pytest.approx([.1] * 4)
    found, verdict = run.judged(ASKED, runs)
    assert verdict == "held" and found["ahead"]["starts"] == "4"
    runs["A", "0.0004"][10] = runs["A", "0.0004"][10] | {"commit": "d"}
    assert list(run.contrast(ASKED, runs, "B@best - A@best", STARTS)) == [11, 12, 13], "another commit"
    assert run.judged(ASKED, runs)[1] == "undecided (3 starts)"
    assert sorted(run.mixed(ASKED, runs)) == [("A", "0.0004", 10), ("B", "0.0001", 10)], "made again as a whole, and no other start"


def test_a_member_made_elsewhere_has_no_rank():
    ends = {"A": .5, "B": .6, "C": .7}
    league = replace(ASKED, arms=dict.fromkeys(ends, ""), further={}, starts=STARTS)
    lines = [made(arm, cell, seed, after, pass_rates=[.95], batch_samples=[256]) for arm, after in ends.items()
             for cell in league.cells for seed in (0, 1, *STARTS)]
    lines = [line | {"machine": "z"} if line["arm"] == "C" else line for line in lines]
    rows = run.league_table(league, index(lines))
    assert [(row["member"], row["rank"] and row["rank"][0]) for row in rows] == [("C", None), ("B", 1), ("A", 2)]
    assert rows[0]["near"] == [] and rows[1]["to_goal"] == 256


def test_a_refused_start_is_recorded_and_the_next_takes_its_place():
    asked = replace(ASKED, plan=(Part(("A", "B"), ("48 layers 0.1",), range(5), 2),), cells={"48 layers 0.1": "", "4 layers 0.1": ""})
    refused = [dict(arm="A", cell="48 layers 0.1", seed=0, refused="cold start", seconds=1.), dict(arm="A", cell="4 layers 0.1", seed=1, refused="cold start")]
    assert [seed for _, _, seed in run.missing(asked, index(refused))] == [1, 1, 2, 2], "of 48 layers alone"


def test_a_run_is_made_once_and_again_after_its_line_is_deleted(workplace, monkeypatch, capsys):
    tiny = " ".join(TINY).replace("--eval_samples 0", "--eval_samples 2 --eval_prompts 4").replace("--use_cpu", "")
    asked = replace(ASKED, flags=f"{tiny} --steps 2 --eval_steps 1", arms={"A": "--algorithm grpo", "B": "--algorithm gspo"})
    monkeypatch.setitem(QUESTIONS, "tiny", asked)
    monkeypatch.setattr(run, "ROOT", workplace)
    monkeypatch.setattr("plumbing.model.cold_start.MUST_PASS", 0.0)
    run.main(["tiny", "--most", "3", "--folder", "here"])
    assert "16 missing (8 of them wait for a choice)" in capsys.readouterr().out
    file = workplace / "here/tiny.jsonl"
    first = file.read_text().splitlines()
    assert [json.loads(line)["arm"] for line in first] == ["A", "A", "B"]
    file.write_text("\n".join(first[1:]) + '\n{"arm": "B", "ce')      # one line deleted, one cut off
    file.write_text(file.read_text() + "\n")
    run.main(["tiny", "--only", "A@0.0001", "--starts", "0", "--folder", "here"])
    again = json.loads(file.read_text().splitlines()[-1])
    then = json.loads(first[0])
    for line in (then, again):
        del line["figures"]["batch_seconds"], line["figures"]["seconds"], line["seconds"]
    assert again == then and set(then["figures"]) >= {"at_1", "collapsed", "clipped", "before", "after"}
    assert "commit" in then and then["versions"].startswith("Python") and not list((workplace / "runs/questions").iterdir())
