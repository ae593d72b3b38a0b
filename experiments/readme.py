"""Writes every measured figure of README.md and docs/*.md from results/*.json.

    python experiments/readme.py

The text between `<!-- NAME -->` and `<!-- /NAME -->` is written by a function of BLOCKS; a figure
inside a sentence, between `<!-- =NAME -->` and `<!-- / -->`, by a function of FIGURES. A test
checks that the documents agree with the results.
"""

import argparse
import ast
import json
import math
import re
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from experiments.shared import sentences, which                                         # noqa: E402
from experiments.shared.run_claims import GROUPS, holm                                  # noqa: E402
from losses import OBJECTIVES                                                           # noqa: E402
from plumbing.run.arguments import ALGORITHMS  # noqa: E402
from tools.trl import trl_loss                                                       # noqa: E402


def load(name):
    return json.loads((ROOT / f"results/{name}.json").read_text())


def data(name):
    return load(name)["data"]


def docstring(file):
    return ast.get_docstring(ast.parse(file.read_text()))


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def table(head, *rows):
    """A markdown table. A | inside a cell is escaped."""
    line = lambda cells: "| " + " | ".join(str(c).replace("|", "\\|") for c in cells) + " |"
    return "\n".join([line(head), line(["---"] * len(head)), *map(line, rows)])


# ------------------------------------------------------------------------------ single figures

def perplexity_start(name):
    """Perplexity of the first rollout batch, averaged over cold starts. name: how it is averaged
    over answers."""
    return mean(curve[0] for curve in data("perplexity_dynamics")[name])


def moved():
    """(tokens of a long answer, s - 1 if the log-prob of one of its tokens changes by 3 nats)."""
    rows = data("hidden_divergence")["rows"]
    length = round(mean(row["length"] for row in rows if 200 < row["length"] < 300))
    return length, math.expm1(3 / length)


def hidden():
    """Share of the answers within GSPO's clip range that have a token outside GRPO's, over all
    lengths."""
    rows = data("hidden_divergence")["rows"]
    return sum(r["hidden"] * r["calm"] for r in rows) / sum(r["calm"] for r in rows)


def clipped(name):
    rows = data("clipped_tokens")[name]
    return mean(a + b for a, b in zip(rows["low"], rows["high"]))


def noise_slope(name):
    return f"{mean(data('gradient_noise')['slopes'][name]):.2f}".replace("-", "−")


def default_run(key):
    return mean(run[key] for run in load("reference_runs")["default"]["runs"])


def smollm2(key):
    return mean(run[key] for run in load("reference_runs")["smollm2"]["runs"])


FIGURES = {
    "bands": lambda: f"{OBJECTIVES['grpo'].epsilon / OBJECTIVES['gspo'].epsilon:.0f}",
    "outside": lambda: f"{mean(data('product_ratio')['outside']['s']):.0%}",
    "slope_grpo": lambda: noise_slope("GRPO"),
    "slope_gspo": lambda: noise_slope("GSPO"),
    "slope_none": lambda: noise_slope("no ratio"),
    "slope_product": lambda: noise_slope("sequence IS, ∏w"),
    "moved_length": lambda: f"{moved()[0]}",
    "moved_by": lambda: f"{moved()[1]:.1%}",
    "moved_bands": lambda: f"{moved()[1] / OBJECTIVES['gspo'].epsilon_high:.0f}",
    "fits_from": lambda: f"{math.ceil(3 / math.log1p(OBJECTIVES['gspo'].epsilon_high)):,}",
    "hidden": lambda: f"{hidden():.0%}",
    "ppl_mean_of_exp": lambda: f"{perplexity_start('mean_of_exp'):.3f}",
    "ppl_exp_of_mean": lambda: f"{perplexity_start('exp_of_mean'):.3f}",
    "identity_float32": lambda: f"{max(data('perplexity_identity')['float32']['max']):.1e}",
    "identity_float64": lambda: f"{max(data('perplexity_identity')['float64']['max']):.1e}",
    "identity_batch": lambda: f"{mean(data('perplexity_identity')['batch']['mean']):.1e}",
    "identity_batch_h": lambda: f"{mean(data('perplexity_identity')['batch_h']['mean']):.1e}",
    "identity_bfloat16": lambda: f"{mean(data('perplexity_identity')['bfloat16']['mean']):.1e}",
    "clipped_gspo": lambda: f"{clipped('gspo'):.0%}",
    "clipped_grpo": lambda: f"{clipped('grpo'):.2%}",
    "default_before": lambda: f"{default_run('pass_at_1_before'):.3f}",
    "default_after": lambda: f"{default_run('pass_at_1_after'):.3f}",
    "default_greedy": lambda: f"{default_run('greedy_after'):.3f}",
    "default_seconds": lambda: f"{default_run('seconds'):.0f} s",
    "smollm2_before": lambda: f"{smollm2('pass_at_1_before'):.3f}",
    "smollm2_after": lambda: f"{smollm2('pass_at_1_after'):.3f}",
    "smollm2_seconds": lambda: f"{smollm2('seconds'):.0f} s",
    "lora_after": lambda: f"{load('reference_runs')['lora']['runs'][0]['pass_at_1_after']:.3f}",
    "lora_mb": lambda: f"{load('reference_runs')['lora']['beside']['lora']['peak_mb']:,}",
    "full_mb": lambda: f"{load('reference_runs')['lora']['beside']['full']['peak_mb']:,}",
    "distilled": lambda: which.with_interval("teacher - verifier"),
    "distilled_both": lambda: which.with_interval("both - verifier"),
    "distilled_self": lambda: f"{mean(data('distillation')['after']['self']):.2f}",
    "sdpo_takeaway": lambda: load("family_flags")["takeaway"],
}


