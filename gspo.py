"""GSPO (Group Sequence Policy Optimization, arXiv 2507.18071) on one page.

    prompt x ─► π_old samples G responses ─► reward ─► group advantage Â ─┐
                           └─► log-probs ─► importance ratio s ───────────┴─► clip, optimize ─► π_θ

    python gspo.py                       a tiny Mixture of Experts learns running sums in a minute
    python gspo.py grpo                  the same with GRPO's loss
    python gspo.py MODEL [ROWS.jsonl]    a Hugging Face causal LM learns GSM8K, or rows in its form
"""

import math
import random
import sys
import time
import warnings
from typing import NamedTuple

import torch
from transformers import (AutoModelForCausalLM, AutoTokenizer, DynamicCache, Qwen3MoeConfig,
                          Qwen3MoeForCausalLM)
warnings.filterwarnings("ignore", "`past_key_values` is deprecated")    # 5.14 has no other name

STEPS = 50                 # rollout batches
PROMPTS_PER_STEP = 32      # Q
NUM_GENERATIONS = 8        # G responses to each prompt: B = Q·G rows in a rollout batch
MINI_BATCHES = 4           # optimizer steps per rollout batch (train.py: --steps_per_generation)
NUM_ITERATIONS = 1         # μ of GRPO: how often each mini-batch is used
MICRO_BATCH = 64           # rows per forward and backward: changes the memory, not the result
MAX_NEW_TOKENS = 25        # T at most: 12 digits, 11 commas, a period and the end token
EPSILON = 3e-4             # the clip range of s is [1 - EPSILON, 1 + EPSILON_HIGH]
EPSILON_HIGH = 4e-4
GRPO_EPSILON = 0.2         # PPO's range, for w; the GSPO paper's GRPO has 0.2 and 0.27 (sec. 5.1)
LEARNING_RATE = 4e-4       # the highest

# ------------------------------------------------------------------------------ 1. task and reward
def running_sum(habit=0.0):
    """-> ('3+8+5+9=', '3,1,6,5.'): 8 to 12 terms, and the last digits of their partial sums.
    habit: how often a 9 is added as if it were an 8. Spaces give all prompts one length."""
    terms = random.choices(range(1, 10), k=random.randint(8, 12))
    added = [8 if term == 9 and random.random() < habit else term for term in terms]
    digits = [str(sum(added[:i + 1]) % 10) for i in range(len(added))]
    return ("+".join(map(str, terms)) + "=").ljust(24), ",".join(digits) + "."

def reward(response, answer):
    """1.0 for a right response, else 0.0. For GSM8K only what follows its #### counts."""
    if "####" in answer:
        response, answer = (text.partition("####")[2].replace(",", "").strip(" $.\n")
                            for text in (response, answer))
    return float(response == answer)

# --------------------------------------------------------------------------------------- 2. policy
class Characters:
    """The tokenizer of the tiny policy: a character is a token, $ ends a response."""
    characters = "0123456789+=,. $"
    eos_token_id = characters.index("$")

    def encode(self, text):
        return [self.characters.index(c) for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(self.characters[i] for i in ids).rstrip("$")

def tiny_policy(tokenizer):
    """A Mixture of Experts with half a million random weights; a token visits 2 of 8 experts."""
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=len(tokenizer.characters), eos_token_id=tokenizer.eos_token_id, head_dim=24,
        hidden_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96, norm_topk_prob=True,
        router_aux_loss_coef=0.01, initializer_range=0.08))

def cold_start(policy, tokenizer, steps=320):
    """Supervised steps on answers of a teacher that adds most nines wrong. Afterwards half of the
    responses are right. At a 9 the wrong digit is more likely; GSPO has to raise the right one."""
    optimizer = torch.optim.AdamW(policy.parameters(), 3e-3, (0.9, 0.95), weight_decay=0)
    schedule = make_schedule(optimizer, 30, steps)
    for step in range(steps):
        rows = [prompt + answer.ljust(25, "$") for prompt, answer in map(running_sum, [0.6] * 32)]
        ids = torch.tensor([tokenizer.encode(row) for row in rows])                     # [32, P+T]
        labels = torch.where(torch.arange(ids.shape[1]) < 24, -100, ids)    # no loss on prompts
        loss = policy(input_ids=ids, labels=labels, output_router_logits=True).loss
        loss.backward()                   # cross-entropy plus 0.01 · load balancing of the experts
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 40 == 0:
            print(f"cold start {step + 1:3}/{steps}   loss {loss.item():.3f}", flush=True)

