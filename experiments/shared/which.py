"""Which should I use, and how wide a band? docs/which.md and the README's lines, from results.

    python experiments/readme.py

A row of ROWS is a question, its answer and figure, what would change it and the results that it
rests on. Every figure is a piece of text out of one of these results, found by a pattern: `said`
raises if it is not there. So no sentence can carry a figure that no result carries.
"""

import json
import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "results"
VALUE = r"([+-][\d.]+ \[[+-][\d.]+, [+-][\d.]+\])"           # a mean and its interval


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def said(name, pattern):
    """The first group of a pattern in what a result says. Raises ValueError if it says no such."""
    result = read(name)
    text = " | ".join(str(result.get(key, "")) for key in ("number", "measured", "takeaway"))
    found = re.search(pattern, text)
    if not found:
        raise ValueError(f"results/{name}.json does not say {pattern!r}: docs/which.md quotes it")
    return found[1]


def versus(arm, other, result="stability_map"):
    """'+0.039 [+0.020, +0.058]' of one arm minus another."""
    return said(result, rf"{re.escape(arm)} minus {re.escape(other)} {VALUE}")


def law(arm):
    return versus(arm, "GRPO", "band_law")


def by_cell(arm, cell):
    """An arm minus GRPO at one rate and number of mini-batches, fresh cold starts."""
    return said("band_law", rf"{re.escape(arm)} minus GRPO [^;]*;[^;]*{re.escape(cell)} {VALUE}")


def best(arm):
    return said("stability_map", rf"; {arm} at its best, ([^ :]+)")


def edge(arm):
    return said("stability_map", rf"largest rate [^;]*{arm} ([^ ,;]+)")


def fell(arm):
    """'3 of 48': runs of an arm that ended below their start."""
    return said("band_law", rf"below their start: (?:[^;]*, )?{re.escape(arm)} (\d+ of \d+)")


def dose(arm, bits="int4"):
    """What an arm loses by trusting a coarse sampler, against a float32 one."""
    return said("band_dose", rf"{bits}: lost by trusting {re.escape(arm)} {VALUE}")


def long_answers():
    """What GRPO loses more than GSPO with the wide band, at int4 and 60 tokens."""
    return said("band_dose", rf"60 tokens, int4: lost by GRPO minus lost by {HUNDRED} {VALUE}")


def lag(arm, k):
    """What an arm loses with samples of the policy of k rollout batches ago."""
    return said("stale_sampler", rf"k = {k}: lost by {re.escape(arm)} {VALUE}")


def coarse():
    if read("band_dose")["verdict"] == "held":
        return "at int4 with GSPO's wide band; else recompute."
    return "recompute them for coarser formats."


def verdict_of_auto():
    found = read("band_law")["verdict"]
    if found == "held":
        return "Yes, for many rates."
    if found == "refuted":
        return "No."
    return "Not shown."


TEN, HUNDRED, AUTO = "GSPO, 10× band", "GSPO, 100× band", "GSPO, auto (c = 2)"

