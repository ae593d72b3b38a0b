"""The measured figures in the sentences of the pages, which experiments/fill.py writes.

A paragraph below is a few words of a sentence as they stand on the page, once, with {NAME} where a
figure stands; fill.py explains the names. Line breaks do not matter. After a change of such a
sentence, change its paragraph.
"""

SENTENCES = {
"README.md": """
CPU core in {first train} s (train.py) and {first gspo} s (gspo.py) of processor time; half

To the held-out prompt {first prompt} the policy answers {first before} before training and {first
after} after it; pass@1, the share of right responses, goes from {mean default: before} to
**{default: after}** (3 seeds).

wide is level, {steps: GSPO wide at 0.0004 × 4}; the paper's range is below, {steps: GSPO at 0.0004
× 4}. SmolLM2: wide {counting: GSPO wide is ahead of GRPO}; in a game {turns: GSPO wide
against GRPO, one advantage per response}.

in later batches wide {offpolicy: wide against GRPO}, the paper's range {offpolicy: the paper's
range against GRPO} ({seeds offpolicy: replay against none} seeds

at an equal rate they change GRPO by {epochs: GRPO: μ = 4 minus μ = 1} ({seeds epochs: GRPO: μ = 4
minus μ = 1} seeds

samples 8 batches old {lags: wide against GRPO at staleness 8}, an int3 sampler {dose: wide against
GRPO, int3 trusted}.

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
float64. The paper's

batch log ∏w has a standard deviation of {lesson std product}, log w one of {lesson std w}.

Here the median distance of w from 1 is {lesson median w}; with

0.2 / 3e-4 = {quotient of epsilons}: the *clip ranges* differ

errs more than w_t in {s worse with a baseline} of the draws and less in the others; without it more
in {s worse without}. Neither

clips the shortest third of ours {short: at least 1.5 times as often} times as often

off its figure. Here: {mean clipped: GSPO's share} against {mean clipped: GRPO's share}. Shares

clips {mean learning: GSPO clips} at the paper's range, {mean learning: GSPO ×10 clips} at ten times
and {mean learning: GSPO wide clips} at a hundred times that range; GRPO clips {mean learning: GRPO
clips}. And

Without its clip GSPO loses {mean learning: no clip, large steps} at large steps (4

GRPO's gradients are noise.* {percent neighbours: GSPO: own} of what leaves

In `collapse` {mean collapse: GSPO collapses, MoE} of its runs
""",
"docs/evidence.md": """
paper's range, by {turn_number: GSPO: the gain at 12 turns is larger than at 2};
undecided for GSPO wide.

(`ended`, {seeds ended: leave-one-out against turn_returns} seeds, best rates {chosen ended:
leave-one-out} and {chosen ended: turn_returns}) `turn_leave_one_out` ends {ended: leave-one-out
against turn_returns} from `turn_returns`, over the last 15 batches {ended: leave-one-out against
turn_returns, last half of the batches} (undecided; {seen ended: leave-one-out against turn_returns}
would be seen); `turn_returns` without the std {ended: not divided against turn_returns} (recorded)

median |log s| is {clipped_who: GSPO: |log s| is larger} times as large with GSPO, {clipped_who:
GSPO wide: |log s| is larger} with GSPO wide; their tokens are clipped {clipped_who: GRPO: clipped
more often} times as often with GRPO, {clipped_who: GSPO: clipped more often} with GSPO.

per response: GSPO wide {turns: GSPO wide: more games won at the end}, GRPO {turns: GRPO: more games
won at the end}, GSPO with the paper's range {turns: GSPO: more games won at the end}. The range

clip range, by {length: LUSPO ends longer than GSPO with its range} tokens, but at another
rate

16 mini-batches, {seeds offpolicy: replay against none} seeds). Against GRPO: wide {offpolicy: wide
against GRPO}, the paper's range {offpolicy: the paper's range against GRPO}, GRPO's weights with
whole responses dropped by s {offpolicy: dropped by s against GRPO}, replay {offpolicy: replay
against none} (undecided); in held-out pass@1 at the end wide {offpolicy: wide against GRPO, pass@1
at the end}, the paper's range {offpolicy: the paper's range against GRPO, pass@1 at the end}. At
usual steps the lead changes by {offpolicy: GSPO wide less ahead of
GRPO at usual steps} (wide) and {offpolicy: GSPO less ahead of GRPO at usual steps} (the paper's;
{seeds offpolicy: GSPO less ahead of GRPO at usual steps} seeds

agree: wide is {offpolicy: the weight: wide against dropped by s} above the same drop rule with
GRPO's weights, {offpolicy: the same share: wide against narrow GRPO} above GRPO with a clip so
narrow that it clips {percent offpolicy: clipped of Â ≠ 0, GRPO narrow} of the tokens with Â ≠ 0
(wide: {percent offpolicy: clipped of Â ≠ 0, GSPO wide}). But by Holm over the nine differences of
`offpolicy` both have p {holm offpolicy: the same share: wide against narrow GRPO} (wide against
GRPO: {holm offpolicy: wide against GRPO}), in pass@1 at the end the second is {offpolicy: the same
share: wide against narrow GRPO, pass@1 at the end}, and without a clip GSPO is below GRPO,
{offpolicy: without a clip: GSPO against GRPO}: s

(`epochs`, undecided), GRPO changes by {epochs: GRPO: μ = 4 minus μ = 1}, GSPO by {epochs: GSPO: μ
= 4 minus μ = 1}, wide by {epochs: GSPO wide: μ = 4 minus μ = 1}; the mean pass rate of the last
half of the batches by {epochs: GRPO: μ = 4 minus μ = 1, last half of the batches}, {epochs: GSPO: μ
= 4 minus μ = 1, last half of the batches} and {epochs: GSPO wide: μ = 4 minus μ = 1, last half of
the batches}.

the paper's range {percent neighbours: GSPO: own} had moved in their own advantage's direction
before they were used, {percent neighbours: GSPO: own_permuted} if advantages were permuted
(`neighbours`, {seeds neighbours: GSPO: own} seeds: {neighbours: GSPO: own direction minus
permuted}); {percent neighbours: GSPO: own_right} of the right ones and {percent neighbours: GSPO:
own_wrong} of the wrong, with wide {percent neighbours: GSPO wide: own}. Our

64 prompts × 4 responses end {group: 64 × 4 against 8 × 32} from

rate (`learning`: {learning: wide against GRPO}) undecided. The

undecided, {learning: against GRPO}, because GRPO itself broke

is no worse than 1: GRPO {reuse: GRPO gains from μ = 4, equal samples}, GSPO
{reuse: GSPO gains from μ = 4, equal samples}, wide
{reuse: GSPO wide gains from μ = 4, equal samples}.

mixed lengths {short: at least 1.5 times as often} times as often

(`fair_range`, {seeds fair_range: ε / √L against one range} seeds) ε/√L ends {fair_range: ε / √L
against one range} from one ε, ε/L {fair_range: ε / L against one range}; the longest third gains
{fair_range: ε / √L against one range, longest minus shortest third} more than

at 6e-4): {mean collapse: GRPO collapses, MoE} of GRPO's runs collapse, {mean collapse: GSPO
collapses, MoE} of GSPO's; GSPO ends above GRPO, {collapse: GSPO prevents it}, GSPO wide {collapse:
GSPO wide against GRPO} (recorded)

wide is {turns: GSPO wide against GSPO, one advantage per response} above the paper's

Of the {readme} differences that README quotes {readme kept} are not 0 by

GSPO wide ends {learning: wide against the paper's clip range} above the paper's range. Without its
clip GSPO changes by {mean learning: no clip, large steps} at large steps (4 seeds

`dapo_paper` is {league_edge: dapo_paper is ahead of grpo} ahead; there

flip: GSPO is {depth: GSPO against GRPO, 2.8e-4} from GRPO, replay {depth: GRPO replay against GRPO,
2.8e-4} (4

float32 − bfloat16 {sixteen: the paper's clip range loses in bfloat16}, undecided)

(`dapo_equal`, {seeds dapo_equal: dapo_paper against GRPO} seeds) it ends {dapo_equal: dapo_paper
against GRPO} from GRPO.

before training ({mean depth: before}; GRPO {mean depth: GRPO}) and {mean depth: flips} of the
experts
""",
"docs/family.md": """
teacher minus reward {distilled: the teacher alone}, both minus reward {distilled: teacher and
verifier}.

model cannot: SDPO changes its pass@1 by {added: SDPO gains} (3 seeds). SmolLM2 can: 0.50
""",
"docs/speed.md": """
It is {gpu-share} times what

the default run raised pass@1 from {gpu-learns}. Not tried

rate of matrix products, {speed_limit}.

in four turns of 16 tokens takes {several turns} times as long as

default run then takes {plain} ({plain_range}) times the processor

by more than 0.05: {algorithms}.

for windows of L tokens of {bf16 responses} responses

independent between tokens, about {bf16 arithmetic}/√L. A clip

with L as arithmetic does: {bf16 lost} at {bf16 longest} tokens, where log s truly moves by {bf16
true}. Weights

clip range is {quotient of epsilons} times as wide
""",
}