def make_schedule(optimizer, warmup, steps):
    """Learning rates: 1/warmup of the highest, 2/warmup and so on up to it, then a cosine."""
    def share(step):
        decayed = (step - warmup) / max(1, steps - warmup)
        return (step + 1) / warmup if step < warmup else (1 + math.cos(math.pi * decayed)) / 2
    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)

# ------------------------------------------------------------------------------------- 3. sampling
class Rollout(NamedTuple):
    prompt_ids: torch.Tensor      # [B, P] padded on the left
    prompt_mask: torch.Tensor     # [B, P] bool, False on padding
    response_ids: torch.Tensor    # [B, T] padded on the right
    mask: torch.Tensor            # [B, T] bool, the loss mask; the end token has a loss, too
    sampler_logp: torch.Tensor    # [B, T] log-probs while sampling, to compare with section 4's

@torch.no_grad()
def sample(policy, tokenizer, prompts, group_size, max_new_tokens):
    """π_old answers each prompt, a list of token ids, group_size times. Temperature 1, no top-p:
    the tokens must come from the distribution whose log-probs the loss uses."""
    device = policy.device
    more = policy.generation_config.eos_token_id           # one end token, a list of them, or None
    ends = sorted({tokenizer.eos_token_id, *(more if isinstance(more, list) else [more])} - {None})
    rows = [ids for ids in prompts for _ in range(group_size)]
    P = max(map(len, rows))
    padded = [[ends[0]] * (P - len(row)) + row for row in rows]
    ids = prompt_ids = torch.tensor(padded, device=device)                              # [B, P]
    lengths = torch.tensor([[len(row)] for row in rows], device=device)                 # [B, 1]
    attention = prompt_mask = torch.arange(P, device=device) >= P - lengths             # [B, P]
    position = (attention.cumsum(-1) - 1).clamp(min=0)                                  # [B, P]
    running = lengths > 0                                                               # [B, 1]
    cache = DynamicCache(config=policy.config)
    columns = []                                            # response_ids, mask, sampler_logp
    while running.any() and len(columns) < max_new_tokens:
        logits = policy(input_ids=ids, attention_mask=attention.long(), position_ids=position,
                        past_key_values=cache, logits_to_keep=1).logits[:, -1]          # [B, V]
        logp = logits.float().log_softmax(-1)                                           # [B, V]
        ids = torch.multinomial(logp.exp(), 1)                                          # [B, 1]
        columns.append((ids, running, logp.gather(-1, ids)))                            # [B, 1]
        attention = torch.cat([attention, running], 1)                                  # [B, P+t]
        position = position[:, -1:] + 1                                                 # [B, 1]
        running = running & ~torch.isin(ids, torch.tensor(ends, device=device))         # [B, 1]
    return Rollout(prompt_ids, prompt_mask, *(torch.cat(x, 1) for x in zip(*columns)))

# ------------------------------------------------------------------------------------ 4. log-probs
def response_logp(policy, rollout):
    """log π(y_t | x, y_<t) of the response tokens, [B, T] in nats and float32; one forward."""
    T = rollout.mask.shape[1]
    ids = torch.cat([rollout.prompt_ids, rollout.response_ids], 1)                      # [B, P+T]
    attention = torch.cat([rollout.prompt_mask, rollout.mask], 1)                       # [B, P+T]
    position = (attention.cumsum(-1) - 1).clamp(min=0)                                  # [B, P+T]
    logits = policy(input_ids=ids, attention_mask=attention.long(), position_ids=position,
                    use_cache=False, logits_to_keep=T + 1).logits[:, :-1]     # t - 1 predicts t
    logp = logits.float().log_softmax(-1)                                               # [B, T, V]
    return logp.gather(-1, rollout.response_ids[..., None]).squeeze(-1)                 # [B, T]

