"""Writes every measured figure of the pages.

    python experiments/fill.py

A table of figures stands below a line `<!-- =NAME -->` and an empty line. The figures of a sentence
are {NAME} in experiments/sentences.py. Names come from experiments/results/numbers.json, which
experiments/run.py writes, and from `texts` in the results of benchmarks:

    learning: against GRPO          mean and 95 % interval of a rule
    mean learning: against GRPO     the mean alone
    chosen learning: GRPO, mb4      the rate of the chosen cell
    table learning                  the rules of a question with their intervals and verdicts
    lost dose                       what each variant loses in its settings
    verdicts, league, reuse         three other tables of docs/evidence.md
    uses, uses in short             how often an arm may use a batch

A test checks that the pages are what this writes.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import mode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

from losses import OBJECTIVES                                                        # noqa: E402
from questions import EQUAL, FIRST, QUESTIONS, REUSED                               # noqa: E402
from sentences import SENTENCES                                                     # noqa: E402

TABLE = re.compile(r"<!-- =([^>]+) -->\n\n(?:\|.*\n)+")
NAME = re.compile(r"\{(.+?)\}")
FIGURE = r"((?:(?!\n\n).){1,400}?)"              # as short as the words around it allow
OLD_MARK = re.compile(r"<!-- =([^>]+) -->.*?<!-- / -->", re.S)       # of README, until it is moved


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def texts():
    """{name: text} of all that pages can quote."""
    found = json.loads((ROOT / "experiments/results/numbers.json").read_text(encoding="utf-8"))
    first, *others = found["league"]
    ratio = OBJECTIVES["grpo"].epsilon / OBJECTIVES["gspo"].epsilon
    names = {"verdicts": verdicts(found), "league": league(found["league"]),
             "members": str(len(others) + 1),
             "members near the first": str(sum(row["near"] for row in others)),
             "samples of the first": f"{first['samples'] / others[-1]['samples']:.1f}",
             "uses": uses(found["numbers"]), "uses in short": uses(found["numbers"], False),
             "reuse": reuse(found["numbers"]), "bands": f"{ratio:.0f}"}
    for key, number in found["numbers"].items():
        if number["mean"] is not None:
            question, _, rule = key.partition(": ")
            form = QUESTIONS[question].rules[rule].form
            names[key] = interval(number, form)
            names[f"mean {key}"] = signed(form.format(number["mean"]))
    names |= {f"table {question}": rules(question, found["numbers"]) for question in QUESTIONS}
    names |= {f"lost {question}": lost(question, found["numbers"]) for question in ("dose", "lags")}
    names |= {f"chosen {key}": rate(cell) for key, cell in found["chosen"].items()}
    for file in sorted((ROOT / "experiments/results").glob("*.json")):
        names |= json.loads(file.read_text(encoding="utf-8")).get("texts", {})
    return names


def interval(number, form):
    if number["mean"] is None:
        return "–"
    middle, low, high = (signed(form.format(number[key])) for key in ("mean", "low", "high"))
    return middle if number["starts"] == "1" else f"{middle} [{low}, {high}]"


def signed(text):
    """With a true minus, as in the pages' prose."""
    return re.sub(r"(?<![\de])-", "−", text)


def rate(cell):
    """The rate of a cell such as "mb4 0.0006", as 6e-4."""
    digits, exponent = f"{float(cell.split()[-1]):e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def table(head, *rows):
    line = lambda cells: "| " + " | ".join(str(x).replace("|", r"\|") for x in cells) + " |"
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)]) + "\n"


def verdicts(found):
    """Every question that has a verdict, the number of its first rule with this verdict, and Holm's
    p over all rows."""
    rows = []
    for name, question in QUESTIONS.items():
        if not question.decides:
            continue
        answer = found["verdicts"][name]
        p = answer["holm"]
        of = {rule: found["numbers"][f"{name}: {rule}"] for rule in question.decides}
        rule = next((rule for rule in of if of[rule]["verdict"] == answer["verdict"]), [*of][0])
        number = interval(of[rule], question.rules[rule].form)
        rows.append((question.claim, question.source, number, answer["verdict"],
                     "–" if p is None else "< 0.001" if p < 5e-4 else f"{p:.3f}"))
    return table(("claim", "source", "number", "verdict", "p"), *rows)


def rules(name, numbers):
    """The rules of a question that have a verdict, in the unit of the first."""
    question = QUESTIONS[name]
    unit = question.rules[(*question.decides, *question.rules)[0]].form
    found = {rule: numbers[f"{name}: {rule}"] for rule, words in question.rules.items()
             if words.form == unit and numbers[f"{name}: {rule}"]["mean"] is not None}
    judged = {rule: number for rule, number in found.items() if not question.rules[rule].reported}
    if not judged:
        return ""
    starts = mode(number["starts"] for number in judged.values())
    rows = [(rule, interval(number, unit), in_a_word(number, question.rules[rule].nothing))
            for rule, number in judged.items()]
    return table((f"`{name}`, {starts} starts", "mean [95 %]", "verdict"), *rows)


