"""What clipping is, in four pictures drawn from losses.py itself.

    python experiments/objectives.py

    objectives.png        every member: its surrogate against the ratio, and its weight of ∇log π
    ratio_units.png       one answer, three units of a ratio: a token, the answer, the product
    gradient_weights.png  GRPO's gradient and GSPO's, with their weights on the same answer
    timeline.png          the family from 2017 to 2026

Every curve and bar is autograd through losses.policy_loss or a function of ratios.py; no formula
is repeated here. The answers are made up, from a fixed seed.
"""

import argparse
import math
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from losses import OBJECTIVES, policy_loss                                            # noqa: E402
from tools import style                                                            # noqa: E402
from ratios import product_ratio, sequence_ratio, token_ratio                         # noqa: E402

OLD = 0.3                        # probability of the token under the old policy; only dppo minds
SHIFT = 0.9                      # rspo's router shift
NEAR_1 = torch.linspace(-6e-3, 6e-3, 2401, dtype=torch.float64) + 1                   # narrow bands
RATIO = torch.cat([torch.linspace(0.005, 2.5, 1000, dtype=torch.float64), NEAR_1]).sort()[0]  # [x]


def curves(name, A, ratio=RATIO, **options):
    """(surrogate [x], weight [x]) of objective `name` for answers of one token, on which w, s and
    ∏w are the same ratio [x]. The surrogate is the derivative of the loss with respect to the
    token's weight, and the weight of ∇log π is its derivative with respect to log π, divided by
    A."""
    old = torch.full_like(ratio, OLD).log()[:, None]                                  # [x, 1]
    logp = (old + ratio.log()[:, None]).requires_grad_()                              # [x, 1]
    weights = torch.ones_like(logp).requires_grad_()                                  # [x, 1]
    if OBJECTIVES[name].ratio == "log-shifted":
        options["router_shift"] = torch.full_like(logp, SHIFT).detach()
    loss, _ = policy_loss(name, logp, old, torch.full_like(ratio, A), torch.ones_like(old).bool(),
                          weights=weights, **options)
    by_weight, by_logp = torch.autograd.grad(loss, (weights, logp))
    return -by_weight[:, 0].detach(), -by_logp[:, 0] / A


def kept(name, **options):
    """The edges of the clip range: the ratios at which the gradient of good and of bad answers
    ends."""
    row = OBJECTIVES[name]
    if row.clip == "weight":
        return max(1 - row.epsilon, 0), 1 + row.epsilon_high
    if row.kind.pulls:                                       # IPO's acts outside its band too
        options["constants"] = {row.kind.pulls: 0.0}
    above, below = (curves(name, A, **options)[1] == 0 for A in (1.0, -1.0))          # [x] bool
    low = RATIO[below & (RATIO < 1)].max().item() if (below & (RATIO < 1)).any() else None
    high = RATIO[above & (RATIO > 1)].min().item() if (above & (RATIO > 1)).any() else None
    return low, high


def draw_member(figure, place, name, title, colour, **options):
    """Draw the surrogate above and the weight below, with the clip range shaded. Returns both
    axes."""
    inner = place.subgridspec(2, 1, hspace=0.12, height_ratios=(1.25, 1))
    top, bottom = figure.add_subplot(inner[0]), figure.add_subplot(inner[1])
    start = curves(name, 1.0, torch.ones(1, dtype=torch.float64), **options)[0]
    low, high = kept(name, **options)
    for A, line in ((1.0, "-"), (-1.0, "--")):
        surrogate, weight = curves(name, A, **options)
        top.plot(RATIO, surrogate + A * (1 - start), line, color=colour, linewidth=1.6)
        bottom.plot(RATIO, weight, line, color=colour, linewidth=1.6)
    for axes in (top, bottom):
        if low is not None:
            axes.axvspan(low, high, color=style.GREY, alpha=0.25, linewidth=0.8)
        axes.axvline(1, color=style.GREY, linewidth=0.5)
        axes.set(xlim=(0, 2.5), xticks=(0, 1, 2))
        axes.tick_params(labelsize=7, length=2)
    top.set(ylim=(-2.6, 2.6), yticks=(-2, 0, 2), xticklabels=())
    bottom.set(ylim=(-0.1, 2.6), yticks=(0, 1, 2))
    top.set_title(title, fontsize=8.5, pad=3)
    return top, bottom


