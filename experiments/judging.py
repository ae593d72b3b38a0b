"""Reads the recorded runs of a question and judges its rules.

A recorded run has the keys `arm` (here: variant) and `cell` (here: setting); verdicts are recorded
as `held` and `refuted` and printed as supported and contradicted.
"""

import contextlib
import json
import math
import re
import statistics
from pathlib import Path

import intervals

ROOT = Path(__file__).resolve().parent.parent
RENAMED = {                                          # after runs were recorded
    '"GSPO ×100': '"GSPO wide', "plumbing/engines/stale.py": "experiments/stale.py",
    "--no_chat_template": "--chat_template false"}
UNKNOWN = "not recorded"
EARLIER = "db735d8 or earlier"          # the commit in lines that recorded no machine or versions


# ---------------------------------------------------------------------------- what was recorded

def read(name, folder="experiments/results"):
    """{(variant, setting, seed): run} of a question. A line that is cut off is ignored and its run
    made again."""
    file = ROOT / folder / f"{name}.jsonl"
    runs = {}
    for text in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        with contextlib.suppress(ValueError):
            for old, new in RENAMED.items():
                text = text.replace(old, new)
            run = json.loads(text)
            runs[run["arm"], run["cell"], run["seed"]] = run
    return runs


def values(runs, variant, setting, seeds, figure="after"):
    """{seed: figure} of the runs of a setting that have it."""
    found = {s: runs.get((variant, setting, s), {}).get("figures", {}).get(figure) for s in seeds}
    return {s: value for s, value in found.items() if value is not None}


def provenance(run):
    """(machine, versions, commit) of a run."""
    return tuple(run.get(key) or UNKNOWN for key in ("machine", "versions", "commit"))


def comparable(runs):
    """Whether machine, versions and commit of all runs are the same. An unknown one equals nothing,
    but for the files of earlier code, which recorded none: docs/evidence.md names them."""
    first, *others = {provenance(run) for run in runs}
    return not others and (UNKNOWN not in first or first[-1] == EARLIER)


# ------------------------------------------------------------------------------ chosen settings

def group_settings(question, variant, group):
    """The settings of a group: those that it lists, or those whose names begin with its name."""
    if group in question.groups:
        return list(question.groups[group])
    return [name for name in question.list_settings(variant) if name.startswith(group)]


def group_name(setting):
    """"48 layers" of "48 layers 0.0001"."""
    return setting.rpartition(" ")[0]


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


def list_choices(question):
    """The (variant, group) whose setting a question chooses."""
    return dict.fromkeys(
        (variant, words.partition(" ")[2]) for part in question.plan
        for variant in part.variants or question.variants
        for words in part.settings.split(", ")
        if words.startswith("best") and " of " not in words)


# ------------------------------------------------------------------------------------ contrasts

def split_terms(of):
    """[(sign, variant, setting, figure)] of "A@x - B@y:z"."""
    terms = re.findall(r"(- |\+ |^)(.+?)(?: (?=[-+] )|$)", of)
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
        chosen = word in ("all", "best", "mean")
        if chosen and not group_settings(question, variant, group) or (
                not chosen and setting not in known):
            raise ValueError(f"{where} names the setting '{group if chosen else setting}'; "
                             f"{variant} has {', '.join(known)}")


def series(question, runs, variant, setting, figure, seeds):
    """{seed: (value, its runs)} of a term of a contrast."""
    word, _, group = setting.partition(" ")
    settings = (group_settings(question, variant, group) if word == "mean"
                else resolve_settings(question, runs, variant, setting))
    found = [values(runs, variant, one, seeds, figure or "after") for one in settings]
    return {s: (intervals.mean(one[s] for one in found), [runs[variant, x, s] for x in settings])
            for s in set.intersection(*map(set, found))}


def pair(question, runs, rule):
    """{seed: (the signed values of its terms, runs)} of a rule's contrast, at the seeds at which
    all its terms were run."""
    found = {s: ([], []) for s in rule.seeds or question.seeds}
    for sign, *term in split_terms(rule.of):
        more = series(question, runs, *term, found)
        found = {s: ([*terms, -more[s][0] if sign == "- " else more[s][0]], used + more[s][1])
                 for s, (terms, used) in found.items() if s in more}
    return found


def contrast(question, runs, rule):
    """{seed: the signed values of its terms} of a rule's contrast, at the seeds whose runs are
    comparable."""
    return {s: terms for s, (terms, used) in pair(question, runs, rule).items()
            if comparable(used)}


# ------------------------------------------------------------------------------------- verdicts

def all_identical(question, runs, rule):
    """Whether a rule compares a figure of two runs that are the same at every seed."""
    def figures(run):
        return {name: value for name, value in run["figures"].items() if name != "seconds"}
    pairs = [used for _, used in pair(question, runs, rule).values()]
    one_figure = len({figure for *_, figure in split_terms(rule.of)}) == 1
    return one_figure and all(
        len(used) == 2 and figures(used[0]) == figures(used[1]) for used in pairs)


