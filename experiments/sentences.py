"""The measured figures in the sentences of the pages, which experiments/fill.py writes.

A paragraph below is a few words of a sentence as they stand on the page, once, with {NAME} where a
figure stands; fill.py explains the names. Line breaks do not matter. After a change of such a
sentence, change its paragraph.
"""

SENTENCES = {
"docs/corrections.md": """
still move s. Here {mean bounded: s leaves the band in less than 1 % of answers} of the responses

the two agree to {mean identity: in float32} in float32 and {mean identity: in float64} in
float64. The

0.2 / 3e-4 = {bands}: the *bands* differ

off its figure. Here: {mean clipped: GSPO's share} against {mean clipped: GRPO's share}. It also
matters
""",
"docs/evidence.md": """
the highest mean of {members} members: {league_edge: dapo_paper is ahead of grpo} above GRPO
([with its published clip range](#the-league)), {league: the first against GSPO} above GSPO ×100,
from {samples of the first} times their samples. {members near the first} others are not

none is shown ahead ({learning: ×100 against GRPO}); over six step sizes ×100 is ({steps: GSPO
×100, mean}). 2. **How wide a band for GSPO?** ×100: {mean learning: ×100 against the paper's
band} against the paper's,

it is ahead by {counting: GSPO ×100 is ahead of GSPO} in reward (undecided);

**Which learning rate?** About {chosen learning: GRPO, mb4} for 4 layers, with GRPO as with GSPO;
{chosen deep_edge: GRPO} for 48. 4.

is ahead of GRPO ({steps: GSPO ×100 at 0.0008 × 16}); the paper's band

or 4, equal samples)? {uses}. 6. **What stabilizes

without one it loses {mean learning: no clip, large steps} at large steps

shown at 48 layers ({depth: GSPO against GRPO, 2.8e-4}; replay {depth: GRPO replay against GRPO,
2.8e-4}). At 4 layers

GSPO ends above GRPO ({collapse: GSPO prevents it}); replay is undecided.

GSPO ×100, which loses {mean dose: ×100 loses less than 0.05 at int4}. Otherwise recompute them,

batches costs GSPO ×100 {mean lags: lost by GSPO ×100 at lag 8}, GRPO {mean lags: lost by GRPO at
lag 8}. 10. **Does a

no loss was seen ({mean sixteen: the paper's band loses in bfloat16}, undecided), nor with

The paper's band clips {mean counting: the clip of GSPO acts} of the tokens, ×100 {mean counting:
the clip of GSPO ×100 acts}, GRPO {mean counting: the clip of GRPO acts}; the quotient times L is
{counting: 1/L shrinks the spread of log s}.

the rules, replay adds {learning: replay against none} to GRPO, and ×10 is {mean learning: ×10
against the paper's band} ahead of the

starts: there `dapo_paper` is {league: the first against GRPO} ahead. `league_edge` gives

more; its best stays {chosen league_edge: rloo}:

on four starts is {chosen ppo: PPO, w}, so the last

16 mini-batches at 6e-4: {mean collapse: GRPO collapses, MoE} of GRPO's runs collapse, {mean
collapse: GSPO collapses, MoE} of GSPO's; at

ends below its start ({mean depth: before}; GRPO {mean depth: GRPO}) and {mean depth: flips} of
the experts

tiny model flips are {flips: at least half of Var[log w]} of Var[log w].

other starts (GSPO's best, {chosen deep_edge: GSPO}, is the largest

`--beta 0.05` GRPO gains {mean shown: KL in the loss gains} with the KL in the loss, {mean shown:
KL in the reward gains} with `--use_kl_in_reward`, and {mean shown: GRPO gains} without a KL.
`--reduction token-mean` gains {mean shown: token-mean gains}, with `--zero_variance_filter` {mean
shown: equal groups left out gains} (3 starts each).
""",
"docs/family.md": """
minus the verifier's is {distilled: the teacher alone}, both minus the verifier {distilled:
teacher and verifier}.

model cannot: SDPO gains {added: SDPO gains}; SmolLM2 can: 0.50
""",
"docs/speed.md": """
rate of matrix products, {speed_limit}.

default run then takes {plain} ({plain_range}) times the processor

by more than 0.02: {algorithms}.

SmolLM2's 4-shot `max` to {mean smollm2: LoRA after} pass@1, in 1,418

log s truly moves {bf16_true} / {bf16_true_16} (root mean squares,

its log-probs stay within {vllm_apart} nats of the policy's while updates move them by
{vllm_moved}; an update that

against the built-in sampler: {vllm_speed}.

ratio per token is {bands} times as wide
""",
}
