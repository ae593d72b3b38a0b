"""gspo.ipynb: gspo.py cell by cell, with what each step produces on the running sum.

    pip install nbclient ipykernel
    python docs/notebooks/make_gspo.py   writes gspo.ipynb with its outputs

The code cells of a section are cut from gspo.py at its section bars, so that file and notebook
cannot differ; the prose and the cells that draw are in CELLS below.
"""

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = Path(__file__).with_name("gspo.ipynb")
TIMEOUT = 3600  # seconds that a cell may take

CELLS = r'''%% text
# GSPO on one page, cell by cell

These are the cells of [`gspo.py`](../../gspo.py), in its order: each section of the file, then a
look at what it produces. All of it runs on a laptop without a GPU. On Colab, first run
`!pip install "transformers>=5.14,<5.25"`. The paper is
[Group Sequence Policy Optimization](https://arxiv.org/abs/2507.18071).

    prompt x ─► π_old samples G responses ─► reward ─► group advantage Â ─┐
                           └─► log-probs ─► importance ratio s ───────────┴─► clip, optimize ─► π_θ

%% text
## Imports and constants

Most of the constants have the name of a flag of `train.py`.

%% gspo.py 0

%% text
The cells that draw are not part of `gspo.py`. They use matplotlib.

%% code
import contextlib
import copy
import io
import re
import sys

import matplotlib.pyplot as plt

plt.rcParams.update({"figure.dpi": 80, "axes.spines.top": False, "axes.spines.right": False,
                     "figure.constrained_layout.use": True})
GOOD, BAD, GREY = "#0072B2", "#D55E00", "#999999"
torch.manual_seed(0)
random.seed(0)

%% text
## 1. Task and reward

A prompt is a sum, its answer the last digit of every partial sum. The reward is 1 for a response
that is right in every character, else 0.

%% gspo.py 1

%% text
The teacher of the cold start makes a systematic error: it adds most nines as if they were eights.

%% code
for habit in (0.0, 0.0, 1.0):
    prompt, answer = running_sum(habit)
    print(f"{prompt}  ->  {answer}{'    the error of the teacher' if habit else ''}")

%% text
## 2. Policy

A Qwen3-MoE from transformers with random weights, trained by supervised steps on the teacher's
answers. This is the slowest cell before the loop.

%% gspo.py 2

%% code
tokenizer = Characters()
policy = tiny_policy(tokenizer)
print(f"{sum(p.numel() for p in policy.parameters()):,} parameters")
cold_start(policy, tokenizer)

%% text
## 3. Sampling

The policy as it is now, π_old, samples G = 8 responses to each of 32 prompts.

%% gspo.py 3

%% text
Below are the responses to the prompt whose pass rate is closest to one half. The wrong responses
go wrong at a 9.

%% code
problems = [running_sum() for _ in range(PROMPTS_PER_STEP)]
rollout = sample(policy, tokenizer, [tokenizer.encode(p) for p, _ in problems], NUM_GENERATIONS,
                 MAX_NEW_TOKENS)
mask = rollout.mask
texts = [tokenizer.decode(y[m].tolist()) for y, m in zip(rollout.response_ids, mask)]
rewards = torch.tensor([reward(text, problems[i // NUM_GENERATIONS][1])
                        for i, text in enumerate(texts)])
share = rewards.view(-1, NUM_GENERATIONS).mean(-1)                              # [Q] pass rates
print(f"pass rate {rewards.mean():.2f} over {len(texts)} responses\n")
group = (share - 0.5).abs().argmin().item()
print(problems[group][0])
for text, r in list(zip(texts, rewards))[group * NUM_GENERATIONS:][:NUM_GENERATIONS]:
    print(f"   reward {r:.0f}   {text}")

%% text
## 4. Log-probs

One forward over prompts and responses gives log π of every response token. The same function
serves the old policy and, with gradient, the new one.

%% gspo.py 4

%% text
The probability of each token of one wrong response of that group. The policy is certain of
everything except the digits after a 9, where it wavers between two.

%% code
check_log_probs(policy, rollout)
with torch.no_grad():
    old_logp = response_logp(policy, rollout)                                   # [B, T]
row = group * NUM_GENERATIONS + int(rewards.view(-1, NUM_GENERATIONS)[group].argmin())
length = int(mask[row].sum())
symbols = [tokenizer.characters[i] for i in rollout.response_ids[row, :length]]
figure, axis = plt.subplots(figsize=(9, 2))
axis.bar(range(length), old_logp[row, :length].exp(), color=GREY)
axis.set(xticks=range(length), xticklabels=symbols, ylabel="π_old(token)",
         title=f"{problems[group][0].strip()}   a wrong response, token by token")
plt.show()

%% text
## 5. Advantages

Equation 6: the reward of a response minus the mean of its group, divided by the group's standard
deviation. No critic is needed.

%% gspo.py 5

%% text
The advantages of the group above, and of all groups. A zero-variance group gives 0: there is
nothing to learn from it.

%% code
advantages = group_advantages(rewards, NUM_GENERATIONS)                       # [B]
own = advantages.view(-1, NUM_GENERATIONS)[group]                               # [G]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.4), width_ratios=(1, 2), sharey=True)
left.bar(range(NUM_GENERATIONS), own, color=[GOOD if a > 0 else BAD for a in own])
left.axhline(0, color="black", linewidth=0.8)
left.set(title="one group", xlabel="response", ylabel="advantage")
right.scatter(torch.arange(len(advantages)) // NUM_GENERATIONS, advantages, s=12,
              color=[GOOD if a > 0 else BAD if a < 0 else GREY for a in advantages])
right.axhline(0, color="black", linewidth=0.8)
right.set(title="all groups", xlabel="prompt")
plt.show()

%% text
## 6. Ratio and loss

Equation 7: the importance ratio of a response is the geometric mean of the ratios of its tokens.
Equation 5: ratio × advantage, clipped. At the first mini-batch every ratio is 1 and nothing is
clipped; the ratios move with the optimizer steps.

%% gspo.py 6

%% text
To see them move, a copy of the policy takes two optimizer steps on half of the responses. First
the token ratios of the response above, with their geometric mean, the ratio that GSPO clips. Then
the ratios of all responses beside the clip range. A good response (A > 0) above the range and a
bad one (A < 0) below it give no gradient any more.

%% code
new_policy = copy.deepcopy(policy)
optimizer = torch.optim.AdamW(new_policy.parameters(), LEARNING_RATE / 10, (0.9, 0.95))
for rows in torch.arange(len(mask) // 2).chunk(2):                # the first steps of a warm-up
    logp = response_logp(new_policy, Rollout(*(x[rows] for x in rollout)))
    loss, clipped = gspo_loss(logp, old_logp[rows], advantages[rows], mask[rows])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss:+.5f}   clipped {clipped.sum() / mask[rows].sum():.2f}")
with torch.no_grad():
    log_w = (response_logp(new_policy, rollout) - old_logp).masked_fill(~mask, 0.0)     # [B, T]
w, s = log_w.exp(), (log_w.sum(-1) / mask.sum(-1)).exp()                        # [B, T], [B]

figure, axis = plt.subplots(figsize=(9, 1.4))
reach = (w[row, :length] - 1).abs().max()
image = axis.imshow(w[row:row + 1, :length], cmap="RdBu", vmin=1 - reach, vmax=1 + reach,
                    aspect="auto")
figure.colorbar(image, label="w")
axis.set(xticks=range(length), xticklabels=symbols, yticks=[],
         title=f"token ratios w of one response (A = {advantages[row]:+.2f}); "
               f"their geometric mean is s = {s[row]:.5f}")
plt.show()

figure, axis = plt.subplots(figsize=(9, 2.8))
axis.axvspan(-EPSILON * 1e4, EPSILON_HIGH * 1e4, color=GREY, alpha=0.3, label="the clip range")
for name, rows, color in (("A > 0", advantages > 0, GOOD), ("A < 0", advantages < 0, BAD)):
    out = rows & ((s > 1 + EPSILON_HIGH) if name == "A > 0" else (s < 1 - EPSILON))
    x = (s - 1) * 1e4
    axis.scatter(x[rows & ~out], advantages[rows & ~out], s=18, color=color, label=name)
    axis.scatter(x[out], advantages[out], s=18, facecolors="none", edgecolors=color,
                 label=f"{name}, clipped: no gradient")
axis.axvline(0, color="black", linewidth=0.8)
axis.set_xscale("symlog", linthresh=10)
axis.set(xlabel="(s - 1) · 10⁴, logarithmic beyond ±10", ylabel="advantage",
         title="the responses and the clip range")
axis.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
plt.show()

%% text
## 7. Loop

Sampling, rewards, advantages, log-probs, four optimizer steps; fifty times. A mini-batch is made
of whole groups.

%% gspo.py 7

%% text
The run. Every batch has new problems, so its reward is a held-out pass rate.

%% code
class Copy(io.StringIO):
    """Prints to the screen and keeps the text."""
    screen = sys.stdout

    def write(self, text):
        self.screen.write(text)
        return super().write(text)

problems = [running_sum() for _ in range(STEPS * PROMPTS_PER_STEP)]
with contextlib.redirect_stdout(Copy()) as printed:
    train(policy, tokenizer, [(tokenizer.encode(prompt), answer) for prompt, answer in problems])

%% text
The pass rate of each batch, and the share of the tokens with Â ≠ 0 that the clip removed. GRPO's
clip, measured on the same tokens, removes next to nothing.

%% code
passed, clipped, of_grpo = (
    [float(x) for x in re.findall(rf"{name} +([\d.]+)   ", printed.getvalue())]
    for name in ("reward", "gspo", "grpo"))
figure, axis = plt.subplots(figsize=(9, 2.8))
axis.plot(range(1, STEPS + 1), passed, color=GOOD, label="reward: pass rate of the batch")
axis.plot(range(1, STEPS + 1), clipped, color=GREY, linestyle="--", label="GSPO clips, of Â ≠ 0")
axis.plot(range(1, STEPS + 1), of_grpo, color=BAD, linestyle=":", label="GRPO would clip")
axis.set(xlabel="rollout batch", ylim=(0, 1))
axis.legend(frameon=False)
plt.show()

%% text
## 8. A checkpoint and GSM8K

`python gspo.py MODEL` trains a model of Hugging Face with the same loop. This notebook does not run
it.

%% gspo.py 8

%% text
## GRPO

`python gspo.py grpo` trains with `grpo_loss` of section 6: the ratio of each token instead of the
response's, and a wider clip range. [family.ipynb](family.ipynb) compares seven objectives on
one recorded batch, `losses.py` has the whole family as a table, and
[docs/lesson.md](../lesson.md) leads from this page through the rest of the project.
'''


