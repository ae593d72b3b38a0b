"""The evidence: verdicts are what the rules say of the runs, pages what fill.py writes, commands
what the table says. python -m pytest tests/house/test_evidence.py"""

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
import torch

from documents import DOCUMENTS, ROOT, pieces
from tiny_run import TINY, jsonl, read_json, write

sys.path.insert(0, str(ROOT / "experiments"))                # as when run.py is the script
import fill  # noqa: E402
import intervals  # noqa: E402
import judging  # noqa: E402
import pictures  # noqa: E402
import run  # noqa: E402
from session.arguments import parse  # noqa: E402
from plumbing.refusal import Refusal
from questions import QUESTIONS, Part, Question, Rule, rates  # noqa: E402

UP = [.10, .11, .12, .10, .11, .12, .10, .11]


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


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_run_that_a_plan_asks_for_is_a_command(name):
    question = QUESTIONS[name]
    judging.check_names(question)
    for variant in question.variants:
        for setting in question.list_settings(variant):
            words = run.command(question, variant, setting, 0)
            assert run.find_settings(words) != words, "train.py knows all its flags"


# ------------------------------------------------------------------------------ rules of evidence

@pytest.mark.parametrize("values, more, verdict", [
    (UP, {}, "ahead"), ([-x for x in UP], {}, "behind"),
    (UP[:7], {}, "undecided"), (UP[:1], {}, "undecided"),    # too few seeds
    ([.5, -.4, .3, -.1, .6, -.2, .4, -.3], {}, "undecided"),             # the mean alone is none
    ([x / 20 for x in UP], {}, "level"), ([x / 20 for x in UP], dict(level=.004), "undecided"),
    ([.025, .003] * 4, {}, "ahead"), ([.025, .003] * 4, dict(alpha=.01), "level")])
def test_a_verdict_needs_enough_seeds_and_an_interval_that_leaves_zero_or_stays_near(
        values, more, verdict):
    assert intervals.compare(values, **dict(level=.03) | more) == verdict


def test_p_is_5_percent_where_the_interval_ends_at_0_and_holms_counts_all_rows_that_have_one():
    values = [.10, .31, .12, .10, -.11, .12, .10, .21]
    _, low, *_ = intervals.interval(values)
    assert intervals.p_zero([x - low for x in values]) == pytest.approx(.05)
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
    settings=rates(1e-4, 2e-4), choosing=range(2), choices=2, seeds=SEEDS,
    parts=(Part("all", range(2)), Part("best", SEEDS)),
    rules={"ahead": Rule("B@best - A@best", least=4)})
BEST = (("A", "0.0002"), ("B", "0.0001"))
CHOSEN = [made(variant, setting, seed, after) for (variant, setting, after), seed in product((
    ("A", "0.0001", .5), ("A", "0.0002", .6), ("B", "0.0001", .8), ("B", "0.0002", .6)), range(2))]
ALL = [*CHOSEN, *(made(*place, seed, after + seed / 100 + (seed == 11) * after / 100)
                  for seed in SEEDS for place, after in zip(BEST, (.5, .6)))]


def test_the_fresh_seeds_follow_at_the_setting_that_was_chosen():
    assert next(run.missing(ASKED, index(CHOSEN[1:]))) == ("A", "0.0001", 0), "made again"
    rest = list(run.missing(ASKED, index(CHOSEN)))
    assert rest == [(*place, seed) for seed in SEEDS for place in BEST]


def test_differences_are_paired_by_seed_within_one_machine_and_commit():
    runs = index(ALL)
    contrast = lambda: judging.contrast(ASKED, runs, ASKED.rules["ahead"])
    assert list(map(sum, contrast().values())) == pytest.approx([.1, .101, .1, .1])
    found, verdict = run.judged(ASKED, runs)
    assert verdict == "ahead" and found["ahead"]["seeds"] == 4
    assert found["ahead"]["levels"] == pytest.approx([.71650, .61625])
    runs[(*BEST[0], 10)] = runs[(*BEST[0], 10)] | {"commit": "d"}
    assert list(contrast()) == [11, 12, 13], "another commit"
    assert run.judged(ASKED, runs)[1] == "undecided"


