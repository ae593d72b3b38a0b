"""The measured figures in the sentences of the pages, which experiments/fill.py writes.

A paragraph below is a few words of a sentence as they stand on the page, once, with {NAME} where a
figure stands; fill.py explains the names. Line breaks do not matter. After a change of such a
sentence, change its paragraph.
"""

SENTENCES = {
"README.md": """
| first | `gspo.py` | {lines gspo.py} |

| 1 | `toy.py` | {lines toy.py} |

| 2 | `ratios.py` | {lines ratios.py} |

| 3 | `advantages.py` | {lines advantages.py} |

| 4 | `losses.py` | {lines losses.py} |

| 5 | `rollout.py` | {lines rollout.py} |

| 6 | `train.py` | {lines train.py} |

| 7 | `moe.py`, `routes.py` | {lines moe.py} + {lines routes.py} |

| 8 | `eval.py` | {lines eval.py} |

right responses, goes from {mean default: before} to {mean default: after} (3 seeds):

CPU: pass@1 {mean smollm2: before} to {mean smollm2: after} in {mean smollm2: seconds} s

the default run is {versus_trl} times as fast
""",
"docs/lesson.md": """
twenty batches it is {mean rule: GSPO: clip_signal} with the paper's range and {mean rule: GRPO:
clip_signal} with GRPO.

pass rate is {toy level GRPO 24 at .05} with GRPO, {toy level paper 24 at .05} with the paper's
range and {toy level w, paper's drops 24 at .05} with w and

mean pass rate of twenty batches), GRPO has {mean rule: GRPO: mean}, GSPO {mean rule: GSPO: mean},
w with its drops {mean rule: w, GSPO's drops: mean}, w with as many drops at random {mean rule: w,
random drops: mean}: the

s is behind w, {mean weight: s, no clip against w, no clip, 61 2e-4}, and level with no ratio. If
only responses with Â < 0 get s they are {mean weight: s where wrong against w, no clip, 61 2e-4
(not primary)} from w, if only those with Â > 0, {mean weight: s where right against w, no clip,
61 2e-4 (not primary)}: where

s is as biased as no ratio, {toy bias s 240 usual} of |∇J| at 240 digits, w {toy bias w 240 usual}.
*As

In the transformer {percent likelihood: own} of the responses and {percent likelihood:
own_distinct} of the distinct

is about a half, {percent likelihood: permuted}. If they are exchanged only among responses that
are about equally likely, it is {percent likelihood: permuted_likelihood}: likely responses are

The share falls to {toy share paper 240 at .05}, and GSPO is ahead of GRPO. At the short length a
range ten times as wide does the same: it drops {toy share ×10 24 at .05} and is ahead.

| 24 | {toy epsilon 24 .05} | {toy best share 24 .05} |

| 240 | {toy epsilon 240 .05} | {toy best share 240 .05} |

| 800 | {toy epsilon 800 .05} | {toy best share 800 .05} |

ahead of the paper's, {lengths: mid against the paper's range, over three lengths}, and level with
GRPO.

over the batches is {toy level paper 24 own} at rate {toy rate paper 24}, GRPO's {toy level GRPO
24 own} at {toy rate GRPO 24}. Wide has {toy level wide 24 own}.

it is, too, {fair: GSPO against GRPO, best 21} at 21 tokens, less

undecided: held-out pass@1 is {mean offpolicy: before: large steps} before, and at the end {other
offpolicy: wide against GRPO, pass@1 at the end} with GRPO, {level offpolicy: wide against GRPO,
pass@1 at the end} with wide and {level offpolicy: the paper's range against GRPO, pass@1 at the
end} with the paper's range (32 seeds).

games at the end: {turns: GSPO wide: more games won at the end} with wide, {turns: GSPO: more
games won at the end} with the paper's

with a flip moved {lesson flips move} times as far

GSPO − GRPO is {depth: GSPO against GRPO, 2.8e-4}. [Others]

its ε at usual steps, {steps: GSPO ×10 at 0.0004 × 4} from GRPO, and with

breaks, {after own_rate: GSPO mid, 21 1.2e-3} (four
""",
"docs/data.md": """
where its log-probs stay within {vllm_apart} nats of the policy's,
""",
"docs/corrections.md": """
still move s. Here {mean bounded: s leaves the clip range in less than 1 % of answers} of the
responses

the two sides agree to {mean identity: in float32} in float32 and {mean identity: in float64} in
float64. The mean

batch log ∏w has a standard deviation of {lesson std product}, log w one of {lesson std w}.

0.2 / 3e-4 = {quotient of epsilons}: the *clip ranges* differ

errs more than w_t in {s worse with a baseline} of the draws; without it in {s worse without}.

off its figure 2. Here: {mean clipped: GSPO's share} against {mean clipped: GRPO's share}. Shares

clips {mean learning: GSPO clips} at the paper's range, {mean learning: GSPO ×10 clips} at ten times
and {mean learning: GSPO wide clips} at a hundred times that range; GRPO clips {mean learning: GRPO
clips}.

Without its clip GSPO changes by {offpolicy: without its clip: GSPO} in the pass rate

([paper], §5.2). {percent likelihood: own} of what leaves GSPO's range had moved in its own
advantage's direction, {percent likelihood: permuted_likelihood} among responses as likely,
{percent likelihood: permuted} by chance

In `collapse` {collapsed collapse: GSPO} of its runs do, and {collapsed collapse: GRPO} of GRPO's:
GSPO ends {final collapse: GSPO} above.
""",
"docs/evidence.md": """
ten times its range at 4e-4, {steps: GSPO ×10 at 0.0004 × 4} from GRPO (`steps`, 8 seeds), and mid

too much for GRPO, {after own_rate: GSPO mid, 21 1.2e-3} (`own_rate`, 21

`fair` {line fair}; `weight` {line weight}; `controls_final` {line controls_final}; `pretrained`
{line pretrained}. A contrast

wrongly. With s only where Â < 0 it is {weight: s where wrong against w, no clip, 61 2e-4 (not
primary)} from w, only where Â > 0 {weight: s where right against w, no clip, 61 2e-4 (not
primary)}, as

W without a clip is {weight: w, no clip against GRPO, 61 2e-4 (not primary)} from GRPO, so

twenty batches): with equal drops s − w is {rule: weight: GSPO against w with GSPO's
drops}, level by ±.03, and what costs is dropping .4: GSPO {rule: GSPO against GRPO}. Held out at
the end, undecided: GSPO is {after rule: GSPO, 21 tokens, 4e-4, 12 seeds}, and as many random drops
{after
rule: w, random drops, 21 tokens, 4e-4, 12 seeds}. *At

at 21 and 61: wide {fair: GSPO wide against GRPO, best 21 (not primary)} and {fair: GSPO wide
against GRPO, best 61 (not primary)}, a GRPO with ε .05 {fair: GRPO narrow against GRPO, best 21
(not primary)} and {fair: GRPO narrow against GRPO, best 61 (not primary)}.

at 21 tokens and 8e-4 {mean fair: choosing: GRPO, 21 8e-4: after}, {mean fair: choosing: GRPO
narrow, 21 8e-4: after}, {mean fair: choosing: GSPO, 21 8e-4: after}, {mean fair: choosing: GSPO
mid, 21 8e-4: after} and {mean fair: choosing: GSPO wide, 21 8e-4: after}, none

At 61 tokens and 8e-4 {mean fair: choosing: GRPO, 61 8e-4: after}, {mean fair: choosing: GRPO
narrow, 61 8e-4: after}, {mean fair: choosing: GSPO, 61 8e-4: after}, {mean fair: choosing: GSPO
mid, 61 8e-4: after} and {mean fair: choosing: GSPO wide, 61 8e-4: after}, of

w with its drops is {controls_final: w, wide's drops against GRPO, 8 batches old} from GRPO with
samples 8 batches old and {controls_final: w, wide's drops against GRPO, int3} with int3. S

Collapsed: GRPO {above offpolicy: collapsed: GRPO}, the paper's range {above offpolicy: collapsed:
GSPO}, wide {above offpolicy: collapsed: GSPO wide}.

Wide minus w with its drops is {offpolicy: the weight: wide against dropped by s}, minus a GRPO
with 3e-4 and 4e-4 {offpolicy: the same share: wide against narrow GRPO}; both p {holm offpolicy:
the same share: wide against narrow GRPO} by Holm: undecided. Without any clip {above offpolicy:
collapsed: GSPO no clip} runs of GSPO collapse and {above offpolicy: collapsed: GRPO no clip} of
GRPO.

with .05 GRPO gains {toy g GRPO .05 24} at 24 digits, with .02 {toy g GRPO .02 240} at 240.

digits it is {toy w against s 24 own} from it

**The best ε** is {toy epsilon 24 .05} to {toy epsilon 240 .2} σ and drops {toy best share 240
.05} to {toy best share 80 .2}.

of 16 experts, 32 seeds): the paper's range {depth: GSPO against GRPO, 2.8e-4}, undecided

GRPO collapses in {collapsed collapse: GRPO} runs, GSPO in {collapsed collapse: GSPO}, wide in
{collapsed collapse: GSPO wide}; routing replay, {collapse: replay repairs it}, undecided.
""",
"docs/speed.md": """
It is {gpu-share} times what

the default run raised pass@1 from {gpu-learns}. Not tried

rate of matrix products, {speed_limit}.

an update peaks at {peak ours} MB beyond the weights, TRL's at {peak trl} (a backbone

for windows of L tokens of {bf16 responses} responses

independent between tokens, in bfloat16 about {bf16 arithmetic}/√L. A clip
""",
}
