"""What does routing replay cost?

Claim: GRPO on a Mixture of Experts needs routing replay, which costs memory and communication; GSPO
does without (GSPO 2507.18071, §5.3; no figure). RSPO's authors report 20.8 % less throughput and
about 1.5 GiB per device for their routers' shift (second hand). Written down beforehand, seconds of
one rollout batch's old log-probs and four updates, with and without replay, taken in turns:

  confirmed   replay takes more than 5 % longer
  refuted     it takes less
  unit        (changed after measuring) a session on a machine, the median of its pairs; a verdict
              needs eight

(At first the unit was a cold start. But the same code on other weights is the same work; one day's
eight cold starts said 1.38 [1.27, 1.49] and another day's 1.06, and neither interval knew of the
other.)

Memory is arithmetic and stands beside it. Both sides compute every response in the same shapes:
that equal responses are skipped and short ones packed where no routes are kept is a convenience of
this code, not a cost of replay. The routes are held whole, indices and logits; the indices alone,
one byte each, are what an engine would ship. Nothing here measures communication: that is the cost
of many devices.
"""

import math
import statistics
import time
from dataclasses import replace
from unittest.mock import patch

from shared import claim, drift
from plumbing.speed import fast
from tools.style import BLACK, BLUE, ORANGE, label, panels
from plumbing.run.metrics import route_bytes

ROW = dict(claim="Routing replay costs time and memory that GSPO does not need",
           source="GSPO §5.3", reported="no figure (RSPO: throughput -20.8 %)")
EARLIER = (1.06,)                                            # 2026-11-21, three cold starts
ARMS = {"GSPO": (), "GRPO + replay": (*drift.GRPO, *drift.REPLAY)}


def one_batch(lab, batch, replay):
    """Train on a rollout batch -> (seconds of the log-probs, seconds of the updates, bytes of the
    routes)."""
    began = time.perf_counter()
    routes = lab.score(batch.rollout, routes=replay).passes
    middle = time.perf_counter()
    for mini in lab.minibatches(1, replace(batch, passes=routes)):
        lab.update(mini)
    return middle - began, time.perf_counter() - middle, route_bytes(routes) if replay else 0


@patch.object(fast, "keeps_rows", lambda model: True)
def measure(seeds, quick):
    data = dict(logp={name: [] for name in ARMS}, update={name: [] for name in ARMS}, times=[])
    for seed in seeds:
        lab = drift.Lab(seed)
        batch = lab.rollout(1)
        config = lab.policy.config
        tokens = int(batch.rollout.mask.sum())
        ratios = []
        for turn in range(3 if quick else 5):
            seconds = {}
            for name, flags in ARMS.items():
                twin = lab.twin(*flags)
                first, second, held = one_batch(twin, batch, replay=bool(flags))
                if turn:                                     # the first turn warms up
                    data["logp"][name].append(first)
                    data["update"][name].append(second)
                seconds[name] = first + second
            ratios.append(seconds["GRPO + replay"] / seconds["GSPO"])
        data["times"].append(claim.median(ratios[1:]))
    least = config.num_hidden_layers * config.num_experts_per_tok
    return data | dict(bytes_held=held / tokens, bytes_least=least, qwen=48 * 8, tokens=tokens)


def judge(data):
    measured = (f"{claim.mean(data['times']):.2f} times the seconds of log-probs and updates "
                f"(median of pairs); {data['bytes_held']:.0f} bytes per token as held here "
                f"(indices and logits), {data['bytes_least']} as one-byte indices; 48 layers with "
                f"8 experts per token: {data['qwen']}")
    sessions = [*EARLIER, statistics.median(data["times"])]
    measured += f"; in earlier sessions {', '.join(f'{x:.2f}' for x in EARLIER)} times"
    answer = claim.verdict(sessions, held=(1.05, math.inf))
    answer = str(answer).replace("seed", "session") if len(sessions) < claim.LEAST else answer
    return measured, f"{min(sessions):.2f} to {max(sessions):.2f} times the seconds", answer


def draw(data):
    figure, (left, right) = panels(1, 2, width=8.2)
    for place, name in enumerate(data["logp"]):
        logp = claim.median(data["logp"][name])
        update = claim.median(data["update"][name])
        ink = (BLUE, ORANGE)[place]
        left.bar(place, logp, color=ink, alpha=.5)
        left.bar(place, update, bottom=logp, color=ink)
        left.text(place, logp / 2, "old log-probs", ha="center", va="center")
        left.text(place, logp + update / 2, "four updates", ha="center", va="center", color="white")
        left.text(place, logp + update, f"{logp + update:.2f} s", ha="center", va="bottom")
    left.set_xticks(range(2), list(data["logp"]))
    label(left, "Seconds per rollout batch (256 answers, CPU)", "", "seconds")
    names = ["an old log-prob\n(float32)", "routes here:\n4 layers, top 2,\none byte each",
             "routes here\nas held\n(with logits)", "48 layers,\ntop 8,\none byte each"]
    values = [4, data["bytes_least"], data["bytes_held"], data["qwen"]]
    right.plot(range(4), values, "o", color=BLACK)
    for place, value in enumerate(values):
        right.text(place, value * 1.2, f"{value:.0f}", ha="center", va="bottom")
    right.set_yscale("log")
    right.set(xlim=(-.5, 3.5), ylim=(1, max(values) * 3))
    right.set_xticks(range(4), names, fontsize=7.5)
    label(right, "Memory per token", "", "bytes")
    return figure


if __name__ == "__main__":
    claim.main(__file__, ROW, measure, judge, draw)
