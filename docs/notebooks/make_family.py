"""family.ipynb: six objectives on one recorded batch, from ratios, advantages and losses alone.

    pip install nbclient ipykernel
    python docs/notebooks/make_family.py            writes family.ipynb with its outputs: 30 s
    python docs/notebooks/make_family.py --record   first records the batch again: a minute

The batch is 96 responses of gspo.py's policy to running sums after a short cold start, with their
log-probs before and after a few optimizer steps without any clipping: recorded_batch.json.
"""

import argparse
import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from make_gspo import executed, made, write    # noqa: E402

NOTEBOOK = Path(__file__).with_name("family.ipynb")
BATCH = Path(__file__).with_name("recorded_batch.json")
PROMPTS = 12
COLD_START = 290        # supervised steps: fewer than gspo.py's, so that responses differ more
UPDATES = 4             # optimizer steps between the old and the new log-probs
RATE = 4e-5             # their learning rate

CELLS = r'''%% text
# Six objectives on one batch

An objective of the family is a row of `losses.OBJECTIVES`: ratio × advantage × clip × reduction.
This notebook puts six of them on the same recorded batch and asks of each: which tokens does it
remove, how hard does it push the others, and what do its constants change? It uses three files of
the project, [`ratios.py`](../../ratios.py), [`advantages.py`](../../advantages.py) and
[`losses.py`](../../losses.py), and no model: the batch consists of log-probs and rewards.

%% code
import json
import sys

import matplotlib.pyplot as plt
import torch

sys.path.insert(0, "../..")                  # the concept files are in the root

from advantages import group_advantages
from losses import OBJECTIVES, policy_loss, token_weights, with_options
from ratios import sequence_ratio, token_ratio

plt.rcParams.update({"figure.dpi": 80, "axes.spines.top": False, "axes.spines.right": False,
                     "figure.constrained_layout.use": True})
GOOD, BAD, GREY = "#0072B2", "#D55E00", "#999999"
SIX = ["grpo", "gspo", "gmpo", "cispo", "dppo", "sapo"]

%% text
## The batch

Twelve prompts of the running sum, eight responses to each. `old_logp` are the log-probs of the
policy that sampled them, `logp` those of the policy after four optimizer steps without clipping.

%% code
with open("recorded_batch.json") as file:
    batch = json.load(file)
G, texts = batch["group_size"], batch["responses"]
width = max(map(len, batch["logp"]))
padded = lambda rows: torch.tensor([row + [0.0] * (width - len(row)) for row in rows])
old_logp, logp = padded(batch["old_logp"]), padded(batch["logp"])               # [B, T]
lengths = torch.tensor([len(row) for row in batch["logp"]])                     # [B]
mask = torch.arange(width) < lengths[:, None]                                   # [B, T]
rewards = torch.tensor(batch["rewards"])                                        # [B]
A = group_advantages(rewards, G)                                                # [B]
w = token_ratio(logp, old_logp, mask)                                           # [B, T]
s = sequence_ratio(logp, old_logp, mask)                                        # [B]
live = A.view(-1, G).ne(0).any(-1)                                              # [Q]
kinds = [len(set(texts[q * G:][:G])) if live[q] else 0 for q in range(len(live))]
group = kinds.index(max(kinds))                              # the one with most different responses
print(f"{len(texts)} responses, {int(mask.sum())} tokens; {int(live.sum())} of {len(live)} groups "
      f"have right and wrong responses\n\n{batch['prompts'][group].strip()}")
for row in range(group * G, group * G + G):
    print(f"   A {A[row]:+.2f}   s {s[row]:.5f}   {texts[row]}")

%% text
Both ratios of this batch. A token ratio w moves much further than the ratio s of a whole response,
which is the geometric mean of its tokens' ratios.

%% code
figure, axes = plt.subplots(1, 2, figsize=(9, 2.4))
for axis, x, name in ((axes[0], w[mask], "token ratios w"), (axes[1], s, "sequence ratios s")):
    axis.hist((x.log()).numpy(), bins=60, color=GREY)
    axis.set(xlabel="log ratio", yscale="log",
             title=f"{name}: std of the log {x.log().std():.1e}")
plt.show()

%% text
## The six rows

The clip range is [1 - epsilon, 1 + epsilon_high] of the ratio; for `gmpo` it is a range of log w,
for `dppo` of the change of the token's probability. `cispo` bounds the weight of a token and
removes none, `sapo` has a smooth gate instead of a range.

%% code
print(f"{'':6} {'ratio':10} {'clip':14} {'epsilon':>8} {'high':>8}   reduction        source")
for name in SIX:
    row = OBJECTIVES[name]
    epsilon, high = ("–" if x is None else f"{x:g}" for x in (row.epsilon, row.epsilon_high))
    print(f"{name:6} {row.ratio:10} {row.clip:14} {epsilon:>8} {high:>8}   {row.reduction:16} "
          f"{row.source}")

%% text
## Which tokens are removed, and how hard the others are pushed

The gradient of the loss with respect to log π of a token, divided by what it would be without a
ratio and a clip (minus the advantage times the token's weight in the mean): the *weight* of the
token. It is 1 for REINFORCE, w or s for an objective with a ratio inside its clip range, 0 for a
token that the clip removes.

%% code
def measure_weights(name, constants=None, **clip_range):
    """-> (weights [B, T], share of the tokens with A ≠ 0 that are removed)."""
    new = logp.clone().requires_grad_()
    row = with_options(name, constants=OBJECTIVES[name].constants | (constants or {}))
    loss, stats = policy_loss(row, new, old_logp, A, mask, **clip_range)
    gradient, = torch.autograd.grad(loss, new)                                  # [B, T]
    plain = -A[:, None] * token_weights(mask, OBJECTIVES[name].reduction)       # [B, T]
    return torch.where(plain != 0, gradient / plain, torch.nan), stats["clip_signal"].item()

weights, removed = {}, {}
for name in SIX:
    weights[name], removed[name] = measure_weights(name)
    kept = weights[name][mask & (weights[name] != 0) & ~weights[name].isnan()]
    print(f"{name:6} removes {removed[name]:6.1%} of the tokens; weights of the others "
          f"{kept.min():7.3f} to {kept.max():.3f}")

%% text
Responses under each objective, a row each: good ones above the line, bad ones below, of both up to
three that GSPO removes and three that it keeps, those with the token that moved most. Blue and red:
weight above and below 1; black: removed. GSPO removes whole responses, GRPO and GMPO single tokens,
DPPO tokens whose probability itself has changed.

%% code
farthest = w.masked_fill(~mask, 1).log().abs().amax(-1)                         # [B]
different = {(row // G, text): row for row, text in enumerate(texts)}.values()
rows = []
for sign in (1, -1):
    for kept in (False, True):
        some = [row for row in different if A[row] * sign > 0
                and bool(weights["gspo"][row, 0] != 0) == kept]
        rows += sorted(some, key=lambda row: -farthest[row])[:3]
rows = torch.tensor(rows)
longest = int(lengths[rows].max())
figure, axes = plt.subplots(len(SIX) + 1, 1, figsize=(9, 11), sharex=True)
shown = [("w itself", w.masked_fill(~mask, torch.nan)), *weights.items()]
for axis, (name, values) in zip(axes, shown):
    values = values[rows, :longest].masked_fill(~mask[rows, :longest], torch.nan)
    image = axis.imshow(values, cmap="RdBu", vmin=0.5, vmax=1.5, aspect="auto")
    gone = (values == 0) & (name != "w itself")
    for y, x in gone.nonzero().tolist():
        axis.add_patch(plt.Rectangle((x - 0.5, y - 0.5), 1, 1, color="black"))
    good = int((A[rows] > 0).sum())
    axis.axhline(good - 0.5, color="black", linewidth=1)
    axis.set(yticks=[(good - 1) / 2, (good + len(rows) - 1) / 2],
             yticklabels=["A > 0", "A < 0"])
    axis.set_title(name, loc="left", fontsize=10)
axes[-1].set_xlabel("token")
figure.colorbar(image, ax=axes, label="weight of the token", shrink=0.4)
plt.show()

%% text
## The shape of each clip

The same weights over the token's ratio w, all groups. For GRPO the picture is PPO's: a good token
(A > 0) is dropped above the range, a bad one below it, and between them the weight is w. For GSPO
w does not decide; the response's s does.

%% code
figure, axes = plt.subplots(2, 3, figsize=(9, 4.6), sharex=True, sharey=True)
every = A[:, None].expand_as(w)
for axis, name in zip(axes.flat, SIX):
    for word, chosen, color in (("A > 0", every > 0, GOOD), ("A < 0", every < 0, BAD)):
        where = mask & chosen
        axis.scatter(w[where], weights[name][where], s=5, color=color, label=word)
    axis.set_title(f"{name}: {removed[name]:.0%} removed", loc="left", fontsize=10)
    axis.set(xscale="log", xlim=(0.3, 3), ylim=(-0.2, 3))
    axis.xaxis.set_major_locator(plt.FixedLocator([0.5, 1, 2]))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(plt.NullLocator())
axes.flat[0].legend(frameon=False, fontsize=8)
figure.supxlabel("token ratio w")
figure.supylabel("weight")
plt.show()

%% text
## The constants, from a hundredth to a hundred times

Each objective has one constant that says how far is too far. Here it is multiplied by 0.01 to 100:
both ends of the clip range; for `cispo`, whose lower end is off, the upper one; for `sapo` its
temperatures τ. Left: the share of the tokens that is removed. Right: how long the gradient is,
compared with the same objective at its paper's constants. A dot marks the paper's values.

%% code
def slid(name, factor):
    """The options of measure_weights for `name` with its constant times `factor`."""
    row = OBJECTIVES[name]
    if name == "sapo":
        return dict(constants={key: value * factor for key, value in row.constants.items()})
    low = row.epsilon if name == "cispo" else row.epsilon * factor
    limit = 1.0 if row.clip in ("min", "tv") else float("inf")
    return dict(epsilon=min(low, limit), epsilon_high=row.epsilon_high * factor)

def length(name, values):
    plain = A[:, None] * token_weights(mask, OBJECTIVES[name].reduction)        # [B, T]
    return (values.nan_to_num() * plain).norm().item()

factors = torch.logspace(-2, 2, 41).tolist()
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
for color, name in zip(plt.cm.tab10.colors, SIX):
    points = [measure_weights(name, **slid(name, factor)) for factor in factors]
    left.plot(factors, [share for _, share in points], color=color, label=name)
    left.plot(1, removed[name], "o", color=color)
    papers = length(name, weights[name])
    right.plot(factors, [length(name, values) / papers for values, _ in points], color=color)
left.set(xscale="log", ylabel="tokens removed", xlabel="constant, times the paper's")
right.set(xscale="log", ylabel="length of the gradient", xlabel="constant, times the paper's")
left.legend(frameon=False, fontsize=8)
plt.show()

%% text
## Do they point the same way?

The cosine between the gradients of two objectives with respect to the log-probs: 1 for the same
direction. Objectives with different clips can still agree on most of the batch.

%% code
def direction(name):
    plain = A[:, None] * token_weights(mask, OBJECTIVES[name].reduction)        # [B, T]
    gradient = (weights[name].nan_to_num() * plain)[mask]
    return gradient / gradient.norm()

every = torch.stack([direction(name) for name in SIX])
cosines = every @ every.T
figure, axis = plt.subplots(figsize=(4.6, 3.8))
image = axis.imshow(cosines, cmap="Blues", vmin=0, vmax=1)
axis.set(xticks=range(len(SIX)), xticklabels=SIX, yticks=range(len(SIX)), yticklabels=SIX)
for y in range(len(SIX)):
    for x in range(len(SIX)):
        axis.text(x, y, f"{cosines[y, x]:.2f}", ha="center", va="center", fontsize=8,
                  color="white" if cosines[y, x] > 0.6 else "black")
plt.show()

%% text
## Your own

A new row is tried here first: add it to `OBJECTIVES` in `losses.py` and its name to `SIX`, and
run all cells. [docs/lesson.md](../lesson.md) has such an exercise with its solution,
[docs/family.md](../family.md) the whole table, and `python train.py --algorithm NAME` trains
with it.
'''


