"""The evidence: verdicts are what the rules say of the runs, pages what fill.py writes, commands
what the table says. python -m pytest tests/house/test_evidence.py"""

import json
import math
import re
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch

from documents import DOCUMENTS, ROOT
from tiny_run import TINY, jsonl, read_json, write

sys.path.insert(0, str(ROOT / "experiments"))                # as when run.py is the script
import fill  # noqa: E402
import intervals  # noqa: E402
import judging  # noqa: E402
import lesson  # noqa: E402
import measures  # noqa: E402
import pictures  # noqa: E402
import run  # noqa: E402
from session.arguments import parse  # noqa: E402
from plumbing.refusal import Refusal
from questions import QUESTIONS, Part, Question, Rule, rates  # noqa: E402

UP = [.10, .11, .12, .10, .11, .12, .10, .11]


WIDE = [.5, -.4, .3, -.1, .6, -.2, .4, -.3]


# ------------------------------------------------------------ verdicts, figures, tables, commands

def test_every_verdict_and_number_is_what_the_rules_say_of_the_runs():
    recorded = read_json(ROOT / "experiments/results/numbers.json")
    assert json.loads(json.dumps(run.summary())) == recorded, "run python experiments/run.py"


@pytest.mark.parametrize("page", fill.pages(), ids=lambda page: page.name)
def test_every_figure_of_a_page_is_what_fill_writes(page):
    text = page.read_text(encoding="utf-8")
    assert fill.filled(page, fill.texts()) == text, "run python experiments/fill.py"


def test_fill_writes_tables_and_the_figures_of_sentences():
    names = {"a": "| x |\n| --- |\n| 2 |\n", "b": "+0.2 [+0.1, +0.3]", "c": "7.1"}
    page = ("First.\n\n<!-- =a -->\n\n| x |\n| --- |\n| 1 |\n\n"
            "* it gains +0.1 [+0.0,\n  +0.2], not\n  5.25.\n")
    filled = fill.fill(page, names, "it gains {b}, not {c}.")
    assert filled == ("First.\n\n<!-- =a -->\n\n| x |\n| --- |\n| 2 |\n\n"
                      "* it gains +0.2 [+0.1, +0.3], not\n  7.1.\n")
    wrapped = filled.replace("[+0.1, +", "[+0.1,\n  +")
    assert fill.fill(wrapped, names, "it gains\n{b}, not\n") == wrapped, "its lines stay"
    for text, sentence, error in ((page, "no such {b} words", "0 times"),
                                  (page + page, "it gains {b}, not", "2 times"),
                                  (page, "it gains {d}, not", "{d} is not a name")):
        with pytest.raises(ValueError, match=error):
            fill.fill(text, names, sentence)


@pytest.mark.parametrize("name", pictures.SIX)
def test_rounding_moves_no_edge_of_a_figure(name):
    """It is the same file on every machine."""
    ratio = pictures.list_ratios(pictures.SIX[name][1])                              # [x]
    for A in (1.0, -1.0):
        weights = [pictures.weight(name, A, ratio * (1 + sign * 1e-12)) for sign in (-1, 1)]
        torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-6)


def test_marks_stand_above_tables_alone_and_the_sentences_pages_exist():
    for name, text in DOCUMENTS.items():
        assert not re.search(r"<!-- [=/](?![^>]+ -->\n\n\|)", text), name
    assert set(fill.SENTENCES) <= set(DOCUMENTS)


def test_every_claim_keeps_its_line():
    page = DOCUMENTS["docs/evidence.md"]
    for question in QUESTIONS.values():
        claim = question.claim.replace("|", r"\|")
        assert not question.deciding or f"| {claim} |" in page


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_run_that_a_plan_asks_for_is_a_command(name):
    question = QUESTIONS[name]
    judging.check_names(question)
    for variant in question.variants:
        first = next(iter([*question.list_settings(variant), *question.further]))
        drawn = {(variant, first, 0): dict(figures=dict(batch_samples=[2560, 2816]))
                 for variant in question.variants}
        words = run.command(question, variant, first, 0, drawn)
        assert words.startswith(("--device cpu --seed 0", "python experiments/measures.py"))
    assert set(question.deciding) <= set(question.rules)


# ------------------------------------------------------------------------------ rules of evidence

