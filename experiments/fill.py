"""Writes every measured figure of the pages.

    python experiments/fill.py

A table of figures stands below a line `<!-- =NAME -->` and an empty line. The figures of a sentence
are {NAME} in experiments/sentences.py. Names come from experiments/results/numbers.json, which
experiments/run.py writes, and from `texts` in the results of benchmarks:

    learning: against GRPO          mean and 95 % interval of a rule
    mean learning: against GRPO     the mean alone
    median learning: against GRPO   the median over seeds
    level learning: against GRPO    the mean of the first term of the difference
    other learning: against GRPO    that of its second term
    above learning: against GRPO    the seeds at which it is above 0, "3 of 8"
    seeds learning: against GRPO    their number
    percent learning: against GRPO  the mean as a percentage
    lines losses.py                 of a file at the root
    holm offpolicy: replay against none     p of "it is not 0", by Holm over its question
    compared rule                   levels, differences and verdicts of a question's variants
    decided, undecided, map         other tables of docs/evidence.md
    toy paper 24 at .05             and others of toy_rules.py: what toy.py's policy says

A test checks that the pages are what this writes.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "experiments", "benchmarks")]

from losses import OBJECTIVES                                                        # noqa: E402
from intervals import in_words                                                       # noqa: E402
from judging import split_terms                                                      # noqa: E402
from questions import MAP, QUESTIONS                                                 # noqa: E402
from sentences import SENTENCES                                                      # noqa: E402
import toy_rules                                                                     # noqa: E402
from timing import table                                                             # noqa: E402

UNDECIDED = ("undecided", "not ", "identical")     # not run, not finished, not comparable
TABLE = re.compile(r"<!-- =([^>]+) -->\n\n(?:\|.*\n)+")
NAME = re.compile(r"\{(.+?)\}")


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def texts():
    """{name: text} of all that pages can quote."""
    found = json.loads((ROOT / "experiments/results/numbers.json").read_text(encoding="utf-8"))
    ratio = OBJECTIVES["grpo"].epsilon / OBJECTIVES["gspo"].epsilon
    numbers = found["numbers"]
    names = {f"lines {file.name}": str(len(file.read_text(encoding="utf-8").splitlines()))
             for file in ROOT.glob("*.py")}
    names |= {"decided": verdicts(found, True), "undecided": verdicts(found, False),
             "map": regimes(numbers), "quotient of epsilons": f"{ratio:.0f}"}
    for key, number in numbers.items():
        if number["mean"] is not None:
            question, _, rule = key.partition(": ")
            form = QUESTIONS[question].rules[rule].form
            names[key] = interval(number, form)
            names[f"seeds {key}"] = number["seeds"]
            names[f"percent {key}"] = f"{number['mean']:.1%}"
            names[f"mean {key}"] = signed(form.format(number["mean"]))
            names[f"median {key}"] = signed(form.format(number["median"]))
            names |= {f"{which} {key}": f"{level:.3f}"
                      for which, level in zip(("level", "other"), number["levels"])}
            names[f"above {key}"] = f"{number['above']} of {number['seeds']}"
    names |= {f"holm {key}": probability(p) for key, p in found["holm"].items()}
    names |= {f"compared {question}": compared(question, found)
              for question in ("rule", "lengths", "own_rate", "controls")}
    names |= toy_rules.texts(json.loads(toy_rules.RESULTS.read_text(encoding="utf-8")))
    for file in sorted((ROOT / "experiments/results").glob("*.json")):
        names |= json.loads(file.read_text(encoding="utf-8")).get("texts", {})
    return names


def interval(number, form):
    if number["mean"] is None:
        return "–"
    middle, low, high = (signed(form.format(number[key])) for key in ("mean", "low", "high"))
    return middle if number["seeds"] == "1" else f"{middle} [{low}, {high}]"


def signed(text):
    """With a true minus, as in the pages' prose."""
    return re.sub(r"(?<![\de])-", "−", text)


def verdicts(found, decided):
    """The questions that are decided, by Holm over all of them, too, or those that are not, each
    with the number of its first rule with this verdict, and its p or the seeds that it would take.
    """
    rows = []
    for name, question in QUESTIONS.items():
        answer = found["verdicts"][name]
        sure = not answer["verdict"].startswith(UNDECIDED) and (answer["holm"] or 0) < .05
        if not (question.deciding and answer["runs"]) or decided != sure:
            continue
        of = {rule: found["numbers"][f"{name}: {rule}"] for rule in question.deciding}
        rule = next((rule for rule in of if of[rule]["verdict"] == answer["verdict"]), [*of][0])
        p = answer["holm"]
        more = ((in_words(answer["verdict"]) + f", p {probability(p)}" * (p is not None),)
                if decided else (of[rule]["seeds"], of[rule]["needed"] or "–"))
        rows.append((f"{question.claim} (`{name}`)",
                     interval(of[rule], question.rules[rule].form), *more, question.asked))
    last = ("verdict",) if decided else ("seeds", "seeds needed")
    return table(("claim (experiment)", "number", *last, "rule written"), *rows)