def recorded():
    """The batch as a dict: 96 responses of gspo.py's policy with their log-probs before and after
    UPDATES optimizer steps on GSPO's loss without its clip."""
    import torch

    import gspo
    torch.manual_seed(0)
    random.seed(0)
    tokenizer = gspo.Characters()
    policy = gspo.tiny_policy(tokenizer)
    gspo.cold_start(policy, tokenizer, COLD_START)
    problems = [gspo.running_sum() for _ in range(PROMPTS)]
    prompts = [tokenizer.encode(prompt) for prompt, _ in problems]
    G = gspo.NUM_GENERATIONS
    rollout = gspo.sample(policy, tokenizer, prompts, G, gspo.MAX_NEW_TOKENS)
    mask = rollout.mask                                                             # [B, T]
    texts = [tokenizer.decode(ids[m].tolist()) for ids, m in zip(rollout.response_ids, mask)]
    rewards = [gspo.reward(text, problems[i // G][1]) for i, text in enumerate(texts)]
    advantages = gspo.group_advantages(torch.tensor(rewards), G)                    # [B]
    with torch.no_grad():
        old_logp = gspo.response_logp(policy, rollout)                              # [B, T]
    gspo.EPSILON = gspo.EPSILON_HIGH = float("inf")                # the batch is to have no clip
    optimizer = torch.optim.AdamW(policy.parameters(), RATE, (0.9, 0.95), weight_decay=0)
    for _ in range(UPDATES):
        logp = gspo.response_logp(policy, rollout)                                  # [B, T]
        gspo.gspo_loss(logp, old_logp, advantages, mask)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logp = gspo.response_logp(policy, rollout)                                  # [B, T]
    rows = lambda x: [[round(v, 6) for v in row[m].tolist()] for row, m in zip(x, mask)]
    return dict(group_size=G, prompts=[prompt for prompt, _ in problems], responses=texts,
                rewards=rewards, old_logp=rows(old_logp), logp=rows(logp))


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="first record the batch again")
    if parser.parse_args().record:
        BATCH.write_text(json.dumps(recorded()) + "\n", encoding="utf-8")
    write(NOTEBOOK, executed(made(CELLS)))
