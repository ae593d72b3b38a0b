"""Reads the recorded runs of a question and judges its rules.

A recorded run has the keys `arm` (here: variant) and `cell` (here: setting).
"""

import contextlib
import json
import re
from collections import Counter
from pathlib import Path

import intervals

ROOT = Path(__file__).resolve().parent.parent
UNKNOWN = "not recorded"


# ---------------------------------------------------------------------------- what was recorded

def read(name, folder="experiments/results"):
    """{(variant, setting, seed): run} of a question. A line that is cut off is ignored and its run
    made again."""
    file = ROOT / folder / f"{name}.jsonl"
    runs = {}
    for text in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        with contextlib.suppress(ValueError):
            run = json.loads(text)
            runs[run["arm"], run["cell"], run["seed"]] = run
    return runs


def values(runs, variant, setting, seeds, figure="after"):
    """{seed: figure} of the runs of a setting that have it."""
    found = {s: runs.get((variant, setting, s), {}).get("figures", {}).get(figure) for s in seeds}
    return {s: value for s, value in found.items() if value is not None}


def comparable(runs):
    """Whether machine, versions and commit of all runs are the same; an unknown one equals none."""
    first, *others = [tuple(run.get(key) or UNKNOWN for key in ("machine", "versions", "commit"))
                      for run in runs]
    return all(UNKNOWN not in first and one == first for one in others)


# ------------------------------------------------------------------------------ chosen settings

def group_settings(question, variant, group):
    """The settings whose names begin with the name of a group."""
    return [name for name in question.list_settings(variant) if name.startswith(group)]


def choose_best(question, runs, variant, group=""):
    """The setting of a group with the highest mean over the choosing seeds, or None before all are
    run. A question's `prefers` names a variant: the others take its best setting if theirs is
    better by no more than the standard error of the difference, paired by seed."""
    found = {}
    for setting in group_settings(question, variant, group):
        found[setting] = values(runs, variant, setting, question.choosing, question.by)
        if len(found[setting]) < question.choices:
            return None
    best = max(found, key=lambda setting: intervals.mean(found[setting].values()), default=None)
    if question.prefers and variant != question.prefers:
        common = choose_best(question, runs, question.prefers, group)
        if common in (None, best):
            return common
        gains = [found[best][seed] - found[common][seed]
                 for seed in found[best].keys() & found[common].keys()]
        if intervals.mean(gains) <= intervals.standard_error(gains):
            return common
    return best


def resolve_settings(question, runs, variant, words):
    """The settings that "all μ4", "best μ4", "best μ4 of GRPO" (that of another variant) or a name
    mean; [None] for the best of settings that are not all run."""
    word, _, group = words.partition(" ")
    if word == "all":
        return group_settings(question, variant, group)
    group, _, other = group.partition(" of ")
    return [choose_best(question, runs, other or variant, group) if word == "best" else words]


# ------------------------------------------------------------------------------------ contrasts

def split_terms(of):
    """[(sign, variant, setting, figure)] of "A@x - B@y:z"."""
    terms = re.findall(r"(- |^)(.+?)(?: (?=- )|$)", of)
    parts = [(sign, *term.partition("@")[::2]) for sign, term in terms]
    return [(sign, variant, *where.partition(":")[::2]) for sign, variant, where in parts]


def check_names(question):
    """Raise ValueError if a rule or the plan names a variant or a setting that there is not."""
    named = [(f"the rule '{rule}'", variant, setting)
             for rule, words in question.rules.items()
             for _, variant, setting, _ in split_terms(words.of)]
    named += [("the plan", variant, setting) for part in question.plan
              for variant in part.variants or question.variants
              for setting in part.settings.split(", ")]
    for where, variant, setting in named:
        if variant not in question.variants:
            raise ValueError(f"{where} names the variant '{variant}'; there are "
                             f"{', '.join(question.variants)}")
        word, _, group = setting.partition(" of ")[0].partition(" ")
        known = question.list_settings(variant)
        chosen = word in ("all", "best")
        if chosen and not group_settings(question, variant, group) or (
                not chosen and setting not in known):
            raise ValueError(f"{where} names the setting '{group if chosen else setting}'; "
                             f"{variant} has {', '.join(known)}")


