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

right responses, goes from {mean default: before} to {default: after} (3 seeds):

**Usual steps, one rate** ({seeds rule: GSPO against GRPO} seeds): GRPO {mean rule: GRPO: mean};
GSPO with the paper's range {mean rule: GSPO: mean}, behind by {rule: GSPO against GRPO}; GRPO's
weights with GSPO's drops {mean rule: w, GSPO's drops: mean}, level with GSPO. At this rate it is
leaving out so much that costs, not the ratio. Elsewhere wide is ahead: SmolLM2 {mean counting:
GSPO wide is ahead of GRPO}, a game {mean turns: GSPO wide against GRPO, one advantage per
response}.

ahead of the paper's, {lengths: mid against the paper's range, over three lengths}, and level with

range is behind, {own_rate: GSPO against GRPO, 21 tokens} (21 tokens) and {own_rate: GSPO against
GRPO, 61 tokens} (61); wide is level, then behind. In play.html's policy the paper's range is
ahead then, {toy paper 24 own}: a toy predicts

rate:** wide is ahead, {mean controls: GSPO wide, 8 batches old: mean} against {mean controls:
GRPO, 8 batches old: mean} (8 batches old) and {mean controls: GSPO wide, int3: mean} against
{mean controls: GRPO, int3: mean} (int3).

on a CPU: pass@1 {mean smollm2: before} to {mean smollm2: after} in {mean smollm2: seconds} s

the default run is {versus_trl} times as fast
""",
"docs/lesson.md": """
twenty batches it is {mean rule: GSPO: clip_signal} with the paper's range and {mean rule: GRPO:
clip_signal} with GRPO. `clip_low`

at 24 digits is {toy level GRPO 24 at .05} with GRPO, {toy level paper 24 at .05} with the paper's
range and {toy level w, paper's drops 24 at .05} with w and

*In the transformer* ({seeds rule: GSPO against GRPO} seeds, one rate; mean pass rate of twenty
batches): GRPO {mean rule: GRPO: mean}, GSPO {mean rule: GSPO: mean}, w with its drops {mean rule:
w, GSPO's drops: mean}, w with as many drops at random {mean rule: w, random drops: mean}. The
weight is level: {rule: weight: GSPO against w with GSPO's drops}. All three that

bias of s is {toy bias s 240 usual} of |∇J|, that of no ratio {toy bias no ratio 240 usual}, of w
{toy bias w 240 usual}. Clips add more: w with GRPO's has {toy bias w, clip .2 240 usual}, s with
the paper's {toy bias s, paper 240 usual}. **After a usual step of the toy s is as biased as no
ratio at all; what GSPO has is a rule for what to leave out.** Where the policies are far apart
the weight counts, too: in the transformer with an int3 sampler (coarsely rounded weights) s is
ahead of w with the same drops, by {mean controls: weight: wide against w with its drops, int3};
so it is

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
GRPO. Here length did not rescue the paper's range: at the longest it still dropped {mean lengths:
GSPO, 110 tokens: clip_signal}.

over the batches is {toy level paper 24 own} at rate {toy rate paper 24}, GRPO's {toy level GRPO
24 own} at {toy rate GRPO 24}. Wide has {toy level wide 24 own} (other seeds than

range is behind, {own_rate: GSPO against GRPO, 21 tokens} at 21 tokens and {own_rate: GSPO against
GRPO, 61 tokens} at 61. Wide

more: held-out pass@1 is {mean offpolicy: before: large steps} before, and at the end {other
offpolicy: wide against GRPO, pass@1 at the end} with GRPO, {level offpolicy: wide against GRPO,
pass@1 at the end} with wide and {level offpolicy: the paper's range against GRPO, pass@1 at the
end} with the paper's range (32 seeds). As many samples in usual steps give {other offpolicy: GSPO
against GRPO, usual steps, pass@1 at the end} with GRPO. With neither clipped, GSPO is behind
GRPO, {mean offpolicy: without a clip: GSPO against GRPO, pass@1 at the end}. </details>

games at the end: {turns: GSPO wide: more games won at the end} with wide, {turns: GSPO: more
games won at the end} with the paper's

with a flip moved {lesson flips move} times as far

GSPO − GRPO is {depth: GSPO against GRPO, 2.8e-4}. Others saw collapses
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

Without its clip GSPO changes by {offpolicy: without its clip: GSPO} in pass rate at large

([paper], §5.2). {percent neighbours: GSPO: own} of what leaves GSPO's range

In `collapse` {mean collapse: GSPO collapses, MoE} of its runs
""",
"docs/evidence.md": """
(tiny task, 10 batches, `learning`, {seeds learning: GSPO wide against GRPO, 16 mini-batches}
seeds): GRPO ends at {other learning: GSPO wide against GRPO, 16 mini-batches}, the paper's range at
{level learning: GSPO against GRPO, 16 mini-batches} and wide at {level learning: GSPO wide against
GRPO, 16 mini-batches}; wide − GRPO is {learning: GSPO wide against GRPO, 16 mini-batches}.

clip**, there, {above offpolicy: collapsed: GSPO no clip} runs of GSPO collapse and {above
offpolicy: collapsed: GRPO no clip} of GRPO; GSPO is {offpolicy: without a clip: GSPO against GRPO}
from

batches of 128 responses, `offpolicy`, {seeds offpolicy: wide against GRPO} seeds). These runs
unlearn: pass@1 is {mean offpolicy: before: large steps} before, and at the end GRPO's is {other
offpolicy: wide against GRPO, pass@1 at the end}, that of the paper's range {level offpolicy: the
paper's range against GRPO, pass@1 at the end} and of wide {level offpolicy: wide against GRPO,
pass@1 at the end}. With as many samples at usual steps it is {other offpolicy: GSPO wide against
GRPO, usual steps, pass@1 at the end}, {level offpolicy: GSPO against GRPO, usual steps, pass@1 at
the end} and {level offpolicy: GSPO wide against GRPO, usual steps, pass@1 at the end}. In pass@1 at
the end wide leads by {offpolicy: wide against GRPO, pass@1 at the end}, but its median is {median
offpolicy: wide against GRPO, pass@1 at the end}, and it is ahead at {above offpolicy: wide against
GRPO, pass@1 at the end} seeds; the paper's range leads by {offpolicy: the paper's range against
GRPO, pass@1 at the end}. Collapsed (a pass rate below half of the best so far, four batches
running): GRPO {above offpolicy: collapsed: GRPO}, the paper's range {above offpolicy: collapsed:
GSPO}, wide {above offpolicy: collapsed: GSPO wide}, the narrow GRPO of the next item {above
offpolicy: collapsed: GRPO narrow}.

