"""The table of questions: what is claimed, which runs answer it, and the rule that decides.

A question is arms × cells × cold starts. An arm and a cell are flags of train.py, a run is a
command line: the question's own flags, the cell's, the arm's, where a later flag counts. A rule
compares arms within a start and was written before the first run; `python experiments/run.py NAME`
makes the runs that are missing, in the order of the plan, and judges. A new question is one entry.

    "GRPO@2e-4"           the figure `after` (held-out pass@1 at the end) of an arm in a cell
    "GRPO@best μ4"        in the cell with the highest mean over the choosing starts, of the cells
                          whose names begin with "μ4 "
    "GRPO@mean"           the mean over all cells, of the starts that have all of them
    "GRPO@best:clipped"   another figure of the same runs
    "A - B + C - D"       paired by start; runs of two machines or commits are never paired

In a plan, "best μ4" is the chosen cell, "all μ4" every cell whose name begins so, and "edge μ4" the
cell of `further` beside the chosen one, if that is the first or the last that was tried: a range
that ends at its best is extended once, by one cell.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from losses import OBJECTIVES
from plumbing.run.arguments import ALGORITHMS

EQUAL = .03                         # pass@1: a difference within ± this counts as none
EVAL = "--eval_prompts 128 --eval_samples 4"                 # a standard error of 0.01 to 0.02
TINY = "1 M parameters, 4 layers, answers of about 20 tokens"


@dataclass(frozen=True)
class Rule:
    """When the 95 % interval of a contrast's mean over starts decides: held and refuted are bounds
    within which all of it lies (refuted None: all of it outside those of held); an interval within
    ±nothing refutes too."""
    of: str
    held: tuple = (0, inf)
    refuted: tuple | None = (-inf, 0)
    nothing: float = 0
    least: int = 8
    starts: range | None = None      # None: those of the question
    less: str = ""                   # minus the mean of this contrast, an independent sample with
    less_starts: range | None = None     # starts of its own, by Welch's t
    factor: bool = False             # values are factors: means and intervals of their logarithms
    form: str = "{:+.3f}"
    reported: bool = False           # no rule was written beforehand: without a verdict


@dataclass(frozen=True)
class Part:
    """A part of the plan: all arms in all cells at one start, then at the next."""
    arms: tuple
    cells: tuple
    starts: range
    count: int | None = None         # usable starts, refused ones not counted; None: all


@dataclass(frozen=True)
class Question:
    claim: str
    source: str
    reported: str
    regime: str
    flags: str                       # of every run
    arms: dict
    cells: dict | Callable           # {name: flags}, or a function of the arm
    starts: range
    plan: tuple
    rules: dict
    decides: tuple                   # the rules that together are the verdict; (): reported only
    depends: str = ""                # on what, if one of them is held and another refuted
    choose: range = range(0)
    choices: int = 4                 # usable starts that choose a cell
    further: dict = field(default_factory=dict)      # cells beyond the first and the last
    groups: dict = field(default_factory=dict)       # {name: cells}, beside those that begin alike
    rate_of: dict = field(default_factory=dict)      # {arm: the arm that chooses its cell}
    before: tuple = ()               # (path, command that makes it) of what its runs need
    seconds: float = 10              # guessed core-seconds of a run
    notes: str = ""                  # what the rules need in words
    measure: str = ""                # of measures.py, where a run is not one of train.py

    def ladder(self, arm):
        return self.cells(arm) if callable(self.cells) else self.cells


def rates(*values, group="", flags=""):
    """{name: flags} of cells that differ in the learning rate."""
    return {f"{group} {value:g}".strip(): f"--learning_rate {value:g} {flags}".strip()
            for value in values}


GRPO = "--algorithm grpo --epsilon_high 0.27"        # the clip range of GSPO's own baseline, §5.1
GSPO = {1: "--algorithm gspo",
        10: "--algorithm gspo --epsilon 3e-3 --epsilon_high 4e-3",
        100: "--algorithm gspo --epsilon 0.03 --epsilon_high 0.04"}
ABOVE = dict(nothing=EQUAL, least=16)                # held above 0; below 0 or equal: refuted
BESIDE = dict(nothing=EQUAL, reported=True)

# ------------------------------------------------------------------- does GSPO learn faster?

MOE = {"GRPO": GRPO, "GSPO": GSPO[1], "GSPO ×10": GSPO[10], "GSPO ×100": GSPO[100],
       "GRPO replay": f"{GRPO} --routing_replay old"}
NO_CLIP = "--algorithm gspo --epsilon 0.99 --epsilon_high 0.99"        # no s gets so far
MAP_RATES = (1e-4, 2e-4, 4e-4, 6e-4, 8e-4, 12e-4, 16e-4)
PLACES = {"mb4": "--steps_per_generation 4", "mb8": "--steps_per_generation 8",
          "mb2": "--steps_per_generation 2", "mb16": "--steps_per_generation 16",
          "dense mb4": "--steps_per_generation 4 --num_experts 1 --num_experts_per_tok 1"}
OLD_CHOOSE = range(4)
ROUGH = tuple(f"mb{m} {rate:g}" for rate in (8e-4, 16e-4) for m in (8, 16))
LEARNING = Question(
    claim="GSPO with the paper's band learns faster than GRPO at equal budget",
    source="GSPO §5.1 and figure 1", reported="higher reward at the same compute (curves only)",
    regime=f"{TINY}, 10 rollout batches", flags=f"--steps 10 {EVAL}",
    arms=MOE | {"GSPO no clip": NO_CLIP, "GMPO": "--algorithm gmpo", "CISPO": "--algorithm cispo",
                "DPPO": "--algorithm dppo"},
    cells={name: flags for place, words in PLACES.items()
           for name, flags in rates(*MAP_RATES, group=place, flags=words).items()},
    groups={"rough": ROUGH}, choose=OLD_CHOOSE, starts=range(4, 12),
    plan=(Part(tuple(MOE), ("all mb4",), OLD_CHOOSE), Part(tuple(MOE), ("best mb4",), range(4, 12)),
          Part(("GSPO", "GSPO no clip"), ROUGH, OLD_CHOOSE)),
    rules={"against GRPO": Rule("GSPO@best mb4 - GRPO@best mb4", nothing=EQUAL),
           "against GRPO with replay": Rule("GSPO@best mb4 - GRPO replay@best mb4", nothing=EQUAL),
           "×100 against GRPO": Rule("GSPO ×100@best mb4 - GRPO@best mb4", **BESIDE),
           "×10 against the paper's band": Rule("GSPO ×10@best mb4 - GSPO@best mb4", **BESIDE),
           "×100 against the paper's band": Rule("GSPO ×100@best mb4 - GSPO@best mb4", **BESIDE),
           "replay against none": Rule("GRPO replay@best mb4 - GRPO@best mb4", **BESIDE),
           "no clip against the paper's band, large steps": Rule(
               "GSPO no clip@mean rough - GSPO@mean rough", starts=OLD_CHOOSE, reported=True),
           "GRPO": Rule("GRPO@best mb4", form="{:.3f}", reported=True)},
    decides=("against GRPO", "against GRPO with replay"),
    notes="Rates chosen on starts 0 to 3 of seven (of four at first: GRPO's and GSPO's fresh runs"
          " at the later best were added then). Had the two shared rates given opposite signs, "
          "the verdict would depend on the rate. Large steps: rates of 8e-4 and more with 8 or 16"
          " mini-batches, on the choosing starts, exploratory.")

STEP_SIZES = tuple((rate, m) for rate, m in ((2e-4, 4), (4e-4, 4), (6e-4, 4), (8e-4, 8), (8e-4, 16),
                                             (16e-4, 2)))
OVER_STEPS = {name: MOE[name] for name in ("GRPO", "GSPO", "GSPO ×10", "GSPO ×100")}
STEPS = Question(
    claim="GSPO with 100 times the band learns more than GRPO over six step sizes",
    source="ours, no paper", reported="no figure", regime=f"{TINY}, 10 rollout batches",
    flags=f"--steps 10 {EVAL}", arms=OVER_STEPS,
    cells={f"{rate:g} × {m}": f"--learning_rate {rate:g} --steps_per_generation {m}"
           for rate, m in STEP_SIZES},
    starts=range(17, 25), plan=(Part(tuple(OVER_STEPS), ("all",), range(17, 25)),),
    rules={**{f"{arm}, mean": Rule(f"{arm}@mean - GRPO@mean", **BESIDE)
              for arm in tuple(OVER_STEPS)[1:]},
           **{f"{arm} at {rate:g} × {m}": Rule(f"{arm}@{rate:g} × {m} - GRPO@{rate:g} × {m}",
                                               **BESIDE)
              for arm in tuple(OVER_STEPS)[1:] for rate, m in STEP_SIZES}},
    decides=(),
    notes="The rules were written for `--epsilon auto`, which was not shown to help and is gone; "
          "the fixed bands stood beside it, by the same intervals.")

# ----------------------------------------------------------------------- mixtures of experts

GAIN = "{:+.2f}"
STABLE = ("--steps 16 --prompts_per_step 16 --plain --eval_prompts 128 --eval_samples 2 "
          "--lr_scheduler_type constant_with_warmup")
COLLAPSE = Question(
    claim="GRPO collapses on a mixture of experts because experts flip; routing replay repairs "
          "it; GSPO needs none", source="GSPO §5.3",
    reported="GRPO without routing replay does not converge on a 48-layer MoE, GSPO does",
    regime=f"{TINY}, 16 rollout batches of 128 answers, rate 6e-4, 16 mini-batches", flags=STABLE,
    arms={name: MOE[name] for name in ("GRPO", "GSPO", "GRPO replay")},
    cells={"MoE": "--learning_rate 0.0006 --steps_per_generation 16",
           "dense": "--learning_rate 0.0006 --steps_per_generation 16 --num_experts 1 "
                    "--num_experts_per_tok 1"},
    starts=range(8),
    plan=(Part(("GRPO", "GSPO", "GRPO replay"), ("MoE",), range(8)),
          Part(("GRPO", "GSPO"), ("dense",), range(8))),
    rules={"GSPO prevents it": Rule("GSPO@MoE - GRPO@MoE", form=GAIN),
           "replay repairs it": Rule("GRPO replay@MoE - GRPO@MoE", refuted=(-inf, .05), form=GAIN),
           "flips cause it": Rule("GSPO@MoE - GRPO@MoE - GSPO@dense + GRPO@dense", form=GAIN),
           **{f"{arm} collapses, {cell}": Rule(f"{arm}@{cell}:collapsed", form="{:.0%}",
                                               reported=True)
              for arm, cell in (("GRPO", "MoE"), ("GSPO", "MoE"), ("GRPO replay", "MoE"),
                                ("GRPO", "dense"))}},
    decides=("GSPO prevents it", "replay repairs it", "flips cause it"),
    notes="Collapsed: a batch's pass rate below half of the best so far, four batches running.")

DEEP_ARMS = {"GRPO": GRPO, "GRPO replay": f"{GRPO} --routing_replay old", "GSPO": GSPO[1],
             "GSPO ×100": GSPO[100]}
DEEP_OTHERS = {"GSPO ×10": GSPO[10], "GRPO R3": f"{GRPO} --routing_replay rollout",
               "GMPO": "--algorithm gmpo", "DPPO": "--algorithm dppo"}
DEEP = ("--hidden_size 48 --num_experts 16 --num_experts_per_tok 2 --min_terms 3 --max_terms 5 "
        "--cold_start_steps 500 --cold_start_learning_rate 1e-3 --prompts_per_step 16 "
        "--lr_scheduler_type constant_with_warmup")
DEEP_RATES = (5e-5, 7e-5, 1e-4, 1.4e-4, 2e-4, 2.8e-4, 4e-4)
SHALLOW = "4 layers 0.00028"
DEEP_REGIME = ("5.8 M parameters, 48 layers of 16 experts, answers of about 9 tokens, 16 rollout "
               "batches")
DEPTH = Question(
    claim="At 48 layers, where runs break, GSPO with the paper's band ends above GRPO",
    source="GSPO §5.3", reported="GRPO converges only with routing replay; GSPO needs none",
    regime=DEEP_REGIME, flags=f"--steps 16 {EVAL} {DEEP}", arms=DEEP_ARMS | DEEP_OTHERS,
    cells=rates(*DEEP_RATES, group="48 layers", flags="--num_hidden_layers 48")
          | rates(2.8e-4, group="4 layers", flags="--num_hidden_layers 4"),
    choose=range(100), starts=range(200, 300), seconds=30,
    plan=(Part(tuple(DEEP_ARMS), ("48 layers 0.00028",), range(200, 300), 32),
          Part(("GRPO", *DEEP_OTHERS), ("48 layers 0.00028",), range(300, 400), 8),
          Part(tuple(DEEP_ARMS | DEEP_OTHERS), ("all 48 layers",), range(100), 4),
          Part(tuple(DEEP_ARMS | DEEP_OTHERS), ("best 48 layers",), range(400, 500), 8),
          Part(tuple(DEEP_ARMS), (SHALLOW,), range(500, 600), 8)),
    rules={**{f"{arm} against {other}, 2.8e-4": Rule(
                  f"{arm}@48 layers 0.00028 - {other}@48 layers 0.00028", nothing=EQUAL, least=32)
              for arm, other in (("GSPO", "GRPO"), ("GRPO replay", "GRPO"), ("GSPO ×100", "GRPO"),
                                 ("GSPO ×100", "GSPO"))},
           **{f"{arm} against GRPO, 2.8e-4": Rule(
                  f"{arm}@48 layers 0.00028 - GRPO@48 layers 0.00028", nothing=EQUAL,
                  starts=range(300, 400)) for arm in DEEP_OTHERS},
           **{f"{arm} against GRPO, best rates": Rule(
                  f"{arm}@best 48 layers - GRPO@best 48 layers", nothing=EQUAL,
                  starts=range(400, 500)) for arm in (*tuple(DEEP_ARMS)[1:], *DEEP_OTHERS)},
           **{f"{arm} against GRPO, 4 layers": Rule(f"{arm}@{SHALLOW} - GRPO@{SHALLOW}",
                                                    nothing=EQUAL, starts=range(500, 600))
              for arm in tuple(DEEP_ARMS)[1:]},
           **{f"{arm} against GRPO, more at 48 layers than at 4": Rule(
                  f"{arm}@48 layers 0.00028 - GRPO@48 layers 0.00028",
                  less=f"{arm}@{SHALLOW} - GRPO@{SHALLOW}", less_starts=range(500, 600))
              for arm in tuple(DEEP_ARMS)[1:]},
           **{name: Rule(f"GRPO@48 layers 0.00028:{figure}", form=form, reported=True)
              for name, figure, form in (("before", "before", "{:.2f}"),
                                         ("GRPO", "after", "{:.2f}"),
                                         ("flips", "flips", "{:.0%}"))}},
    decides=("GSPO against GRPO, 2.8e-4",),
    notes="A pilot of six starts chose 2.8e-4, where some runs broke; 32 starts were fixed "
          "beforehand. A start whose cold start train.py refuses (pass@1 below 0.3) is skipped in"
          " all arms and the next takes its place. 4 layers: the largest rate at which four arms "
          "still end above their start, which is the same. 16 layers and the dense control are "
          "not complete.")

FLIPS = Question(
    claim="Expert flips are what makes token ratios noisy on a mixture of experts",
    source="GSPO §5.3", reported="about 10 % of experts per update in 48 layers",
    regime=f"{TINY}, 12 rollout batches", flags="--steps 12", arms={"GSPO": GSPO[1]},
    cells={"run": ""}, starts=range(8), plan=(Part(("GSPO",), ("run",), range(8)),),
    rules={"at least half of Var[log w]": Rule("GSPO@run:share", held=(.5, 1),
                                               refuted=(-inf, .2), form="{:.0%}")},
    decides=("at least half of Var[log w]",), measure="flips", seconds=60,
    notes="share: of Var[log w] on a batch's last mini-batch after its updates, summed over "
          "batches, what goes away when the new policy follows the old one's routes (this "
          "estimator was named after measuring).")

# ------------------------------------------------------------------------------ infrastructure

BITS = ("int3", "int4", "int5", "bfloat16", "float32")
SAMPLERS = {bits: f"--sampler_dtype {bits}" for bits in BITS}
TRUST = " --old_logp sampler"
SAMPLER = Question(
    claim="GSPO tolerates the sampler's numerics, so old log-probs need no recomputation",
    source="GSPO §5.4", reported="no figure", regime=f"{TINY}, 16 rollout batches, rate 4e-4",
    flags=f"--steps 16 --learning_rate 0.0004 {EVAL}",
    arms={"GRPO": GRPO, "GSPO": GSPO[1], "GRPO trusted": GRPO + TRUST,
          "GSPO trusted": GSPO[1] + TRUST},
    cells=SAMPLERS, starts=range(8),
    plan=(Part(("GRPO trusted", "GSPO trusted", "GRPO", "GSPO"), ("int3", "int4", "bfloat16"),
               range(8)),),
    rules={f"{arm} tolerates {bits}": Rule(f"{arm}@{bits} - {arm} trusted@{bits}",
                                           held=(-inf, .05), refuted=(.05, inf), form=GAIN)
           for bits in ("bfloat16", "int4", "int3") for arm in ("GSPO", "GRPO")},
    decides=("GSPO tolerates bfloat16", "GSPO tolerates int4"), depends="the dose",
    notes="Lost: pass@1 with recomputed log-probs minus that with the sampler's; the sampler's "
          "weights are rounded row by row.")
WIDE = {"GRPO": GRPO, "GSPO": GSPO[1], "GSPO ×100": GSPO[100]}
DOSE = Question(
    claim="GSPO with 100 times the paper's band loses less than GRPO where a coarse sampler is "
          "trusted", source="GSPO §5.4", reported="no figure",
    regime=f"{TINY}, 16 rollout batches, rate 4e-4",
    flags=f"--steps 16 --learning_rate 0.0004 {EVAL}",
    arms={f"{arm}{name}": f"{flags}{trust}" for name, trust in (("", ""), (" trusted", TRUST))
          for arm, flags in WIDE.items()},
    cells=SAMPLERS | {f"60 tokens {bits}": f"{flags} --verbose_answers"
                      for bits, flags in SAMPLERS.items()},
    groups={"coarse": ("int3", "int4")}, starts=range(25, 41),
    plan=(Part(tuple(WIDE), ("float32",), range(25, 41)),
          Part(("GRPO trusted", "GSPO ×100 trusted"), ("int3", "int4"), range(25, 41)),
          Part(("GSPO trusted",), ("int4",), range(25, 41))),
    rules={"GRPO loses more than ×100": Rule(
               "GRPO@float32 - GRPO trusted@mean coarse - GSPO ×100@float32 "
               "+ GSPO ×100 trusted@mean coarse", refuted=(-inf, EQUAL)),
           "×100 loses less than 0.05 at int4": Rule(
               "GSPO ×100@float32 - GSPO ×100 trusted@int4", held=(-inf, .05),
               refuted=(.05, inf)),
           "the paper's band loses more than ×100 at int4": Rule(
               "GSPO@float32 - GSPO trusted@int4 - GSPO ×100@float32 + GSPO ×100 trusted@int4",
               held=(.05, inf), refuted=(-inf, .05)),
           **{f"lost by {arm} at {bits}": Rule(f"{arm}@float32 - {arm} trusted@{bits}",
                                                 reported=True)
              for arm, bits in (("GRPO", "int4"), ("GRPO", "int3"), ("GSPO", "int4"),
                                ("GSPO ×100", "int3"))},
           "GRPO loses more than ×100 at int4, 60 tokens": Rule(
               "GRPO@60 tokens float32 - GRPO trusted@60 tokens int4 "
               "- GSPO ×100@60 tokens float32 + GSPO ×100 trusted@60 tokens int4",
               reported=True)},
    decides=("GRPO loses more than ×100", "×100 loses less than 0.05 at int4"),
    notes="Lost: a float32 sampler minus a coarse one that is trusted. A pilot on four other "
          "starts chose the claim.")
STALE = {"GRPO": GRPO + TRUST, "GSPO": GSPO[1] + TRUST, "GSPO ×100": GSPO[100] + TRUST,
         "DPPO": "--algorithm dppo", "MiniRL": "--algorithm minirl"}
LAGS = Question(
    claim="A ratio per sequence tolerates samples of an older policy better than one per token",
    source="GSPO §3 and §4.1", reported="no figure", regime=f"{TINY}, 16 rollout batches",
    flags=f"--steps 16 --learning_rate 0.0004 {EVAL}", arms=STALE,
    cells={f"k{k}": f"--sampler plumbing/engines/stale.py:Stale{k}" for k in (0, 2, 8)},
    groups={"old": ("k2", "k8")}, starts=range(41, 49),
    plan=(Part(tuple(STALE), ("all",), range(41, 49)),),
    rules={**{f"GRPO loses more than {arm}": Rule(
                  f"GRPO@k0 - GRPO@mean old - {arm}@k0 + {arm}@mean old")
              for arm in ("GSPO", "GSPO ×100")},
           **{f"lost by {arm} at lag {k}": Rule(f"{arm}@k0 - {arm}@k{k}", reported=True)
              for k in (2, 8) for arm in STALE}},
    decides=("GRPO loses more than GSPO", "GRPO loses more than GSPO ×100"), depends="the band",
    notes="k: how many rollout batches ago the sampler's policy was trained; with 8, nine of the "
          "sixteen batches come from the policy at the start.")
SMOLLM2 = ("--model_name_or_path checkpoints/SmolLM2-135M-Instruct --no_chat_template --stop \\n "
           "--lr_scheduler_type constant_with_warmup")
CHECKPOINT = ("checkpoints/SmolLM2-135M-Instruct", "tests/make_smollm2.py")
MAX_DATA = ("data/max_of_two_train.jsonl", "tests/make_max_data.py data")
LARGER = (f"{SMOLLM2} --max_completion_length 5 --dataset_name data/max_of_two_train.jsonl "
          "--test_dataset_name data/max_of_two_test.jsonl --verifier exact")
HALF = {name: f"{flags} {bits}" for bits, of in (("--bf16 false", ""), ("--bf16 true", " bf16"))
        for name, flags in ((f"GSPO{of}", GSPO[1]), (f"GSPO ×100{of}", GSPO[100]))}
SIXTEEN = Question(
    claim="In bfloat16 GSPO with the paper's band learns less than in float32, with 100 times the"
          " band it does not", source="ours, no paper", reported="no figure",
    regime="SmolLM2-135M, 30 layers, answers of 3 tokens, 20 rollout batches of 128 answers",
    flags=f"--steps 20 --prompts_per_step 16 {EVAL} {LARGER}", arms=HALF,
    cells=rates(7.5e-6, 1.5e-5, 3e-5, 6e-5), choose=range(2), choices=2, starts=range(100, 108),
    rate_of={"GSPO bf16": "GSPO", "GSPO ×100 bf16": "GSPO ×100"}, seconds=240,
    before=(CHECKPOINT, MAX_DATA),
    plan=(Part(("GSPO", "GSPO ×100"), ("all",), range(2)),
          Part(tuple(HALF), ("best",), range(100, 108))),
    rules={"the paper's band loses in bfloat16": Rule("GSPO@best - GSPO bf16@best",
                                                      refuted=(-inf, .02)),
           "×100 loses less than 0.05 in bfloat16": Rule("GSPO ×100@best - GSPO ×100 bf16@best",
                                                         held=(-inf, .05), refuted=(.05, inf)),
           **{f"{arm} clips more in bfloat16": Rule(f"{arm} bf16@best:clipped - {arm}@best:clipped",
                                                      reported=True)
              for arm in ("GSPO", "GSPO ×100")},
           **{f"×100 against the paper's band, {bits}": Rule(f"GSPO ×100{of}@best - GSPO{of}@best",
                                                            reported=True)
              for bits, of in (("float32", ""), ("bfloat16", " bf16"))}},
    decides=("the paper's band loses in bfloat16", "×100 loses less than 0.05 in bfloat16"),
    notes="One pretrained model: a seed changes prompts and samples. The best rate of both is the"
          " smallest that was tried.")

# ------------------------------------------------------------------------------- the family

LEAGUE_RATES = (2e-4, 4e-4, 6e-4, 8e-4, 12e-4)
MORE = {"srpo": " --stage2_step 5"}      # its second stage begins after 5 batches
MEMBERS = tuple(name for name in ALGORITHMS if name != "gspo_token")     # that is GSPO here


def widths(name):
    """Factors of the published clip range that a member is tried with; (1,) if it has none."""
    low, high = clip_range(name)
    row = OBJECTIVES[ALGORITHMS[name]["objective"]]
    if low is None or high is None:
        return (1,)
    factors = (1, 10, 100) if row.clips_s else (.5, 1, 2)
    return tuple(f for f in factors if f <= 1 or f * max(low, high) < row.kind.widest)


def clip_range(name):
    preset = ALGORITHMS[name]
    row = OBJECTIVES[preset["objective"]]
    return preset.get("epsilon", row.epsilon), preset.get("epsilon_high", row.epsilon_high)


def league_cells(name):
    """Five rates for each width of the clip range of a member."""
    cells = {}
    for factor in widths(name):
        low, high = clip_range(name)
        band = "" if factor == 1 else f"--epsilon {factor * low:g} --epsilon_high {factor * high:g}"
        cells |= rates(*LEAGUE_RATES, group=f"×{factor:g}", flags=band)
    return cells


LEAGUE = Question(
    claim="Each at its best rate and clip range, the five best members of the family are within "
          "0.03 pass@1", source="ours, no paper", reported="no paper compares them",
    regime=f"{TINY}, 10 rollout batches", flags=f"--steps 10 {EVAL}",
    arms={name: f"--algorithm {name}{MORE.get(name, '')}" for name in MEMBERS},
    cells=league_cells, choose=OLD_CHOOSE, starts=range(600, 616),
    plan=tuple(part for name in MEMBERS for part in (Part((name,), ("all",), OLD_CHOOSE),
                                                     Part((name,), ("best",), range(600, 616)))),
    rules={"the first leads the fifth by at most 0.03": Rule(
               "1st@best - 5th@best", held=(-inf, EQUAL), refuted=(EQUAL, inf), least=16),
           "the first against GRPO": Rule("1st@best - grpo@best", reported=True),
           "the first against GSPO": Rule("1st@best - gspo@best", reported=True),
           "GSPO against GRPO": Rule("gspo@best - grpo@best", reported=True)},
    decides=("the first leads the fifth by at most 0.03",),
    notes="The same budget for every member: five rates and, where it has a clip range, three "
          "widths (1, 10 and 100 times the published one where s is clipped, else 0.5, 1 and 2 "
          "times) on starts 0 to 3, the best of them on 16 fresh starts. A rank's interval is a "
          "bootstrap over these starts. Hundreds of pairs are compared: a single one is no "
          "verdict.")
CREDIT = Question(
    claim="Advantages per token help where the verifier knows the first wrong step",
    source="GSPO §4.3; blog critique", reported="no figure", regime=f"{TINY}, 10 rollout batches",
    flags=f"--steps 10 {EVAL}",
    arms={"GSPO": GSPO[1], "token credit": "--algorithm gspo_token --advantage token_credit"},
    cells={"default": ""}, starts=range(8),
    plan=(Part(("GSPO", "token credit"), ("default",), range(8)),),
    rules={"token credit helps": Rule("token credit@default - GSPO@default", refuted=(-inf, .01))},
    decides=("token credit helps",))
TEACHER = "runs/questions/teacher"
TAUGHT = f"--teacher_model_name_or_path {TEACHER}/checkpoints/step_10"
DISTILLED = Question(
    claim="A teacher's signal per token learns faster than a verifier's per answer",
    source="blog On-Policy Distillation; GKD 2306.13649",
    reported="the same accuracy at a tenth of the compute and less",
    regime=f"{TINY}, 10 rollout batches", flags=f"--steps 10 {EVAL}",
    before=((TEACHER, "train.py --device cpu --algorithm dro --steps 10 --seed 0 --output_dir "
                      f"{TEACHER}"),),
    arms={"verifier": "--algorithm grpo",
          "teacher": f"--algorithm grpo --advantage distillation {TAUGHT}",
          "both": f"--algorithm grpo --distillation_coef 1 {TAUGHT}"},
    cells={"default": ""}, starts=range(1, 9),
    plan=(Part(("verifier", "teacher", "both"), ("default",), range(1, 9)),),
    rules={"the teacher alone": Rule("teacher@default - verifier@default", nothing=EQUAL),
           "teacher and verifier": Rule("both@default - verifier@default", **BESIDE)},
    decides=("the teacher alone",),
    notes="The teacher is a run of 10 batches, which a longer one would beat.")
CUT = "--algorithm grpo --max_completion_length 20"
PULLED = "--algorithm grpo --beta 0.05"
FLAGS = {   # arm: (its flags, the arm without)
    "mask truncated": (f"{CUT} --mask_truncated_completions", "cut"),
    "top-p": ("--algorithm grpo --top_p 0.9", "GRPO"),
    "top-k": ("--algorithm grpo --top_k 3", "GRPO"),
    "moving reference": (f"{PULLED} --sync_ref_model --ref_model_mixup_alpha 0.6 "
                         "--ref_model_sync_steps 2", "fixed reference"),
    "mask outliers": ("--algorithm grpo --sampler_dtype int3 --mismatch_mask outlier", "int3"),
    "KPop": ("--algorithm kpop", "GRPO"),
    "leave one out, std": ("--algorithm grpo --advantage leave_one_out_std", "GRPO"),
    "advantage clip": ("--algorithm grpo --advantage_clip 1", "GRPO"),
    "likelihood": ("--algorithm grpo --positive_example_nll_weight 0.1", "GRPO")}
ALONE = {"GRPO": "--algorithm grpo", "cut": CUT, "fixed reference": PULLED,
         "int3": "--algorithm grpo --sampler_dtype int3", "SDPO": "--algorithm sdpo"}
ADDED = Question(
    claim="A policy learns from its own right responses as hints for its wrong ones",
    source="SDPO 2601.20802", reported="higher accuracy than GRPO (models of 4 to 8 B)",
    regime=f"{TINY}, 10 rollout batches", flags=f"--steps 10 {EVAL}",
    arms=ALONE | {arm: flags for arm, (flags, _) in FLAGS.items()}, cells={"default": ""},
    starts=range(1, 9),
    plan=(Part((*ALONE, *FLAGS), ("default",), range(1, 4)), Part(("SDPO",), ("default",),
                                                                  range(1, 9))),
    rules={"SDPO gains": Rule("SDPO@default - SDPO@default:before"),
           **{f"{arm} against none": Rule(f"{arm}@default - {other}@default", reported=True)
              for arm, (_, other) in FLAGS.items()}},
    decides=("SDPO gains",),
    notes="The other rows have three starts and one value each that was not tuned: they show that"
          " a flag learns, not that it helps.")

# ------------------------------------------------------------------------- the runs of README

PROMISED = Question(
    claim="The default run ends above 0.95 held-out pass@1", source="this project's target",
    reported="0.95", regime=f"{TINY}, 50 rollout batches", flags="", arms={"GSPO": ""},
    cells={"default": ""}, starts=range(3), plan=(Part(("GSPO",), ("default",), range(3)),),
    rules={"after": Rule("GSPO@default", form="{:.3f}", reported=True),
           **{name: Rule(f"GSPO@default:{name}", form=form, reported=True)
              for name, form in (("before", "{:.3f}"), ("greedy", "{:.3f}"),
                                 ("seconds", "{:.0f}"))}},
    decides=(), seconds=120)
SMOLLM2_RUN = Question(
    claim="SmolLM2 learns the larger of two numbers to 0.9 within 20 rollout batches",
    source="this project's target", reported="0.9",
    regime="SmolLM2-135M, answers of 3 tokens, 20 rollout batches of 128 answers",
    flags=f"--steps 20 --prompts_per_step 16 --eval_prompts 128 {LARGER}",
    arms={"GSPO": "", "LoRA": "--use_peft --lora_r 16 --lora_alpha 32"},
    cells={"default": "--learning_rate 1.5e-5", "LoRA": "--learning_rate 1e-4"}, starts=range(3),
    plan=(Part(("GSPO",), ("default",), range(3)), Part(("LoRA",), ("LoRA",), range(1))),
    rules={"after": Rule("GSPO@default", form="{:.3f}", reported=True),
           **{name: Rule(f"GSPO@default:{name}", form=form, reported=True)
              for name, form in (("before", "{:.3f}"), ("seconds", "{:.0f}"))},
           "LoRA after": Rule("LoRA@LoRA", form="{:.3f}", reported=True),
           "memory": Rule("GSPO@default:peak_mb", form="{:,.0f}", reported=True),
           "LoRA memory": Rule("LoRA@LoRA:peak_mb", form="{:,.0f}", reported=True)},
    decides=(), before=(CHECKPOINT, MAX_DATA), seconds=240)

# --------------------------------------------------------------------- what a ratio and a clip do

RUN = f"{TINY}, 12 rollout batches"
TAUGHT_LITTLE = "width 64, 2 layers, three updates off-policy, answers of 7 to {} tokens"
ONE = dict(flags="", arms={"GSPO": GSPO[1]}, cells={"run": ""}, starts=range(8),
           plan=(Part(("GSPO",), ("run",), range(8)),), seconds=60)
THREE = ONE | dict(starts=range(3), plan=(Part(("GSPO",), ("run",), range(3)),))
IDENTITY = Question(
    claim="s = PPL_old / PPL_new = exp(ΔH), answer by answer",
    source="Rethinking GSPO, eq. 2 and Table 1",
    reported="mean difference 4.02e-4, largest 1.2e-2", regime=f"{TINY}, 6 rollout batches",
    rules={"in float32": Rule("GSPO@run:apart32", held=(-inf, 2e-6), refuted=None, least=3,
                              form="{:.1e}"),
           "in float64": Rule("GSPO@run:apart64", held=(-inf, 1e-14), refuted=None, least=3,
                              form="{:.1e}"),
           "of means over a batch": Rule("GSPO@run:batch_h", form="{:.1e}", reported=True)},
    decides=("in float32", "in float64"), measure="drift",
    notes="The largest difference over answers. What reaches their size: means over a batch, "
          "where the mean of ratios is not the ratio of means, and bfloat16.", **THREE)
CLIPPED = Question(
    claim="GSPO clips about a hundred times more tokens than GRPO",
    source="GSPO §5.1 and figure 2", reported="15 % against 0.13 %", regime=RUN,
    rules={"30 to 300 times": Rule("GSPO@run:clipped_factor", held=(30, 300), refuted=None,
                                   factor=True, form="{:.0f}"),
           "GSPO's share": Rule("GSPO@run:clipped_gspo", form="{:.0%}", reported=True),
           "GRPO's share": Rule("GSPO@run:clipped_grpo", form="{:.2%}", reported=True)},
    decides=("30 to 300 times",), measure="drift",
    notes="At every batch of a GSPO run GRPO makes its own updates from the same policy.", **ONE)
BOUNDED = Question(
    claim="Clipping tokens leaves the product of ratios unbounded; clipping s bounds s",
    source="slides; Rethinking GSPO §4.1",
    reported="product anywhere in [0.8^n, 1.2^n]; s directly bounded, Var[s] ≤ ε²", regime=RUN,
    rules={"s leaves the band in less than 1 % of answers": Rule(
               "GSPO@run:outside_s", held=(-inf, .01), refuted=(.05, inf), form="{:.0%}")},
    decides=("s leaves the band in less than 1 % of answers",), measure="drift",
    notes="Before the last mini-batch's update. The other half, that the spread of a product of "
          "clipped ratios grows with length (slope +0.38) and that of log s falls (−0.56), was "
          "held on answers of 7 to 259 tokens.", **ONE)
SPREAD = Question(
    claim="Ratios spread from the first mini-batch to the fourth", source="GSPO §3",
    reported="later mini-batches are off-policy (no figure)", regime=RUN,
    rules={"0 in the first": Rule("GSPO@run:log_w_var_1", held=(-inf, 1e-12), refuted=None,
                                  form="{:.0e}"),
           "from the 2nd to the 3rd": Rule("GSPO@run:spread_3", held=(1, inf), refuted=None,
                                           factor=True, form="{:.1f}"),
           "from the 3rd to the 4th": Rule("GSPO@run:spread_4", held=(1, inf), refuted=None,
                                           factor=True, form="{:.1f}")},
    decides=("from the 3rd to the 4th", "from the 2nd to the 3rd", "0 in the first"),
    measure="drift", notes="Var[log w] of a mini-batch before its update.", **ONE)
VARIANCE = Question(
    claim="Var[log s] = Var[log w] / L", source="Rethinking GSPO, eq. 19 and §5.3",
    reported="factor 0.00835 at L = 817 by its own variances (printed 0.00436), theory 0.00122",
    regime=TAUGHT_LITTLE.format(997),
    rules={"the exponent of L": Rule("GSPO@run:variance_slope", held=(-1.25, -.75), refuted=None,
                                     form="{:.2f}")},
    decides=("the exponent of L",), measure="lengths", **ONE)
SHORT = Question(
    claim="A fixed band wide enough to clip 15 % clips short answers more than long ones",
    source="open question; FSPO 2509.09177", reported="no figure",
    regime=TAUGHT_LITTLE.format(259),
    rules={"at least 1.5 times as often": Rule("GSPO@run:short_factor", held=(1.5, inf),
                                               refuted=(0, 1.2), factor=True, form="{:.1f}")},
    decides=("at least 1.5 times as often",), measure="lengths",
    notes="The shortest third of the lengths against the longest. The paper's band clips about "
          "half at every length.", **ONE)

# --------------------------------------------------------------------------- a batch used μ times

MU = {f"μ{mu}": f"--num_iterations {mu}" for mu in (1, 2, 4)}
REUSED = {"GRPO": GRPO, "GSPO": GSPO[1], "GSPO ×100": GSPO[100],
          "DAPO": "--algorithm dapo", "GMPO": "--algorithm gmpo", "GSPO ×10": GSPO[10]}
FIRST = tuple(REUSED)[:3]
CHOOSE = range(700, 704)
FRESH = range(704, 720)


def reuse_rules():
    rules = {}
    for arm in REUSED:
        for mu in (4, 2):
            rules[f"{arm} gains from μ = {mu}, equal samples"] = Rule(
                f"{arm}@best μ{mu} - {arm}@best μ1", **ABOVE)
    for arm in REUSED:
        for mu, batch in ((4, 3), (2, 6)):
            rules[f"{arm} gains from μ = {mu}, equal optimizer steps"] = Rule(
                f"{arm}@best μ{mu}:at_{batch} - {arm}@best μ1", **ABOVE)
    for arm in tuple(REUSED)[1:]:
        rules[f"{arm} minus GRPO grows from μ = 1 to 4"] = Rule(
            f"{arm}@best μ4 - GRPO@best μ4 - {arm}@best μ1 + GRPO@best μ1", **ABOVE)
    for arm in tuple(REUSED)[1:]:
        for mu in (1, 2, 4):
            rules[f"{arm} is ahead of GRPO at μ = {mu}"] = Rule(
                f"{arm}@best μ{mu} - GRPO@best μ{mu}", **ABOVE)
    for arm in REUSED:
        for mu in (1, 2, 4):
            rules[f"the clip of {arm} acts at μ = {mu}"] = Rule(
                f"{arm}@best μ{mu}:clipped", held=(.01, inf), refuted=(-inf, .01), least=16)
    return rules


REUSE = Question(
    claim="At equal samples, GRPO, GSPO with the paper's band and with 100 times it all learn "
          "more from a batch used four times than from one used once",
    source="GRPO's μ (2402.03300, algorithm 1)", reported="μ is a parameter; no paper compares",
    regime=f"{TINY}, 12 rollout batches, constant rate",
    flags=f"--steps 12 --eval_steps 3 --lr_scheduler_type constant_with_warmup {EVAL}",
    arms=REUSED,
    cells={name: flags for group, mu in MU.items()
           for name, flags in rates(1e-4, 2e-4, 4e-4, 8e-4, group=group, flags=mu).items()},
    further={name: flags for group, mu in MU.items()
             for name, flags in rates(5e-5, 16e-4, group=group, flags=mu).items()},
    choose=CHOOSE, starts=FRESH, seconds=14,
    plan=tuple(part for arms, groups in ((FIRST, ("μ1", "μ4")), (FIRST, ("μ2",)),
                                         (tuple(REUSED)[3:], ("μ1", "μ4")),
                                         (tuple(REUSED)[3:], ("μ2",)))
               for part in (Part(arms, tuple(f"all {g}" for g in groups), CHOOSE),
                            Part(arms, tuple(f"edge {g}" for g in groups), CHOOSE),
                            Part(arms, tuple(f"best {g}" for g in groups), FRESH))),
    rules=reuse_rules(),
    decides=tuple(f"{arm} gains from μ = 4, equal samples" for arm in FIRST),
    notes="Each arm has its own rate for every μ, of four, by held-out pass@1 at the end on "
          "starts 700 to 703; a range that ends at its best is extended once by one rate. Equal "
          "samples: 12 batches each. Equal optimizer steps (48): μ = 4 after 3 batches, μ = 2 "
          "after 6, μ = 1 after 12, of the same runs, which is why the rate is constant; their "
          "rates are those chosen for 12 batches. A clip acts if the interval of its share of "
          "clipped tokens, mean over the updates of a run, lies above 0.01. Order of worth: GRPO,"
          " GSPO and GSPO ×100 at μ = 1 and 4, then at μ = 2; then DAPO, GMPO and ×10. There is "
          "one core for two hours at first, which may not finish the first part; later sessions "
          "go on in this order, and 16 starts were fixed beforehand: fewer decide nothing and "
          "change nothing.")

# ------------------------------------------------------- a pretrained model, answers of 60 tokens

COUNTERS = {"GRPO": GRPO, "GSPO": GSPO[1], "GSPO ×100": GSPO[100],
            "GSPO ×100 bf16": f"{GSPO[100]} --bf16 true"}
COUNT_FRESH = range(100, 108)
COUNT_RULES = dict(nothing=EQUAL, least=8)
COUNTING = Question(
    claim="With answers of sixty tokens of a pretrained model, GSPO with 100 times the paper's "
          "band learns as much in bfloat16 as in float32",
    source="ours, no paper", reported="no figure",
    regime="SmolLM2-135M-Instruct counts twenty numbers, 8 rollout batches of 8 × 8 answers",
    flags=f"{SMOLLM2} --dataset_name data/counting_train.jsonl --test_dataset_name "
          "data/counting_test.jsonl --verifier experiments/counting.py:share "
          "--max_completion_length 90 --steps 8 --prompts_per_step 8 --steps_per_generation 4 "
          "--bf16 false --eval_prompts 20 --eval_samples 4",
    arms=COUNTERS, rate_of={"GSPO ×100 bf16": "GSPO ×100"},
    cells=rates(7.5e-6, 1.5e-5, 3e-5), further=rates(3.75e-6, 6e-5),
    choose=range(2), choices=2, starts=COUNT_FRESH, seconds=600,
    before=(CHECKPOINT, ("data/counting_train.jsonl", "experiments/counting.py")),
    plan=(Part(tuple(COUNTERS)[:3], ("all",), range(2)),
          Part(tuple(COUNTERS)[:3], ("edge",), range(2)),
          Part(tuple(COUNTERS)[2:], ("best",), COUNT_FRESH),
          Part(tuple(COUNTERS)[:2], ("best",), COUNT_FRESH)),
    rules={"bfloat16 costs ×100 nothing": Rule(
               "GSPO ×100@best:reward - GSPO ×100 bf16@best:reward", held=(-inf, EQUAL),
               refuted=(EQUAL, inf), least=8),
           **{f"{arm} learns": Rule(f"{arm}@best:reward - {arm}@best:reward_before", least=8)
              for arm in COUNTERS},
           "GSPO is ahead of GRPO": Rule("GSPO@best:reward - GRPO@best:reward", **COUNT_RULES),
           "GSPO ×100 is ahead of GRPO": Rule("GSPO ×100@best:reward - GRPO@best:reward",
                                              **COUNT_RULES),
           "GSPO ×100 is ahead of GSPO": Rule("GSPO ×100@best:reward - GSPO@best:reward",
                                              **COUNT_RULES),
           **{f"the clip of {arm} acts": Rule(f"{arm}@best:clipped", held=(.01, inf),
                                              refuted=(-inf, .01), least=8) for arm in COUNTERS},
           # 1 if tokens moved independently of each other, L if all moved alike
           "1/L shrinks the spread of log s": Rule("GSPO ×100@best:factor_times_length",
                                                   held=(.5, 2), refuted=None, least=8)},
    decides=("bfloat16 costs ×100 nothing",),
    notes="Reward: the share of the twenty numbers before the first wrong one; the figure is the "
          "mean held-out reward. One pretrained model: a seed changes prompts and samples. The "
          "rate of each arm by seeds 0 and 1 in float32; bfloat16 uses that of float32. Factor: "
          "Var[log s] / Var[log w] times L, median over batches. At most 15 minutes a run on one "
          "core in float32: if the first choosing run takes more, --steps becomes 6 for all, and "
          "these runs are made again; bfloat16 may take longer, as a CPU only imitates it. "
          "Choosing runs first, then ×100 in both formats, then the others.")

# -------------------------------------------------------------------------------- PPO, fairly

def flags_of(**values):
    return " ".join(f"--{name} {value:g}" for name, value in values.items())


HEADS = {f"w{w} λ{lam}": flags_of(critic_warmup=w, lam=lam)  # flags that train.py is to get
         for w in (0, 2, 5) for lam in (.95, 1)}
PPO_RATES = (5e-5, 1e-4, 2e-4, 4e-4)
PLAIN_RATES = (2e-4, 4e-4, 6e-4, 8e-4)
PPO = Question(
    claim="PPO with a head start for its critic learns as much as GRPO",
    source="ours, no paper", reported="no figure", regime=f"{TINY}, 10 rollout batches",
    flags=f"--steps 10 {EVAL}",
    arms={"PPO": "--algorithm ppo", "GRPO": GRPO,
          "REINFORCE++": "--algorithm reinforce_plus_plus"},
    cells={name: flags for group, head in HEADS.items()
           for name, flags in rates(*PPO_RATES, group=group, flags=head).items()}
          | rates(*PLAIN_RATES, group="no critic"),
    further={name: flags for group, head in HEADS.items()
             for name, flags in rates(2.5e-5, 8e-4, group=group, flags=head).items()}
            | rates(1e-4, 12e-4, group="no critic"),
    choose=CHOOSE, starts=FRESH, seconds=10,
    plan=(Part(("PPO",), ("all w",), CHOOSE),
          Part(("GRPO", "REINFORCE++"), ("all no critic",), CHOOSE),
          Part(("PPO",), ("edge w",), CHOOSE),
          Part(("GRPO", "REINFORCE++"), ("edge no critic",), CHOOSE),
          Part(("PPO",), ("best w", "best w0"), FRESH),
          Part(("GRPO", "REINFORCE++"), ("best no critic",), FRESH)),
    rules={"PPO equals GRPO or is ahead": Rule("PPO@best w - GRPO@best no critic",
                                               held=(-EQUAL, inf), refuted=(-inf, -EQUAL),
                                               least=16),
           "PPO equals REINFORCE++ or is ahead": Rule(
               "PPO@best w - REINFORCE++@best no critic", held=(-EQUAL, inf),
               refuted=(-inf, -EQUAL), least=16),
           "the head start helps": Rule("PPO@best w - PPO@best w0", **ABOVE)},
    decides=("PPO equals GRPO or is ahead",),
    notes="PPO's head start (0, 2, 5 batches), λ (0.95, 1) and rate are chosen together on starts"
          " 700 to 703; the chosen one is compared with the best without head start, with GRPO "
          "and with REINFORCE++, each at its rate. If the best has no head start, the last rule "
          "says nothing.")

# ------------------------------------------------------------------------------------- edges

DEEP_EDGE = Question(
    claim="At 48 layers, each at its best rate, GSPO with the paper's band ends above GRPO",
    source="GSPO §5.3", reported="GRPO converges only with routing replay; GSPO needs none",
    regime=DEEP_REGIME, flags=f"--steps 16 {EVAL} {DEEP} --num_hidden_layers 48",
    arms=DEEP_ARMS,
    cells=rates(1.2e-5, 2.5e-5, 5e-5, 7e-5), further=rates(6e-6, 1e-4),
    choose=range(720, 740), starts=range(740, 760), seconds=30,
    plan=(Part(tuple(DEEP_ARMS), ("all",), range(720, 740), 4),
          Part(tuple(DEEP_ARMS), ("edge",), range(720, 740), 4),
          Part(tuple(DEEP_ARMS), ("best",), range(740, 760), 8)),
    rules={f"{arm} is ahead of GRPO": Rule(f"{arm}@best - GRPO@best", nothing=EQUAL)
           for arm in tuple(DEEP_ARMS)[1:]},
    decides=("GSPO is ahead of GRPO",),
    notes="The best of most arms was the smallest rate of the old grid, 5e-5. A start whose cold "
          "start train.py refuses is skipped in all arms and the next takes its place.")
LEAGUE_ARMS = {"dapo_paper": "--algorithm dapo_paper --epsilon 0.1 --epsilon_high 0.14",
               "grpo ×0.5": "--algorithm grpo --epsilon 0.1 --epsilon_high 0.1",
               "grpo": "--algorithm grpo",
               "grpo ×1.35": GRPO, "rloo": "--algorithm rloo --steps_per_generation 1"}
LEAGUE_EDGE = Question(
    claim="GRPO with its published clip range, at its best rate, ends within 0.03 of the league's"
          " first", source="ours, no paper",
    reported="no paper compares them", regime=f"{TINY}, 10 rollout batches",
    flags=f"--steps 10 {EVAL}", arms=LEAGUE_ARMS,
    cells=rates(2e-4, 4e-4, 6e-4, 8e-4, 12e-4), further=rates(1e-4, 18e-4),
    choose=CHOOSE, starts=FRESH, seconds=10,
    plan=(Part(tuple(LEAGUE_ARMS), ("all",), CHOOSE), Part(tuple(LEAGUE_ARMS), ("edge",), CHOOSE),
          Part(tuple(LEAGUE_ARMS), ("best",), FRESH)),
    rules={"dapo_paper is ahead of grpo by more than 0.03": Rule(
               "dapo_paper@best - grpo@best", held=(EQUAL, inf), refuted=(-inf, EQUAL), least=16),
           **{f"{arm} is ahead of grpo": Rule(f"{arm}@best - grpo@best", **ABOVE)
              for arm in LEAGUE_ARMS if arm != "grpo"}},
    decides=("dapo_paper is ahead of grpo by more than 0.03",),
    notes="The league's GRPO had half the published clip range (0.1, 0.1), chosen on four starts,"
          " and RLOO's best rate was the largest tried.")

QUESTIONS = {
    "identity": IDENTITY, "clipped": CLIPPED, "bounded": BOUNDED, "spread": SPREAD,
    "variance": VARIANCE, "short": SHORT, "collapse": COLLAPSE, "depth": DEPTH, "flips": FLIPS,
    "sampler": SAMPLER, "dose": DOSE, "lags": LAGS, "sixteen": SIXTEEN, "learning": LEARNING,
    "steps": STEPS, "league": LEAGUE, "credit": CREDIT, "distilled": DISTILLED,
    "added": ADDED, "default": PROMISED, "smollm2": SMOLLM2_RUN, "reuse": REUSE,
    "counting": COUNTING, "ppo": PPO, "deep_edge": DEEP_EDGE, "league_edge": LEAGUE_EDGE}