# ---------------------------------------------------------------------------------- the claims

def result(name):
    """The committed result of a claim, or None if there is none."""
    return load(name) if (ROOT / f"results/{name}.json").is_file() else None


def verdict(found):
    """A verdict in a word or two. For a result with several verdicts, how many of each."""
    parts = found["verdict"].split("; ")
    return found["verdict"].split(":")[0] if len(parts) == 1 else f"{len(parts)} answers"


def claims():
    """The table of claims in README: one row per group, described by its first claim that has a
    result."""
    rows = []
    for group, (question, names) in GROUPS.items():
        name = next(name for name in names if result(name))
        found = result(name)
        link = f"[{verdict(found)}](docs/claims.md#{group.replace(' ', '-')})"
        rows.append((question, found["reported"].split(";")[0][:88], found["number"], link))
    return table(("question", "the sources", f"here: {regime()}", "verdict"), *rows)


def regime():
    """The setting in which most claims were measured. Claims with another one say so in
    docs/claims.md."""
    return Counter(found["regime"] for found in all_results()).most_common(1)[0][0]


def all_results():
    names = [name for _, names in GROUPS.values() for name in names]
    return [found for name in names if (found := result(name))]


def verdicts():
    """Every claim with its verdict, its p-value, and the p-value after Holm's correction over all
    rows."""
    found = all_results()
    form = lambda p: "–" if p is None else "< 0.001" if p < 5e-4 else f"{p:.3f}"
    rows = [(r["claim"], r["number"], r["verdict"].split(":")[0], form(r["p"]), form(p))
            for r, p in zip(found, holm([r["p"] for r in found]))]
    return (f"Regime: {regime()}; a claim measured in another regime\nnames it below. p: the "
            "chance of so extreme an interval if the true value equals the rule's\nbound; Holm: "
            "the same over all rows together. A verdict whose Holm p is above 0.05 may\n"
            "be chance among so many. Verdicts on several doses or places have no p.\n\n"
            + table(("claim", "number", "verdict", "p", "Holm"), *rows))


def rule(name):
    """The rule that was written beforehand: the indented lines of the experiment's docstring."""
    doc = docstring(ROOT / f"experiments/{name}.py")
    after = doc[re.search("beforehand|before the", doc).start():]
    lines = [line for line in after.splitlines() if line.startswith("  ")]
    return "\n".join(line[2:] for line in lines)


def all_claims():
    """The text of docs/claims.md: every claim with its figure, number, verdict, rule and
    measurement."""
    parts = []
    for group, (question, names) in GROUPS.items():
        parts.append(f"## {group.capitalize()}\n\n{question}")
        parts += [one_claim(name, result(name)) for name in names if result(name)]
    return "\n\n".join(parts)


