"""Does self-distillation learn from a right response of the group? And does every flag learn?

Claim: feedback from the policy's own right responses is enough to teach its wrong ones: the policy
that reads a right response of the same group teaches the wrong responses of that group, and learns
(SDPO 2601.20802). distillation.py found that the policy that reads the reference answer
(--self_distillation) ends below its start on the running sum, whose model never saw an answer
before a prompt. There a right response is the reference answer, to the letter, so the arms differ
in who is taught, not in what is read.

Setting: train.py's default task and policy, 4e-4, 10 rollout batches of 256 responses, cold starts
1 to 8. Arms: self-distillation (every response, the reference answer), SDPO with the policy itself
and with an average of the policies so far as teacher, SDPO with the group's advantages added, and
GRPO. gain = held-out pass@1 at the end minus that at the start. Written down beforehand, 95 % t
intervals over cold starts:

  confirmed                SDPO's gain lies above 0 with both teachers, self-distillation's below 0
  refuted                  SDPO's gain lies below 0 with both teachers
  depends on the teacher   it lies above 0 with one teacher and below 0 with the other
  undecided                otherwise, and with fewer than 8 cold starts

Reported beside it, without a verdict: the same on SmolLM2-135M-Instruct, which can read a hint (the
larger of two numbers, a worked line more as the hint, 5 rollout batches of 64 responses; 10 of 128
had been planned and were too slow; 2 seeds: another order of the prompts, one model); and one row
for every other flag that docs/family.md shares with other frameworks, on the cold starts 1 to 3,
each beside the same run without it. Each has one value that was not tuned: these runs show that a
flag learns, not that it helps.
"""

import math
import subprocess
import sys
from pathlib import Path

from shared import claim, maps
import pretrained
from tools.style import BLACK, BLUE, GREEN, GREY, ORANGE, label, panels

ROW = dict(claim="A policy learns from its own right responses as hints for its wrong ones, where "
                 "the reference answer as a hint makes it worse",
           source="SDPO 2601.20802", reported="higher accuracy than GRPO (models of 4 to 8 B)")
SELF = "--algorithm grpo --advantage distillation --self_distillation"
SDPO = {"self": SELF, "sdpo_live": "--algorithm sdpo --teacher_model_kind live",
        "sdpo": "--algorithm sdpo",
        "sdpo_group": "--algorithm sdpo --advantage group --distillation_coef 1",
        "grpo": "--algorithm grpo"}
TEACHERS = ("sdpo_live", "sdpo")
NAMES = {"self": "self-distillation (reference answer)", "sdpo_live": "SDPO (policy as teacher)",
         "sdpo": "SDPO (average as teacher)", "sdpo_group": "SDPO + group advantages",
         "grpo": "GRPO"}
CUT = "--max_completion_length 20"
REFERENCE = "--beta 0.05"
MOVING = "--sync_ref_model --ref_model_mixup_alpha 0.6 --ref_model_sync_steps 2"
FLAGS = {               # arm: (what both runs have, the flag, the sampler's number format)
    "masked": (CUT, "--mask_truncated_completions", "float32"),
    "top_p": ("", "--top_p 0.9", "float32"),
    "top_k": ("", "--top_k 3", "float32"),
    "moving": (REFERENCE, MOVING, "float32"),
    "outlier": ("", "--mismatch_mask outlier", "int3"),
    "kpop": ("", "--algorithm kpop", "float32"),
    "leave_one_out_std": ("", "--advantage leave_one_out_std", "float32"),
    "advantage_clip": ("", "--advantage_clip 1", "float32"),
    "likelihood": ("", "--positive_example_nll_weight 0.1", "float32"),
    "length": ("", "--length_penalty 0.2", "float32"),
}
POLICIES = {"moe": "",
            "SmolLM2": pretrained.POLICIES[pretrained.MAX].replace("step 16", "step 8")}
HINT = "--hint_template {prompt}{answer}\\n{prompt}"         # one worked line more
SEEDS = range(1, 9)
FEW = range(1, 4)
SMOLLM2 = range(2)
BATCHES = {"moe": 10, "SmolLM2": 5}
CURVES = ("length", "truncated", "kl", "teacher_kl", "mismatch_kl")
FILE = maps.runs_of("family_flags")


