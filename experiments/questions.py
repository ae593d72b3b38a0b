"""The table of questions: what is claimed, which runs answer it, and the rule that decides.

A question is variants × settings × seeds. A variant and a setting are flags of train.py, a run is
a command line: the question's own flags, the setting's, the variant's; a later flag overrides. A
rule compares variants at the same seed and was written before the first run. `python
experiments/run.py NAME` makes the missing runs, in the order of the plan, and judges them. A new
question is one entry; your own is a file beside this table (docs/evidence.md). Questions that are
closed keep their numbers, in results/closed.json, and their runs; their code is that of commit
99b9041.

    "GRPO@2e-4"           the figure `after` (held-out pass@1 at the end) of a variant in a setting
    "GRPO@best 21 of A"   in the best setting of variant A
    "GRPO@best 21"        in the setting with the highest mean over the choosing seeds, of the
                          settings whose names begin with "21 "
    "GRPO@best:clipped"   another figure of the same runs
    "A - B"               paired by seed; runs whose machine, versions or code differ are not paired

In a plan, "best 21" is the chosen setting and "all 21" every setting whose name begins so.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product

EVAL = "--eval_prompts 128 --eval_samples 4"                 # a standard error of 0.01 to 0.02
TINY = "1 M parameters, 4 layers, answers of about 20 tokens"


@dataclass(frozen=True)
class Rule:
    """What is said of a contrast's mean over seeds, by its interval with 1 - alpha confidence:
    ahead or behind if it leaves 0, by .01 or more; level if it lies within ±level; else, and with
    fewer seeds than `least`, undecided (intervals.compare)."""
    of: str
    level: float = .03
    least: int = 8
    alpha: float = .05               # two looks at .025 are one at .05
    predicted: str = ""              # which of the verdicts was expected
    seeds: range | None = None       # None: those of the question
    form: str = "{:+.3f}"
    reported: bool = False           # no rule was written beforehand: without a verdict


Reported = partial(Rule, reported=True)


@dataclass(frozen=True)
class Part:
    """A part of the plan: variants in settings at one seed, then at the next."""
    settings: str                    # separated by commas
    seeds: range
    variants: tuple = ()             # (): all of the question
    count: int | None = None         # usable seeds, refused ones not counted; None: all


@dataclass(frozen=True, kw_only=True)
class Question:
    claim: str
    regime: str
    variants: dict                   # {name: flags}
    rules: dict
    asks: str = ""                   # the title of its figure
    flags: str = ""                  # of every run
    settings: dict | Callable = field(default_factory=lambda: {"default": ""})   # {name: flags}, or
    seeds: range = range(8)                                         # a function of the variant
    parts: tuple = ()                # of the plan; (): all variants in all settings at the seeds
    choosing: range = range(0)       # the seeds that choose a setting
    choices: int = 4                 # how many of them must be usable
    by: str = "after"                # the figure by whose mean it is chosen
    prefers: str = ""                # a variant whose setting the others take unless theirs is
    #                                  better by more than a standard error
    before: tuple = ()               # (path, command that makes it) of what its runs need
    seconds: float = 10              # guessed core-seconds of a run
    notes: str = ""                  # what the rules need in words
    script: str = "train"            # the module whose main(flags) makes a run
    least_start: float = 0           # a seed with a lower first pass rate is not used

    @property
    def plan(self):
        return self.parts or (Part("all", self.seeds),)

    def list_settings(self, variant):
        return self.settings(variant) if callable(self.settings) else self.settings


def rates(*values):
    """{"RATE": flags} of settings: every learning rate."""
    return {f"{rate:g}": f"--learning_rate {rate:g}" for rate in values}


def each(name, of, *axes, **bounds):
    """{name: reported rule} of every combination of the axes, which are {0}, {1} of both words."""
    return {name.format(*words): Reported(of.format(*words), **bounds) for words in product(*axes)}


GRPO = "--algorithm grpo --epsilon_high 0.27"        # the clip range of GSPO's own baseline, §5.1
KNOWN = {"GRPO": GRPO, "GSPO": "--algorithm gspo",
         "GSPO wide": "--algorithm gspo --epsilon 0.03 --epsilon_high 0.04"}
DROPS = "--algorithm grpo --epsilon .03 --epsilon_high .04 --drop_by_s"   # wide's, with w

# ------------------------------------------------------------------------- the runs of README

SMOLLM2 = ("--model_name_or_path checkpoints/SmolLM2-135M-Instruct --chat_template false "
           "--stop \\n")
CHECKPOINT = ("checkpoints/SmolLM2-135M-Instruct", "tests/make_smollm2.py")
DEFAULT = Question(
    claim="The default run ends above 0.95 held-out pass@1",
    regime=f"{TINY}, 50 rollout batches", variants={"GSPO": ""}, seeds=range(3),
    rules=each("{0}", "GSPO@default:{0}", ("after", "before"), form="{:.3f}"), seconds=120)
SMOLLM2_RUN = Question(
    claim="SmolLM2 learns the larger of two numbers to 0.9 within 20 rollout batches",
    regime="SmolLM2-135M, answers of 3 tokens, 20 rollout batches of 128 answers",
    flags=f"{SMOLLM2} --lr_scheduler_type constant_with_warmup --steps 20 --prompts_per_step 16 "
          "--steps_per_generation 4 --eval_prompts 128 --max_completion_length 5 --dataset_name "
          "data/max_of_two_train.jsonl --test_dataset_name data/max_of_two_test.jsonl --verifier "
          "exact",
    variants={"GSPO": ""}, settings={"default": "--learning_rate 1.5e-5"}, seeds=range(3),
    rules={**each("{0}", "GSPO@default:{0}", ("after", "before"), form="{:.3f}"),
           "seconds": Reported("GSPO@default:seconds", form="{:.0f}")},
    before=(CHECKPOINT, ("data/max_of_two_train.jsonl", "tests/make_max_data.py data")),
    seconds=240)

# ---------------------------------------------------------------- responses of several lengths

LENGTHS_OF = {                       # {tokens: (flags, ε of GSPO mid)}
    "21": ("--cold_start_steps 270", .0097),
    "61": ("--verbose_answers --cold_start_steps 215", .0098),
    "110": ("--verbose_answers --min_terms 16 --max_terms 20 --cold_start_steps 400", .0029)}


def at_lengths(variant, lengths, rates):
    """{"LENGTH RATE": flags}. GSPO mid has the ε that would have dropped a fifth of the last
    mini-batches' signal in GRPO's run at 4e-4, another seed's (rows.py --print_range 0.2)."""
    found = {}
    for length in lengths:
        flags, epsilon = LENGTHS_OF[length]
        if variant in ("GSPO mid", "w, mid's drops"):
            flags += f" --epsilon {epsilon:g} --epsilon_high {4 / 3 * epsilon:.2g}"
        found |= {f"{length} {rate}": f"{flags} --learning_rate {rate}" for rate in rates}
    return found