def one_claim(name, r):
    takeaway = f"\n\n{r['takeaway']}" if r.get("takeaway") else ""
    seeds = "" if "seed" in r["verdict"] else f" ({r['seeds']} cold starts)"
    return (f"### {r['claim']}\n\n"
            f"**{r['number']}.** Verdict: **{r['verdict']}**{seeds}. "
            f"In the source ({r['source']}): {r['reported']}. Measured with: {r['regime']}."
            f"{takeaway}\n\n"
            f"![{r['claim']}]({r['figure'].removeprefix('docs/')})\n\n"
            f"<details><summary>the rule, written beforehand, and the measurement</summary>\n\n"
            f"```\n{rule(name)}\n```\n\n"
            f"Measured: {r['measured']}.\n\n"
            f"`{r['command']}`; data: [results/{name}.json](../results/{name}.json)\n\n</details>")


# ------------------------------------------------------------- the family, the reference runs

# What the table says beside an objective's arXiv id.
REMARKS = {
    "ppo": " eq. 7, with GAE and a critic", "grpo": " eq. 3",
    "dr_grpo": ", advantages without std", "dapo": ", as implemented everywhere",
    "dapo_paper": " eq. 8, as printed", "gspo": " eq. 5, 7", "gspo_token": " eq. 13, 14",
    "rspo": " v2", "cispo": " eq. 4, 5", "sequence_is": " importance sampling",
    "ipo": " #2798 (2026-06)", "kpop": ", KPop in its documentation",
    "rollout_is": " (GLM-5)", "dro": ", as in verl #7245",
}
# Where an objective is implemented: of TRL, verl, slime, prime-rl, SkyRL, NeMo-RL, ms-swift,
# OpenRLHF, AReaL and ROLL.
IMPLEMENTED = {
    "reinforce": "NeMo-RL, ROLL", "ppo": "verl, OpenRLHF, AReaL, ROLL",
    "grpo": "TRL, verl, slime, NeMo-RL, ms-swift, OpenRLHF, AReaL, ROLL",
    "dr_grpo": "TRL, verl, ms-swift, ROLL",
    "dapo": "TRL, verl, NeMo-RL, ms-swift, OpenRLHF, AReaL, ROLL",
    "gspo": "TRL, verl, slime, NeMo-RL, ms-swift, OpenRLHF, AReaL, ROLL",
    "gspo_token": "verl, ms-swift",
    "gmpo": "TRL, verl", "cispo": "TRL, verl, slime, SkyRL, NeMo-RL, ms-swift, AReaL, ROLL",
    "dppo": "verl, slime, SkyRL, prime-rl", "dppo_kl": "verl", "kpop": "AReaL",
    "ipo": "prime-rl", "rollout_is": "SkyRL",
    "dro": "verl, Tinker", "sapo": "TRL, verl, ms-swift, AReaL", "luspo": "TRL", "vespo": "TRL",
}
SHOWN_AS = {"GSPO": "gspo", "GRPO": "grpo", "GMPO": "gmpo", "RSPO": "rspo", "DAPO": "dapo",
            "Dr. GRPO": "dr_grpo", "CISPO": "cispo", "SAPO": "sapo", "PPO": "ppo",
            "REINFORCE, one step": "reinforce", "RLOO, one step": "rloo",
            "REINFORCE++": "reinforce_plus_plus",
            "LUSPO": "luspo", "VESPO": "vespo", "SRPO": "srpo", "sequence IS": "sequence_is",
            "DPPO": "dppo", "DPPO, KL": "dppo_kl", "MaxRL": "maxrl", "ScaleRL": "scalerl",
            "MiniRL": "minirl", "IPO": "ipo", "rollout IS": "rollout_is", "IcePop": "icepop",
            "DRO": "dro"}