def zoom(axes, name, colour):
    """Draw the weight close to ratio 1, for clip ranges too narrow to see."""
    half = 2.5 * OBJECTIVES[name].epsilon_high
    inset = axes.inset_axes((0.03, 0.5, 0.34, 0.36))
    for A, line in ((1.0, "-"), (-1.0, "--")):
        inset.plot(NEAR_1, curves(name, A, NEAR_1)[1], line, color=colour, linewidth=1.2)
    inset.axvspan(*kept(name), color=style.GREY, alpha=0.25, linewidth=0)
    inset.set(xlim=(1 - half, 1 + half), ylim=(-0.1, 1.4), xticks=(), yticks=())
    inset.set_title(f"1 ± {half:.1g}", fontsize=6.5, pad=1, loc="center")
    inset.grid(False)


def objectives():
    plt = style.pyplot()
    figure = plt.figure(figsize=(8, 8), layout="none")
    rows = math.ceil((len(OBJECTIVES) + 3) / 4)              # ppo is wide; dual clip, the legend
    figure.set_figheight(0.3 + 2.26 * rows)
    grid = figure.add_gridspec(rows, 4, left=0.055, right=0.99, top=0.948, bottom=0.02,
                               hspace=0.34, wspace=0.2)
    top, bottom = draw_member(figure, grid[0, :2], "ppo", "ppo: the four corners of a clip",
                              style.GREY)
    corners = [(1.25, 1.45, "A > 0 and above the band:\nno gradient"),
               (0.03, 0.85, "A > 0, below:\nkept"),
               (0.03, -2.1, "A < 0 and below it:\nno gradient"),
               (1.25, -0.75, "A < 0, above:\nkept, unbounded")]
    for x, y, text in corners:
        top.text(x, y, text, fontsize=7, linespacing=1.0)
    top.set_ylabel("surrogate", fontsize=8)
    bottom.set_ylabel("weight of ∇log π", fontsize=8)
    bottom.set_xlabel("ratio", fontsize=8, labelpad=1)
    places = iter([grid[0, 2], grid[0, 3], *(grid[i, j] for i in range(1, rows) for j in range(4))])
    draw_member(figure, next(places), "ppo", "ppo, dual_clip 2", style.GREY, dual_clip=2.0)
    for name, row in OBJECTIVES.items():
        if name == "ppo":
            continue
        note = {"log-shifted": f", γ̃ {SHIFT}", "none": ""}.get(row.ratio, "")
        note = f", π_old {OLD}" if row.kind.of == "π - μ" else note
        axes = draw_member(figure, next(places), name, f"{name}{note}\n{row.reduction}",
                           style.colour(name))[1]
        if row.epsilon_high and row.epsilon_high < 0.01 and row.kind.of == "w":
            zoom(axes, name, style.colour(name))
    legend = figure.add_subplot(next(places))
    legend.axis("off")
    legend.plot([], [], "-", color=style.BLACK, label="A > 0")
    legend.plot([], [], "--", color=style.BLACK, label="A < 0")
    legend.fill_between([], [], color=style.GREY, alpha=0.25, label="the band")
    legend.legend(loc="upper left", fontsize=8)
    figure.suptitle("What a ratio is worth to each member (above) and how hard it still pushes "
                    "(below)\nShifted to A at ratio 1. cispo, dppo, rollout_is and vespo stop a "
                    "gradient: there the slope is not the weight.", fontsize=9.5, x=0.01,
                    ha="left", y=0.993)
    return figure


# ---------------------------------------------------------------------------- the units of a ratio

def answer(T, spread, seed=0):
    """Log-probs of an invented answer whose tokens changed independently: logp and old_logp, [1,
    T]."""
    generator = torch.Generator().manual_seed(seed)
    old = -2 * torch.rand(1, T, generator=generator, dtype=torch.float64)
    return old + spread * torch.randn(1, T, generator=generator, dtype=torch.float64), old


