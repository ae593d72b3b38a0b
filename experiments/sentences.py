"""The measured figures in the sentences of the pages, which experiments/fill.py writes.

A paragraph below is a few words of a sentence as they stand on the page, once, with {NAME} where a
figure stands; fill.py explains the names. Line breaks do not matter. After a change of such a
sentence, change its paragraph.
"""

SENTENCES = {
"README.md": """
pass@1, the share of right responses, goes from {mean default: before} to **{default: after}** (3
seeds).

wide is level, {steps: GSPO wide at 0.0004 × 4}; the paper's range is below, {steps: GSPO at 0.0004
× 4}. SmolLM2: wide {counting: GSPO wide is ahead of GRPO}; in a game {turns: GSPO wide
against GRPO, one advantage per response}.

in later batches wide {offpolicy: wide against GRPO}, the paper's range {offpolicy: the paper's
range against GRPO} ({seeds offpolicy: replay against none} seeds

at an equal rate they change GRPO by {epochs: GRPO: μ = 4 minus μ = 1} ({seeds epochs: GRPO: μ = 4
minus μ = 1} seeds

samples 8 batches old {lags: GSPO wide against GRPO at staleness 8}, an int3 sampler {dose: wide
against GRPO, int3 trusted}.

experts:** undecided, {depth: GSPO against GRPO, 2.8e-4}.

CPU: pass@1 {mean smollm2: before} to {mean smollm2: after} in {mean smollm2: seconds} s

yes: {mean clipped: GSPO's share} of the tokens here, 15% in the paper

why-3e-4)). GRPO clips {mean clipped: GRPO's share}.

default run is {versus_trl} times as fast as TRL's
""",
"docs/lesson.md": """
the paper's range ends below GRPO, by {steps: GSPO at 0.0004 × 4} in pass@1, and the wide range
(0.03 / 0.04) is level, {steps: GSPO wide at 0.0004 × 4}. With


differs from GRPO's by {offpolicy: the paper's range against GRPO} with the paper's range and
{offpolicy: wide against GRPO} with the wide one ({seeds offpolicy: wide against GRPO} seeds;

It is ahead of the first by {offpolicy: the same share: wide against narrow GRPO}, of the second
by {offpolicy: the weight: wide against dropped by s}; but corrected for the number of comparisons
(Holm) both have p {holm offpolicy: the same share: wide against narrow GRPO}.
Without a clip it is behind, {offpolicy: without a clip: GSPO against GRPO}.

all mini-batches {percent neighbours: GSPO: own} of those outside have moved in their own direction,
{percent neighbours: GSPO: own_right} of the right ones and {percent neighbours: GSPO: own_wrong} of
the wrong. Shuffled it is {percent neighbours: GSPO: own_permuted}, a difference of {neighbours:
GSPO: own direction minus permuted} (`neighbours`

an advantage per turn: {turns: GSPO wide: more games won at the end} with the wide range,
{turns: GSPO: more games won at the end} with the paper's

(*zero variance*): {lesson zero early} of them in the first ten batches, {lesson zero late} in the
last ten.

from **batch B**, {lesson responses} responses

log w has a standard deviation of {lesson A std w}, log s one of {lesson clip std}. Most

w: its median distance from 1 is {lesson median w}, that of s {lesson median s}. Log

Kept does not mean inside: {lesson kept outside} of the responses that

In batch B the standard deviation is {lesson std w} for log w, {lesson std product} for the
logarithm of the product, {lesson std s} for log s: {lesson quotient} times smaller than log w; √L =
{lesson root L}.

In run A v is {lesson v} before mini-batch 4, −v/2 = {lesson half v}, and the mean of log w is
{lesson mean w}; heavy

run A v was {lesson v low} to {lesson v high}: measure

{lesson outside} are outside, and {lesson own} of these are on their own side ({lesson chance} with
the advantages shuffled among the responses): {lesson above right} of those above are right
responses, {lesson below wrong} of those below are wrong ones. So {lesson
outside} · {lesson own} = {lesson clipped} of the {lesson dots} responses

half of those outside? In run A it is {lesson later outside}.

20% / ¾ = {lesson paper low}, and 40% / ½ = {lesson paper high}.

| clipped | 20 to 40% | {lesson later clipped} |

| outside | {lesson paper low} to {lesson paper high} | {lesson later outside} |

standard deviations of a normal log s | {lesson paper sigma high} to {lesson paper sigma low} |
{lesson normal} |

1/{lesson sigma} of a standard deviation (median; 1/{lesson sigma high} to 1/{lesson sigma low}),

Now {lesson clips wide} of Â ≠ 0 are `clipped`, not {lesson clips as it is}, and `reward` is
{lesson reward wide} against {lesson reward as it is} in

share that GSPO clips is {lesson clips iterations} instead of {lesson clips as it is} in batches

5 to 10 had a mean of {lesson reward clip} instead of {lesson reward as it is}.

every token gets {lesson game whole}, the wrong turn too. With an advantage per turn the wrong turn
gets {lesson game last turn}.

else less: in run A {lesson flipped share} of the tokens have one. They move {lesson flips move}
times as far as the others (mean |log w| {lesson moved where flipped} against {lesson moved
elsewhere}), mostly through a few tokens of one layer. The medians are {lesson median flipped} and
{lesson median still}: the

counts *experts*, {lesson flips mean} over run A's 50 batches, {lesson flips low} to {lesson flips
high} in its
""",
"docs/data.md": """
where its log-probs stay within {vllm_apart} nats of the policy's,

on one core, the share of held-out games won rose from {mean guess: before} to {mean guess: after}.
""",
"docs/corrections.md": """
still move s. Here {mean bounded: s leaves the clip range in less than 1 % of answers} of the
responses

the two sides agree to {mean identity: in float32} in float32 and {mean identity: in float64} in
float64. The mean

batch log ∏w has a standard deviation of {lesson std product}, log w one of {lesson std w}.

Here the median distance of w from 1 is {lesson median w}; with

0.2 / 3e-4 = {quotient of epsilons}: the *clip ranges* differ

errs more than w_t in {s worse with a baseline} of the draws and less in the others; without it more
in {s worse without}. Neither

clips the shortest third of ours {short: at least 1.5 times as often} times as often

off its figure 2. Here: {mean clipped: GSPO's share} against {mean clipped: GRPO's share}. Shares

clips {mean learning: GSPO clips} at the paper's range, {mean learning: GSPO ×10 clips} at ten times
and {mean learning: GSPO wide clips} at a hundred times that range; GRPO clips {mean learning: GRPO
clips}. And

Without its clip GSPO changes by {offpolicy: without its clip: GSPO} in pass rate at large

([paper], §5.2). {percent neighbours: GSPO: own} of what leaves the range

In `collapse` {mean collapse: GSPO collapses, MoE} of its runs
""",
"docs/evidence.md": """
(tiny task, 10 batches, `learning`, {seeds learning: GSPO wide against GRPO, 16 mini-batches}
seeds): GRPO ends at {other learning: GSPO wide against GRPO, 16 mini-batches}, the paper's range at
{level learning: GSPO against GRPO, 16 mini-batches} and wide at {level learning: GSPO wide against
GRPO, 16 mini-batches}; wide − GRPO is {learning: GSPO wide against GRPO, 16 mini-batches}.

clip**, there, GSPO changes by {offpolicy: without its clip: GSPO} and GRPO by {offpolicy: without
its clip: GRPO}; {above offpolicy: collapsed: GSPO no clip} runs of GSPO collapse and {above
offpolicy: collapsed: GRPO no clip} of GRPO. GSPO without a clip is {offpolicy: without a clip: GSPO
against GRPO} from GRPO without

four epochs change GRPO by {epochs: GRPO: μ = 4 minus μ = 1}, the paper's range by {epochs: GSPO: μ
= 4 minus μ = 1}, wide by {epochs: GSPO wide: μ = 4 minus μ = 1}.

batches of 128 responses, `collapse`): {mean collapse: GRPO collapses, MoE} of GRPO's runs collapse
and {mean collapse: GSPO collapses, MoE} of GSPO's; GSPO ends above GRPO, {collapse: GSPO prevents
it}; without a rule beforehand GSPO wide does so by {collapse: GSPO wide against GRPO}. Its two

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
experts flip, GSPO is {depth: GSPO against GRPO, 2.8e-4} from GRPO, replay {depth: GRPO replay
against GRPO, 2.8e-4}. At best

more games than one per response: GSPO wide {turns: GSPO wide: more games won at the end}, GRPO
{turns: GRPO: more games won at the end}, the paper's range {turns: GSPO: more games won at the
end}. With one per response wide is {turns: GSPO wide against GSPO, one advantage per response}
above

`learning`) both are undecided: wide {learning: wide against GRPO}, the paper's range {learning:
against GRPO} (GRPO broke

There wide is {offpolicy: the weight: wide against dropped by s} above the same drop rule with
GRPO's weights and {offpolicy: the same share: wide against narrow GRPO} above a GRPO so narrow that
it clips {percent offpolicy: clipped of Â ≠ 0, GRPO narrow} of the tokens with Â ≠ 0, wide {percent
offpolicy: clipped of Â ≠ 0, GSPO wide}; by Holm over the nine differences of `offpolicy` both have
p {holm offpolicy: the same share: wide against narrow GRPO}: undecided (ahead at {above offpolicy:
the weight: wide against dropped by s} and {above offpolicy: the same share: wide against narrow
GRPO} seeds). The narrow GRPO is {offpolicy: the same share: narrow GRPO against GRPO} above GRPO

clips the shortest third {short: at least 1.5 times as often} times as often

(`neighbours`, {seeds neighbours: GSPO: own} seeds): of the responses with Â ≠ 0 outside the paper's
range {percent neighbours: GSPO: own} had moved in their own advantage's direction before they were
used, {percent neighbours: GSPO: own_permuted} if advantages were permuted, a difference of
{neighbours: GSPO: own direction minus permuted}; {percent neighbours: GSPO: own_right} of the right
ones and {percent neighbours: GSPO: own_wrong} of the wrong, with wide {percent neighbours: GSPO
wide: own}: an early stop

`lags`, {seeds lags: lost by GRPO at staleness 8} seeds) GRPO loses {lags: lost by GRPO at staleness
8} against fresh ones, the paper's range {lags: lost by GSPO at staleness 8}, wide {lags: lost by
GSPO wide at staleness 8}, DPPO {lags: lost by DPPO at staleness 8} and MiniRL {lags: lost by MiniRL
at staleness 8}. Over both ages GRPO loses more than wide, by {lags: GRPO loses more than GSPO
wide}; whether more than the paper's range is undecided, {lags: GRPO loses more than GSPO}.

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

for windows of L tokens of {bf16 responses} responses

independent between tokens, about {bf16 arithmetic}/√L. A clip

with L as arithmetic does: {bf16 lost} at {bf16 longest} tokens, where log s truly moves by {bf16
true}. Weights

clip range is {quotient of epsilons} times as wide
""",
}
