"""Rollout: π_old samples G responses per query; log π(y|x) of given responses under any policy.

One sampling loop and one log-prob function serve the tiny MoE and every Hugging Face causal LM. Four ideas make them fast, and each
can be skipped by a reader who does not care about speed:

1. The prompt is computed once and its keys and values are shared by its G responses, while sampling and in the log-prob pass
   (there with gradients); what all prompts begin with, few-shot lines or a system prompt, is computed once for all of them. Where
   all is short, prompts and responses are packed into one row. `share_prompt=False` is the plain path, one row per response; the
   results are equal.
2. Only the positions that predict a loss token go through the LM head, in chunks, so that no [B, T, V] tensor exists.
3. Rows that have ended leave the batch while the others go on.
4. A token is drawn by inverting the cumulative distribution at one uniform number per row and position. The numbers may be given, so
   a rollout does not depend on how its rows are divided over micro-batches or machines.

Left out on purpose: top-p, top-k and repetition penalties. Sampling from anything but softmax(logits / temperature) would make the
log-probs of the loss belong to another distribution than the one that was sampled.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.generation import StopStringCriteria

from caches import has_plain_cache, sampling_cache, static_cache

MAX_LOGITS = 2 ** 24             # how many logits may exist at once: 64 MB in float32
MIN_PREFIX = 16                  # tokens that all prompts must begin with before a pass of their own pays
MAX_PACKED = 256                 # tokens in a packed row: it pays for attention between responses that must not see each other


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


class Scores(NamedTuple):
    logp: torch.Tensor           # [B, T] float32 log π(y_t | x, y_<t) in nats, 0 outside the mask
    entropy: torch.Tensor        # [B, T] float32 entropy of the next-token distribution in nats, 0 outside the mask; None if not asked for
    hidden: torch.Tensor         # [B, T, D] last hidden state that predicts token t (PPO's critic reads it)


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


def prompt_inputs(model, ids, mask, prefix, cache):
    """What a forward of prompts [Q, P] into the cache is called with; their common prefix is computed here, one row for all."""
    position = (mask.cumsum(-1) - 1).clamp(min=0)                                        # [Q, P]
    if prefix:
        model.base_model(input_ids=ids[:1, :prefix], position_ids=position[:1, :prefix], past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(len(ids))
    return dict(input_ids=ids[:, prefix:], attention_mask=None if bool(mask.all()) else mask.long(), position_ids=position[:, prefix:],
                past_key_values=cache, use_cache=True)


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


@torch.no_grad()
def sample(model, tokenizer, prompts, group_size, max_new_tokens, temperature=1.0, uniforms=None, stop=(), drop_every=None, compiled=None):
    """π_old samples G responses to each prompt.

    prompts: Q lists of token ids, or Q strings. temperature: > 0 samples softmax(logits / temperature); 0 is greedy.
    uniforms: [B, max_new_tokens] numbers in [0, 1) that decide the tokens (None: fresh ones). stop: strings that end a response, as the
    end-of-sequence token does; both are loss tokens. drop_every: look for ended rows every so many tokens (None: every token on a CPU;
    every 16 on a GPU, where looking means waiting for it). compiled: the model's forward under torch.compile, for the token steps; it
    gets a static cache, and ended rows stay, as every new shape would be compiled again. Returns a `Rollout`; on the model's device.
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
    drop_every = drop_every or (16 if device.type == "cuda" else 1)

    response = torch.full((B, T), pad, device=device)                                    # [B, T]
    logp = torch.zeros(B, T, device=device)                                              # [B, T]
    lengths = torch.full((B,), T, device=device)                                         # [B]
    truncated = torch.ones(B, dtype=torch.bool, device=device)                           # [B]
    rows = torch.arange(B, device=device)                                                # [b] rows still in the batch
    ended = torch.zeros(B, dtype=torch.bool, device=device)                              # [b]

    cache = sampling_cache(model)
    padded = not bool(prompt_mask.all())
    position = prompt_mask.sum(-1).repeat_interleave(G)                                  # [B] position of the next token
    logits = model(**prompt_inputs(model, prompt_ids, prompt_mask, prefix, cache), logits_to_keep=1).logits[:, -1]   # [Q, V]
    logits = logits.repeat_interleave(G, 0)                                              # [B, V]
    attention = prompt_mask.repeat_interleave(G, 0).long() if padded else None           # [B, P]
    if compiled:
        cache = static_cache(cache, model.config, G, prompt_ids.shape[1] + T)
        attention = F.pad(attention, (0, T), value=1) if padded else None                # [B, P+T]  causality hides what is not there yet
    else:
        cache.batch_repeat_interleave(G)
    step = compiled or torch.inference_mode()(model.__call__)                            # a tenth less overhead per call than no_grad

    for t in range(T):
        logits = logits.float() if temperature in (0, 1) else logits.float() / temperature   # [b, V]
        token = draw(logits, uniforms[rows, t]) if temperature else logits.argmax(-1)    # [b]
        response[rows, t] = torch.where(ended, pad, token)
        logp[rows, t] = (logits.gather(-1, token[:, None]).squeeze(-1) - logits.logsumexp(-1)).masked_fill(ended, 0.0)
        now = torch.isin(token, ends)                                                    # [b]
        if stops is not None:
            now |= stops(response[rows, :t + 1], None)
        now &= ~ended
        lengths[rows] = torch.where(now, t + 1, lengths[rows])
        truncated[rows] &= ~now
        ended |= now
        if t + 1 == T:
            break
        if (t + 1) % drop_every == 0:
            left = int((~ended).sum())
            if left == 0:
                break
            if left <= 0.9 * len(rows) and not compiled:                                 # copying the cache for a few rows does not pay
                keep = (~ended).nonzero().squeeze(-1)
                rows, token, ended, position = rows[keep], token[keep], ended[keep], position[keep]
                attention = attention[keep] if padded else None
                cache.batch_select_indices(keep)
        if padded and not compiled:
            attention = F.pad(attention, (0, 1), value=1)                                # [b, P+t+1]
        logits = step(input_ids=token[:, None], attention_mask=attention, position_ids=position[:, None],
                      past_key_values=cache, use_cache=True).logits[:, -1]               # [b, V]
        position = position + 1

    width = int(lengths.max())
    mask = torch.arange(width, device=device) < lengths[:, None]                         # [B, T]
    response, logp = response[:, :width], logp[:, :width]
    texts = tokenizer.batch_decode([ids[m].tolist() for ids, m in zip(response, mask)], skip_special_tokens=True)
    for string in stop:
        texts = [text.split(string)[0] for text in texts]
    return Rollout(prompt_ids, prompt_mask, response, mask, logp, truncated, texts, G, prefix)