def ratio_units(T=240, spread=0.1):
    logp, old = answer(T, spread)
    prefix = torch.ones(T, T).tril().bool()                                           # [n, T]
    both = logp.expand(T, T), old.expand(T, T), prefix
    w, s = token_ratio(logp, old, prefix[-1:])[0], sequence_ratio(*both)              # [T]
    product = product_ratio(*both)                                                    # [T]
    figure, axes = style.panels(3, 1, height=6.6, sharex=True)
    token, sequence = OBJECTIVES["grpo"], OBJECTIVES["gspo"]
    rows = ((w, token, style.colour("grpo"), f"a token: {T} ratios w_t, each with its own noise"),
            (s, sequence, style.colour("gspo"), "the answer: one ratio s = exp(mean log w), "
             "steadier the longer the answer"),
            (product, token, style.colour("sequence_is"), "the product ∏w: one ratio that wanders "
             "off the longer the answer"))
    for place, (x, row, colour, title) in zip(axes, rows):
        band = (1 - row.epsilon, 1 + row.epsilon_high)
        place.axhspan(*band, color=style.GREY, alpha=0.25, linewidth=0)
        look = dict(marker=".", markersize=4, linewidth=0.5) if x is w else {}
        place.plot(range(1, T + 1), x, color=colour, **look)
        place.axhline(1, color=style.GREY, linewidth=0.6)
        style.label(place, title, "", "")
        place.text(1.01, 0.5, f"band\n{band[0]:g}\nto\n{band[1]:g}", fontsize=8, va="center",
                   transform=place.transAxes)
    axes[0].set(ylabel="w_t", xlim=(0, T + 1))
    axes[1].set(ylabel="s of the first n tokens", ylim=(0.985, 1.015))
    axes[2].set(ylabel="∏w of the first n tokens", xlabel="token n of the answer")
    figure.suptitle(f"One answer, three units of a ratio (log w drawn from a normal distribution, "
                    f"standard deviation {spread:g})", fontsize=10.5, x=0.01, ha="left")
    return figure


# ---------------------------------------------------------------------------- the two gradients

EQUATIONS = {
    "grpo": r"$\nabla J = \mathbb{E}\,\frac{1}{G}\sum_i \hat{A}_i\,\frac{1}{|y_i|}\sum_t"
            r"\ w_{i,t}\ \nabla\log\pi(y_{i,t})$",
    "gspo": r"$\nabla J = \mathbb{E}\,\frac{1}{G}\sum_i \hat{A}_i\ s_i\ \frac{1}{|y_i|}\sum_t"
            r"\ \nabla\log\pi(y_{i,t})$",
}


def gradient_weights(T=24, spread=0.2):
    logp, old = answer(T, spread)
    logp = logp - (logp - old).mean()                        # now s is 1
    mask = torch.ones(1, T).bool()
    figure, axes = style.panels(3, 2, height=7.0, sharex=True, sharey=True)
    for column, name in zip(axes.T, EQUATIONS):
        for place, A, shift in zip(column, (1.0, -1.0, 1.0), (1e-4, 1e-4, 1e-3)):
            new = (logp + shift).requires_grad_()
            loss, _ = policy_loss(name, new, old, torch.tensor([A]), mask)
            weight = -torch.autograd.grad(loss, new)[0][0] * T / A                    # [T]
            dropped = [t + 1 for t in range(T) if weight[t] == 0]
            place.bar(range(1, T + 1), weight, color=style.colour(name), width=0.75)
            place.plot(dropped, [0.06] * len(dropped), "x", color=style.RED, markersize=7,
                       markeredgewidth=2)
            place.axhline(1, color=style.GREY, linewidth=0.8)
            s = sequence_ratio(new, old, mask).item()
            title = f"Â = {A:+.0f}, s = {s:.4f}: {len(dropped)} of {T} dropped (×)"
            style.label(place, title, "", "weight of ∇log π" if name == "grpo" else "")
        column[0].set_title(f"{name.upper()}   {EQUATIONS[name]}\n{column[0].get_title('left')}")
        column[-1].set_xlabel("token of the same answer")
    figure.suptitle("GRPO weighs and drops token by token; GSPO gives a whole answer one weight, "
                    "or none.\nThe equations hold inside the band.", fontsize=10.5, x=0.01,
                    ha="left")
    return figure


# ---------------------------------------------------------------------------- the timeline

LANES = ("routers\nheld", "advantages\nand data", "a mask beside\nthe clip", "a ratio\nper token",
         "a ratio\nper answer")