def family():
    """The table of objectives: the choices of each, its paper, the frameworks that have it, and
    TRL's name."""
    rows = []
    for name, row in OBJECTIVES.items():
        band = "–" if row.epsilon is None else f"{row.epsilon:g}, {row.epsilon_high:g}"
        constants = ", ".join(f"`{key}={x:g}`" for key, x in row.constants.items()) or "–"
        paper = row.source + REMARKS.get(name, "") or "–"
        rows.append((f"`{name}`", row.ratio, row.clip, band, constants, row.reduction, paper,
                     IMPLEMENTED.get(name, "–"), trl_name(name)))
    return table(("name", "ratio", "clip", "ε low, high", "constants", "reduction", "paper",
                  "where it is implemented", "TRL 1.16"), *rows)


def trl_name(name):
    """The arguments of trl.GRPOConfig that select this objective."""
    if name == "gmpo":
        return "`trl.experimental.gmpo`"
    if name == "ppo" or not trl_loss(OBJECTIVES[name]):
        return "–"
    loss_type, level = trl_loss(OBJECTIVES[name])
    level = "" if level == "token" else f', importance_sampling_level="{level}"'
    return f'`loss_type="{loss_type}"{level}`'


def presets():
    """The table of presets: the objective of each --algorithm, the flags that it sets, and its
    pass@1."""
    def flags(row):
        words = [f"--{k}" if v is True else f"--{k} {v}"
                 for k, v in row.items() if k != "objective"]
        return f"`{' '.join(words)}`" if words else "–"
    found = data("family_rewards")
    after = {SHOWN_AS[name]: f"{mean(values):.3f} ({len(values)})"
             for name, values in (found["after"] | found["later"]).items() if name in SHOWN_AS}
    rows = [(f"`{name}`", f"`{row['objective']}`", flags(row), after.get(name, "–"))
            for name, row in ALGORITHMS.items()]
    return table(("--algorithm", "objective", "fills in",
                  f"pass@1 after {found['steps']} batches (seeds)"), *rows)


def family_flags():
    """The table of flags that other frameworks share: pass@1 with each and beside it without."""
    rows = [(f"`{r['flags']}`", f"{r['before']:.3f}", f"{r['after']:.3f}", f"{r['without']:.3f}",
             r["minus"], r["seeds"]) for r in data("family_flags")["table"]]
    return table(("flags", "pass@1 before", "after", "after, without", "difference",
                  "cold starts"), *rows)


def self_distillation():
    """The table of self-distillation: pass@1 of each kind on the running sum and on SmolLM2."""
    def cell(found):
        return f"{found['before']:.3f} → {found['after']:.3f} ({found['seeds']})" if found else "–"
    rows = [(r["arm"], f"`{r['flags']}`", cell(r.get("moe")), cell(r.get("SmolLM2")))
            for r in data("family_flags")["teachers"]]
    return table(("", "flags", "running sum (seeds)", "SmolLM2, larger of two (seeds)"), *rows)


def headline():
    runs = load("reference_runs")["default"]
    after = mean(r["pass_at_1_after"] for r in runs["runs"])
    head = ("held-out pass@1 before", "after 50 rollout batches", "greedy after", "total time")
    row = (FIGURES["default_before"](), f"**{after:.3f}**", FIGURES["default_greedy"](),
           f"**{FIGURES['default_seconds']()}**")
    return (table(head, row)
            + f"\n\nMean of {len(runs['runs'])} cold starts on {runs['machine']}.")


def league():
    """The table of docs/league.md: the members that have all of their runs, and who has not."""
    file = ROOT / "results/league_runs.jsonl"
    runs = file.read_text().splitlines() if file.is_file() else []
    rows = result("league")["data"]["table"] if result("league") else []
    entered = {row["member"] for row in rows}
    waiting = [f"`{name}`" for name in ALGORITHMS if name not in entered | {"gspo_token"}]
    made = f"{len(runs)} runs."
    if waiting:
        made += f" Not entered yet: {', '.join(waiting)}."
    if not rows:
        return f"No member has all of its runs yet, so nobody has a rank. {made}"
    places = {row["member"]: row["rank"][0] for row in rows}
    shown = [(place_of(row), f"`{row['flags']}`", which.rate(row["rate"]),
              f"{row['mean']:.3f} [{row['low']:.3f}, {row['high']:.3f}]",
              in_ranges([places[name] for name in row["near"]]) or "–",
              "–" if row["to_goal"] is None else "{:,} in {:g} s".format(*row["to_goal"]),
              f"{row['samples']:,}",
              "none" if row["survived"] is None else which.rate(row["survived"]))
             for row in rows]
    head = ("rank [95 %]", "flags", "rate", "pass@1 [95 %]", "not told apart from ranks",
            "samples to 0.9", "samples in all", "largest rate survived")
    return (table(head, *shown) + f"\n\n{result('league')['takeaway']} {made}\n\n"
            "![held-out pass@1 of every member on the fresh cold starts](figures/league.png)")