standard deviation of {median offpolicy: std of log s, GSPO, usual steps} (the paper's range) to
{median offpolicy: std of log s, GSPO wide, usual steps} (wide) at usual steps and {median
offpolicy: std of log s, GSPO, large steps} to {median offpolicy: std of log s, GSPO wide, large
steps} at the large steps

(16 batches, `depth`, {seeds depth: GSPO against GRPO, 2.8e-4} seeds): every variant ends below its
pass@1 before training ({mean depth: before}; GRPO {mean depth: GRPO}), {mean depth: flips} of the
experts flip, replay is {depth: GRPO replay against GRPO, 2.8e-4} from

more games than one per response, GRPO {turns: GRPO: more games won at the end}; [the
others](lesson.md#9-turns-what-is-gspo-token-for). With one per response wide is {turns: GSPO wide
against GSPO, one advantage per response} above

There wide is {offpolicy: the weight: wide against dropped by s} above the same drop rule with
GRPO's weights and {offpolicy: the same share: wide against narrow GRPO} above a GRPO so narrow that
it clips {percent offpolicy: clipped of Â ≠ 0, GRPO narrow} of the tokens with Â ≠ 0, wide {percent
offpolicy: clipped of Â ≠ 0, GSPO wide}; by Holm over the nine differences of `offpolicy` both have
p {holm offpolicy: the same share: wide against narrow GRPO}: undecided. The narrow GRPO is
{offpolicy: the same share: narrow GRPO against GRPO} above GRPO

(`neighbours`, {seeds neighbours: GSPO: own} seeds): of the responses with Â ≠ 0 outside the paper's
range {percent neighbours: GSPO: own} had moved in their own advantage's direction before they were
used, {percent neighbours: GSPO: own_permuted} if advantages were permuted, a difference of
{neighbours: GSPO: own direction minus permuted} ([why]

At rate .05 w with the paper's drops is level with the paper's range at all five lengths, as
predicted: {toy w against s 24 at .05} at 24 digits. As many drops at random are ahead of it there,
{toy random against s 24 at .05}, and behind at 240, {toy random against s 240 at .05}.

at 24 digits: w with the paper's drops is {toy w against s 24 own} from the paper's range, where
level was predicted; at 240 it is level.

The paper's range minus GRPO is {toy paper 24 at .05} at 24 digits and {toy paper 240 at .05} at 240
at rate .05, but {toy paper 24 own} and {toy paper 240 own} with each at its best rate; wide then
leads by {toy wide 24 own} at 24. GRPO's best rate at 240 is {toy rate GRPO 240}, that of the
paper's range {toy rate paper 240}, the largest tried: GRPO breaks first. With an ε of .05 GRPO
gains {toy g GRPO .05 24} at 24 digits.

With 64 prompts the paper's range does not lead at 240 digits and rate .05: {toy 64 paper 240 at
.05}.

of {toy best share 240 .05} to {toy best share 80 .2} at every length and at rates .05 and .2.
Predicted was an ε of 1 to 2 standard deviations of log s; it was {toy epsilon 24 .05} to {toy
epsilon 240 .2}.

in units of its length. After a usual step, at 240 digits, it is {toy bias s 240 usual} with s, {toy
bias no ratio 240 usual} without a ratio and {toy bias w 240 usual} with w (noise {toy floor 240
usual}). That w has less failed after a large step: at 24 digits {toy bias w 24 large}, s {toy bias
s 24 large}, and one response's estimate has a standard deviation of {toy std w 24 large}, with s
{toy std s 24 large}.

steps (`rule`, {seeds rule: GSPO against GRPO} seeds)
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
