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

from dataclasses import dataclass, field
from math import inf

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
    flags: str
    arms: dict
    cells: dict
    starts: range
    plan: tuple
    rules: dict
    decides: tuple                   # the rules that together are the verdict
    choose: range = range(0)
    choices: int = 4                 # usable starts that choose a cell
    further: dict = field(default_factory=dict)      # cells beyond the first and the last
    seconds: float = 10              # guessed core-seconds of a run
    notes: str = ""                  # what the rules need in words


def rates(*values, group="", flags=""):
    """{name: flags} of cells that differ in the learning rate."""
    return {f"{group} {value:g}".strip(): f"--learning_rate {value:g} {flags}".strip()
            for value in values}


GRPO = "--algorithm grpo --epsilon_high 0.27"        # the clip range of GSPO's own baseline, §5.1
GSPO = {1: "--algorithm gspo",
        10: "--algorithm gspo --epsilon 3e-3 --epsilon_high 4e-3",
        100: "--algorithm gspo --epsilon 0.03 --epsilon_high 0.04"}
ABOVE = dict(nothing=EQUAL, least=16)                # held above 0; below 0 or equal: refuted

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
    claim="At equal samples, GRPO, GSPO with the paper's band and with 100 times it all learn more "
          "from a batch used four times than from one used once",
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
    notes="Each arm has its own rate for every μ, of four, by held-out pass@1 at the end on starts "
          "700 to 703; a range that ends at its best is extended once by one rate. Equal samples: "
          "12 batches each. Equal optimizer steps (48): μ = 4 after 3 batches, μ = 2 after 6, μ = 1 "
          "after 12, of the same runs, which is why the rate is constant; their rates are those "
          "chosen for 12 batches. A clip acts if the interval of its share of clipped tokens, mean "
          "over the updates of a run, lies above 0.01. Order of worth: GRPO, GSPO and GSPO ×100 at "
          "μ = 1 and 4, then at μ = 2; then DAPO, GMPO and ×10. There is one core for two hours "
          "at first, which may not finish the first part; later sessions go on in this order, and "
          "16 starts were fixed beforehand: fewer decide nothing and change nothing.")

# ------------------------------------------------------- a pretrained model, answers of 60 tokens

COUNTERS = {"GRPO": GRPO, "GSPO": GSPO[1], "GSPO ×100": GSPO[100],
            "GSPO ×100 bf16": f"{GSPO[100]} --bf16 true"}
COUNT_FRESH = range(100, 108)
COUNT_RULES = dict(nothing=EQUAL, least=8)
COUNTING = Question(
    claim="With answers of sixty tokens of a pretrained model, GSPO with 100 times the paper's band "
          "learns as much in bfloat16 as in float32",
    source="ours, no paper", reported="no figure",
    regime="SmolLM2-135M-Instruct counts twenty numbers, 8 rollout batches of 8 × 8 answers",
    flags="--model_name_or_path checkpoints/SmolLM2-135M-Instruct --no_chat_template --stop \\n "
          "--dataset_name data/counting_train.jsonl --test_dataset_name data/counting_test.jsonl "
          "--verifier experiments/counting.py:share --max_completion_length 90 --steps 8 "
          "--prompts_per_step 8 --lr_scheduler_type constant_with_warmup --bf16 false "
          "--eval_prompts 32 --eval_samples 2",
    arms=COUNTERS,
    cells=rates(7.5e-6, 1.5e-5, 3e-5), further=rates(3.75e-6, 6e-5),
    choose=range(2), choices=2, starts=COUNT_FRESH, seconds=600,
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
          "mean held-out reward. One pretrained model: a seed changes prompts and samples. The rate "
          "of each arm by seeds 0 and 1 in float32; bfloat16 uses that of float32. Factor: "
          "Var[log s] / Var[log w] times L, median over batches. At most 15 minutes a run on one "
          "core in float32: if the first choosing run takes more, --steps becomes 6 for all, and "
          "these runs are made again; bfloat16 may take longer, as a CPU only imitates it. Choosing "
          "runs first, then ×100 in both formats, then the others.")

# -------------------------------------------------------------------------------- PPO, fairly

HEADS = {f"w{w} λ{lam}": f"--critic_warmup {w} --gae_lambda {lam}"
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
    notes="PPO's head start (0, 2, 5 batches), λ (0.95, 1) and rate are chosen together on starts "
          "700 to 703; the chosen one is compared with the best without head start, with GRPO and "
          "with REINFORCE++, each at its rate. If the best has no head start, the last rule says "
          "nothing.")

# ------------------------------------------------------------------------------------- edges

DEEP = ("--hidden_size 48 --num_experts 16 --num_experts_per_tok 2 --num_hidden_layers 48 "
        "--min_terms 3 --max_terms 5 --cold_start_steps 500 --cold_start_learning_rate 1e-3 "
        "--prompts_per_step 16 --lr_scheduler_type constant_with_warmup")
DEEP_ARMS = {"GRPO": GRPO, "GSPO": GSPO[1], "GSPO ×100": GSPO[100],
             "GRPO replay": f"{GRPO} --routing_replay old"}
DEEP_EDGE = Question(
    claim="At 48 layers, each at its best rate, GSPO with the paper's band ends above GRPO",
    source="GSPO §5.3", reported="GRPO converges only with routing replay; GSPO needs none",
    regime="5.8 M parameters, 48 layers of 16 experts, answers of about 9 tokens, 16 rollout "
           "batches",
    flags=f"--steps 16 {EVAL} {DEEP}", arms=DEEP_ARMS,
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
    claim="GRPO with its published clip range, at its best rate, ends within 0.03 of the league's "
          "first", source="ours, no paper",
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
    notes="The league's GRPO had half the published clip range (0.1, 0.1), chosen on four starts, "
          "and RLOO's best rate was the largest tried.")

QUESTIONS = {"reuse": REUSE, "counting": COUNTING, "ppo": PPO, "deep_edge": DEEP_EDGE,
             "league_edge": LEAGUE_EDGE}