# ----------------------------- one figure of merit (rules and predictions before any run)
#
# final   `after`: held-out pass@1 of the trained policy after the last batch, of 2,048 samples,
#         under a rate that has gone to 0 (cosine), as under a constant one the policy jitters
# speed   the mean over the batches that can differ, of the policy: the pass rates of the second
#         batch to the last; where samples are old or rounded, held-out pass@1 every four batches
#
# Beside each variant stand the share of the signal that its clip drops (clip_signal), ε / σ (σ: the
# standard deviation of log s before the last mini-batch) where it clips s, and `dropped`, the share
# of Σ |Â|·w·(1 − π) (rows.py), by which a clip of tokens and one of responses can be compared.
# Primary contrasts are in final, level within ±0.02; those in speed, level within ±0.015, have a
# verdict and no prediction. Seeds from 700. 12 seeds; if a primary contrast of a question is then
# undecided, 24 for the whole question: two looks of .025 each. Holm over the contrasts of a figure.

FINAL = "--eval_prompts 512 --eval_samples 4"
OPEN = "--epsilon 1 --epsilon_high inf"                     # a clip range that nothing leaves
SHOWN = ("after", "speed", "clip_signal", "std_log_s", "dropped", "before", "collapsed")


def contrast(one, other, predicted, setting, seeds=12):
    """Two rules of one minus other in a setting: final, which is primary, and speed. seeds: as many
    as are planned; with fewer it is undecided."""
    look = dict(alpha=.025, least=seeds)
    name = f"{one} against {other}, {setting}"
    of = f"{one}@{setting}:{{}} - {other}@{setting}:{{}}"
    return {name: Rule(of.format("after", "after"), level=.02, predicted=predicted, **look),
            f"{name}: speed": Rule(of.format("speed", "speed"), level=.015, **look)}


def beside(variants, settings, figures=SHOWN):
    """Reported figures of variants in settings."""
    return each("{0}, {1}: {2}", "{0}@{1}:{2}", variants, settings, figures, form="{:.4f}")


def not_primary(setting, *pairs):
    """Reported differences, final and speed, of pairs of variants in a setting."""
    return {f"{rule} (not primary)": Reported(of.of) for one, other in pairs
            for rule, of in contrast(one, other, "", setting).items()}