@pytest.mark.parametrize("values, ranges, more, verdict", [
    (UP, [(0, 1)], {}, "held"),
    (UP, [(-1, 0)], {}, "refuted"),
    (UP[:7], [(0, 1)], {}, "undecided (7 seeds)"),
    (UP[:1], [(0, 1)], {}, "undecided (1 seed)"),
    (WIDE, [(0, 1)], {}, "undecided (8 seeds)"),            # the mean alone decides nothing
    (UP, [(.2, 1), (-1, .05)], {}, "undecided (8 seeds)"),                         # between
    ([0] * 8, [(0, math.inf)], {}, "undecided (8 seeds)"),           # a bound is not inside
    ([.1] * 8, [(0, math.inf)], {}, "undecided (8 seeds)"),          # no spread, no interval
    ([0] * 8, [(0, math.inf)], dict(nothing=.03), "refuted"),        # equal
    ([x / 20 for x in UP], [(0, 1), (-1, 0)], dict(nothing=.03), "refuted")])       # equal
def test_a_verdict_needs_enough_seeds_and_an_interval_that_clears_the_bound(
        values, ranges, more, verdict):
    assert intervals.decide(values, *ranges, **more) == verdict


def test_the_p_of_a_verdict_is_below_5_percent_where_the_interval_clears_the_bound():
    values = [.10, .31, .12, .10, -.11, .12, .10, .21]
    decide, beyond = intervals.decide, intervals.p_beyond
    assert decide(values, (0, math.inf)).p == beyond(values, 0, 1) < .05
    assert intervals.p_zero(values) == beyond(values, 0, 1)
    within = max(beyond(values, -.3, 1), beyond(values, .4, -1))         # both must be cleared
    assert decide(values, (-.3, .4)).p == within
    assert decide(values, (.2, 1), (-1, .05)).p > .05
    _, low, *_ = intervals.interval(values)
    assert beyond(values, low, 1) == pytest.approx(.05), "a bound at the interval's end"


def test_an_exact_rule_asks_every_value_and_holms_p_counts_all_rows_that_have_one():
    assert intervals.decide_exact([1e-7, 2e-7], (0, 1e-6)) == "held"
    assert intervals.decide_exact([1e-7, 1e-6], (0, 1e-6)) == "refuted"
    assert intervals.holm([.01, None, .04, .03]) == pytest.approx([.03, None, .06, .06])
    assert intervals.holm([.5, .9]) == [1, 1] and intervals.holm([]) == []


# ------------------------------------------------------------------------------------- the runner

def made(variant, setting, seed, after, **more):
    return dict(arm=variant, cell=setting, seed=seed, figures=dict(after=after, before=.5, **more),
                seconds=1., machine="a", versions="b", commit="c")


def index(lines):
    return {(line["arm"], line["cell"], line["seed"]): line for line in lines}


SEEDS, BOTH = range(10, 14), ("A", "B")
ASKED = Question(
    claim="B is ahead", regime="tiny", variants=dict.fromkeys(BOTH, ""),
    settings=rates(1e-4, 2e-4), further=rates(5e-5, 4e-4), choosing=range(2), choices=2,
    seeds=SEEDS, parts=(Part("all", range(2)), Part("edge", range(2)), Part("best", SEEDS)),
    rules={"ahead": Rule("B@best - A@best", least=4)})
BEST = (("A", "0.0004"), ("B", "0.0001"))                    # A's after the grid was extended
CHOSEN = [made(variant, setting, seed, after) for (variant, setting, after), seed in product((
    ("A", "0.0001", .5), ("A", "0.0002", .6), ("A", "0.0004", .7),
    ("B", "0.0001", .8), ("B", "0.0002", .6), ("B", "5e-05", .7)), range(2))]
ALL = [*CHOSEN, *(made(*place, seed, after + seed / 100 + (seed == 11) * after / 100)
                  for seed in SEEDS for place, after in zip(BEST, (.5, .6)))]


def test_a_grid_that_ends_at_its_best_is_extended_once_and_the_fresh_seeds_follow():
    lines = [line for line in CHOSEN if line["cell"] in ASKED.settings]
    further = [("A", "0.0004", 0), ("B", "5e-05", 0), ("A", "0.0004", 1), ("B", "5e-05", 1)]
    assert list(run.missing(ASKED, index(lines)))[:4] == further
    assert next(run.missing(ASKED, index(lines[1:]))) == ("A", "0.0001", 0), "made again"
    rest = list(run.missing(ASKED, index(CHOSEN)))
    assert rest == [(*place, seed) for seed in SEEDS for place in BEST]


