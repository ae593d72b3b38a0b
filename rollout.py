"""Rollout: π_old samples G responses per query. (log π(y|x) of given responses under any policy: logprobs.py.)

One sampling loop serves the tiny MoE and every Hugging Face causal LM. Three ideas make it fast, and each can be skipped by a reader
who does not care about speed:

1. What is equal is computed once: the prompt for its G responses, what all prompts begin with (few-shot lines, a system prompt) for all
   of them, and responses of a group as long as they are equal so far. The prompt is the root of a tree, the responses are its branches.
2. Rows that have ended leave the batch while the others go on.
3. A token is drawn by inverting the cumulative distribution at one uniform number per row and position. The numbers may be given, so
   a rollout does not depend on how its rows are divided over micro-batches or machines.

Left out on purpose: top-p, top-k and repetition penalties. Sampling from anything but softmax(logits / temperature) would make the
log-probs of the loss belong to another distribution than the one that was sampled.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from transformers.generation import StopStringCriteria

from plumbing.caches import has_plain_cache, prompt_inputs, sampling_cache, static_cache
from plumbing.logprobs import response_logp                           # noqa: F401  also found here

MIN_PREFIX = 16                  # tokens that all prompts must begin with before a pass of their own pays


@dataclass
class Rollout:
    """Q prompts and their B = Q·G responses; the G rows of a prompt are adjacent."""
    prompt_ids: torch.Tensor     # [Q, P] one row per prompt, padded on the left (of what follows the common prefix)
    prompt_mask: torch.Tensor    # [Q, P] bool
    response_ids: torch.Tensor   # [B, T] right-padded
    mask: torch.Tensor           # [B, T] bool: loss tokens, the end-of-sequence token included
    sampler_logp: torch.Tensor   # [B, T] float32 log-probs recorded while sampling
    truncated: torch.Tensor      # [B] bool: ran into max_new_tokens
    texts: list                  # B strings, cut before a stop string
    group_size: int
    prefix: int = 0              # tokens that all prompts begin with, to be computed once; they stand left of the padding

    def prompts(self, index):
        """The groups of the prompts in `index` [q] (integers), as a rollout of their own."""
        rows = self.rows_of(index)
        return Rollout(self.prompt_ids[index], self.prompt_mask[index], self.response_ids[rows], self.mask[rows],
                       self.sampler_logp[rows], self.truncated[rows], [self.texts[i] for i in rows.tolist()], self.group_size, self.prefix)

    def to(self, device):
        return replace(self, **{name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)})

    def rows_of(self, index):
        """Row numbers [q·G] of the groups of the prompts in `index` [q]."""
        offsets = torch.arange(self.group_size, device=self.mask.device)               # [G]
        return (index[:, None].to(self.mask.device) * self.group_size + offsets).flatten()   # [q·G]

    def rows(self, start, stop):
        """Rows start:stop: whole groups, or part of one group."""
        G = self.group_size
        if (start % G or stop % G) and start // G != (stop - 1) // G:
            raise ValueError(f"rows {start}:{stop} cut through groups of {G}: take whole groups, or part of one")
        group, prompts = min(G, stop - start), slice(start // G, (stop - 1) // G + 1)
        return replace(self, prompt_ids=self.prompt_ids[prompts], prompt_mask=self.prompt_mask[prompts],
                       response_ids=self.response_ids[start:stop], mask=self.mask[start:stop], group_size=group,
                       sampler_logp=self.sampler_logp[start:stop], truncated=self.truncated[start:stop], texts=self.texts[start:stop])


# ---------------------------------------------------------------------------------------------------------------- sampling

def common_prefix(prompts):
    """How many tokens all prompts (lists of token ids) begin with, each keeping one of its own; 0 if too few to pay."""
    first, last = min(prompts), max(prompts)                 # as lists are ordered, the others lie between
    shared = next((i for i, (a, b) in enumerate(zip(first, last)) if a != b), len(first))
    shared = min(shared, min(map(len, prompts)) - 1)
    return shared if shared >= MIN_PREFIX and len(prompts) > 1 else 0


def left_pad(prompts, pad_id, device, prefix=0):
    """Lists of token ids -> (ids [Q, P], mask [Q, P] bool), padded on the left of what follows their common prefix."""
    width = max(len(p) for p in prompts)
    ids = [[*p[:prefix], *[pad_id] * (width - len(p)), *p[prefix:]] for p in prompts]
    mask = [[True] * prefix + [False] * (width - len(p)) + [True] * (len(p) - prefix) for p in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)           # [Q, P] each


def draw(logits, uniform):
    """One token per row at softmax(logits), by inverse CDF. logits [B, V] float32, uniform [B] in [0, 1) -> tokens [B]."""
    cdf = logits.softmax(-1).cumsum(-1)                                                  # [B, V]
    target = (uniform * cdf[:, -1])[:, None]                                             # [B, 1]  the sum is 1 only up to rounding
    return torch.searchsorted(cdf, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)   # [B]


def end_tokens(model, tokenizer):
    """Every token id that ends a response: the tokenizer's and the checkpoint's own."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    return sorted({*ids, tokenizer.eos_token_id} - {None})


