"""The named numbers of docs/which.md: every figure of that page, from the runs of the maps.

    python experiments/which.py        # -> results/which.json

A number has a name, what it is of, a mean, a 95 % interval and a number of cold starts, and the
result that it comes from. They are computed by the functions of the experiments, from the same
runs; experiments/shared/which.py puts them into sentences and measures nothing.
"""

import argparse
import json
import os

from shared import claim, maps
from shared.which import rate
import band_dose
import band_law
import depth
import distillation
import league
import moe_stability
import pretrained
import sampler_noise
import stability_map
import stale_sampler
from plumbing.run import checkpoints

RESULT = claim.ROOT / "results" / "which.json"
NAMES = stability_map.NAMES | depth.NAMES | {"auto": "GSPO, --epsilon auto"}


def entry(values, of, result, digits=3):
    """A named number from one value per cold start; None without at least two of them."""
    values = list(values)
    if len(values) < 2:
        return None
    middle, low, high = (round(x, digits) for x in claim.interval(values))
    return dict(of=of, mean=middle, low=low, high=high, starts=len(values), digits=digits,
                result=result)


def at_best_rates(runs):
    """Two arms of the stability map, each at its best rate, fresh cold starts."""
    best = {arm: stability_map.best_rate(runs, arm) for arm in stability_map.MAIN}
    pairs = (("gspo", "grpo"), ("gspo", "grpo_replay"), ("gspo_x100", "grpo"),
             ("gspo_x10", "gspo"), ("gspo_x100", "gspo"), ("grpo_replay", "grpo"))
    for arm, other in pairs:
        gap = stability_map.gap(runs, (best[other], best[arm]), others=(other, arm))
        yield (f"{arm} - {other}, best rates",
               entry(gap, f"{NAMES[arm]} minus {NAMES[other]}, each at its best rate",
                     "stability_map"))
    for arm, rate in best.items():
        edge = stability_map.frontier(runs, arm)
        yield f"best rate of {arm}", dict(of=f"best of seven rates, {NAMES[arm]}", mean=rate,
                                          result="stability_map")
        yield f"largest rate of {arm}", dict(of=f"largest rate that ends above its start, "
                                                f"{NAMES[arm]} (4 cold starts)", mean=edge,
                                             result="stability_map")


def over_step_sizes(runs):
    """band_law: arms minus GRPO, mean of six step sizes and in single ones."""
    for arm in ("gspo", "gspo_x10", "gspo_x100", "auto"):
        cells = band_law.gaps(runs, arm)
        yield (f"{arm} - grpo, six step sizes",
               entry(band_law.pooled(cells), f"{NAMES[arm]} minus GRPO, mean of six step sizes",
                     "band_law"))
        for rate, minibatches in band_law.CELLS:
            yield (f"{arm} - grpo, {band_law.shown((rate, minibatches))}",
                   entry(cells[rate, minibatches].values(), f"{NAMES[arm]} minus GRPO at "
                         f"{rate * 1e4:g}e-4 with {minibatches} mini-batches", "band_law"))
    yield ("auto - gspo_x100, six step sizes",
           entry(band_law.pooled(band_law.gaps(runs, "auto", "gspo_x100")),
                 f"{NAMES['auto']} minus {NAMES['gspo_x100']}, mean of six step sizes",
                 "band_law"))
    lost = band_law.in_rough_cells(maps.read(stability_map.FILE), "gspo_free", "gspo")
    yield ("gspo_free - gspo, large steps",
           entry(lost, "GSPO without a clip minus GSPO, rates of 8e-4 and more with 8 or 16 "
                       "mini-batches (exploratory)", "band_law"))