# --------------------------------------------------------------------------------------------------------------- log-probs

def response_logp(model, rollout, temperature=1.0, share_prompt=True, entropy=True, entropy_grad=False, max_logits=MAX_LOGITS):
    """log π(y_t | x, y_<t) of a rollout's tokens under any policy, at the temperature they were sampled with.

    share_prompt: compute each prompt once for its G responses; False (and gradient checkpointing, which turns a model's cache off)
    takes the plain path. entropy: compute it too. entropy_grad: let gradients flow through it (an entropy bonus needs them).
    max_logits: how many logits may exist at once; beyond it the LM head runs in chunks whose backward recomputes them. Returns `Scores`.
    """
    routed = any(m._forward_hooks for m in model.modules() if type(m).__name__.endswith("Router"))      # recorded or replayed: their shape
    T = rollout.mask.shape[1] if routed else int(rollout.mask.any(0).nonzero().max()) + 1               # must not depend on the rows
    mask, ids = rollout.mask[:, :T], rollout.response_ids[:, :T]                         # [B, T]
    hidden = response_hidden(model, rollout, T, share_prompt, routed)                    # [B, T, D]
    flat, targets = hidden[mask], ids[mask]                                              # [N, D], [N]  loss tokens only
    head, rows = model.get_output_embeddings(), max(1, max_logits // model.config.vocab_size)
    options = (temperature, entropy, entropy_grad)
    if len(flat) <= rows:
        values = token_logp(head, flat, targets, *options)                               # [N] each
    else:
        parts = [checkpoint(token_logp, head, h, y, *options, use_reentrant=False) for h, y in zip(flat.split(rows), targets.split(rows))]
        values = [torch.cat(p) for p in zip(*parts)]                                     # [N] each
    back = torch.zeros(mask.shape, device=mask.device)                                   # [B, T]
    pad = (0, rollout.mask.shape[1] - T)
    logp, entropy = [F.pad(back.masked_scatter(mask, x), pad) for x in values] + ([] if entropy else [None])          # [B, T]
    return Scores(logp, entropy, F.pad(hidden, (0, 0, *pad)))


def token_logp(head, hidden, targets, temperature, entropy=True, entropy_grad=False):
    """LM head and log-softmax in float32: hidden [N, D], targets [N] -> (log-probs [N],) or (log-probs [N], entropies [N])."""
    logits = head(hidden).float()                                                        # [N, V]
    logits = logits if temperature == 1 else logits / temperature                        # [N, V]
    logp = logits.log_softmax(-1)                                                        # [N, V]
    chosen = logp.gather(-1, targets[:, None]).squeeze(-1)                               # [N]
    if not entropy:
        return chosen,
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        return chosen, -(logp.exp() * logp).sum(-1)                                      # [N] each


def response_hidden(model, rollout, T, share_prompt, routed):
    """The hidden states that predict the first T tokens of each response [B, T, D]: three ways, the same result."""
    checkpointing = any(getattr(m, "gradient_checkpointing", False) for m in model.modules())
    if not share_prompt or checkpointing or rollout.group_size == 1 and not rollout.prefix:
        return plain_hidden(model, rollout, T)
    groups = groups_per_row(model.config, rollout, T)
    if not groups or routed or torch.is_autocast_enabled(rollout.mask.device.type):      # old and new log-probs are rounded alike
        return shared_hidden(model, rollout, T)
    return packed_hidden(model, rollout, T, groups)


def plain_hidden(model, rollout, T):
    """One pass over prompt and response together [B, P+T-1], a row per response. -> [B, T, D]"""
    prompt_mask = rollout.prompt_mask.repeat_interleave(rollout.group_size, 0)                        # [B, P]
    ids = torch.cat([rollout.prompt_ids.repeat_interleave(rollout.group_size, 0), rollout.response_ids[:, :T - 1]], 1)
    attention = F.pad(prompt_mask.long(), (0, T - 1), value=1)                                        # [B, P+T-1]
    hidden = model.base_model(input_ids=ids, attention_mask=attention, position_ids=(attention.cumsum(-1) - 1).clamp(min=0),
                              use_cache=False).last_hidden_state                                      # [B, P+T-1, D]
    return hidden[:, prompt_mask.shape[1] - 1:]                                                       # [B, T, D]


def shared_hidden(model, rollout, T):
    """Prompts once [Q, P], then responses [B, T-1] on their repeated keys and values. -> [B, T, D]"""
    G, prompt_mask = rollout.group_size, rollout.prompt_mask
    cache, padded = DynamicCache(config=model.config), not bool(prompt_mask.all())
    prompts = prompt_inputs(model, rollout.prompt_ids, prompt_mask, rollout.prefix, cache)
    first = model.base_model(**prompts).last_hidden_state[:, -1:].repeat_interleave(G, 0)             # [B, 1, D]
    if T == 1:
        return first
    cache.batch_repeat_interleave(G)
    steps = torch.arange(T - 1, device=prompt_mask.device)                                            # [T-1]
    position = prompt_mask.sum(-1).repeat_interleave(G)[:, None] + steps                              # [B, T-1]
    # Right padding needs no mask: under causal attention nothing to its left can see it.
    attention = F.pad(prompt_mask.repeat_interleave(G, 0).long(), (0, T - 1), value=1) if padded else None   # [B, P+T-1]
    rest = model.base_model(input_ids=rollout.response_ids[:, :T - 1], attention_mask=attention, position_ids=position,
                            past_key_values=cache, use_cache=True).last_hidden_state                  # [B, T-1, D]
    return torch.cat([first, rest], 1)                                                                # [B, T, D]


def groups_per_row(config, rollout, T):
    """How many groups make a packed row; 0: not even one is short enough, or the model does not take positions and any mask."""
    Q, P = rollout.prompt_ids.shape
    each = P - rollout.prefix + rollout.group_size * (T - 1)
    fit = [k for k in range(1, Q + 1) if Q % k == 0 and rollout.prefix + k * each <= MAX_PACKED]
    rotary = getattr(config, "rope_parameters", None) and not getattr(config, "alibi", False)
    able = rotary and config._attn_implementation in ("sdpa", "eager") and has_plain_cache(config)
    return max(fit, default=0) if able else 0


def packed_hidden(model, rollout, T, groups):
    """Prompts and responses of `groups` groups in one row, what the prompts share once; a mask keeps them apart. -> [B, T, D]"""
    (Q, P), G, prefix, device = rollout.prompt_ids.shape, rollout.group_size, rollout.prefix, rollout.mask.device

    def row(prompts, responses):                             # [Q, P], [Q, G(T-1)] -> [R, N]: prefix, prompt, responses, prompt, ...
        own = torch.cat([prompts[:, prefix:], responses], 1).reshape(Q // groups, -1)
        return torch.cat([prompts[::groups, :prefix], own], 1)

    steps = rollout.prompt_mask.sum(-1, keepdim=True) + torch.arange(T - 1, device=device).repeat(G)  # [Q, G(T-1)]
    position = row((rollout.prompt_mask.cumsum(-1) - 1).clamp(min=0), steps)                          # [R, N]
    number = torch.arange(Q, device=device)[:, None]                                                  # [Q, 1]
    of_prompt = number.where(rollout.prompt_mask, -2)                                                 # [Q, P]  -2: padding
    of_prompt[:, :prefix] = -1                                                                        # -1: everybody's
    group = row(of_prompt, number.expand(Q, G * (T - 1)))                                             # [R, N]
    answer = torch.arange(Q * G, device=device).view(Q, G).repeat_interleave(T - 1, 1)                # [Q, G(T-1)]
    answer = row(torch.full_like(of_prompt, -1), answer)                                              # [R, N]
    place = torch.arange(answer.shape[1], device=device)                                              # [N]
    sees = lambda owner: (owner[:, None] == -1) | (owner[:, None] == owner[:, :, None])               # [R, N, N]
    blocked = ~(sees(group) & sees(answer) & (place <= place[:, None]))[:, None]                      # [R, 1, N, N]
    mask = torch.zeros(blocked.shape, dtype=model.get_output_embeddings().weight.dtype, device=device)
    mask = mask.masked_fill(blocked, torch.finfo(torch.bfloat16).min)                                 # [R, 1, N, N]  added to the scores
    ids = row(rollout.prompt_ids, rollout.response_ids[:, :T - 1].reshape(Q, G * (T - 1)))            # [R, N]
    hidden = model.base_model(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False).last_hidden_state
    hidden = hidden[:, prefix:].reshape(Q, P - prefix + G * (T - 1), -1)                              # [Q, P-prefix+G(T-1), D]
    first = hidden[:, P - prefix - 1:P - prefix].repeat_interleave(G, 0)                              # [B, 1, D]
    return torch.cat([first, hidden[:, P - prefix:].reshape(Q * G, T - 1, hidden.shape[-1])], 1)      # [B, T, D]


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
    import time

    from tasks import builtin_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    tokenizer = builtin_tokenizer()
    config = Qwen3Config(vocab_size=17, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                         intermediate_size=128, eos_token_id=tokenizer.eos_token_id)
    model = Qwen3ForCausalLM(config)
    rollout = sample(model, tokenizer, ["3+8+5=", "9+9+1+4="], group_size=3, max_new_tokens=24)
    logp = response_logp(model, rollout).logp.detach()                                   # [B, T]
    print("a policy with random weights answers two queries three times each; every row ends at its own <eos> or is cut off\n")
    for i, text in enumerate(rollout.texts):
        length = int(rollout.mask[i].sum())
        print(f"  query {i // 3}   |y| {length:2}   log π(y|x) {logp[i].sum():7.2f}   {'cut off' if rollout.truncated[i] else 'ended  '}   {text!r}")
    print(f"\nlog-probs recorded while sampling against recomputed ones: largest difference {(logp - rollout.sampler_logp).abs().max():.1e}"
          f"\n(so the ratio of the first update is 1, its group-normalised loss about 0, and its gradient not 0)\n")
    big = sample(model, tokenizer, ["3+8+5+9+2+7+1+9+4+4+4+4=" * 4] * 8, group_size=8, max_new_tokens=16)
    for name, share in (("plain path: one row per response", False), ("shared path: each prompt once   ", True)):
        began = time.perf_counter()
        scores = response_logp(model, big, share_prompt=share)
        scores.logp.sum().backward()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
        model.zero_grad()
        print(f"{name}   forward and backward {time.perf_counter() - began:.3f} s   gradient norm {norm:.6f}")
