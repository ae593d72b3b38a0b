"""Writes every measured figure of the pages.

    python experiments/fill.py

A table of figures stands below a line `<!-- =NAME -->` and an empty line. The figures of a sentence
are {NAME} in experiments/sentences.py. Names come from experiments/results/numbers.json, which
experiments/run.py writes, and from `texts` in other files of results/: those of benchmarks, and
closed.json, the numbers of questions that are closed:

    rule: GSPO against GRPO         mean and interval of a rule
    mean rule: GSPO against GRPO    the mean alone; level, other: of the first, the second term of
                                    the difference; seeds: their number
    percent, above, median …        of closed questions: the mean as a percentage, the seeds at
                                    which it is above 0, the median over seeds
    line fair                       how far a question is, and its verdicts
    compared fair                   a question: a row for each variant in each setting
    decides                         every predicted difference of all questions
    rates                           what each variant of `fair` reaches at each rate, and collapses
    lines losses.py                 of a file at the root
    toy paper 24 at .05             and others of toy_rules.py: what toy.py's policy says
    toy lengths                     a table of them

A test checks that the pages are what this writes.
"""

import argparse
import itertools
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("", "experiments", "benchmarks")]

from losses import OBJECTIVES                                                        # noqa: E402
from judging import split_terms                                                      # noqa: E402
from questions import FAIR_ARMS, FAIR_RATES, QUESTIONS                               # noqa: E402
from sentences import SENTENCES                                                      # noqa: E402
import toy_rules                                                                     # noqa: E402
from timing import table                                                             # noqa: E402

NEW = ("fair", "weight", "controls_final", "pretrained")
PLACES = {r"best (\d+) of (.+)": r"\1 tokens, \2's rate", r"best (\d+)": r"\1 tokens, own rates",
          r"best": "SmolLM2", r"(\d+) 2e-4": r"\1 tokens"}      # of settings, in words
TABLE = re.compile(r"<!-- =([^>]+) -->\n\n(?:\|.*\n)+")
NAME = re.compile(r"\{(.+?)\}")


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")),
            ROOT / "experiments/results/tables.md"]


def texts():
    """{name: text} of all that pages can quote."""
    found = json.loads((ROOT / "experiments/results/numbers.json").read_text(encoding="utf-8"))
    ratio = OBJECTIVES["grpo"].epsilon / OBJECTIVES["gspo"].epsilon
    numbers = found["numbers"]
    names = {f"lines {file.name}": str(len(file.read_text(encoding="utf-8").splitlines()))
             for file in ROOT.glob("*.py")}
    names["quotient of epsilons"] = f"{ratio:.0f}"
    for key, number in numbers.items():
        if number["mean"] is not None:
            names[key] = interval(number)
            names[f"seeds {key}"] = str(number["seeds"])
            names[f"mean {key}"] = signed(number["form"].format(number["mean"]))
            names |= {f"{which} {key}": f"{level:.3f}"
                      for which, level in zip(("level", "other"), number["levels"])}
    names |= {f"line {name}": line for name, line in found["lines"].items()}
    names |= {f"compared {name}": compared(name, found) for name in NEW}
    names |= {"decides": decides(found), "rates": usable_rates(found)}
    toy = toy_rules.texts(json.loads(toy_rules.RESULTS.read_text(encoding="utf-8")))
    names |= toy | {"toy lengths": toy_lengths(toy)}
    for file in sorted((ROOT / "experiments/results").glob("*.json")):
        names |= json.loads(file.read_text(encoding="utf-8")).get("texts", {})
    return names


def interval(number):
    if number["mean"] is None:
        return "–"
    middle, low, high = (signed(number["form"].format(number[key]))
                         for key in ("mean", "low", "high"))
    return middle if number["seeds"] == 1 else f"{middle} [{low}, {high}]"


def signed(text):
    """With a true minus, as in the pages' prose."""
    return re.sub(r"(?<![\de])-", "−", text)