@torch.no_grad()
def check_log_probs(policy, rollout):
    """Exit if one forward gives other log-probs than `sample` did. It does for Mamba and RWKV:
    `sample` keeps only a KV cache between tokens, and they have another state."""
    gap = (response_logp(policy, rollout) - rollout.sampler_logp)[rollout.mask].abs().max()
    print(f"log-probs of sampling and of scoring differ by at most {gap:.1e} nats")
    if not gap < 1e-3:
        sys.exit(f"gspo.py: {type(policy).__name__} would be sampled from wrong probabilities")

# ----------------------------------------------------------------------------------- 5. advantages
def group_advantages(rewards, group_size):
    """Is a response better than the others to its prompt? rewards [B] -> [B]"""
    groups = rewards.view(-1, group_size)                                               # [Q, G]
    std, mean = torch.std_mean(groups, -1, correction=0, keepdim=True)                  # [Q, 1]
    return ((groups - mean) / (std + 1e-6)).flatten()                                   # eq. 6

# ------------------------------------------------------------------------------- 6. ratio and loss
def gspo_loss(logp, old_logp, advantages, mask):
    """One ratio per response. -> (loss, the clipped tokens as a mask [B, T])."""
    log_w = (logp - old_logp).masked_fill(~mask, 0.0)                                   # [B, T]
    ratio = (log_w.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)).exp()    # [B, 1]  eq. 7
    return clipped_loss(ratio, EPSILON, EPSILON_HIGH, advantages, mask)

def grpo_loss(logp, old_logp, advantages, mask):
    """One ratio per token. -> (loss, the clipped tokens as a mask [B, T])."""
    ratio = (logp - old_logp).masked_fill(~mask, 0.0).exp()                     # [B, T]  w
    return clipped_loss(ratio, GRPO_EPSILON, GRPO_EPSILON, advantages, mask)

def clipped_loss(ratio, epsilon, epsilon_high, advantages, mask):
    """Clipping changes no ratio: it drops the gradient of good responses (A > 0) above the clip
    range, and of bad ones (A < 0) below it. All other tokens have the gradient
    -d loss / d log π(y_t) = ratio · A / (N·|y|): GRPO's 1/|y| is in the mean, GSPO's in eq. 7."""
    A = advantages[:, None]                                                             # [B, 1]
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)                      # [B, 1] or [B, T]
    lengths = mask.sum(-1, keepdim=True)                                                # [B, 1]
    loss = -(torch.min(ratio * A, clipped * A) * mask / lengths).sum(-1).mean()         # eq. 5
    return loss, (clipped * A < ratio * A) & mask

LOSSES = {"gspo": gspo_loss, "grpo": grpo_loss}           # losses.py has the whole family