WEIGHTS = {
    "GRPO": GRPO, "GSPO wide": KNOWN["GSPO wide"],
    "w, wide's drops": DROPS,
    "s, no clip": f"--algorithm gspo {OPEN}", "w, no clip": f"--algorithm grpo {OPEN}",
    "no ratio": "--algorithm reinforce --scale_rewards group --steps_per_generation 4 "
                "--reduction sequence-mean",
    "s where right": f"--algorithm grpo {OPEN} --s_where right",
    "s where wrong": f"--algorithm grpo {OPEN} --s_where wrong"}
WEIGHT = Question(
    claim="With equal drops, or none, the weight of a token (s, w or none) does not matter",
    asks="Does the weight matter?",
    regime="1 M parameters, 4 layers, responses of about 61 and 110 tokens, 16 rollout batches, "
           "2e-4, cosine, 4 mini-batches",
    flags=f"--steps 16 {FINAL}", script="rows", seeds=range(830, 880), least_start=.1, seconds=30,
    variants=WEIGHTS, settings=partial(at_lengths, lengths=("61", "110"), rates=("2e-4",)),
    parts=(Part("61 2e-4", range(830, 880), count=12), Part("110 2e-4", range(830, 880), count=12)),
    rules={rule: of for setting in ("61 2e-4", "110 2e-4") for one, other in (
               ("s, no clip", "w, no clip"), ("s, no clip", "no ratio"),
               ("GSPO wide", "w, wide's drops"))
           for rule, of in contrast(one, other, "level", setting).items()}
          | {rule: of for setting in ("61 2e-4", "110 2e-4") for rule, of in not_primary(
                 setting, ("s where right", "w, no clip"), ("s where wrong", "w, no clip"),
                 *((arm, "GRPO") for arm in WEIGHTS if arm != "GRPO")).items()}
          | beside(WEIGHTS, ("61 2e-4", "110 2e-4")),
    notes="""No ratio: REINFORCE with the group's standard deviation, in four mini-batches. The last
        two arms test a mechanism: where w has fallen it stops the push on a token with Â < 0, and s
        goes on pushing. If that is why s is behind w in speed, `s where wrong` (s where Â < 0) is
        behind `w, no clip` as s is, and `s where right` is level with it.""")

FAIR_RATES = ("1e-4", "2e-4", "4e-4", "8e-4", "1.6e-3")
FAIR_ARMS = ("GRPO", "GRPO narrow", "GSPO", "GSPO mid", "GSPO wide")
MID_DROPS = "w, mid's drops"
SECOND = 24                          # seeds: at both lengths a contrast was undecided at 12
FAIR = Question(
    claim="Each at its own best rate, GSPO mid, which drops a tenth of the signal, is level "
          "with GRPO; the paper's constant is behind at 21 tokens",
    asks="And each at its own best rate?",
    regime="1 M parameters, 4 layers, responses of about 21 and 61 tokens, 16 rollout batches, "
           "cosine, 4 mini-batches",
    flags=f"--steps 16 {FINAL}", script="rows", prefers="GRPO", least_start=.1, seconds=20,
    variants=KNOWN | {
        "GRPO narrow": "--algorithm grpo --epsilon .05 --epsilon_high .067",
        "GSPO mid": "--algorithm gspo", MID_DROPS: "--algorithm grpo --drop_by_s"},
    settings=partial(at_lengths, lengths=("21", "61"), rates=FAIR_RATES),
    choosing=range(702, 722), seeds=range(770, 820),
    parts=tuple(part for length in ("21", "61") for part in (
              Part(f"all {length}", range(702, 722), FAIR_ARMS, 4),
              Part(f"best {length}, best {length} of GRPO", range(770, 820), FAIR_ARMS, SECOND),
              Part(f"best {length} of GSPO mid", range(770, 820), ("GSPO mid", MID_DROPS),
                   SECOND))),
    rules={**contrast("GSPO mid", "GRPO", "level", "best 21", SECOND),
           **contrast("GSPO mid", "GRPO", "level", "best 61", SECOND),
           **contrast("GSPO", "GRPO", "behind", "best 21", SECOND),
           **contrast("GSPO", "GRPO", "level", "best 61", SECOND),
           **contrast("GSPO mid", MID_DROPS, "level", "best 21 of GSPO mid", SECOND),
           **contrast("GSPO mid", MID_DROPS, "level", "best 61 of GSPO mid", SECOND),
           **{rule: of for length in ("21", "61") for rule, of in (
                  not_primary(f"best {length}", ("GSPO wide", "GRPO"), ("GRPO narrow", "GRPO"))
                  | not_primary(f"best {length} of GRPO",
                                *((arm, "GRPO") for arm in FAIR_ARMS[1:]))).items()},
           **beside(FAIR_ARMS, ("best 21", "best 61", "best 21 of GRPO", "best 61 of GRPO")),
           **beside(("GSPO mid", MID_DROPS), ("best 21 of GSPO mid", "best 61 of GSPO mid")),
           **each("choosing: {0}, {1} {2}: {3}", "{0}@{1} {2}:{3}", FAIR_ARMS,
                  ("21", "61"), FAIR_RATES, ("after", "collapsed", "std_log_s", "clip_signal"),
                  seeds=range(702, 722), form="{:.4f}")},
    notes="""Four seeds choose an arm's rate by final; it takes GRPO's if that is within a standard
        error (paired) of its best. Others judge, at the arm's own rate and at GRPO's. GSPO
        mid keeps the ε of `lengths`; ε / σ is printed for each rate. The choosing runs say which
        rates stay usable: final at each rate, and how many of four runs collapse (a batch's pass
        rate below half of the best so far, four batches running). W with mid's drops was to be
        tried at each rate, too: these 37 runs were not made.""")