def coarse_and_old_samples():
    """What trusting a coarse sampler costs, and what old samples cost."""
    runs = maps.read(sampler_noise.FILE)
    for bits in ("bfloat16", "int4"):
        yield (f"gspo trusts {bits}",
               entry(sampler_noise.lost(runs, "gspo", bits), f"lost by trusting a {bits} sampler, "
                     f"GSPO (recomputed minus trusted)", "sampler_noise", 2))
    runs = maps.read(band_dose.FILE)
    for arm in band_dose.ALGORITHMS:
        for bits in band_dose.DOSES:
            yield (f"{arm} loses at {bits}",
                   entry(band_dose.lost(runs, arm, bits).values(), f"lost by trusting an {bits} "
                         f"sampler, {NAMES[arm]} (float32 minus {bits})", "band_dose"))
    yield ("grpo - gspo_x100 loses at int4, 60 tokens",
           entry(band_dose.gaps(runs, "int4", band_dose.LONG).values(), "lost by trusting an int4 "
                 f"sampler, answers of 60 tokens, GRPO minus {NAMES['gspo_x100']}", "band_dose"))
    runs = maps.read(stale_sampler.FILE)
    for arm in stale_sampler.ALGORITHMS | stale_sampler.BESIDE:
        for k in (2, 8):
            yield (f"{arm} loses at lag {k}",
                   entry(stale_sampler.lost(runs, arm, k).values(), f"lost with samples of {k} "
                         f"rollout batches ago, {stale_sampler.NAMES[arm]}", "stale_sampler"))


def replay_where_it_is_rough():
    gains = moe_stability.gains([r for r in moe_stability.table(moe_stability.read())
                                 if moe_stability.setting(r) == moe_stability.setting(
                                     moe_stability.cell(0, 0))])
    yield ("replay, 16 mini-batches",
           entry(gains["replay repairs it"], "GRPO + replay minus GRPO at 6e-4 with 16 "
                 "mini-batches", "moe_stability", 2))


def deep():
    """48 layers: the deciding cell, each arm at its best rate; then fewer layers, and dense."""
    runs = maps.read(depth.FILE)
    at = f"48 layers at {rate(depth.RATE)}"
    for arm, other in (("gspo", "grpo"), ("grpo_replay", "grpo"), ("gspo_x100", "grpo"),
                       ("gspo_x100", "gspo")):
        yield (f"{arm} - {other}, 48 layers",
               entry(depth.gap(runs, arm, other), f"{NAMES[arm]} minus {NAMES[other]}, {at}",
                     "depth"))
    for arm in depth.OTHERS[1:]:
        yield (f"{arm} - grpo, 48 layers",
               entry(depth.others_gap(runs, arm), f"{NAMES[arm]} minus GRPO, {at}", "depth"))
    for arm in depth.ARMS:
        if arm != "grpo":
            yield (f"{arm} - grpo, 48 layers, best rates",
                   entry(depth.best_gap(runs, arm), f"{NAMES[arm]} minus GRPO, 48 layers, each at "
                         "its best rate", "depth"))
        for name, value, of in (
                ("best", depth.best_rate(runs, arm), "best of seven rates"),
                ("largest", depth.edge(runs, depth.DEEP, (arm,)),
                 "largest rate that ends above start")):
            yield (f"{name} rate of {arm}, 48 layers", value and dict(
                of=f"{of}, 48 layers, {NAMES[arm]} (4 cold starts)", mean=value, result="depth"))
    for policy in ("4 layers", "16 layers", depth.DENSE):
        if edge := depth.edge(runs, policy):
            for arm in depth.FIRST[1:]:
                yield (f"{arm} - grpo, {policy}",
                       entry(depth.gap(runs, arm, policy=policy), f"{NAMES[arm]} minus GRPO, "
                             f"{policy} at {rate(edge)}, where runs break", "depth"))
                yield f"{arm} - grpo, 48 layers - {policy}", more_than(runs, arm, policy)
    yield ("starts, 48 layers", dict(of="cold starts of the deciding cell so far",
                                     mean=len(depth.gap(runs, "gspo")), result="depth"))
    yield "planned starts, 48 layers", dict(of="cold starts that the rule asks for",
                                            mean=depth.STARTS, result="depth")


def more_than(runs, arm, policy):
    """What the difference to GRPO has at 48 layers beyond that of another policy, by Welch's t."""
    found = depth.beyond(runs, arm, policy)
    if not found:
        return None
    here, there, interval = found
    middle, low, high = (round(x, 3) for x in interval)
    return dict(of=f"{NAMES[arm]} minus GRPO at 48 layers, minus the same of {policy}", mean=middle,
                low=low, high=high, starts=f"{len(here)} and {len(there)}", digits=3,
                result="depth")