def equal_so_far(row, token):
    """Responses that read the same row [b] and drew the same token [b] go on as one: (rows to go on [n], which of them each takes [b])."""
    kind, child = (row * 2 ** 32 + token).unique(return_inverse=True)                    # [n], [b]
    return kind // 2 ** 32, child


@torch.no_grad()
def sample(model, tokenizer, prompts, group_size, max_new_tokens, temperature=1.0, uniforms=None, stop=(), drop_every=None, compiled=None):
    """π_old samples G responses to each prompt.

    prompts: Q lists of token ids, or Q strings. temperature: > 0 samples softmax(logits / temperature); 0 is greedy.
    uniforms: [B, max_new_tokens] numbers in [0, 1) that decide the tokens (None: fresh ones). stop: strings that end a response, as the
    end-of-sequence token does; both are loss tokens. drop_every: look at the tokens every so many steps, to drop ended responses; if at
    every one, those of a group that are equal so far share a row of the model (None: every step on a CPU; every 16 on a GPU, where
    looking means waiting for it). compiled: the model's forward under torch.compile, for the token steps; it gets a static cache, and
    its rows stay, as every new shape would be compiled again. Returns a `Rollout`; on the model's device.
    """
    model.eval()
    if isinstance(prompts[0], str):
        prompts = [tokenizer(p)["input_ids"] for p in prompts]
    device, G, T = model.device, group_size, max_new_tokens
    B, pad = len(prompts) * G, tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    prefix = common_prefix(prompts) if has_plain_cache(model.config) else 0              # a sliding window would count the padding behind it
    prompt_ids, prompt_mask = left_pad(prompts, pad, device, prefix)                     # [Q, P]
    uniforms = torch.rand(B, T, device=device) if uniforms is None else uniforms.to(device)   # [B, T]
    ends = torch.tensor(end_tokens(model, tokenizer), device=device)
    stops = StopStringCriteria(tokenizer, list(stop)) if stop else None
    drop_every = drop_every or (16 if device.type == "cuda" or compiled else 1)

    response = torch.full((B, T), pad, device=device)                                    # [B, T]
    logp = torch.zeros(B, T, device=device)                                              # [B, T]
    lengths = torch.full((B,), T, device=device)                                         # [B]
    truncated = torch.ones(B, dtype=torch.bool, device=device)                           # [B]
    live, ended = torch.arange(B, device=device), torch.zeros(B, dtype=torch.bool, device=device)   # [b] responses still looked at

    cache = sampling_cache(model)
    padded = not bool(prompt_mask.all())
    logits = model(**prompt_inputs(model, prompt_ids, prompt_mask, prefix, cache), logits_to_keep=1).logits[:, -1]   # [Q, V]
    tree = drop_every == 1 and not compiled                  # responses that are equal so far share a row of the model:
    copies = 1 if tree else G                                # one per prompt, until they part
    position = prompt_mask.sum(-1).repeat_interleave(copies)                             # [n] position of the next token
    attention = prompt_mask.repeat_interleave(copies, 0).long() if padded else None      # [n, P]
    row = live // (G // copies)                                                          # [b] the model's row that each reads
    if compiled:
        cache = static_cache(cache, model.config, G, prompt_ids.shape[1] + T)
        attention = F.pad(attention, (0, T), value=1) if padded else None                # [n, P+T]  causality hides what is not there yet
    elif copies > 1:
        cache.batch_repeat_interleave(copies)
    logits = logits.repeat_interleave(copies, 0)                                         # [n, V]
    step = compiled or torch.inference_mode()(model.__call__)                            # 7 % faster than under no_grad

    for t in range(T):
        logits = (logits.float() if temperature in (0, 1) else logits.float() / temperature)[row]   # [b, V]
        token = draw(logits, uniforms[live, t]) if temperature else logits.argmax(-1)    # [b]
        response[live, t] = torch.where(ended, pad, token)
        logp[live, t] = (logits.gather(-1, token[:, None]).squeeze(-1) - logits.logsumexp(-1)).masked_fill(ended, 0.0)
        now = torch.isin(token, ends)                                                    # [b]
        if stops is not None:
            now |= stops(response[live, :t + 1], None)
        now &= ~ended
        lengths[live] = torch.where(now, t + 1, lengths[live])
        truncated[live] &= ~now
        ended |= now
        if t + 1 == T:
            break
        if (t + 1) % drop_every == 0:
            keep = (~ended).nonzero().squeeze(-1)                                        # [b]
            if len(keep) == 0:
                break
            live, row, token, ended = live[keep], row[keep], token[keep], ended[keep]    # [b]
            if not compiled:
                if tree:
                    parent, child = equal_so_far(row, token)                             # [n], [b]
                    tree = 2 * len(parent) <= len(live)                                  # most differ by now: from here on
                if not tree:                                                             # each has a row of its own
                    parent, child = row, torch.arange(len(live), device=device)          # [b] each
                if len(parent) > len(parent.unique()) or len(parent) <= 0.9 * len(position):   # copying the cache for a few does not pay
                    cache.batch_select_indices(parent)
                    row, position, attention = child, position[parent], attention[parent] if padded else None
        if padded and not compiled:
            attention = F.pad(attention, (0, 1), value=1)                                # [n, P+t+1]
        tokens = torch.full_like(position, pad).scatter(0, row, token)                   # [n]
        logits = step(input_ids=tokens[:, None], attention_mask=attention, position_ids=position[:, None],
                      past_key_values=cache, use_cache=True).logits[:, -1]               # [n, V]
        position = position + 1

    width = int(lengths.max())
    mask = torch.arange(width, device=device) < lengths[:, None]                         # [B, T]
    response, logp = response[:, :width], logp[:, :width]
    texts = tokenizer.batch_decode([ids[m].tolist() for ids, m in zip(response, mask)], skip_special_tokens=True)
    for string in stop:
        texts = [text.split(string)[0] for text in texts]
    return Rollout(prompt_ids, prompt_mask, response, mask, logp, truncated, texts, G, prefix)