@pytest.mark.parametrize("key", ["machine", "versions", "commit"])
def test_an_unknown_machine_version_or_commit_equals_nothing(key):
    for lines in ([line | {key: judging.UNKNOWN} for line in ALL],
                  [{name: value for name, value in line.items() if name != key} for line in ALL]):
        found, line = run.judged(ASKED, index(lines))
        assert found["ahead"]["mean"] is None and line == "undecided"


def test_a_choice_that_is_not_complete_is_not_finished_and_says_how_far_it_is():
    found, line = run.judged(ASKED, index(CHOSEN[1:]))
    assert line == "not finished: 7 of 16 runs" and found["ahead"]["verdict"] == "undecided"
    assert found["ahead"]["mean"] is None
    found, line = run.judged(ASKED, index(ALL[:-1]))
    assert line == "not finished: 15 of 16 runs" and found["ahead"]["verdict"] == "undecided"
    assert found["ahead"]["seeds"] == 3, "what there is"


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


def test_lines_whose_flags_have_changed_neither_count_nor_are_paired(workplace, monkeypatch,
                                                                     capsys):
    """But those that are only spelled otherwise do."""
    asked = replace(ASKED, variants={"A": "", "B": "--beta 0.1"}, seeds=range(4),
                    parts=(Part("0.0001", range(4)),),
                    rules={"ahead": Rule("B@0.0001 - A@0.0001", least=4)})
    lines = [made(variant, "0.0001", seed, .5 + (variant == "B") / 10 + seed / 1000)
             | {"command": run.command(asked, variant, "0.0001", seed)}
             for variant in BOTH for seed in range(4)]
    lines[0]["command"] = "--steps_per_generation 4 --learning_rate 1e-4 --seed 0 --device cpu"
    assert run.current(asked, index(lines)) == index(lines)
    changed = replace(asked, variants={"A": "", "B": "--beta 0.2"})
    left = run.current(changed, index(lines))
    assert left == index(lines[:4]) and len([*run.missing(changed, left)]) == 4
    monkeypatch.setitem(QUESTIONS, "mine", changed)
    for module in (run, judging):
        monkeypatch.setattr(module, "ROOT", workplace)
    jsonl("mine.jsonl", lines)
    run.main("mine --judge --folder .".split())
    said = capsys.readouterr().out
    assert "4 runs made, 4 missing" in said and "4 more are left out: their flags" in said
    assert "not finished: 4 of 8 runs" in said.lower()


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
    file = workplace / "here/tiny.jsonl"
    first = file.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["arm"] for line in first] == ["A", "A", "B"]
    write(file, "\n".join(first[1:]) + '\n{"arm": "B", "ce\n')    # cut off
    run.main("tiny --most 1 --folder here".split())
    then, again = (json.loads(line) for line in
                   (first[0], file.read_text(encoding="utf-8").splitlines()[-1]))
    for line in (then, again):
        del line["figures"]["seconds"], line["seconds"]
    assert again == then and "commit" in then and then["versions"].startswith("Python")
    assert {*then["figures"]} >= {"speed", "collapsed", "clip_signal", "std_log_s", "before"}


# ------------------------------------------------------------------------ a question of one's own

RECORD = dict(pass_rate=.5, minibatches=[dict(signal_tokens=9, clip_signal=.2, log_s_var=.01)])