def contrast(question, runs, rule):
    """{seed: the signed values of its terms} of a rule's contrast, at the seeds at which all its
    terms were run and their runs are comparable."""
    terms = [(-1 if sign else 1, variant, setting, figure or "after")
             for sign, variant, words, figure in split_terms(rule.of)
             for setting in resolve_settings(question, runs, variant, words)]
    seeds = rule.seeds or question.seeds
    found = [values(runs, variant, setting, seeds, figure)
             for _, variant, setting, figure in terms]
    return {seed: [sign * one[seed] for (sign, *_), one in zip(terms, found)] for seed in seeds
            if all(seed in one for one in found)
            and comparable([runs[variant, setting, seed] for _, variant, setting, _ in terms])}


# ------------------------------------------------------------------------------------- verdicts

def judge(question, runs):
    """{rule: dict(mean, low, high, seeds, levels, verdict, p)}, without a mean where no seed is
    comparable. levels: the mean of each term. p: of a difference, that of "it is not 0", by Holm
    over the question's rules about the same figure; one that has not run yet counts as p = 1."""
    found = {}
    for name, rule in question.rules.items():
        pairs = contrast(question, runs, rule)
        sample = list(map(sum, pairs.values()))
        number = dict(seeds=len(sample), form=rule.form, predicted=rule.predicted, verdict="",
                      mean=None, p=None)
        if sample:
            number |= zip(("mean", "low", "high"), intervals.interval(sample, rule.alpha))
            number["levels"] = [abs(intervals.mean(term)) for term in zip(*pairs.values())]
        if not rule.reported:
            number["p"] = 1.0
            number["verdict"] = "undecided"
        if not rule.reported and len(sample) > 1:
            number["verdict"] = intervals.compare(sample, rule.level, rule.least, rule.alpha)
            number["p"] = intervals.p_zero(sample)
        found[name] = number
    families = {}
    for name, rule in question.rules.items():
        if not rule.reported:
            families.setdefault(split_terms(rule.of)[0][-1], []).append(name)
    for names in families.values():
        for name, p in zip(names, intervals.holm([found[name]["p"] for name in names])):
            found[name]["p"] = p
            if found[name]["verdict"] in ("ahead", "behind") and p >= question.rules[name].alpha:
                found[name]["verdict"] = "undecided"
    return found


def summarize(question, found, made, lacking):
    """A line about a question: how far it is, and its verdicts beside what was predicted."""
    if lacking:
        return f"not finished: {made} of {made + lacking} runs"
    verdicts = [number["verdict"] for number in found.values() if number["verdict"]]
    predicted = [number for number in found.values() if number["predicted"]]
    right = sum(number["verdict"] == number["predicted"] for number in predicted)
    counts = [f"{n} {verdict}" if len(verdicts) > 1 else verdict
              for verdict, n in Counter(verdicts).items()]
    return ", ".join(counts or ["reported only"]) + (
        f"; {right} of {len(predicted)} as predicted" if predicted else "")


# ------------------------------------------------------------------------------- as sentences

def describe_rule(rule):
    """A rule as a sentence."""
    if rule.reported:
        return f"{rule.of}: reported beside the rules, without a verdict"
    predicted = f"; predicted: {rule.predicted}" if rule.predicted else ""
    return (f"{rule.of}: ahead or behind if the {1 - rule.alpha:.1%} interval leaves 0, by 0.01 or "
            f"more, and p < {rule.alpha:g} by Holm; level within ±{rule.level:g}; else, and below "
            f"{rule.least} seeds, undecided{predicted}")


def print_verdict(question, runs, found, line):
    print(f"{question.claim}\n  {line.upper()}\n  regime    {question.regime}\n"
          f"  {' '.join(question.notes.split())}")
    for words in dict.fromkeys(words for part in question.plan
                               for words in part.settings.split(", ") if words.startswith("best")):
        for variant in () if " of " in words else question.variants:
            chosen, = resolve_settings(question, runs, variant, words)
            print(f"  {words}, {variant}: {chosen or 'not yet'}")
    for rule, number in found.items():
        shown = ("" if number["mean"] is None else "{} [{}, {}] ({} seeds)".format(
            *(number["form"].format(number[key]) for key in ("mean", "low", "high")),
            number["seeds"]))
        print(f"  {rule}: {number['verdict']} {shown}\n"
              f"      {describe_rule(question.rules[rule])}")