def page_cells(source):
    """gspo.py cut at its section bars -> (docstring, code before section 1, sections 1 to 8).
    Joined they are the file up to its `if __name__`."""
    body = source[:source.index("if __name__ ==")]
    first, *sections = re.split(r"(?m)^(?=# -{10,} \d\. )", body)
    end = first.index('"""\n', 3) + 4
    return first[:end], first[end:], *sections


def cell(kind, number, text, of_page=False):
    """A cell of a notebook, without outputs; of_page: its code is gspo.py's."""
    more = {"outputs": [], "execution_count": None} if kind == "code" else {}
    metadata = {"tags": ["gspo.py"]} if of_page else {}
    return {"cell_type": kind, "id": f"cell-{number}", "metadata": metadata,
            "source": text.strip("\n").splitlines(keepends=True), **more}


def notebook(source):
    """gspo.ipynb as a dict, from the text of gspo.py and CELLS."""
    return made(CELLS, page_cells(source)[1:])


def made(text, sections=()):
    """A notebook as a dict, from its cells: `%% text`, `%% code`, `%% gspo.py N` for a section."""
    cells = []
    for part in re.split("(?m)^%% ", text)[1:]:
        kind, _, text = part.partition("\n")
        of_page = kind.startswith("gspo.py")
        text = sections[int(kind.split()[1])] if of_page else text
        cells.append(cell("markdown" if kind == "text" else "code", len(cells), text, of_page))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "nbformat": 4, "nbformat_minor": 5,
            "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}}}