def place(name, text):
    """Write a file whose folders may not be there yet."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    write(name, text)


def own_question(flags):
    """The file of docs/evidence.md, with other flags."""
    text, = (text for kind, name, text in pieces("docs/evidence.md") if name == "wider.py")
    assert text.count("--steps 10") == 1
    write("wider.py", text.replace("--steps 10", flags))
    return text


def test_a_question_of_ones_own_stands_alone_and_decides_with_its_four_seeds(workplace, monkeypatch,
                                                                             capsys):
    """Its lines lie in its own folder, the published numbers stay, and the verdict is that of the
    rule of the page."""
    assert len([line for line in own_question("--steps 1").splitlines() if line]) <= 10
    for module in (run, judging, pictures):
        monkeypatch.setattr(module, "ROOT", workplace)
    places = product((("paper", .5), ("ten", .6)), range(4))
    lines = [made(variant, "default", seed, after + seed / 1000 * (variant == "ten"))
             for (variant, after), seed in places]
    place("runs/questions/wider.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    run.main(["wider.py"])
    said = capsys.readouterr().out
    assert "8 runs made, 0 missing" in said and "AHEAD" in said
    assert f"figure: {workplace / 'runs/questions/wider.png'}" in said
    assert sorted(path.name for path in workplace.rglob("*.json*")) == ["wider.jsonl"]
    for name, error in (("gone.py", "no such file"), ("gone", "no question is called gone")):
        with pytest.raises(Refusal, match=error):
            run.main([name])
    write("fair.py", "")
    with pytest.raises(Refusal, match="called like a question of the table"):
        run.main(["fair.py"])


def test_runs_of_many_laptops_are_pooled_by_their_flags_and_seeds(workplace, monkeypatch, capsys):
    """Whatever folder they lie in. Those with other flags, and unfinished ones, are left out."""
    tiny = " ".join([*TINY, "--eval_samples 2 --eval_prompts 4 --steps 2"])
    own_question(tiny)
    for seed, after in enumerate((.6, .62, .64, .66)):
        for name, flags, more in (("a", "--algorithm gspo", 0),
                                  ("b", "--epsilon 3e-3 --epsilon_high 4e-3", .1 + seed / 500)):
            folder = f"class/student {seed}/{name}"
            words = f"{tiny} {flags} --seed {seed} --device auto --output_dir {seed}"
            place(f"{folder}/config.json", json.dumps(asdict(parse(words.split()))))
            record = RECORD | ({} if seed else {"minibatches": []})      # at seed 0 no signal
            jsonl(f"{folder}/metrics.jsonl", [record | {"step": n} for n in (1, 2)])
            write(f"{folder}/summary.json", json.dumps(dict(pass_at_1_after=after + more)))
    place("class/other/config.json", json.dumps(asdict(parse([*TINY, "--beta", "1"]))))
    write("class/other/summary.json", "{}")
    place("class/stopped/config.json", "{}")
    for module in (run, judging, pictures):
        monkeypatch.setattr(module, "ROOT", workplace)
    run.main("wider.py --pool class".split())
    said = capsys.readouterr().out
    assert "8 runs made, 0 missing" in said and "AHEAD" in said and "(4 seeds)" in said
    assert "the flags of no variant" in said and said.count("left out") == 1
    assert not (workplace / "runs/questions/wider.jsonl").exists()


def test_a_change_of_another_experiment_keeps_runs_comparable(workplace, monkeypatch):
    """The commit of a run is that of the program and of its own script."""
    monkeypatch.setattr(run, "ROOT", workplace)
    git = lambda *words: subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a", *words],
                                        check=True, capture_output=True)
    code = lambda script="train": run.describe_code.__wrapped__(script)
    for name in ("train.py", "features/lora.py", "experiments/rows.py", "experiments/fill.py"):
        place(name, "1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    first = code()
    write("experiments/fill.py", "2")
    git("commit", "-qam", "another experiment")
    write("experiments/rows.py", "2")
    assert code() == first == code("stale") and code("rows").startswith(f"{first}+")
    git("commit", "-qam", "its script")
    assert code() == first and "+" not in code("rows") != first
    write("features/lora.py", "2")
    assert code().startswith(f"{first}+"), "not committed"
