"""How many experts change after an update, and how much of the ratios' noise is that?

Claim: about 10 % of the activated experts differ after each gradient update for the same rollout, in a model of 48 layers, more in deeper
ones, and that invalidates token ratios (GSPO 2507.18071, §5.3). Here a layer has 8 experts of which 2 are used, and there are 4 layers.
Written down beforehand, after the four updates of a rollout batch, on the answers of its last mini-batch:

  confirmed   at least half of Var[log w] goes away when the new policy is made to follow the old policy's routes (same weights)
  refuted     less than a fifth of it does: then ratios spread because the policy changed, not because experts did
  the 10 %    and the growth with depth cannot be tested on 4 layers; what is measured here stands beside them

The updates themselves are made without replay. What replay does to a training run is moe_stability.py's question.
"""

import torch

import claim
import drift
import train
from plumbing.style import BLUE, COLOURS, GREEN, GREY, LINES, ORANGE, label, panels
from plumbing.batches import response_routes
from plumbing.fast import response_logp
from routes import flip_rate, replay_routes


def measure(seeds, quick):
    data = dict(flips=[], first=[], explained=[], native=[], replayed=[])
    for seed in seeds:
        lab, flips, first, native, replayed = drift.Lab(seed, "--steps", "12"), [], [], [], []
        for step in range(1, 4 if quick else 13):
            rollout, batch, routes = lab.rollout(step, routes=True)
            minis = list(lab.minibatches(step, rollout, batch, routes))
            mini, part, old = minis[-1]
            for k, (one, its, _) in enumerate(minis):
                lab.update(one, its)
                if k in (0, 3):
                    logp, new = lab.logp(mini, routes=True)                                                  # [B, T]
                    rates = flip_rate(*(response_routes(r, mini).indices for r in (old, new)), mini.mask).tolist()
                    (first if k == 0 else flips).append(rates)
            with torch.no_grad(), replay_routes(lab.policy, old):
                forced = response_logp(lab.policy, mini, lab.args.temperature, entropy=False).logp           # [B, T]
            for x, found in ((logp, native), (forced, replayed)):
                found.append((x - part["old_logp"])[mini.mask].var(unbiased=False).item())
        claim.say(f"seed {seed}: flips of {len(flips)} rollout batches")
        data["explained"].append(1 - sum(replayed) / sum(native))
        for name, values in (("flips", flips), ("first", first), ("native", native), ("replayed", replayed)):
            data[name].append(values)
    rate = lambda name: claim.mean([x for seed in data[name] for rates in seed for x in rates])
    layers = [claim.mean([rates[layer] for seed in data["flips"] for rates in seed]) for layer in range(len(data["flips"][0][0]))]
    share = claim.mean(data["explained"])
    verdict = claim.HELD if share >= .5 else claim.NOT_HELD if share < .2 else claim.CANNOT
    measured = (f"{rate('first'):.1%} of the chosen experts change with one update and {rate('flips'):.1%} with four (layers {', '.join(f'{x:.1%}' for x in layers)}); "
                f"following the old routes removes {share:.0%} of Var[log w]")
    return measured, claim.span(data["explained"], "{:.0%}") + " (explained)", verdict, data


def draw(data):
    figure, (left, right) = panels(1, 2, width=8.6)
    for layer in range(len(data["flips"][0][0])):
        series = [claim.mean([seed[step][layer] for seed in data["flips"]]) for step in range(len(data["flips"][0]))]
        left.plot(range(1, len(series) + 1), [100 * x for x in series], LINES[layer % 4], color=COLOURS[layer], marker="osD^"[layer % 4], markersize=4, label=f"layer {layer + 1}")
    label(left, "Chosen experts changed by a batch's four updates", "rollout batch", "per cent")
    left.set_ylim(bottom=0)
    left.legend()
    for place, (native, replayed) in enumerate(zip(data["native"], data["replayed"])):
        right.loglog(native, replayed, "osD^v"[place % 5], color=(BLUE, ORANGE, GREEN, GREY)[place % 4], label=f"seed {place}", markersize=5)
    ends = [min(min(r) for r in data["native"]), max(max(r) for r in data["native"])]
    right.loglog(ends, ends, "k--", linewidth=1, label="no difference")
    label(right, "Var[log w] of the same weights", "experts chosen anew", "old experts replayed")
    right.legend()
    return figure


if __name__ == "__main__":
    claim.main(__file__, "Expert flips are what makes token ratios noisy on a Mixture of Experts", "GSPO §5.3",
               "about 10 % of experts per update in 48 layers, more in deeper models", measure, draw)
