"""Does a teacher's score of every token train faster than a verifier's reward per answer?

Claim: on-policy distillation, which scores every token of the policy's own responses by a teacher's
log-prob, learns faster than a reward per answer (blog "On-Policy Distillation", Thinking Machines
2025; GKD 2306.13649). Setting: train.py's default task and policy; the teacher is a finished run
of 10 rollout batches, family_rewards' DRO on cold start 0 (a longer run would teach more); the
students are cold starts 1 to 8, 10 rollout batches of 256 responses each, GRPO's objective (one
ratio per token, as advantages per token need one) at the default run's 4e-4. Arms:

  verifier   --advantage group, rewards of the verifier
  teacher    --advantage distillation, no reward
  both       --advantage group --distillation_coef 1
  self       --advantage distillation --self_distillation: the policy itself, shown the right answer

Endpoint: held-out pass@1 at the end, differences paired by cold start, 95 % t intervals. Written
down beforehand, of teacher minus verifier:

  confirmed   the interval lies above 0
  refuted     it lies below 0, or within ±0.03 of 0
  undecided   otherwise, and with fewer than 8 cold starts

By the same intervals and without a verdict: both minus verifier, both minus teacher (their sum
beats both if the two lie above 0), self minus verifier. A policy that never saw an answer before a
prompt may not know what to do with one: self may lose, and the figure will show it. It did: self
ended below its start on all eight cold starts.
"""

from pathlib import Path

from shared import claim
from tools.style import BLACK, BLUE, GREEN, GREY, ORANGE, band, label, panels

ROW = dict(claim="A teacher's signal per token learns faster than a verifier's per answer",
           source="blog On-Policy Distillation; GKD 2306.13649",
           reported="the same accuracy at a tenth of the compute and less")
SIGNAL = {"verifier": [], "both": ["--distillation_coef", "1"],
          "teacher": ["--advantage", "distillation"], "self": ["--advantage", "distillation"]}
ARMS = tuple(SIGNAL)
COLOURS = {"verifier": ORANGE, "teacher": BLUE, "both": GREEN, "self": GREY}
PAIRS = (("teacher", "verifier"), ("both", "verifier"), ("both", "teacher"), ("self", "verifier"))


def teacher_flags(arm, checkpoint):
    from_checkpoint = ["--teacher_model_name_or_path", checkpoint]
    return {"verifier": [], "self": ["--self_distillation"]}.get(arm, from_checkpoint)


def measure(seeds, quick):
    steps = 3 if quick else 10
    folder = Path("runs/claims/distillation_teacher")
    _, summary = claim.trained(["--algorithm", "dro"], 0, 10, folder)
    checkpoint = str(folder / "checkpoints/step_10")
    data = dict(steps=steps, teacher=summary["pass_at_1_after"], before=[],
                curves={arm: [] for arm in ARMS}, after={arm: [] for arm in ARMS})
    for seed in seeds:
        for arm in ARMS:
            flags = ["--algorithm", "grpo", *SIGNAL[arm], *teacher_flags(arm, checkpoint)]
            records, summary = claim.trained(flags, seed + 1, steps)     # 0 is the teacher's
            data["curves"][arm].append([r["pass_rate"] for r in records])
            data["after"][arm].append(summary["pass_at_1_after"])
        data["before"].append(summary["pass_at_1_before"])
    return data


def gaps(data, one, other):
    return [a - b for a, b in zip(data["after"][one], data["after"][other])]


def judge(data):
    found = gaps(data, "teacher", "verifier")
    answer = claim.verdict(found, held=(0, 1), refuted=(-1, 0))
    if claim.verdict(found, held=(-.03, .03)) == claim.HELD:
        answer = claim.REFUTED
    ends = ", ".join(f"{arm} {claim.mean(data['after'][arm]):.3f}" for arm in ARMS)
    pairs = "; ".join(f"{a} minus {b} {claim.number(gaps(data, a, b), '{:+.3f}')}"
                      for a, b in PAIRS[1:])
    measured = (f"after {data['steps']} batches, from {claim.mean(data['before']):.3f}: {ends}; "
                f"the teacher's own pass@1 {data['teacher']:.3f}; {pairs}")
    return measured, claim.number(found, "{:+.3f}", "pass@1, teacher minus verifier"), answer


def draw(data):
    figure, (learning, end) = panels(1, 2, height=3.8, width=9)
    batches = range(1, data["steps"] + 1)
    for arm, line in zip(ARMS, ("-", "--", "-.", ":")):
        band(learning, batches, data["curves"][arm], arm, COLOURS[arm], None, line)
    label(learning, "Pass rate of rollouts", "rollout batch of 256 responses", "")
    learning.legend(loc="upper left")
    for place, arm in enumerate(ARMS):
        middle, low, high = claim.interval(data["after"][arm])
        end.plot([low, high], [place, place], color=COLOURS[arm], linewidth=1.5)
        end.plot(data["after"][arm], [place] * len(data["after"][arm]), ".", color=GREY)
        end.plot(middle, place, "o", color=COLOURS[arm])
    end.axvline(data["teacher"], color=BLACK, linestyle="--", linewidth=1)
    end.axvline(claim.mean(data["before"]), color=GREY, linestyle=":")
    end.set_yticks(range(len(ARMS)), ARMS)
    label(end, "Held out (dashed: teacher, dotted: start)", "pass@1", "")
    return figure


if __name__ == "__main__":
    claim.main(__file__, ROW, measure, judge, draw)