def ranked():
    """The league: its first member minus every other, the best first, and minus the fifth; the
    best rates."""
    runs = maps.read(league.FILE)
    found = league.entered(runs)
    first = next(iter(found), None)
    for place, name in enumerate(list(found)[1:], 2):
        number = entry(claim.differences(found[first], found[name]),
                       f"{first} minus {name}, each at its best", "league")
        yield f"league, first - {name}", number
        if place == league.FIFTH:
            yield "first - fifth of the league", number
    if {"gspo", "grpo"} <= set(found):
        yield "gspo - grpo, the league", entry(
            claim.differences(found["gspo"], found["grpo"]),
            "gspo minus grpo, each at its best rate and clip range", "league")
    rates = [league.best(runs, name)[1] for name in found]
    for which_one, value in (("smallest", min(rates)), ("largest", max(rates))):
        yield f"{which_one} best rate of the league", dict(
            of=f"{which_one} best of five rates, {len(found)} members of the family", mean=value,
            result="league")


def distilled():
    """pass@1 of distillation, with and without the verifier's reward, minus that of the verifier
    alone."""
    data = json.loads((claim.ROOT / "results/distillation.json").read_text())["data"]
    for arm in ("teacher", "both"):
        yield (f"{arm} - verifier", entry(distillation.gaps(data, arm, "verifier"),
                                          f"{arm} minus verifier", "distillation"))


def arithmetic():
    """What 16 bits do to SmolLM2's log s: one step of AdamW at 1e-6, benchmarks/bfloat16.py."""
    noise = json.loads((claim.ROOT / "results/bfloat16.json").read_text())["noise"]["steps"]["1"]
    yield "SmolLM2's step", dict(of="change of log s by one step at 1e-6, float32",
                                 mean=float(f"{noise['true_rms']:.2g}"), result="bfloat16")
    for arm in ("bfloat16", "float16"):
        yield f"error of {arm}", dict(of=f"error of the same change in {arm}",
                                      mean=float(f"{noise['arms'][arm]['error_rms']:.2g}"),
                                      result="bfloat16")


def pretrained_bands():
    """SmolLM2: what 16 bits cost each clip range, and the clip ranges against each other."""
    runs = maps.read(pretrained.FILE)
    for arm in pretrained.ARMS:
        of = f"SmolLM2, {pretrained.MAX} numbers, {pretrained.NAMES[arm]}"
        if rate := pretrained.best_rate(runs, pretrained.MAX, arm):
            yield f"best rate of {arm}, SmolLM2", dict(of=f"best of four rates, {of} (2 seeds)",
                                                       mean=rate, result="pretrained")
        for bits in list(pretrained.FORMATS)[1:]:
            yield (f"{arm} loses in {bits}",
                   entry(pretrained.loss(runs, arm, bits), f"{of}: pass@1 in float32 minus that "
                         f"in {bits}", "pretrained"))
            excess = [-x for x in pretrained.loss(runs, arm, bits, name="clipped")]
            yield (f"{arm} clips more in {bits}",
                   entry(excess, f"{of}: clipped share in {bits} minus that in float32",
                         "pretrained"))
        for bits in pretrained.FORMATS:
            gap = claim.differences(*(pretrained.ends(runs, pretrained.MAX, name, bits)
                                      for name in (arm, "gspo")))
            if arm != "gspo":
                yield (f"{arm} - gspo, SmolLM2, {bits}",
                       entry(gap, f"{of} minus {pretrained.NAMES['gspo']}, {bits}, each at its "
                             "best rate", "pretrained"))


def numbers():
    """{name: number}, without those that have no runs yet."""
    found = dict(at_best_rates(maps.read(stability_map.FILE)))
    found |= dict(over_step_sizes(maps.read(band_law.FILE)))
    for part in (coarse_and_old_samples, replay_where_it_is_rough, deep, ranked, distilled,
                 arithmetic, pretrained_bands):
        found |= dict(part())
    return {name: number for name, number in found.items() if number is not None}


if __name__ == "__main__":
    help_form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=help_form).parse_args()
    os.chdir(claim.ROOT)
    found = numbers()
    text = ",\n".join(f" {json.dumps(name)}: {json.dumps(number, ensure_ascii=False)}"
                      for name, number in found.items())
    checkpoints.write_text(RESULT, f"{{\n{text}\n}}\n")
    print(f"{len(found)} numbers in {RESULT.relative_to(claim.ROOT)}")