# question, answer, figure, what would change it, results
ROWS = (
    ("Which algorithm?",
     lambda: "GSPO with about 100 times the paper's clip range, or GRPO; GSPO with "
             "the paper's learns less.",
     lambda: f"GSPO minus GRPO {said('stability_map', VALUE + ' against GRPO')}, minus GRPO + "
             f"replay {said('stability_map', VALUE + ' against GRPO . replay')}, each at its best "
             f"rate; with a band 100 times as wide, minus GRPO {versus(HUNDRED, 'GRPO')}, and over "
             f"six step sizes on other cold starts {law(HUNDRED)}.",
     "answers of hundreds of tokens, 48 layers, runs of hundreds of rollout batches: the "
     "setting of GSPO's paper, which was out of reach here",
     ("stability_map", "band_law")),
    ("How wide a band for GSPO?",
     lambda: "About 100 times the paper's here: `--epsilon 0.03 --epsilon_high 0.04`.",
     lambda: f"over six step sizes, minus GRPO: the paper's {law('GSPO')}, 10 times {law(TEN)}, "
             f"100 times {law(HUNDRED)}; on other cold starts, best rates, minus the paper's: "
             f"10 times {versus(TEN, 'GSPO')}, 100 times {versus(HUNDRED, 'GSPO')}.",
     "longer answers, on which s spreads less: look at `epsilon_over_std` in metrics.jsonl",
     ("band_law", "stability_map")),
    ("A band that follows log s, `--epsilon auto`?",
     lambda: verdict_of_auto() + " A wide fixed band is simpler and learned more.",
     lambda: f"minus GRPO over six step sizes {law(AUTO)}; minus the band 100 times as wide "
             f"{versus(AUTO, HUNDRED, 'band_law')}; at 2e-4 with 4 mini-batches "
             f"{by_cell(AUTO, '2e-4 × 4')}, at 8e-4 with 16 {by_cell(AUTO, '8e-4 × 16')}, as "
             f"the band widens just when the policy diverges; {fell(AUTO)} runs ended below their "
             f"start, {fell('GRPO')} of GRPO, {fell(HUNDRED)} with the band 100 times as wide.",
     "another c, a lower upper limit of the band, a longer memory of std(log s)",
     ("band_law",)),
    ("Which learning rate?",
     lambda: "6e-4 for all algorithms; GSPO's clip helps at large rates.",
     lambda: f"best of seven rates: {best('GRPO')} for GRPO and {best('GSPO')} for GSPO; the "
             f"largest that ends above its start is {edge(': GRPO')} for GRPO and "
             f"{edge(', GSPO')} for GSPO, on "
             f"{said('stability_map', r'start .(4 cold starts, undecided)')}.",
     "another model: learning rates do not transfer, their order may",
     ("stability_map",)),
    ("How many mini-batches per rollout batch?",
     lambda: "4. With more, or at a large rate, use GSPO with the wide fixed band.",
     lambda: f"100 times the band minus GRPO: at 2e-4 with 4 {by_cell(HUNDRED, '2e-4 × 4')}, at "
             f"8e-4 with 8 {by_cell(HUNDRED, '8e-4 × 8')}, at 8e-4 with 16 "
             f"{by_cell(HUNDRED, '8e-4 × 16')}.",
     "more cold starts: if runs collapse, a single run can decide a mean",
     ("band_law",)),
    ("What stabilizes GSPO, the clip or the sequence ratio?",
     lambda: "The clip: without one, the sequence ratio collapses.",
     lambda: "GSPO without a clip minus GSPO, at rates of 8e-4 and more with 8 or 16 mini-batches, "
             + said("band_law", rf"8 or 16 mini-batches {VALUE}")
             + " (4 cold starts, exploratory).",
     "small steps, at which no algorithm needs a clip",
     ("band_law",)),
    ("Is routing replay worth it?",
     lambda: "Not here: its gain is within the noise, and it costs time.",
     lambda: f"GRPO + replay minus GRPO {versus('GRPO + replay', 'GRPO')} at the best rates, "
             f"in the roughest setting {said('moe_stability', r'replay repairs it: ' + VALUE)}; "
             f"{read('replay_cost')['number']}.",
     "deeper mixtures, where more experts flip",
     ("stability_map", "moe_stability", "replay_cost")),
    ("Can the sampler's log-probs be trusted?",
     lambda: f"Yes for a bfloat16 sampler; {coarse()}",
     lambda: "at int4 it costs GSPO "
             + said("sampler_noise", r"(\+[\d.]+ \[[^]]+\]) \(int4\)")
             + f", with 100 times the band {dose(HUNDRED)} pass@1; with the paper's band "
             + said("sampler_noise", r"trusting costs GSPO ([+-][\d.]+ \[[^]]+\] \(bfloat16\))")
             + f"; the wide band was run on other cold starts, where int4 costs GRPO "
             f"{dose('GRPO')} and GSPO with the paper's band {dose('GSPO')}, int3 costs GRPO "
             f"{dose('GRPO', 'int3')} and the wide band {dose(HUNDRED, 'int3')}; with answers of "
             f"60 tokens int4 costs GRPO {long_answers()} more than the wide band.",
     "another clip range for GRPO, which was not varied; longer answers",
     ("sampler_noise", "band_dose")),
    ("How old may the samples be?",
     lambda: "As new as possible; with a lag, GSPO with the wide fixed band loses least.",
     lambda: f"lost pass@1 with samples of two and of eight rollout batches ago: GRPO "
             f"{lag('GRPO', 2)} and {lag('GRPO', 8)}, GSPO with the paper's band "
             f"{lag('GSPO', 2)} and {lag('GSPO', 8)}, with 100 times the band {lag(HUNDRED, 2)} "
             f"and {lag(HUNDRED, 8)}, DPPO {lag('DPPO', 2)} and {lag('DPPO', 8)}, MiniRL "
             f"{lag('MiniRL', 2)} and {lag('MiniRL', 8)}.",
     "more rollout batches: with a lag of eight, nine of the sixteen are sampled by the policy at "
     "the start; another clip range for GRPO, which was not varied",
     ("stale_sampler",)),
)
IN_README = 8                                                # of them: the first

NOT_TESTED = (
    "the paper's setting: 48 layers, answers of thousands of tokens, hundreds of rollout batches",
    "one law of the band for all lengths: the same runs at 60 and 130 tokens",
    "the paper's band with a trusted sampler at int3, and with answers of 60 tokens",
    "a stale sampler with lags of 1 and 4, with replay, or over longer runs",
    "GMPO, DPPO, GSPO without a clip, and c = 1 and 4 on the fresh cold starts",
    "a lower limit or a slower memory for `--epsilon auto`; it was not tuned after it was seen",
    "whether sequence likelihoods are left alone by flips (Var[log s] decomposed as Var[log w] is)",
    "a claim about gradient noise by length where ratios are far from 1",
)


def page():
    """docs/which.md: a section per question."""
    parts = []
    for question, answer, figure, change, sources in ROWS:
        links = ", ".join(f"[{name}](../results/{name}.json)" for name in sources)
        parts.append(f"## {question}\n\n**{answer()}** {sentence(figure())}\n\n"
                     f"Measured with: {read(sources[0])['regime']} ({links}). "
                     f"It would change with: {change}.")
    return "\n\n".join([*parts, not_tested()])


def not_tested():
    return "## Not tested\n\n" + "\n".join(f"* {text}." for text in NOT_TESTED)


def short():
    """The README's eight lines: each answer with the first part of its figure."""
    first = lambda text: sentence(text).split(";")[0].rstrip(".")
    return "\n".join(f"* **{question}** {answer()} {first(figure())}."
                     for question, answer, figure, *_ in ROWS[:IN_README])


def sentence(text):
    return text[0].upper() + text[1:]
