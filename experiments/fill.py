"""Writes every measured figure of the pages: text between `<!-- =NAME -->` and `<!-- / -->`.

    python experiments/fill.py               all pages
    python experiments/fill.py --names       the names there are

Names come from experiments/results/numbers.json, which experiments/run.py writes, and from
`texts` in the results of benchmarks:

    learning: against GRPO          mean and 95 % interval of a rule
    mean learning: against GRPO     the mean alone
    verdict learning                the verdict of a question; of a rule likewise
    chosen learning: GRPO, mb4      the rate of the chosen cell; `survived …`: the largest rate that
                                    ends above its start
    table learning                  the rules of a question with their intervals and verdicts
    verdicts, league, member grpo   the two tables of docs/evidence.md, the mean of a member

A test checks that the pages are what this writes.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "experiments")]

from losses import OBJECTIVES                                                        # noqa: E402
from questions import QUESTIONS                                                      # noqa: E402

MARK = re.compile(r"<!-- =([^>]+) -->.*?<!-- / -->", re.S)

SHORT = {   # names of figures that stand in a sentence
    **{f"default_{what}": f"mean default: {what}" for what in ("before", "after", "greedy",
                                                                "seconds")},
    **{f"smollm2_{what}": f"mean smollm2: {what}" for what in ("before", "after", "seconds")},
    "lora_after": "mean smollm2: LoRA after", "lora_mb": "mean smollm2: LoRA memory",
    "full_mb": "mean smollm2: memory", "clipped_gspo": "mean clipped: GSPO's share",
    "clipped_grpo": "mean clipped: GRPO's share",
    "outside": "mean bounded: s leaves the band in less than 1 % of answers",
    "identity_float32": "mean identity: in float32",
    "identity_float64": "mean identity: in float64"}


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def texts():
    """{name: text} of all that pages can quote."""
    found = json.loads((ROOT / "experiments/results/numbers.json").read_text())
    first, *others = found["league"]
    names = {"verdicts": verdicts(found), "league": league(found["league"]),
             "members": str(len(others) + 1), "members near the first": str(len(first["near"])),
             "samples of the first": f"{first['samples'] / others[-1]['samples']:.1f}"}
    names |= {f"member {row['member']}": f"{row['interval'][0]:.3f}" for row in found["league"]}
    for key, number in found["numbers"].items():
        if number["mean"] is not None:
            question, _, rule = key.partition(": ")
            form = QUESTIONS[question].rules[rule].form
            names[key] = interval(number, form)
            names[f"mean {key}"] = signed(form.format(number["mean"]))
            names[f"verdict {key}"] = number["verdict"]
    for question, answer in found["verdicts"].items():
        names[f"verdict {question}"] = answer["verdict"]
        names[f"runs {question}"] = f"{found['made'][question]:,}"
        if QUESTIONS[question].decides:
            names[f"table {question}"] = rules(question, found["numbers"])
    for kind in ("chosen", "survived"):
        names |= {f"{kind} {key}": rate(cell) for key, cell in found[kind].items()}
    for file in sorted((ROOT / "experiments/results").glob("*.json")):
        content = json.loads(file.read_text())
        names |= content.get("texts", {}) if isinstance(content, dict) else {}
    ratio = OBJECTIVES["grpo"].epsilon / OBJECTIVES["gspo"].epsilon
    return names | {short: names[name] for short, name in SHORT.items()} | {"bands": f"{ratio:.0f}"}


def interval(number, form):
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
    line = lambda cells: "| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |"
    return "\n" + "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)]) + "\n"


def verdicts(found):
    """Every question that has a verdict, its first number, and Holm's p over all rows."""
    rows = []
    for name, question in QUESTIONS.items():
        if not question.decides:
            continue
        answer = found["verdicts"][name]
        p = answer["holm"]
        number = found["numbers"][f"{name}: {question.decides[0]}"]
        one = "–" if number["mean"] is None else interval(
            number, question.rules[question.decides[0]].form)
        rows.append((question.claim, question.source, one, answer["verdict"],
                     "–" if p is None else "< 0.001" if p < 5e-4 else f"{p:.3f}"))
    return table(("claim", "source", "number", "verdict", "p"), *rows)


def rules(name, numbers):
    """The rules of a question that have runs, in the unit of the first that decides."""
    rows = []
    unit = QUESTIONS[name].rules[QUESTIONS[name].decides[0]].form
    for rule, words in QUESTIONS[name].rules.items():
        number = numbers[f"{name}: {rule}"]
        if number["mean"] is not None and words.form == unit:
            rows.append((rule, interval(number, words.form), number["starts"],
                         in_a_word(number, words.nothing)))
    return table((f"`{name}`", "mean [95 %]", "starts", "verdict"), *rows)


def in_a_word(number, nothing):
    """A verdict without its starts; "equal" for an interval within ±nothing, and "–" for a number
    that was reported beside the rules."""
    word = number["verdict"].partition(" ")[0]
    if word in ("refuted", "reported") and -nothing <= number["low"] <= number["high"] <= nothing:
        return "equal"
    return "–" if word == "reported" else word


def league(rows):
    flags = lambda row: re.sub(r" --learning_rate \S+", "", row["flags"]).strip()
    rank = lambda row: "{} [{}, {}]".format(*row["rank"]) if row["rank"] else "made elsewhere"
    shown = [(rank(row), f"`{flags(row)}`", rate(row["cell"]),
              "{:.3f} [{:.3f}, {:.3f}]".format(*row["interval"]), in_ranges(row["near"]) or "–",
              f"{row['to_goal']:,.0f}" if row["to_goal"] else "–", f"{row['samples']:,.0f}")
             for row in rows]
    return table(("rank [95 %]", "flags", "rate", "pass@1 [95 %]", "not told apart from",
                  "samples to 0.9", "in all"), *shown)


def in_ranges(places):
    """Whole numbers as text, runs of three and more as a range: [1, 3, 4, 5, 7] as 1, 3–5, 7."""
    parts = []
    for place in sorted(places):
        if parts and parts[-1][-1] == place - 1:
            parts[-1].append(place)
        else:
            parts.append([place])
    return ", ".join(f"{part[0]}–{part[-1]}" if len(part) > 2 else ", ".join(map(str, part))
                     for part in parts)


def fill(text, names):
    """A page with its marked parts written again. Raises ValueError for an unknown name."""
    def known(match):
        if match[1] not in names:
            raise ValueError(f"<!-- ={match[1]} --> is no name of experiments/fill.py (--names)")
        return f"<!-- ={match[1]} -->{names[match[1]]}<!-- / -->"
    return MARK.sub(known, text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--names", action="store_true", help="print the names there are")
    listed = parser.parse_args().names
    names = texts()
    if listed:
        print("\n".join(name for name in names))
    else:
        for page in pages():
            page.write_text(fill(page.read_text(), names))
