"""How many experts change after an update, and how much of the ratios' noise is that?

Claim: about 10 % of the activated experts differ after each gradient update for the same rollout,
in a model of 48 layers, more in deeper ones, and that invalidates token ratios (GSPO 2507.18071,
§5.3). Here a layer has 8 experts of which 2 are used, and there are 4 layers. Written down
beforehand, after the four updates of a rollout batch, on the answers of its last mini-batch, the
median over batches of each cold start:

  confirmed   at least half of Var[log w] goes away when the new policy is made to follow the old
              policy's routes (same weights)
  refuted     less than a fifth of it does: then ratios spread because the policy changed, not
              because experts did

The 10 % of 48 layers cannot be tested on 4; what is measured here stands beside them.

The updates themselves are made without replay. What replay does to a training run is
moe_stability.py's question.
"""

import math

import torch

from shared import claim
from shared import drift
from plumbing.speed.cutting import response_routes
from plumbing.speed.fast import response_logp
from tools.style import BLACK, GREYS, LINES, label, panels
from routes import flip_rate, replay_routes

ROW = dict(claim="Expert flips are what makes token ratios noisy on a Mixture of Experts",
           source="GSPO §5.3",
           reported="about 10 % of experts per update in 48 layers, more in deeper models")


def measure(seeds, quick):
    data = dict(flips=[], first=[], native=[], replayed=[])
    for seed in seeds:
        for name, values in follow(drift.Lab(seed, "--steps", "12"), 3 if quick else 12).items():
            data[name].append(values)
        claim.say(f"seed {seed}: flips followed")
    return data


def follow(lab, count):
    """That many rollout batches, each on the answers of its last mini-batch:

    -> {"first", "flips": [batches, L] after one update and after all of them,
        "native", "replayed": [batches] Var[log w] with experts chosen anew and with the old ones}
    """
    found = dict(first=[], flips=[], native=[], replayed=[])
    for step in range(1, count + 1):
        rollout, batch, routes = lab.rollout(step, routes=True)
        minis = list(lab.minibatches(step, rollout, batch, routes))
        mini, part, old = minis[-1]
        for k, (one, its, _) in enumerate(minis, 1):
            lab.update(one, its)
            if k in (1, len(minis)):
                logp, new = lab.logp(mini, routes=True)                                     # [B, T]
                indices = [response_routes(r, mini).indices for r in (old, new)]
                flips = flip_rate(*indices, mini.mask).tolist()                             # [L]
                found["first" if k == 1 else "flips"].append(flips)
        with torch.no_grad(), replay_routes(lab.policy, old):
            forced = response_logp(lab.policy, mini, lab.args.temperature, entropy=False).logp
        for x, name in ((logp, "native"), (forced, "replayed")):
            found[name].append((x - part["old_logp"])[mini.mask].var(unbiased=False).item())
    return found


def judge(data):
    rate = lambda name: claim.mean([x for seed in data[name] for rates in seed for x in rates])
    layers = [claim.mean([rates[layer] for seed in data["flips"] for rates in seed])
              for layer in range(len(data["flips"][0][0]))]
    explained = [claim.median([1 - b / a for a, b in zip(native, replayed)])
                 for native, replayed in zip(data["native"], data["replayed"])]
    bursts = claim.mean(1 - b / a > .5 for native, replayed in zip(data["native"], data["replayed"])
                        for a, b in zip(native, replayed))
    measured = (f"{rate('first'):.1%} of the chosen experts change with one update and "
                f"{rate('flips'):.1%} with four (layers {', '.join(f'{x:.1%}' for x in layers)}); "
                f"following the old routes removes {claim.mean(explained):.0%} of Var[log w] "
                f"(median over batches; {min(explained):.0%} to {max(explained):.0%} by seed), but "
                f"more than half of it in {bursts:.0%} of the batches")
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