def judge_rule(question, runs, rule):
    """dict(mean, low, high, seeds, verdict, p, zero, needed, levels, median, above) of a rule, or
    None without a comparable seed. zero: of a difference, the p of "it is not 0". needed: the seeds
    that an undecided one would take. levels: the mean of each term. above: how many seeds have a
    value above 0."""
    to = (lambda x: math.log(x) if x > 0 else -math.inf) if rule.factor else float
    back = math.exp if rule.factor else float
    found = contrast(question, runs, rule)
    if not found:
        return None
    sample = [to(sum(terms)) for terms in found.values()]
    bounds = [b and tuple(map(to, b)) for b in (rule.supported, rule.contradicted)]
    alike = f"{intervals.IDENTICAL} ({len(sample)} pair{'s' * (len(sample) > 1)})"
    answer = (intervals.Verdict("reported") if rule.reported else
              intervals.Verdict(alike) if all_identical(question, runs, rule) else
              intervals.decide_exact(sample, bounds[0]) if rule.exact else
              intervals.compare(sample, rule.level, rule.least, rule.alpha) if rule.level else
              intervals.decide(sample, *bounds, rule.nothing, rule.least))
    middle, low, high = map(back, intervals.interval(sample, rule.alpha))
    zero = intervals.p_zero(sample) if " - " in rule.of and len(sample) > 1 else None
    undecided = answer.startswith("undecided") and len(sample) > 1
    needed = intervals.seeds_needed(sample, *bounds, rule.nothing) if undecided else None
    needed = needed and max(needed, rule.least)
    levels = [abs(intervals.mean(term)) for term in zip(*found.values())]
    return dict(mean=middle, low=low, high=high, seeds=str(len(sample)), verdict=answer, p=answer.p,
                zero=zero, needed=needed, levels=levels,
                median=back(statistics.median(sample)), above=sum(value > 0 for value in sample))


IDENTICAL_RUNS = (
    "identical: in every pair both runs drew, earned and updated the same, so the variant changes "
    "nothing here. Is its flag in the command, its code reached? The built-in task cannot show "
    "everything: a prompt has one right text, so rewards are 0 or 1 and right responses to a "
    "prompt are equally long")


def judge(question, runs, lacking):
    """({rule: dict}, the verdict of the question). lacking: how many runs of its plan are missing.
    The mean of a rule without a number is None."""
    found = {}
    for name, rule in question.rules.items():
        why = ("not run" if not runs else
               f"not finished: {len(runs)} of {len(runs) + lacking} runs" if lacking else
               "not comparable: machine, versions or commit differ" if pair(question, runs, rule)
               else f"no run has the figures of {rule.of}")
        none = dict(mean=None, seeds="0", verdict=intervals.Verdict(why), p=None, zero=None,
                    needed=None)
        found[name] = judge_rule(question, runs, rule) or none
    # Holm's correction over the comparisons of one figure
    families = {}
    for name, rule in question.rules.items():
        if rule.level and found[name]["zero"] is not None:
            families.setdefault(split_terms(rule.of)[0][-1], []).append(name)
    for names in families.values():
        for name, p in zip(names, intervals.holm([found[name]["zero"] for name in names])):
            if p >= question.rules[name].alpha and found[name]["verdict"] in ("ahead", "behind"):
                found[name]["verdict"] = intervals.Verdict(f"undecided (p {p:.3f} by Holm)", p)
    deciding = [found[name] for name in question.deciding]
    answers = [as_predicted(question.rules[name], found[name]["verdict"])
               for name in question.deciding]
    if not answers:
        return found, intervals.Verdict("reported only")
    without = [number["verdict"] for number in deciding if number["mean"] is None]
    if without:
        return found, without[0]
    if question.depends and {intervals.HELD, intervals.REFUTED} <= set(answers):
        return found, intervals.Verdict(f"depends on {question.depends}")
    return found, intervals.join_verdicts(answers)


def as_predicted(rule, verdict):
    """The verdict on a claim that one variant is ahead, behind or level."""
    if not rule.level or verdict not in ("ahead", "behind", "level"):
        return verdict
    return intervals.Verdict(intervals.HELD if verdict == rule.predicted else intervals.REFUTED,
                             verdict.p)


# ------------------------------------------------------------------------------- as sentences

def describe_rule(rule):
    """A rule as a sentence, from its bounds."""
    if rule.reported:
        return f"{rule.of}: reported beside the rules, without a verdict"
    if rule.level:
        predicted = f"; predicted: {rule.predicted}" if rule.predicted else ""
        return (f"{rule.of}: ahead or behind if the {1 - rule.alpha:.1%} interval leaves 0, by "
                f"0.01 or more, and p < {rule.alpha:g} by Holm; level within ±{rule.level:g}; else "
                f"undecided{predicted}")
    if rule.exact:
        return f"{rule.of}: supported if the value of every seed lies {between(rule.supported)}"
    against = (between(rule.contradicted) if rule.contradicted
               else f"wholly outside {rule.supported[0]:g} to {rule.supported[1]:g}")
    equal = f", or within ±{rule.nothing:g}: equal" if rule.nothing else ""
    return (f"{rule.of}: supported if the interval lies {between(rule.supported)}; contradicted if "
            f"{against}{equal}; else, and below {rule.least} seeds, undecided")


def between(bounds):
    low, high = bounds
    if math.isinf(high):
        return f"above {low:g}"
    return f"below {high:g}" if math.isinf(low) else f"between {low:g} and {high:g}"


def print_verdict(question, runs, found, verdict):
    print(f"{question.claim}   ({question.source})\n"
          f"  {intervals.in_words(verdict).upper()}\n  regime    {question.regime}\n"
          f"  reported  {question.reported}\n  {' '.join(question.notes.split())}")
    for variant, group in list_choices(question):
        chosen = choose_best(question, runs, variant, group)
        print(f"  chosen    {variant}: {chosen or 'not yet'}")
    if any(number["verdict"].startswith(intervals.IDENTICAL) for number in found.values()):
        print(f"  {IDENTICAL_RUNS}")
    for rule, number in found.items():
        form = question.rules[rule].form
        shown = ("" if number["mean"] is None else ": {} [{}, {}] ({} seeds)".format(
            *(form.format(number[key]) for key in ("mean", "low", "high")), number["seeds"]))
        print(f"  {rule}: {intervals.in_words(number['verdict'])}{shown}\n"
              f"      {describe_rule(question.rules[rule])}")