OLD = {"8 batches old": "--sampler experiments/stale.py:Stale8", "int3": "--sampler_dtype int3"}
TRUSTED = {"GRPO": f"{GRPO} --old_logp sampler",
           "GSPO wide": f"{KNOWN['GSPO wide']} --old_logp sampler",
           "w, wide's drops": f"{DROPS} --old_logp sampler"}
CONTROLS_FINAL = Question(
    claim="With samples of eight batches ago or of an int3 policy, GSPO wide ends above GRPO and "
          "above w with its drops",
    asks="Old or rounded samples: is it s, or what is left out?",
    regime=f"{TINY}, 20 rollout batches, rate 4e-4, cosine",
    flags=f"--steps 20 --learning_rate 4e-4 --eval_steps 4 {FINAL}", script="rows",
    variants=TRUSTED, settings=OLD, seeds=range(902, 926), seconds=20,
    rules={rule: of for setting in OLD for one, other in (
               ("GSPO wide", "GRPO"), ("GSPO wide", "w, wide's drops"),
               ("w, wide's drops", "GRPO"))
           for rule, of in contrast(one, other, "ahead", setting, 24).items()}
          | beside(TRUSTED, OLD),
    notes="""The samplers' log-probs are the old ones (--old_logp sampler). Read at 12, 16 and 24
        seeds. `w, wide's drops`: GRPO's weights, responses dropped by s at .03 / .04.""")

PRETRAINED = Question(
    claim="SmolLM2 counting: wide, w with wide's drops and GRPO end level, each at its own rate",
    asks="And a pretrained model?",
    regime="SmolLM2-135M-Instruct counts twenty numbers, 6 batches of 8 × 8 answers, cosine",
    flags=f"{SMOLLM2} --dataset_name data/counting_train.jsonl --test_dataset_name "
          "data/counting_test.jsonl --verifier experiments/counting.py:share "
          "--max_completion_length 90 --steps 6 --prompts_per_step 8 --steps_per_generation 4 "
          "--bf16 false --eval_prompts 20 --eval_samples 4", script="rows",
    variants={name: WEIGHTS[name] for name in ("GRPO", "GSPO wide", "w, wide's drops")},
    settings=rates(1.5e-5, 3e-5), by="reward", prefers="GRPO", choosing=range(950, 952), choices=2,
    seeds=range(960, 966), seconds=640,
    before=(CHECKPOINT, ("data/counting_train.jsonl", "experiments/counting.py")),
    parts=(Part("all", range(950, 952)), Part("best", range(960, 966))),
    rules={f"{one} against {other}": Rule(f"{one}@best:reward - {other}@best:reward", level=.02,
                                          predicted="level", alpha=.025, least=6)
           for one, other in (("GSPO wide", "GRPO"), ("GSPO wide", "w, wide's drops"))}
          | beside(("GRPO", "GSPO wide", "w, wide's drops"), ("best",),
                   ("reward", "clip_signal", "std_log_s", "dropped")),
    notes="""Two seeds choose between two rates, six judge. The figure is the mean held-out reward
        of 20 prompts: its interval is over seeds, not over prompts or models.""")

QUESTIONS = {
    "default": DEFAULT, "smollm2": SMOLLM2_RUN, "weight": WEIGHT, "fair": FAIR,
    "controls_final": CONTROLS_FINAL, "pretrained": PRETRAINED}