class Seen:
    """What numbers.json has of a question: numbers by what its rules compare."""

    def __init__(self, name, found):
        self.name, self.question, self.chosen = name, QUESTIONS[name], found["chosen"]
        self.numbers = {rule.of: found["numbers"][f"{name}: {label}"]
                        for label, rule in self.question.rules.items()}

    def value(self, variant, setting, figure):
        return self.numbers.get(f"{variant}@{setting}:{figure}", {}).get("mean")

    def show(self, variant, setting, figure, digits=3):
        value = self.value(variant, setting, figure)
        return "–" if value is None else f"{value:.{digits}f}"

    def difference(self, one, other, setting, figure):
        """A difference, its verdict and what was predicted."""
        number = self.numbers.get(f"{one}@{setting}:{figure} - {other}@{setting}:{figure}")
        if number is None or number["mean"] is None:
            return "–"
        verdict, predicted = number["verdict"], number["predicted"]
        if predicted:
            verdict += ", as predicted" if verdict == predicted else f" (predicted: {predicted})"
        return f"{interval(number)} {verdict}".strip()

    def narrow(self, variant, setting):
        """ε over the standard deviation of log s, of a variant that clips s."""
        rate = self.rate(variant, setting)
        settings = self.question.list_settings(variant)
        flags = f"{settings.get(rate or setting, '')} {self.question.variants[variant]}"
        sigma = self.value(variant, setting, "std_log_s")
        if sigma is None or " gspo" not in flags and "--drop_by_s" not in flags:
            return "–"
        epsilon = float([OBJECTIVES["gspo"].epsilon, *re.findall(r"--epsilon (\S+)", flags)][-1])
        return f"{epsilon / sigma:.2g}" if epsilon < 1 else "–"

    def rate(self, variant, setting):
        """The setting that a variant has chosen, None where none is chosen."""
        words, _, other = setting.partition(" of ")
        return self.chosen.get(f"{self.name}: {words}, {other or variant}")


def place(setting):
    """A setting in words."""
    return next((re.sub(pattern, words, setting) for pattern, words in PLACES.items()
                 if re.fullmatch(pattern, setting)), setting)


def compared(name, found):
    """A row for each variant in each setting of a question; below them its other differences."""
    seen = Seen(name, found)
    figure = seen.question.by
    rows, others = [], []
    for label, rule in seen.question.rules.items():
        (_, one, setting, of), *rest = split_terms(rule.of)
        if of != figure or label.startswith("choosing"):
            continue
        other = rest[0][1] if rest else "GRPO"
        both = [seen.difference(one, other, setting, which) for which in (of, "speed")]
        if not rest:
            rate = (seen.rate(one, setting) or "").rpartition(" ")[2]
            rows.append((place(setting), one + f" at {rate}" * bool(rate),
                         seen.show(one, setting, of), *both,
                         seen.show(one, setting, "clip_signal"), seen.narrow(one, setting),
                         seen.show(one, setting, "dropped")))
        elif other != "GRPO":
            others.append((place(setting), f"{one} − {other}", "", *both, "", "", ""))
    what = {"after": "final pass@1", "reward": "held-out reward"}[figure]
    order = list(dict.fromkeys(row[0] for row in rows))
    return table((f"`{name}`: {found['lines'][name]}", "arm", what, f"{what}: minus GRPO",
                  "speed: minus GRPO", "share", "ε/σ", "dropped"),
                 *sorted(rows + others, key=lambda row: order.index(row[0])))


def decides(found):
    """The predicted differences of all questions but those of w from GRPO, a row each."""
    rows = []
    for name in NEW:
        seen = Seen(name, found)
        for rule in seen.question.rules.values():
            (_, one, setting, of), *rest = split_terms(rule.of)
            if not rule.predicted or one.startswith("w,") or not seen.numbers[rule.of]["seeds"]:
                continue
            other = rest[0][1]
            both = lambda show: "/".join(show(arm) for arm in (one, other))
            rows.append((place(setting), f"{one} − {other}",
                         both(lambda arm: seen.show(arm, setting, "clip_signal", 2)),
                         both(lambda arm: seen.narrow(arm, setting)),
                         seen.difference(one, other, setting, of),
                         seen.difference(one, other, setting, "speed")))
    return table(("situation", "arms", "share", "ε/σ", "final", "speed"), *rows)


def usable_rates(found):
    """What the choosing seeds of `fair` reach at each rate."""
    seen = Seen("fair", found)
    rows = []
    for length, arm in itertools.product(("21", "61"), FAIR_ARMS):
        cells = []
        for setting in (f"{length} {rate}" for rate in FAIR_RATES):
            collapsed = seen.numbers[f"{arm}@{setting}:collapsed"]
            cells.append("–" if collapsed["mean"] is None else
                         f"{seen.show(arm, setting, 'after')} "
                         f"({collapsed['mean'] * collapsed['seeds']:.0f} of {collapsed['seeds']}; "
                         f"{seen.show(arm, setting, 'clip_signal', 2)}; "
                         f"{seen.narrow(arm, setting)})")
        rows.append((f"{arm}, {length} tokens", *cells))
    return table(("final pass@1 (collapsed; share; ε/σ)", *FAIR_RATES), *rows)


def toy_lengths(toy):
    """toy.py's policy at its five lengths: differences from GRPO."""
    lengths = (8, 24, 80, 240, 800)
    rows = [(words, *(toy[name.format(L)] for L in lengths)) for words, name in (
        ("the paper's range, rate .05", "toy paper {} at .05"),
        ("the paper's range, own rates", "toy paper {} own"),
        ("wide, own rates", "toy wide {} own"))]
    return table(("mean exact pass rate of 16 batches: minus GRPO",
                  *(f"{L} digits" for L in lengths)), *rows)


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