def test_differences_are_paired_by_seed_within_one_machine_and_commit():
    runs = index(ALL)
    contrast = lambda: judging.contrast(ASKED, runs, ASKED.rules["ahead"])
    assert list(contrast().values()) == pytest.approx([.1, .101, .1, .1])
    found, verdict = run.judged(ASKED, runs)
    assert verdict == "held" and found["ahead"]["seeds"] == "4"
    runs[(*BEST[0], 10)] = runs[(*BEST[0], 10)] | {"commit": "d"}
    assert list(contrast()) == [11, 12, 13], "another commit"
    assert run.judged(ASKED, runs)[1] == "undecided (3 seeds)"
    assert sorted(run.mixed(ASKED, runs)) == [(*place, 10) for place in BEST], "no other seed"


@pytest.mark.parametrize("key", ["machine", "versions", "commit"])
def test_an_unknown_machine_version_or_commit_equals_nothing(key):
    unknown = [line | {key: judging.UNKNOWN} for line in ALL]
    assert run.judged(ASKED, index(unknown))[1].startswith("not comparable")
    without = [{name: value for name, value in line.items() if name != key} for line in ALL]
    assert run.judged(ASKED, index(without))[1].startswith("not comparable")
    earlier = [line | {key: judging.UNKNOWN, "commit": judging.EARLIER} for line in ALL]
    assert run.judged(ASKED, index(earlier))[1] == "held", "recorded nothing, and the page says so"


def test_a_choice_that_is_not_complete_is_not_finished_and_says_how_far_it_is():
    found, verdict = run.judged(ASKED, index(CHOSEN[1:]))
    assert verdict == found["ahead"]["verdict"] == "not finished: 11 of 20 runs"
    assert found["ahead"]["mean"] is None and run.judged(ASKED, {})[1] == "not run"
    assert run.judged(ASKED, index(CHOSEN))[1] == "not finished: 12 of 20 runs"


@pytest.mark.parametrize("of, part, error", [
    ("B@0.1 - A@best", "all", "the rule 'ahead' names the setting '0.1'; B has 0.0001, 0.0002"),
    ("B@best μ4 - A@best", "all", "the rule 'ahead' names the setting 'μ4'; B has 0.0001"),
    ("C@best - A@best", "all", "the rule 'ahead' names the variant 'C'; there are A, B"),
    ("B@best - A@best", "all, 0.3", "the plan names the setting '0.3'; A has 0.0001, 0.0002")])
def test_a_misspelled_variant_or_setting_is_named(of, part, error, monkeypatch, capsys):
    asked = replace(ASKED, rules={"ahead": Rule(of)}, parts=(Part(part, range(2)),))
    monkeypatch.setitem(QUESTIONS, "mine", asked)
    with pytest.raises(SystemExit) as stop:
        run.main(["mine", "--judge"])
    assert stop.value.code == 2 and error in capsys.readouterr().err


def test_runs_that_are_the_same_are_called_identical_and_what_the_task_cannot_show(capsys):
    """A variant without an effect, such as another weight per length where all right texts of a
    prompt are equally long."""
    alike = [made(variant, "0.0001", seed, .8) for variant in BOTH for seed in range(8)]
    asked = replace(ASKED, seeds=range(8), parts=(Part("0.0001", range(8)),),
                    rules={"ahead": Rule("B@0.0001 - A@0.0001", nothing=.03)})
    found, verdict = run.judged(asked, index(alike))
    assert verdict == found["ahead"]["verdict"] == "identical (8 pairs)"
    judging.print_verdict(asked, index(alike), found, verdict)
    said = capsys.readouterr().out
    assert "one right text" in said and "IDENTICAL (8 PAIRS)" in said
    gains = replace(asked, rules={"gains": Rule("B@0.0001 - B@0.0001:before")})
    assert run.judged(gains, index(alike))[1].startswith("undecided"), "figures of one run"
    saturated = [line | {"figures": line["figures"] | {"pass_rates": [line["arm"] == "A"]}}
                 for line in alike]
    assert run.judged(asked, index(saturated))[1] == "refuted", "equal, but not the same runs"


def test_lines_whose_flags_have_changed_neither_count_nor_are_paired(workplace, monkeypatch,
                                                                     capsys):
    """But those that are only spelled otherwise do."""
    asked = replace(ASKED, variants={"A": "", "B": "--beta 0.1"}, seeds=range(4),
                    parts=(Part("0.0001", range(4)),),
                    rules={"ahead": Rule("B@0.0001 - A@0.0001", least=4)})
    lines = [made(variant, "0.0001", seed, .5 + (variant == "B") / 10 + seed / 1000)
             | {"command": run.command(asked, variant, "0.0001", seed, {})}
             for variant in BOTH for seed in range(4)]
    lines[0]["command"] = "--steps_per_generation 4 --learning_rate 1e-4 --seed 0 --device cpu"
    assert run.current(asked, index(lines)) == index(lines)
    changed = replace(asked, variants={"A": "", "B": "--beta 0.2"})
    left = run.current(changed, index(lines))
    assert left == index(lines[:4]) and len([*run.missing(changed, left)]) == 4
    lines[4]["not_repeatable"] = "c"
    assert len(run.current(changed, index(lines))) == 5
    monkeypatch.setitem(QUESTIONS, "mine", changed)
    for module in (run, judging):
        monkeypatch.setattr(module, "ROOT", workplace)
    jsonl("mine.jsonl", lines[:4] + lines[5:])
    run.main("mine --judge --folder .".split())
    said = capsys.readouterr().out
    assert "4 runs made, 4 missing" in said and "3 more are left out: their flags" in said
    assert "not finished: 4 of 8 runs" in said.lower()