PAPERS = {                       # name: (arXiv id, lane or row of OBJECTIVES)
    "PPO": ("1707.06347", "ppo"),
    "dual clip": ("1912.09729", 2),
    "GRPO": ("2402.03300", "grpo"),
    "DAPO": ("2503.14476", "dapo"),
    "Dr. GRPO": ("2503.20783", "dr_grpo"),
    "DRO": ("2405.19107", "dro"),
    "on-policy\ndistillation": ("2306.13649", 1),
    "SRPO": ("2504.14286", 1),
    "80/20": ("2506.01939", 2),
    "CISPO": ("2506.13585", "cispo"),
    "GSPO": ("2507.18071", "gspo"),
    "GMPO": ("2507.20673", "gmpo"),
    "routing replay R3": ("2510.11370", 0),
    "RSPO": ("2510.23027", "rspo"),
    "SAPO": ("2511.20347", "sapo"),
    "off-policy mask": ("2512.02556", 2),
    "GDPO": ("2601.05242", 1),
    "MaxRL": ("2602.02710", 1),
    "DPPO": ("2602.04879", "dppo"),
    "GLM-5": ("2602.15763", "rollout_is"),
    "IPO": ("2603.00000", "ipo"),                            # prime-rl's, no paper
    "LUSPO": ("2602.05261", "luspo"),
    "VESPO": ("2602.10693", "vespo"),
}


def lane(row):
    """The lane of the timeline that a paper is drawn in, by the ratio of its objective. An int is
    the lane itself."""
    if isinstance(row, int):
        return row
    per_token = OBJECTIVES[row].ratio == "token"
    return 3 if per_token else 4


def timeline():
    figure, axes = style.panels(1, 1, height=4.6)
    last = {}                                                # lane: (place of its last paper, side)
    labels = {}                                              # (lane, side): its last place
    for name, (number, row) in sorted(PAPERS.items(), key=lambda paper: paper[1][0]):
        at, y = when(number), lane(row)
        before, side = last.get(y, (-99, 1))
        side = -side if at - before < 3 else 1               # neighbours take turns above and below
        last[y] = at, side
        aside = 32 if at - labels.get((y, side), -99) < 1 else 0     # labels that would touch
        labels[y, side] = at
        colour = style.colour(row) if isinstance(row, str) else style.GREY
        axes.plot(at, y, "o", color=colour, markersize=8)
        said = number if number[5:] != "00000" else f"20{number[:2]}-{number[2:4]}"
        axes.annotate(f"{name}\n{said}", (at, y), (aside, 8 * side), textcoords="offset points",
                      fontsize=7.5, ha="center", va="bottom" if side > 0 else "top", linespacing=1)
    years = {f"{year}01.00000": f"20{year}" for year in (17, 19, 21, 23)}
    months = {f"{year}{month:02}.00000": f"20{year}-{month:02}"
              for year, last in ((25, 12), (26, 3)) for month in range(1, last + 1, 2)}
    axes.set_xticks([when(number) for number in years | months], (years | months).values(),
                    fontsize=8, rotation=45)
    axes.set_yticks(range(len(LANES)), LANES, fontsize=8)
    axes.set(ylim=(-0.6, len(LANES) - 0.35), xlim=(-9, 15.5))
    axes.axvline(0, color=style.GREY, linewidth=0.8, linestyle=":")
    axes.set_title("In 2025 the ratio moved from the token to the answer (before 2025 a year is as "
                   "wide as a month)", fontsize=9.5)
    return figure


def when(number):
    """Position of an arXiv id on the time axis: months since January 2025, and one unit per year
    before that. Ids count up within a month, to about 25,000."""
    months = 12 * (int(number[:2]) - 25) + int(number[2:4]) - 1 + int(number[5:]) / 25_000
    return months if months >= 0 else months / 12


PICTURES = {"objectives": objectives, "ratio_units": ratio_units,
            "gradient_weights": gradient_weights, "timeline": timeline}

if __name__ == "__main__":
    help_form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=help_form).parse_args()
    for name, draw in PICTURES.items():
        style.save(draw(), ROOT / f"docs/figures/{name}.png")
        print(f"docs/figures/{name}.png")