def lost(name, numbers):
    """What each variant loses in each setting, by the rules "lost by VARIANT at SETTING"."""
    found = {}
    for key, number in numbers.items():
        if match := re.fullmatch(f"{name}: lost by (.+) at (.+)", key):
            found[match.groups()] = interval(number, "{:+.3f}")
    settings = dict.fromkeys(setting for _, setting in found)
    rows = [(variant, *(found.get((variant, setting), "–") for setting in settings))
            for variant in dict.fromkeys(variant for variant, _ in found)]
    return table(("lost", *settings), *rows)


def uses(numbers, sizes=True):
    """How often each arm is shown to gain from using a batch, of 1, 2 and 4 times, at equal
    samples."""
    said = []
    for arm in FIRST:
        of = {mu: numbers[f"reuse: {arm} gains from μ = {mu}, equal samples"] for mu in (4, 2)}
        gains = [mu for mu, number in of.items() if number["verdict"] == "held"]
        words = f"{arm} {gains[0]} times" if gains else f"{arm} {in_a_word(of[4], EQUAL)}"
        number = interval(of[gains[0] if gains else 4], "{:+.3f}")
        said.append(words + f" ({number})" * sizes)
    return ", ".join(said)


def reuse(numbers):
    """What each arm gains from μ uses of a batch, and from which μ on its clip acts."""
    columns = {"μ = 2, equal samples": "{} gains from μ = 2, equal samples",
               "μ = 4": "{} gains from μ = 4, equal samples",
               "μ = 4, equal steps": "{} gains from μ = 4, equal optimizer steps",
               "minus GRPO, from μ = 1 to 4": "{} minus GRPO grows from μ = 1 to 4"}
    rows = []
    for arm in REUSED:
        of = [numbers.get(f"reuse: {rule.format(arm)}") for rule in columns.values()]
        acts = [f"μ = {mu}" for mu in (1, 2, 4)
                if numbers[f"reuse: the clip of {arm} acts at μ = {mu}"]["verdict"] == "held"]
        rows.append((arm, *(f"{interval(n, '{:+.3f}')} {in_a_word(n, EQUAL)}" if n else "–"
                            for n in of), [*acts, "not shown"][0]))
    return table((f"`reuse`, {len(QUESTIONS['reuse'].starts)} starts", *columns,
                  "its clip acts from"), *rows)


def in_a_word(number, nothing):
    """A verdict without its starts; "equal" for an interval within ±nothing."""
    word = number["verdict"].partition(" ")[0]
    if word == "refuted" and -nothing <= number["low"] <= number["high"] <= nothing:
        return "equal"
    return word


def league(rows):
    """Members with the clip range that was chosen for them, where it is not the published one."""
    rank = lambda row: "{} [{}–{}]".format(*row["rank"]) if row["rank"] else "made elsewhere"
    band = lambda row: ", ".join(re.findall(r"--epsilon\S* (\S+)", row["flags"]))
    shown = [(rank(row), f"`{row['member']}` {band(row)}".strip(), rate(row["cell"]),
              f"{row['interval'][0]:.3f}") for row in rows]
    return table(("rank [95 %]", "member, clip range", "rate", "pass@1"), *shown)


def fill(text, names, sentences=""):
    """A page with its tables and the figures of its sentences written again.

    Raises ValueError for an unknown name and for a sentence that is not on the page, or twice."""
    def known(name):
        if name not in names:
            raise ValueError(f"{{{name}}} is not a name of experiments/fill.py")
        return names[name].strip("\n")

    text = OLD_MARK.sub(lambda mark: f"<!-- ={mark[1]} -->{known(mark[1])}<!-- / -->", text)
    text = TABLE.sub(lambda mark: f"<!-- ={mark[1]} -->\n\n{known(mark[1])}\n", text)
    for sentence in filter(None, map(" ".join, map(str.split, sentences.split("\n\n")))):
        found = list(re.finditer(pattern(sentence), text, re.S))
        if len(found) != 1:
            raise ValueError(f"experiments/sentences.py: '{sentence}' is on the page {len(found)} "
                             "times, not once")
        for i, name in reversed([*enumerate(NAME.findall(sentence), 1)]):
            start, end = found[0].span(i)
            if text[start:end].split() != known(name).split():           # else its lines stay
                text = text[:start] + known(name) + text[end:]
    return text


def pattern(sentence):
    """The regular expression of whole words of a page, with a group for each figure."""
    words = re.split(r"\{.+?\}", sentence)
    parts = (r"\s+".join(map(re.escape, part.split(" "))) for part in words)
    return rf"(?<!\w){FIGURE.join(parts)}(?!\w)"


def filled(page, names):
    """The text of a page as it should be. Raises ValueError with the page's name."""
    name = str(page.relative_to(ROOT))
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