def executed(cells):
    """The same notebook with the outputs of its cells; raises nbclient's CellExecutionError."""
    import nbformat
    from nbclient import NotebookClient
    book = nbformat.reads(json.dumps(cells), as_version=4)
    NotebookClient(book, timeout=TIMEOUT, record_timing=False,
                   resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    return joined(json.loads(nbformat.writes(book)))


def joined(book):
    """Streams that were printed piece by piece as one output each, for a small file; without what
    went to stderr, warnings with paths of this machine, and without its seconds per batch."""
    for each in book["cells"]:
        merged = []
        for output in each.get("outputs", []):
            if output.get("name") == "stderr":
                continue
            if merged and output["output_type"] == merged[-1]["output_type"] == "stream":
                merged[-1]["text"] += output["text"]
            else:
                merged.append(output)
        for output in merged:
            if "text" in output:
                text = "".join(output["text"])
                output["text"] = re.sub(r" +[\d.]+ s$", "", text, flags=re.M)
        if "outputs" in each:
            each["outputs"] = merged
    return book


def sources(book):
    """Type and text of every cell."""
    return [(each["cell_type"], "".join(each["source"])) for each in book["cells"]]


def write(path, book):
    path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    help_form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=help_form).parse_args()
    write(NOTEBOOK, executed(notebook((ROOT / "gspo.py").read_text(encoding="utf-8"))))