def plain(common, bits):
    """The arm and the flags of the run beside a flag's: GRPO, with what both have."""
    named = {("", "float32"): "grpo", (CUT, "float32"): "cut", (REFERENCE, "float32"): "fixed",
             ("", "int3"): "grpo_int3"}
    return named[common, bits], f"--algorithm grpo {common}".strip()


def flags_of(c):
    """train.py's flags of a cell."""
    if c["arm"] in SDPO:
        hint = HINT if c["policy"] == "SmolLM2" and c["arm"] != "grpo" else ""
        return f"{SDPO[c['arm']]} {hint}".strip()
    for name, (common, flag, bits) in FLAGS.items():
        beside, words = plain(common, bits)
        if c["arm"] == beside:
            return words
        if c["arm"] == name:
            return f"{words} {flag}"
    raise ValueError(f"{c['arm']} is no arm of experiments/family_flags.py")


def grid(full):
    """The cells to run, what is reported first: three cold starts of SDPO, one of every flag, one
    seed of SmolLM2, then the rest of the cold starts and seeds."""
    yield from (cell(arm, seed) for seed in FEW for arm in SDPO)
    yield from of_flags(FEW[0])
    yield from of_smollm2(SMOLLM2[0])
    yield from (c for seed in FEW for c in of_flags(seed))
    yield from of_smollm2(SMOLLM2[1])
    yield from (cell(arm, seed) for seed in SEEDS for arm in SDPO)


def of_smollm2(seed):
    yield from (cell(arm, seed, "SmolLM2") for arm in ("sdpo", "sdpo_live", "self", "grpo"))


def of_flags(seed):
    for name, (common, _, bits) in FLAGS.items():
        yield cell(plain(common, bits)[0], seed, bits=bits)
        yield cell(name, seed, bits=bits)


def cell(arm, seed, policy="moe", bits="float32"):
    rate = 1.5e-5 if policy == "SmolLM2" else 4e-4
    return maps.cell(arm, seed, policy, bits, rate, batches=BATCHES[policy])


def make(c):
    if c["policy"] == "SmolLM2" and not Path("data/max_of_two_train.jsonl").is_file():
        subprocess.run([sys.executable, "tests/make_max_data.py", "data"], check=True)
    return maps.one_run(c, flags_of(c), POLICIES, CURVES)


# -------------------------------------------------------------------------------- what was found

def ends(runs, arm, policy="moe", name="after"):
    """{seed: held-out pass@1} of an arm."""
    return maps.values(runs, name, arm=arm, policy=policy)


def gains(runs, arm, policy="moe"):
    """What an arm learnt, pass@1 at the end minus that at the start, one value per seed."""
    return claim.differences(ends(runs, arm, policy), ends(runs, arm, policy, "before"))


def decide(reference, teachers):
    """The verdict, from the gains of self-distillation and of SDPO with each teacher."""
    seeds = min(map(len, (reference, *teachers)))
    if seeds < claim.LEAST:
        return claim.undecided(seeds)
    answers = [claim.verdict(g, held=(0, math.inf), refuted=(-math.inf, 0)) for g in teachers]
    if set(answers) == {claim.HELD, claim.REFUTED}:
        return claim.depends("the teacher")
    if set(answers) == {claim.REFUTED}:
        return claim.Verdict(claim.REFUTED, max(answer.p for answer in answers))
    worse = claim.verdict(reference, held=(-math.inf, 0))
    if set(answers) == {claim.HELD} and worse == claim.HELD:
        return claim.all_of(*answers, worse)
    return claim.Verdict(claim.undecided(seeds), max(answer.p for answer in (*answers, worse)))


def judge(runs):
    parts = []
    for policy, what in (("moe", "running sum"), ("SmolLM2", "SmolLM2, larger of two")):
        found = {arm: gains(runs, arm, policy) for arm in SDPO}
        parts += [f"{what}: gain of {NAMES[arm]} {claim.counted(values)}"
                  for arm, values in found.items() if values]
    parts += [f"{row['flags']}: {row['minus']} pass@1 ({row['seeds']}) against the same without it"
              for row in table(runs)]
    reference = gains(runs, "self")
    teachers = [gains(runs, arm) for arm in TEACHERS]
    seeds = min(map(len, (reference, *teachers)))
    form = lambda values: claim.number(values, "{:+.3f}")
    number = (f"gain {' and '.join(map(form, teachers))} by SDPO with the policy and with an "
              f"average as teacher, {form(reference)} by self-distillation")
    return "; ".join(parts), number, decide(reference, teachers), seeds


