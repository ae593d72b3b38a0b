"""How many experts change after an update, and how much of the ratios' noise is that?

Claim: about 10 % of the activated experts differ after each gradient update for the same rollout,
in a model of 48 layers, more in deeper ones, and that invalidates token ratios (GSPO 2507.18071,
§5.3). Here a layer has 8 experts of which 2 are used, and there are 4 layers. Written down
beforehand, after the four updates of a rollout batch, on the answers of its last mini-batch:

  confirmed   at least half of Var[log w] goes away when the new policy is made to follow the old
              policy's routes (same weights)
  refuted     less than a fifth of it does: then ratios spread because the policy changed, not
              because experts did
  estimator   (named after measuring) one value per cold start, the variance that goes away summed
              over the batches, divided by the variance that was there summed over the batches

The sentence is about the noise that a run meets, and variances add up: a batch whose ratios barely
spread says little about it, and a median or a mean of per-batch shares would count it as much as a
batch that spreads a thousand times as far. (The rule at first named no estimator, and a median was
added after measuring; the upper of the two middle batches at that, which made the verdict
"refuted". The true median stands beside the number.)

The 10 % of 48 layers cannot be tested on 4; what is measured here stands beside them.

The updates themselves are made without replay. What replay does to a training run is
moe_stability.py's question.
"""

import math
import statistics

import torch

from shared import claim, drift
from plumbing.speed.fast import response_logp
from tools.style import BLACK, GREYS, LINES, label, panels
from routes import flip_rate, replay_routes

ROW = dict(claim="Expert flips are what makes token ratios noisy on a Mixture of Experts",
           source="GSPO §5.3",
           reported="about 10 % of experts per update in 48 layers, more in deeper models",
           regime="1 M parameters, 4 layers, answers of about 20 tokens, 12 rollout batches")


def measure(seeds, quick):
    data = dict(flips=[], first=[], native=[], replayed=[])
    for seed in seeds:
        for name, values in follow(drift.Lab(seed, "--steps", "12"), 3 if quick else 12).items():
            data[name].append(values)
        claim.say(f"seed {seed}: flips followed")
    return data


def follow(lab, count):
    """Train for that many rollout batches and measure on the last mini-batch of each.

    -> {"first", "flips": [batches, L] share of experts that change, after one update and after all,
        "native", "replayed": [batches] Var[log w] with experts chosen anew and with the old}"""
    found = dict(first=[], flips=[], native=[], replayed=[])
    for step in range(1, count + 1):
        minis = list(lab.minibatches(step, lab.rollout(step, routes=True)))
        mini = minis[-1]
        mask = minis[-1].rollout.mask                                               # [B, T]
        for k, one in enumerate(minis, 1):
            lab.update(one)
            if k in (1, len(minis)):
                new = lab.score(mini.rollout, routes=True)
                flips = flip_rate(mini.routes.indices, new.routes.indices, mask).tolist()   # [L]
                found["first" if k == 1 else "flips"].append(flips)
        with torch.no_grad(), replay_routes(lab.policy, mini.passes):
            forced = response_logp(lab.policy, mini.rollout, lab.args.temperature, entropy=False,
                                   replayed=True)
        for x, name in ((new, "native"), (forced, "replayed")):
            log_w = (x.logp - mini.old_logp)[mask]                                  # [loss tokens]
            found[name].append(log_w.var(unbiased=False).item())
    return found


def judge(data):
    rate = lambda name: claim.mean([x for seed in data[name] for rates in seed for x in rates])
    layers = [claim.mean([rates[layer] for seed in data["flips"] for rates in seed])
              for layer in range(len(data["flips"][0][0]))]
    pairs = list(zip(data["native"], data["replayed"]))      # of each cold start, [batches] twice
    explained = [1 - sum(replayed) / sum(native) for native, replayed in pairs]
    medians = [statistics.median(1 - b / a for a, b in zip(*pair)) for pair in pairs]
    bursts = claim.mean(1 - b / a > .5 for native, replayed in zip(data["native"], data["replayed"])
                        for a, b in zip(native, replayed))
    measured = (f"{rate('first'):.1%} of the chosen experts change with one update and "
                f"{rate('flips'):.1%} with four (layers {', '.join(f'{x:.1%}' for x in layers)}); "
                f"following the old routes removes {claim.mean(explained):.0%} of Var[log w] "
                f"summed over batches ({min(explained):.0%} to {max(explained):.0%} by seed), "
                f"{claim.number(medians, '{:.0%}')} in the median batch and more than half of it "
                f"in {bursts:.0%} of the batches")
    answer = claim.verdict(explained, held=(.5, 1.), refuted=(-math.inf, .2))
    return measured, claim.number(explained, "{:.0%}", "of Var[log w] is due to flips"), answer


def draw(data):
    figure, (left, right) = panels(1, 2, width=8.6)
    for layer in range(len(data["flips"][0][0])):
        series = [claim.mean([seed[step][layer] for seed in data["flips"]])
                  for step in range(len(data["flips"][0]))]
        left.plot(range(1, len(series) + 1), [100 * x for x in series], LINES[layer % 4],
                  color=GREYS[layer % 4], marker="osD^"[layer % 4], markersize=4,
                  label=f"layer {layer + 1}")
    label(left, "Chosen experts changed by a batch's four updates", "rollout batch", "per cent")
    left.set_ylim(bottom=0)
    left.legend()
    for place, (native, replayed) in enumerate(zip(data["native"], data["replayed"])):
        right.loglog(native, replayed, "osD^v"[place % 5], markersize=5, label=f"seed {place}",
                     color=BLACK, fillstyle="none")
    ends = [min(min(r) for r in data["native"]), max(max(r) for r in data["native"])]
    right.loglog(ends, ends, "k--", linewidth=1, label="no difference")
    label(right, "Var[log w] of the same weights", "experts chosen anew", "old experts replayed")
    right.legend()
    return figure


if __name__ == "__main__":
    claim.main(__file__, ROW, measure, judge, draw)