def regimes(numbers):
    """GSPO and GSPO wide beside GRPO: levels, and differences with their intervals."""
    rows = []
    for where, *keys in MAP:
        paper, wide = (key and numbers[key] for key in keys)
        rows.append((where.removeprefix("tiny task, "), f"{wide['levels'][1]:.3f}",
                     *(f"{of['levels'][0]:.3f}: {interval(of, '{:+.3f}')}" if of else "–"
                       for of in (paper, wide))))
    return table(("batches, rate × mini-batches (experiment)", "GRPO",
                  "the paper's range: minus GRPO", "GSPO wide: minus GRPO"), *rows)


def compared(name, found):
    """The variants of a question in its settings: mean pass rate, clip_signal, the learning rate if
    it was chosen, difference from GRPO and verdict. Below them its other comparisons."""
    question = QUESTIONS[name]
    rules = {rule.of: (label, rule, found["numbers"][f"{name}: {label}"])
             for label, rule in question.rules.items()}
    cells = {}
    for of, (label, _, level) in list(rules.items()):
        if of.endswith(":mean") and " - " not in of:
            (_, variant, setting, _), = split_terms(of)
            place = label.removeprefix(variant).removesuffix(": mean").strip(", ")
            share = rules[of.replace(":mean", ":clip_signal")][2]
            best = (found["chosen"].get(f"{name}: {variant} {setting}") or "").rpartition(" ")[2]
            against = rules.pop(f"{of} - GRPO@{setting}:mean", None)
            cells[variant, place] = "–" if level["mean"] is None else (
                f"{level['mean']:.3f} ({share['mean']:.2f})" + f" at {best}" * bool(best)
                + (f": {difference(*against[1:])}" if against else ""))
    places = dict.fromkeys(place for _, place in cells)
    rows = [(variant, *(cells[variant, place] for place in places))
            for variant in question.variants]
    rows += [(label, difference(rule, number), *[""] * (len(places) - 1))
             for label, rule, number in rules.values() if rule.level]
    return table(("mean pass rate (share): minus GRPO",
                  *(place or "tiny task" for place in places)), *rows)


def difference(rule, number):
    """A difference and its verdict, if its rule has one, with what was predicted."""
    verdict = number["verdict"].partition(" (")[0] * bool(rule.level and number["mean"] is not None)
    as_said = {"": "", verdict: ", as predicted"}.get(rule.predicted,
                                                      f" (predicted: {rule.predicted})")
    return f"{interval(number, rule.form)} {verdict}{as_said * bool(verdict)}".strip()


def probability(p):
    return "–" if p is None else "<0.001" if p < 5e-4 else f"{p:.3f}"


def fill(text, names, sentences=""):
    """A page with its tables and the figures of its sentences written again.

    Raises ValueError for an unknown name and for a sentence that is not on the page, or twice."""
    def known(name):
        if name not in names:
            raise ValueError(f"{{{name}}} is not a name of experiments/fill.py")
        return names[name].strip("\n")

    text = TABLE.sub(lambda mark: f"<!-- ={mark[1]} -->\n\n{known(mark[1])}\n", text)
    for sentence in filter(None, map(" ".join, map(str.split, sentences.split("\n\n")))):
        figures = list(map(known, NAME.findall(sentence)))
        found = list(re.finditer(pattern(sentence, figures), text, re.S))
        if len(found) != 1:
            raise ValueError(f"experiments/sentences.py: '{sentence}' is on the page {len(found)} "
                             "times, not once")
        for i, figure in reversed([*enumerate(figures, 1)]):
            start, end = found[0].span(i)
            if text[start:end].split() != figure.split():                # else its lines stay
                text = text[:start] + figure + text[end:]
    return text


def pattern(sentence, figures):
    """The regular expression of whole words of a page, with a group for each figure, as short as
    the words around it allow and not much longer than the new one."""
    first, *others = (r"\s+".join(map(re.escape, part.split(" ")))
                      for part in NAME.sub("\0", sentence).split("\0"))
    more = (rf"((?:(?!\n\n).){{1,{len(figure) + 25}}}?){part}"
            for figure, part in zip(figures, others))
    return rf"(?<!\w){first}{''.join(more)}(?!\w)"


def filled(page, names):
    """The text of a page as it should be. Raises ValueError with the page's name."""
    name = page.relative_to(ROOT).as_posix()
    try:
        return fill(page.read_text(encoding="utf-8"), names, SENTENCES.get(name, ""))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    names = texts()
    try:
        pages_filled = {page: filled(page, names) for page in pages()}
    except ValueError as error:
        print(f"fill.py: {error}", file=sys.stderr)
        sys.exit(2)
    for page, text in pages_filled.items():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main()