def table(runs):
    """One row per flag: pass@1 before and after with it, and after without it, means over the cold
    starts that have both."""
    rows = []
    for name, (common, flag, bits) in FLAGS.items():
        beside, words = plain(common, bits)
        one = ends(runs, name)
        other = ends(runs, beside)
        both = sorted(one.keys() & other.keys())
        if both:
            before = ends(runs, name, name="before")
            sampler = "" if bits == "float32" else f" --sampler_dtype {bits}"
            flags = f"{words}{sampler} {flag}"
            if "--algorithm" in flag:
                flags = flag
            rows.append(dict(
                flags=flags, seeds=len(both),
                before=claim.mean(before[seed] for seed in both),
                after=claim.mean(one[seed] for seed in both),
                without=claim.mean(other[seed] for seed in both),
                minus=claim.number(claim.differences(one, other), "{:+.3f}")))
    return claim.rounded(rows)


def teachers_table(runs):
    """One row per arm of self-distillation: pass@1 before and after on both tasks."""
    rows = []
    for arm in SDPO:
        row = dict(arm=NAMES[arm], flags=SDPO[arm])
        for policy in POLICIES:
            after = ends(runs, arm, policy)
            before = ends(runs, arm, policy, "before")
            if after:
                row[policy] = dict(before=claim.mean(before.values()), seeds=len(after),
                                   after=claim.mean(after.values()))
        rows.append(row)
    return claim.rounded(rows)


def takeaway(runs):
    """Whether SDPO learns on either task, and pass@1 at the start and the end of every arm."""
    told = []
    for policy, what in (("moe", "On the running sum"), ("SmolLM2", "on SmolLM2")):
        found = {arm: gains(runs, arm, policy) for arm in SDPO if ends(runs, arm, policy)}
        learns = [claim.mean(found[arm]) > 0 for arm in TEACHERS if arm in found]
        if learns:
            answer = "yes" if all(learns) else "with one teacher" if any(learns) else "no"
            least = min(map(len, found.values()))
            each = f"{least} seed{'s' * (least > 1)}"
            ways = ", ".join(f"{claim.mean(ends(runs, arm, policy).values()):.2f} by {NAMES[arm]}"
                             for arm in found)
            told.append(f"{what} {answer}: pass@1 goes from {start(runs, policy):.2f} to {ways} "
                        f"({each})")
    return "; ".join(told) + "." if told else "Not run."


def start(runs, policy):
    """Pass@1 before training, mean over the arms of self-distillation and their seeds."""
    return claim.mean(value for arm in SDPO
                      for value in ends(runs, arm, policy, "before").values())


def draw(runs):
    """Every run of the arms of self-distillation on both tasks, with the mean of each arm."""
    colours = dict(zip(SDPO, (GREY, BLUE, BLUE, GREEN, ORANGE)))
    figure, axes = panels(1, 2, height=3.4, width=9.4, sharey=True)
    for ax, policy, what in zip(axes, POLICIES, ("Running sum", "SmolLM2, larger of two")):
        for place, arm in enumerate(SDPO):
            values = list(ends(runs, arm, policy).values())
            if values:
                ax.plot(values, [place] * len(values), ".", color=colours[arm], alpha=.5)
                ax.plot(claim.mean(values), place, "o", color=colours[arm])
        if any(ends(runs, arm, policy) for arm in SDPO):
            ax.axvline(start(runs, policy), color=BLACK, linestyle=":", linewidth=1)
        ax.set_xlim(-.03, 1.03)
        label(ax, f"{what}, {BATCHES[policy]} batches", "held-out pass@1 (dotted: start)", "")
    axes[0].set_yticks(range(len(SDPO)), NAMES.values(), fontsize=8)
    axes[0].invert_yaxis()
    return figure


if __name__ == "__main__":
    maps.main(__file__, ROW, grid, make, judge, takeaway, draw,
              lambda runs: dict(table=table(runs), teachers=teachers_table(runs)))
