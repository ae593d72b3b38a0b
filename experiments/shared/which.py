"""Which should I use, and how wide a band? docs/which.md and README's lines, from named numbers.

    python experiments/which.py        # the numbers, from the maps' runs: results/which.json
    python experiments/readme.py       # the page and README's lines, from the numbers

ROWS holds the answers by regime: a question, its answer in one sentence, one figure, the intervals
behind it, and what would change it. A figure is named: n("name") raises if results/which.json has
no such number, so no sentence can carry a figure that no run carries.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "results"


def result(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


@cache
def numbers():
    return result("which")


def named(name):
    """A number of results/which.json. Raises ValueError if it is not there."""
    if name not in numbers():
        raise ValueError(f"results/which.json has no number {name!r}, which docs/which.md quotes: "
                         "python experiments/which.py")
    return numbers()[name]


def n(name):
    """A named number as text: a difference with its sign, a rate as 6e-4, a count."""
    number = named(name)
    if "digits" in number:
        return f"{number['mean']:+.{number['digits']}f}"
    return rate(number["mean"]) if isinstance(number["mean"], float) else str(number["mean"])


def with_interval(name):
    """A named difference as text: its mean and its 95 % interval."""
    number = named(name)
    low, high = (f"{number[end]:+.{number['digits']}f}" for end in ("low", "high"))
    return f"{n(name)} [{low}, {high}]"


def rate(value):
    """0.0006 as 6e-4, 0.012 as 0.012."""
    if value >= 2e-3:
        return f"{value:g}"
    digits, exponent = f"{value:e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"


def interval(name):
    """A line of the list below an answer: what it is, mean, interval, cold starts, result."""
    number = named(name)
    link = f"[{number['result']}](../results/{number['result']}.json)"
    if "low" not in number:
        return f"* {number['of']}: {n(name)} ({link})"
    of_what = "seeds" if number["result"] == "pretrained" else "cold starts"
    return f"* {number['of']}: {with_interval(name)}, {number['starts']} {of_what} ({link})"


@dataclass
class Row:
    question: str
    answer: str              # one sentence
    figure: str              # one figure, without an interval
    behind: tuple            # names of the numbers whose intervals are listed
    change: str              # what would change the answer
    readme: str = ""         # README's line, without brackets; "": it is not in README


SHORT = ("Short answers, tiny model, float32", "1 M parameters, 4 layers, answers of about 20 "
         "tokens, 10 to 16 rollout batches on a CPU. Pass@1 is held out; differences are paired "
         "by cold start.")
LONG = ("Longer answers, tiny model", "1 M parameters, 4 layers, answers of about 60 tokens, 16 "
        "rollout batches.")
DEEP = ("Deep: 48 layers", "5.8 M parameters, 48 layers of 16 experts, answers of about 9 tokens, "
        "16 rollout batches; the rate at which runs break.")
PRETRAINED = ("A pretrained model: float32, bfloat16, float16", "SmolLM2-135M-Instruct on a CPU; "
              "autocast rounds there as on a GPU.")

DEEP_ANSWERS = {"held": "GSPO with the paper's clip range ends above GRPO.",
                "refuted": "GSPO with the paper's clip range is no better than GRPO."}
SO_FAR = "{} of {} cold starts are run, and nothing is decided."
ALL_RUN = "{} cold starts show no difference between GSPO, GRPO and GRPO with replay."


def depth_answer():
    """What the deciding cell of experiments/depth.py says, in one sentence without figures."""
    verdict = result("depth")["verdict"]
    run = n("starts, 48 layers")
    planned = n("planned starts, 48 layers")
    unsure = SO_FAR.format(run, planned) if int(run) < int(planned) else ALL_RUN.format(run)
    return DEEP_ANSWERS.get(verdict, unsure)


SIXTEEN_BITS = {"held": "Yes: in bfloat16 the paper's clip range learns less than in float32.",
                "refuted": "No: the paper's clip range learns as much in bfloat16 as in float32."}


def sixteen_bits_answer():
    """What the deciding runs of experiments/pretrained.py say, in one sentence without figures."""
    unsure = "Not decided: in bfloat16 and float32 the runs end alike within wide intervals."
    return SIXTEEN_BITS.get(result("pretrained")["verdict"], unsure)


def league_answer():
    """Who leads experiments/league.py and who cannot be told apart from it, in one sentence."""
    first, *others = result("league")["data"]["table"]
    near = ", ".join(first["near"])
    told = f"{near} cannot be told apart from it" if near else "all others are behind it"
    more = ", from more samples" * (first["samples"] > min(row["samples"] for row in others))
    return f"`{first['member']}` has the highest mean of {len(others) + 1} members{more}; {told}."


def rows():
    """{(regime, setting): [Row]}, the sections of docs/which.md."""
    lags = tuple(f"{arm} loses at lag {k}" for arm in ("grpo", "gspo", "gspo_x100", "dppo",
                                                       "minirl") for k in (2, 8))
    at_best = tuple(f"{arm} - grpo, 48 layers, best rates" for arm in (
        "gspo", "gspo_x10", "gspo_x100", "grpo_replay", "grpo_r3", "gmpo", "dppo"))
    others = [name for name in numbers() if name.startswith("league, first - ")]
    behind_first = tuple(name for place, name in enumerate(others, 2)
                         if place <= 5 or name.rpartition(" ")[2] in ("gspo", "grpo", "ppo"))
    first = result("league")["data"]["table"][0]["member"]
    return {SHORT: [
        Row("GSPO or GRPO?",
            "GSPO with about 100 times the paper's clip range, or GRPO; GSPO with the paper's "
            "learns less.",
            f"The wide clip range minus GRPO, mean of six step sizes: "
            f"{n('gspo_x100 - grpo, six step sizes')} pass@1.",
            ("gspo - grpo, best rates", "gspo - grpo_replay, best rates",
             "gspo_x100 - grpo, best rates", "gspo_x100 - grpo, six step sizes",
             "gspo - grpo, the league"),
            "longer answers, deeper models, longer runs (below)"),
        Row("Which algorithm?",
            league_answer(),
            "The first minus the fifth: "
            f"{n('first - fifth of the league')} pass@1.",
            behind_first,
            "longer runs and deeper models: [league.md](league.md) has the table, and "
            "`python experiments/league.py NAME` adds a member",
            f"On the tiny model, each at its best, `{first}` has the highest mean: "
            f"{n('league, first - grpo')} pass@1 above GRPO, {n('league, first - gspo')} above "
            "GSPO with a wide range; those not told apart from it: `docs/league.md`."),
        Row("How wide a band for GSPO?",
            "`--epsilon 0.03 --epsilon_high 0.04`, 100 times the paper's; the default stays the "
            "paper's, so that `--algorithm gspo` is the published algorithm.",
            "100 times the paper's clip range minus the paper's, each at its best rate: "
            f"{n('gspo_x100 - gspo, best rates')} pass@1.",
            ("gspo - grpo, six step sizes", "gspo_x10 - grpo, six step sizes",
             "gspo_x100 - grpo, six step sizes", "gspo_x10 - gspo, best rates",
             "gspo_x100 - gspo, best rates"),
            "longer answers, on which s spreads less: look at `epsilon_over_std` in metrics.jsonl",
            "On the tiny model `--epsilon 0.03 --epsilon_high 0.04`, "
            f"{n('gspo_x100 - gspo, best rates')} pass@1 against the paper's. The paper's stays "
            "the default, so that `--algorithm gspo` is the published algorithm."),
        Row("A band that follows log s, `--epsilon auto`?",
            "Not shown to help: a wide fixed band is simpler and learned more.",
            f"Auto minus the wide clip range: {n('auto - gspo_x100, six step sizes')} pass@1.",
            ("auto - grpo, six step sizes", "auto - gspo_x100, six step sizes",
             "auto - grpo, 2e-4 × 4", "auto - grpo, 8e-4 × 16"),
            "another c, a lower upper limit of the band, a longer memory of std(log s)"),
        Row("Which learning rate?",
            f"About {n('best rate of grpo')} for the tiny model of 4 layers; rates do not transfer "
            "to another model, so `--num_hidden_layers 48` and a checkpoint have smaller "
            "defaults.",
            f"The largest rate that ends above its start is {n('largest rate of grpo')} for GRPO.",
            ("best rate of grpo", "best rate of gspo", "best rate of gspo_x100",
             "best rate of grpo_replay", "smallest best rate of the league",
             "largest best rate of the league", "largest rate of grpo", "largest rate of gspo"),
            "another model, or another member: [league.md](league.md) has the best rate of each",
            f"On the tiny model about {n('best rate of grpo')}; a checkpoint needs less and has "
            "another default."),
        Row("How many mini-batches per rollout batch?",
            "4; with more, or at a large rate, use GSPO with the wide fixed band.",
            "The wide clip range minus GRPO at 8e-4 with 16 mini-batches: "
            f"{n('gspo_x100 - grpo, 8e-4 × 16')} pass@1.",
            ("gspo_x100 - grpo, 2e-4 × 4", "gspo_x100 - grpo, 8e-4 × 8",
             "gspo_x100 - grpo, 8e-4 × 16"),
            "more cold starts: if runs collapse, a single run can decide a mean"),
        Row("What stabilizes GSPO, the clip or the sequence ratio?",
            "The clip: without one, the sequence ratio collapses.",
            f"Without a clip minus with it, large steps: {n('gspo_free - gspo, large steps')} "
            "pass@1.",
            ("gspo_free - gspo, large steps",), "small steps, at which no algorithm needs a clip"),
        Row("Is routing replay worth it?",
            "Not here: its gain is within the noise, and it costs time.",
            f"GRPO + replay minus GRPO, best rates: {n('grpo_replay - grpo, best rates')} pass@1.",
            ("grpo_replay - grpo, best rates", "replay, 16 mini-batches"),
            "deeper mixtures, where more experts flip (below)"),
        Row("Can the sampler's log-probs be trusted?",
            "Yes for a bfloat16 sampler, at int4 with GSPO's wide band; else recompute them.",
            f"An int4 sampler costs the wide clip range {n('gspo_x100 loses at int4')} pass@1.",
            ("gspo trusts bfloat16", "gspo trusts int4", "grpo loses at int4",
             "gspo loses at int4", "gspo_x100 loses at int4", "grpo loses at int3",
             "gspo_x100 loses at int3"),
            "another clip range for GRPO, which was not varied; longer answers"),
        Row("How old may the samples be?",
            "As new as possible; with a lag, GSPO with the wide fixed band loses least.",
            f"Samples of 8 rollout batches ago cost it {n('gspo_x100 loses at lag 8')} pass@1.",
            lags, "more rollout batches: with a lag of 8, nine of the sixteen are sampled by the "
            "policy at the start; another clip range for GRPO, which was not varied"),
    ], LONG: [
        Row("Which band for longer answers?",
            "Not decided: only GRPO and the wide band were run, and only with a trusted sampler.",
            "At int4 GRPO loses more than the wide clip range, by "
            f"{n('grpo - gspo_x100 loses at int4, 60 tokens')} pass@1.",
            ("grpo - gspo_x100 loses at int4, 60 tokens",),
            "`experiments/length_duration.py` holds the rules for 20, 60, 130 and 260 tokens; what "
            "it has run is in results/"),
    ], DEEP: [
        Row("Does GSPO hold where GRPO breaks, and which band?",
            depth_answer(),
            f"GSPO with the paper's clip range minus GRPO: {n('gspo - grpo, 48 layers')} pass@1.",
            ("gspo - grpo, 48 layers", "grpo_replay - grpo, 48 layers",
             "gspo_x100 - grpo, 48 layers", "gspo_x100 - gspo, 48 layers",
             "gspo_x10 - grpo, 48 layers", "grpo_r3 - grpo, 48 layers", "gmpo - grpo, 48 layers",
             "dppo - grpo, 48 layers"),
            "more batches: `python experiments/depth.py --full` has rules for 60, and goes on "
            "where the map stopped",
            f"At 48 layers, where runs break: {depth_answer()}"),
        Row("Which learning rate at 48 layers, and who is best at it?",
            f"{n('best rate of grpo, 48 layers')} to {n('best rate of dppo, 48 layers')}; at its "
            "best rate no algorithm is ahead of GRPO, and all but DPPO equal it.",
            "GSPO with the paper's clip range minus GRPO, each at its best rate: "
            f"{n('gspo - grpo, 48 layers, best rates')} pass@1.",
            (*at_best, *(f"best rate of {arm}, 48 layers" for arm in ("grpo", "gspo", "dppo")),
             *(f"largest rate of {arm}, 48 layers" for arm in ("grpo", "gspo", "grpo_replay"))),
            f"rates below {n('best rate of grpo, 48 layers')}, the smallest that was tried and the "
            "best of most arms"),
        Row("Does the advantage of GSPO, or of replay, grow with depth?",
            "Not shown: 4 layers have a difference as small as 48, each where its runs break.",
            "GSPO minus GRPO at 48 layers, minus the same at 4 layers: "
            f"{n('gspo - grpo, 48 layers - 4 layers')} pass@1.",
            ("gspo - grpo, 4 layers", "grpo_replay - grpo, 4 layers",
             "gspo - grpo, 48 layers - 4 layers", "grpo_replay - grpo, 48 layers - 4 layers"),
            "more cold starts at 4 layers; 16 layers and the dense control, whose runs are not "
            "complete"),
    ], PRETRAINED: [
        Row("Does GSPO's clip range mean anything in 16 bits?",
            "Not where a step moves log s by less than rounding does: there use `--bf16 false`, or "
            "a clip range wider than `log_s_noise`, which every run measures.",
            f"bfloat16 adds an error of {n('error of bfloat16')} to log s, more than a step at "
            "1e-6 changes it, and the paper's clip range is `[1 - 0.0003, 1 + 0.0004]`.",
            ("SmolLM2's step", "error of bfloat16", "error of float16"),
            "a larger learning rate (next question); longer answers, over which rounding averages "
            "out",
            f"Not at a checkpoint's default rate: bfloat16 moves SmolLM2's log s by "
            f"{n('error of bfloat16')}, more than a step does: use `--bf16 false`."),
        Row("Does GSPO learn less in bfloat16, and with which clip range?",
            sixteen_bits_answer(),
            "The paper's clip range in float32 minus the same in bfloat16, the larger of two "
            f"numbers: {n('gspo loses in bfloat16')} pass@1.",
            (*(f"{arm} {what} in bfloat16" for what in ("loses", "clips more")
               for arm in ("gspo", "gspo_x100")),
             *(f"gspo_x100 - gspo, SmolLM2, {bits}" for bits in ("float32", "bfloat16")),
             *(f"best rate of {arm}, SmolLM2" for arm in ("gspo", "gspo_x100"))),
            f"a smaller rate: {n('best rate of gspo, SmolLM2')} is the smallest that was tried and "
            "the best of both, and at it the clip removes hardly more in bfloat16 than in float32; "
            "answers longer than three tokens"),
    ]}


OTHERS = (
    "verl#2775 reports GSPO on GSM8K: some 30 % of its tokens are clipped, and GRPO learns a "
    "little faster, as on the tiny model here",
    "NVIDIA/Megatron-LM#4168 quotes the experiments with routes of the sampler (R3, 2510.11370) on "
    "Qwen3-30B-A3B: three of three GRPO runs collapsed without, all completed with them; there the "
    "sampler and the trainer are two engines, here they are one",
)

NOT_TESTED = (
    "the paper's setting: answers of thousands of tokens, hundreds of rollout batches",
    "48 layers: rates below 5e-5, 16 mini-batches, 60 rollout batches; 16 layers; the dense "
    "control (`experiments/depth.py` has the rules and goes on)",
    "SmolLM2 with GRPO, IcePop or 10 times the paper's clip range, on chain_sum, and in float16 "
    "(`experiments/pretrained.py` has the rules); a task with a chain of thought",
    "the best band at 20, 60, 130 and 260 tokens, and after 100 rollout batches "
    "(`experiments/length_duration.py` has the rules)",
    "the [league](league.md) on 48 layers and on SmolLM2",
    "the paper's band with a trusted sampler at int3, and with answers of 60 tokens",
    "a stale sampler with lags of 1 and 4, with replay, or over longer runs",
    "GMPO, DPPO, GSPO without a clip, and c = 1 and 4 on the fresh cold starts",
    "a lower limit or a slower memory for `--epsilon auto`; it was not tuned after it was seen",
    "whether sequence likelihoods are left alone by flips (Var[log s] decomposed as Var[log w] is)",
)


def page():
    """docs/which.md: a part per regime, a section per question."""
    parts = []
    for (regime, setting), questions in rows().items():
        parts.append(f"## {regime}\n\n{setting}")
        for row in questions:
            behind = "\n".join(map(interval, row.behind))
            parts.append(f"### {row.question}\n\n**{row.answer}** {row.figure}\n\n{behind}\n\n"
                         f"It would change with: {row.change}.")
    return "\n\n".join([*parts, bullets("Others' evidence", OTHERS),
                        bullets("Not tested", NOT_TESTED)])


def bullets(title, lines):
    return f"## {title}\n\n" + "\n".join(f"* {line}." for line in lines)


def short():
    """README's lines."""
    return "\n".join(f"* **{row.question}** {row.readme}"
                     for questions in rows().values() for row in questions if row.readme)