# ------------------------------------------------------------------------------------------------------------------ batches

def concat(rollouts):
    """Join rollouts of the same group size; narrower ones are padded."""
    device, T = rollouts[0].mask.device, max(r.mask.shape[1] for r in rollouts)
    prompts = [ids[mask].tolist() for r in rollouts for ids, mask in zip(r.prompt_ids, r.prompt_mask)]
    prefix = common_prefix(prompts) if all(r.prefix for r in rollouts) else 0
    right = lambda name: torch.cat([F.pad(getattr(r, name), (0, T - r.mask.shape[1])) for r in rollouts])         # [B, T]
    return Rollout(*left_pad(prompts, 0, device, prefix), right("response_ids"), right("mask"), right("sampler_logp"),
                   torch.cat([r.truncated for r in rollouts]), [t for r in rollouts for t in r.texts], rollouts[0].group_size, prefix)


if __name__ == "__main__":
    from plumbing.tasks import builtin_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    tokenizer = builtin_tokenizer()
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=17, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                                         head_dim=16, intermediate_size=128, eos_token_id=tokenizer.eos_token_id))
    torch.nn.init.normal_(model.lm_head.weight, std=1.0)     # random weights, but sure of themselves
    rows = []
    model.register_forward_pre_hook(lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True)
    rollout = sample(model, tokenizer, ["3+8+5=", "9+9+1+4="], group_size=6, max_new_tokens=16)
    print("a policy with random weights answers two queries six times each; every row ends at its own <eos> or is cut off\n")
    for i, text in enumerate(rollout.texts):
        length, total = int(rollout.mask[i].sum()), rollout.sampler_logp[i].sum()
        print(f"  query {i // 6}   |y| {length:2}   log π(y|x) {total:7.2f}   {'cut off' if rollout.truncated[i] else 'ended  '}   {text!r}")
    print(f"\nrows the model computed, token by token: {' '.join(map(str, rows))}\n"
          "(the prompts once; then a row for all responses that are equal so far, until most of them differ; ended ones leave)")