def place_of(row):
    place, low, high = row["rank"]
    return f"{place} [{low}, {high}]"


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


def stability():
    """The table of results/moe_stability.json: every arm with its collapses and its final
    pass@1."""
    rows = []
    for r in load("moe_stability")["table"]:
        flips = " ".join(f"{100 * x:.1f}" for x in r["flips_per_layer"] or ())
        rows.append((r["policy"], r["answers"], f"{r['optim']} {r['rate']:g}", r["minibatches"],
                     r["arm"], f"{r['collapsed']} of {r['runs']}",
                     "{:.2f}–{:.2f}".format(*r["interval"]), f"{mean(r['last']):.2f}",
                     f"{mean(r['held_out']):.2f}", flips or "–", f"{r['w_negative']:.3g}",
                     f"{r['grad_norm']:.3g}"))
    return table(("policy", "answers", "optimizer, rate", "mini-batches", "arm", "collapsed",
                  "95 %", "pass rate, last 4", "held out", "flips per layer (%)", "max w, A < 0",
                  "max |g|"), *rows)


def read_off():
    """Sentences of the sources that can be judged by the runs of the stability map."""
    return table(("sentence", "computed from the map's runs", "mean", "cold starts"),
                 *sentences.rows())


def rooms():
    """The list of all files that a first reader can skip, each with the beginning of its
    docstring."""
    parts = []
    rooms_of_plumbing = sorted((ROOT / "plumbing").glob("[!_]*/"))
    for folder in (*rooms_of_plumbing, ROOT / "tools", ROOT / "experiments/shared"):
        room = folder.relative_to(ROOT)
        rows = []
        for file in sorted(folder.glob("[!_]*.py")):
            about = docstring(file).split("\n\n")[0]
            rows.append((f"[`{file.name}`](../{room}/{file.name})", " ".join(about.split())))
        parts.append(table((f"`{room}/`", ""), *rows))
    return "\n\n".join(parts)


BLOCKS = {"rooms": rooms, "read off": read_off,
          "headline": headline, "claims": claims, "verdicts": verdicts,
          "all claims": all_claims, "family": family, "family flags": family_flags,
          "self distillation": self_distillation, "presets": presets,
          "stability": stability, "league": league,
          "which": which.page, "which in short": which.short}


def of_benchmarks():
    """{name: text} that the benchmarks wrote beside their measurements."""
    return {name: text for file in ("versus_trl", "scaling", "memory", "simulated", "bfloat16",
                                    "engines") for name, text in load(file)["texts"].items()}


# --------------------------------------------------------------------------------- the documents

def documents():
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def build(text):
    """The text of a document with its marked parts generated again. Raises ValueError for an
    unknown mark."""
    measured = of_benchmarks()

    def block(match):
        if match[1] not in BLOCKS:
            raise ValueError(f"<!-- {match[1]} --> is no block of experiments/readme.py")
        return f"<!-- {match[1]} -->\n{BLOCKS[match[1]]()}\n<!-- /{match[1]} -->"

    def figure(match):
        if match[1] not in FIGURES and match[1] not in measured:
            raise ValueError(f"<!-- ={match[1]} --> is no figure of experiments/readme.py")
        text = measured[match[1]] if match[1] in measured else FIGURES[match[1]]()
        return f"<!-- ={match[1]} -->{text}<!-- / -->"

    text = re.sub(r"<!-- ([a-z][\w ]*) -->.*?<!-- /\1 -->", block, text, flags=re.S)
    return re.sub(r"<!-- =(\w+) -->.*?<!-- / -->", figure, text, flags=re.S)


if __name__ == "__main__":
    help_form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=help_form).parse_args()
    for file in documents():
        file.write_text(build(file.read_text()))