def test_a_question_of_which_some_rules_hold_and_others_do_not_says_how_many():
    held, refuted = intervals.Verdict("held", .01), intervals.Verdict("refuted", .02)
    assert intervals.join_verdicts([held, refuted, held, refuted]) == "2 of 4 supported"
    assert intervals.join_verdicts([refuted, refuted]) == "refuted"
    assert intervals.join_verdicts([held, held]) == "held"


def test_the_next_seed_takes_the_place_of_one_that_was_refused():
    settings = {"48 layers 0.1": "", "4 layers 0.1": ""}
    asked = replace(ASKED, parts=(Part("48 layers 0.1", range(5), count=2),), settings=settings)
    refused = [dict(arm="A", cell=setting, seed=seed, refused="cold start", seconds=1.)
               for seed, setting in enumerate(settings)]
    seeds = [seed for _, _, seed in run.missing(asked, index(refused))]
    assert seeds == [1, 1, 2, 2], "of 48 layers alone"


def test_a_run_is_made_once_and_again_after_its_line_is_deleted(workplace, monkeypatch, capsys):
    asked = replace(
        ASKED, variants={"A": "--algorithm grpo", "B": "--algorithm gspo"},
        rules=ASKED.rules | {"A learns": Rule("A@0.0001 - A@0.0001:before", seeds=range(2))},
        flags=" ".join([*TINY, "--eval_samples 2 --eval_prompts 4 --steps 2 --eval_steps 1"]))
    monkeypatch.setitem(QUESTIONS, "tiny", asked)
    for module in (run, judging, pictures):
        monkeypatch.setattr(module, "ROOT", workplace)
    run.main("tiny --most 3 --folder here".split())
    printed = capsys.readouterr().out
    assert "16 missing (8 of them wait for a choice)" in printed
    figure = workplace / "runs/questions/tiny.png"           # an own question draws its figure
    assert f"figure: {figure}" in printed and figure.is_file()
    assert figure.with_suffix(".svg").read_text(encoding="utf-8").startswith("<?xml")
    file = workplace / "here/tiny.jsonl"
    first = file.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["arm"] for line in first] == ["A", "A", "B"]
    write(file, "\n".join(first[1:]) + '\n{"arm": "B", "ce\n')    # cut off
    run.main("tiny --only A@0.0001 --most 1 --folder here".split())
    then, again = (json.loads(line) for line in
                   (first[0], file.read_text(encoding="utf-8").splitlines()[-1]))
    for line in (then, again):
        del line["figures"]["seconds"], line["seconds"]
    assert again == then and "commit" in then and then["versions"].startswith("Python")
    assert {*then["figures"]} >= {"at_1", "collapsed", "clipped", "before", "after"}


def test_a_run_at_equal_samples_has_as_many_batches_as_the_other_drew():
    question = QUESTIONS["dapo_equal"]
    drawn = {("dapo_paper", "default", 3): dict(figures=dict(batch_samples=[2560, 2816, 200]))}
    words = run.command(question, "GRPO", "default", 3, drawn)
    assert words.endswith("--epsilon_high 0.27 --steps 22")
    assert parse(words.split()).steps == 22
    assert "--steps 10" in run.command(question, "dapo_paper", "default", 3, {})
    with pytest.raises(Refusal, match="dapo_paper, which has no run at this seed"):
        run.command(question, "GRPO", "default", 4, drawn)


# ---------------------------------------------------------------------- rows that are no algorithm


@pytest.mark.slow
def test_drift_measures_what_a_figure_of_the_lesson_reads(monkeypatch):
    """Of recorded runs that are made again, too."""
    found = measures.drift(0, "--num_hidden_layers 1 --hidden_size 32", True)
    monkeypatch.setattr(judging, "read", lambda name: {0: dict(figures=found)})
    for first, *later in lesson.read_spread():
        assert abs(first) < 1e-9 < min(later)