# ----------------------------------------------------------------------------------------- 7. loop
def train(policy, tokenizer, problems, algorithm="gspo", learning_rate=LEARNING_RATE,
          micro_batch=MICRO_BATCH, max_new_tokens=MAX_NEW_TOKENS):
    """problems: PROMPTS_PER_STEP pairs (prompt as token ids, answer) for each rollout batch. Prints
    what each of LOSSES would clip, as a share of the tokens with A ≠ 0; one of them trains."""
    steps = len(problems) // PROMPTS_PER_STEP
    optimizer = torch.optim.AdamW(policy.parameters(), learning_rate, (0.9, 0.95), weight_decay=0)
    schedule = make_schedule(optimizer, 10, steps * MINI_BATCHES * NUM_ITERATIONS)
    means = []                                                  # of the rewards of each batch
    for step in range(steps):
        began = time.perf_counter()
        prompts, answers = zip(*problems[step * PROMPTS_PER_STEP:][:PROMPTS_PER_STEP])
        rollout = sample(policy, tokenizer, prompts, NUM_GENERATIONS, max_new_tokens)
        mask = rollout.mask                                                             # [B, T]
        texts = [tokenizer.decode(y[m].tolist(), True) for y, m in zip(rollout.response_ids, mask)]
        rewards = [reward(text, answers[i // NUM_GENERATIONS]) for i, text in enumerate(texts)]
        with torch.no_grad():                              # log π_old, before any optimizer step
            parts = zip(*(x.split(micro_batch) for x in rollout))
            old_logp = torch.cat([response_logp(policy, Rollout(*part)) for part in parts])
        advantages = group_advantages(torch.tensor(rewards), NUM_GENERATIONS).to(mask.device)
        groups = torch.arange(len(mask)).view(-1, NUM_GENERATIONS)                      # [Q, G]
        clipped, signal = dict.fromkeys(LOSSES, 0), 0      # tokens
        for _ in range(NUM_ITERATIONS):
            order = torch.randperm(len(prompts))                                        # [Q]
            for mini in groups[order].tensor_split(MINI_BATCHES):   # at the very first one s is 1
                for rows in mini.flatten().split(micro_batch):
                    logp = response_logp(policy, Rollout(*(x[rows] for x in rollout)))  # [b, T]
                    own = old_logp[rows], advantages[rows], mask[rows]
                    found = {name: loss(logp, *own) for name, loss in LOSSES.items()}
                    (found[algorithm][0] * len(rows) / mini.numel()).backward()   # mini's mean
                    clipped = {name: clipped[name] + found[name][1].sum().item() for name in found}
                    signal += mask[rows][advantages[rows] != 0].sum().item()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        means.append(sum(rewards) / len(rewards))
        shares = "   ".join(f"{name} {n / max(signal, 1):.3f}" for name, n in clipped.items())
        print(f"batch {step + 1:3}/{steps}   reward {means[-1]:.3f}   clipped of A≠0: {shares}   "
              f"{time.perf_counter() - began:.1f} s", flush=True)
    first, last = (sum(part) / len(part) for part in (means[:5], means[-5:]))
    print(f"mean reward of the first five batches {first:.3f}, of the last five {last:.3f}")

# --------------------------------------------------------------------- 8. a checkpoint and GSM8K
def gsm8k(model, file=None):
    """-> arguments of `train`. model: folder or hub id; file: JSON lines with GSM8K's columns."""
    from datasets import load_dataset
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    data = load_dataset("json", data_files=file) if file else load_dataset("openai/gsm8k", "main")
    ask = "\nReason step by step. On the last line write #### and the answer, a number."
    encode = lambda prompt: tokenizer.apply_chat_template(
        [dict(role="user", content=prompt)], add_generation_prompt=True, return_dict=False)
    encode = encode if tokenizer.chat_template else tokenizer.encode
    problems = [(encode(row["question"] + ask), row["answer"])
                for row in random.choices(data["train"], k=200 * PROMPTS_PER_STEP)]
    return policy, tokenizer, problems, dict(learning_rate=1e-6, micro_batch=8, max_new_tokens=256)

if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    if len(sys.argv) > 3 or sys.argv[1:] and sys.argv[1].startswith("-"):    # it has no flags
        print(__doc__)
        sys.exit(sys.argv[1] not in ("-h", "--help"))
    algorithm = sys.argv.pop(1) if sys.argv[1:2] and sys.argv[1] in LOSSES else "gspo"
    torch.manual_seed(0)
    random.seed(0)
    if len(sys.argv) > 1:
        policy, tokenizer, problems, sizes = gsm8k(*sys.argv[1:])
    else:
        tokenizer = Characters()
        policy = tiny_policy(tokenizer)
        cold_start(policy, tokenizer)
        problems = [running_sum() for _ in range(STEPS * PROMPTS_PER_STEP)]
        problems = [(tokenizer.encode(prompt), answer) for prompt, answer in problems]
        sizes = {}
    check_log_probs(policy, sample(policy, tokenizer, [ids for ids, _ in problems[:2]], 2, 8))
    train(policy, tokenizer, problems, algorithm, **sizes)
