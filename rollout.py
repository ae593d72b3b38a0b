"""Rollout: π_old samples G responses per query; log π(y|x) of given responses under any policy.

    sample()          query ─► prompt, a row per response ─► token by token ─► G responses
    response_logp()   prompt and response in one forward ─► log π of each token, with gradient

Both are the plain way: a row per response, right for every causal LM of transformers, and short
enough to be read at once. plumbing/speed/fast.py has the same two names, quicker and tested equal.

Each token is drawn by one uniform number of its row and place. The numbers may be given: a rollout
then does not depend on how its rows are divided.

Left out on purpose: top-p, top-k and repetition penalties. Sampling from anything but
softmax(logits / temperature) would make the log-probs of the loss belong to another distribution.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.generation import StopStringCriteria

MAX_LOGITS = 2**24  # how many logits may exist at once: 64 MB in float32


@dataclass
class Rollout:
    """Q prompts and their B = Q·G responses; the G rows of a prompt are adjacent."""

    prompt_ids: torch.Tensor     # [Q, P] one row per prompt, padded on the left
    prompt_mask: torch.Tensor    # [Q, P] bool
    response_ids: torch.Tensor   # [B, T] padded on the right
    mask: torch.Tensor           # [B, T] bool: loss tokens, the end-of-sequence token included
    sampler_logp: torch.Tensor   # [B, T] float32 log-probs recorded while sampling
    truncated: torch.Tensor      # [B] bool: ran into max_new_tokens
    texts: list                  # B strings, cut before a stop string
    group_size: int
    prefix: int = 0              # how many first tokens all prompts share (only fast.py looks)
    routes: object = None        # what the sampler's routers chose (plumbing/loop/replay.py)
    tokens: list | None = None   # B numbers of loss tokens, where they were counted


# ---------------------------------------------------------------------------------------- sampling

@torch.no_grad()
def sample(model, tokenizer, prompts, group_size, max_new_tokens, temperature=1.0, uniforms=None,
           stop=(), tool=None):
    """π_old samples G responses to each prompt -> `Rollout`, on the model's device.

    prompts      Q lists of token ids, or Q strings
    temperature  above 0: softmax(logits / temperature); 0: greedy
    uniforms     [B, max_new_tokens] numbers in [0, 1) that decide the tokens; None: fresh ones
    stop         strings that end a response like the end-of-sequence token; both are loss tokens
    tool         a function of a response's text so far -> text to insert next, '' mostly; what it
                 inserts is read by the policy but no loss token: the mask has a hole there
    """
    model.eval()
    device, G, T, pad = model.device, group_size, max_new_tokens, pad_token(tokenizer)
    prompt_ids, prompt_mask = left_pad(token_ids(tokenizer, prompts), pad, device)  # [Q, P]
    B = len(prompts) * G
    uniforms = torch.rand(B, T, device=device) if uniforms is None else uniforms.to(device)
    is_end = end_test(model, tokenizer, stop)

    response = torch.full((B, T), pad, device=device)                               # [B, T]
    logp = torch.zeros(B, T, device=device)                                         # [B, T]
    lengths = torch.zeros(B, dtype=torch.long, device=device)                       # [B]
    ended = torch.zeros(B, dtype=torch.bool, device=device)                         # [B]
    inserted = torch.full((B, T), -1, device=device)           # [B, T] by a tool; -1: by the policy

    cache = DynamicCache(config=model.config)
    attention = prompt_mask.repeat_interleave(G, 0).long()                          # [B, P]
    position = (attention.cumsum(-1) - 1).clamp(min=0)                              # [B, P]
    logits = model(input_ids=prompt_ids.repeat_interleave(G, 0), attention_mask=attention,
                   position_ids=position, past_key_values=cache, use_cache=True,
                   logits_to_keep=1).logits[:, -1]                                  # [B, V]
    position = attention.sum(-1, keepdim=True)                                      # [B, 1]

    for t in range(T):
        token, chosen = draw_token(logits, uniforms[:, t], temperature)             # [B], [B]
        own = inserted[:, t] < 0                                                    # [B]
        response[:, t] = torch.where(own, token, inserted[:, t]).masked_fill(ended, pad)
        logp[:, t] = chosen.masked_fill(ended | ~own, 0.0)
        lengths += ~ended
        ended |= own & is_end(response[:, :t + 1])
        if t + 1 == T or ended.all():
            break
        if tool:
            use_tool(tool, tokenizer, response[:, :t + 1], inserted, own & ~ended)
        attention = F.pad(attention, (0, 1), value=1)                               # [B, P+t+1]
        logits = model(input_ids=response[:, t:t + 1], attention_mask=attention,
                       position_ids=position + t, past_key_values=cache,
                       use_cache=True).logits[:, -1]                                # [B, V]
    return finish(tokenizer, stop, (prompt_ids, prompt_mask), G, response, logp, lengths, ended,
                  inserted)


def token_ids(tokenizer, prompts):
    """Prompts as lists of token ids, whether they are strings or such lists already."""
    return [tokenizer(p)["input_ids"] if isinstance(p, str) else p for p in prompts]


def pad_token(tokenizer):
    return tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def left_pad(prompts, pad_id, device):
    """Lists of token ids -> (ids [Q, P], mask [Q, P] bool), padded on the left."""
    width = max(len(p) for p in prompts)
    ids = [[pad_id] * (width - len(p)) + list(p) for p in prompts]
    mask = [[False] * (width - len(p)) + [True] * len(p) for p in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)      # [Q, P] each


def draw_token(logits, uniform, temperature):
    """logits [b, V], uniform [b] -> (tokens [b], their log-probs [b]). temperature 0: greedy."""
    logits = logits.float() if temperature in (0, 1) else logits.float() / temperature  # [b, V]
    token = draw(logits, uniform) if temperature else logits.argmax(-1)             # [b]
    chosen = logits.gather(-1, token[:, None]).squeeze(-1)                          # [b]
    return token, chosen - logits.logsumexp(-1)


def draw(logits, uniform):
    """One token per row at softmax(logits), by inverse CDF: logits [b, V], uniform [b] -> [b]."""
    cdf = logits.softmax(-1).cumsum(-1)                                             # [b, V]
    target = (uniform * cdf[:, -1])[:, None]                         # [b, 1]  rounding: not quite 1
    token = torch.searchsorted(cdf, target, right=True).squeeze(-1)                 # [b]
    return token.clamp(max=logits.shape[-1] - 1)


def end_tokens(model, tokenizer):
    """Every token id that ends a response: the tokenizer's and the checkpoint's own."""
    known = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    known = known if isinstance(known, list) else [known]
    return sorted({*known, tokenizer.eos_token_id} - {None})


def end_test(model, tokenizer, stop):
    """A function of the tokens so far [b, t]: does the last one end its response? -> [b] bool."""
    ends = torch.tensor(end_tokens(model, tokenizer), device=model.device)
    at_end = lambda ids: torch.isin(ids[:, -1], ends)                               # [b]
    if not stop:
        return at_end
    stops = StopStringCriteria(tokenizer, list(stop))
    return lambda ids: at_end(ids) | stops(ids, None)


def use_tool(tool, tokenizer, response, inserted, ready):
    """Let the tool read the responses so far [B, t] that are `ready` [B]; what it says comes next,
    in inserted [B, T], as far as there is room."""
    start, end = response.shape[1], inserted.shape[1]
    for row in ready.nonzero().flatten().tolist():
        said = tool(tokenizer.decode(response[row]))
        if said:
            ids = tokenizer(said, add_special_tokens=False)["input_ids"][:end - start]
            inserted[row, start:start + len(ids)] = torch.tensor(ids, device=inserted.device)


def finish(tokenizer, stop, prompts, group_size, response, logp, lengths, ended, inserted,
           prefix=0):
    """A Rollout, cut to its longest response, with mask and texts; prompts: (ids, mask) [Q, P]."""
    width = int(lengths.max())
    mask = torch.arange(width, device=lengths.device) < lengths[:, None]            # [B, T]
    mask &= inserted[:, :width] < 0
    response, logp = response[:, :width], logp[:, :width]                           # [B, T]
    rows = zip(response.tolist(), lengths.tolist())
    texts = tokenizer.batch_decode([row[:n] for row, n in rows], skip_special_tokens=True)
    for string in stop:
        texts = [text.split(string)[0] for text in texts]
    return Rollout(*prompts, response, mask, logp, ~ended, texts, group_size, prefix)


# --------------------------------------------------------------------------------------- log-probs

class Scores(NamedTuple):
    logp: torch.Tensor            # [B, T] float32 log π(y_t | x, y_<t) in nats, 0 outside the mask
    entropy: torch.Tensor | None  # [B, T] float32 entropy of the next-token distribution in nats
    hidden: torch.Tensor          # [B, T, D] last hidden state that predicts token t, for a critic
    rows: object = slice(None)    # which row of the forward each response read (fast.py shares)


def response_logp(model, rollout, temperature=1.0, entropy=True, entropy_grad=False,
                  max_logits=MAX_LOGITS):
    """log π(y_t | x, y_<t) of a rollout's tokens, at their sampling temperature -> Scores.

    entropy: compute it; entropy_grad: with gradient, as an entropy bonus needs it. max_logits: how
    many logits may exist at once; beyond it the LM head runs in chunks."""
    hidden = response_hidden(model, rollout)                                        # [B, T, D]
    return token_scores(model, hidden, rollout, temperature, entropy, entropy_grad, max_logits)


def response_hidden(model, rollout, seen=None):
    """Prompt and response side by side in one forward, a row per response -> [B, T, D].
    seen: makes another mask of the attention mask [B, N] (fast.py)."""
    G, T = rollout.group_size, rollout.mask.shape[1]
    prompt_mask = rollout.prompt_mask.repeat_interleave(G, 0)                       # [B, P]
    prompt_ids = rollout.prompt_ids.repeat_interleave(G, 0)                         # [B, P]
    ids = torch.cat([prompt_ids, rollout.response_ids[:, :T - 1]], 1)               # [B, P+T-1]
    attention = F.pad(prompt_mask.long(), (0, T - 1), value=1)                      # [B, P+T-1]
    position = (attention.cumsum(-1) - 1).clamp(min=0)                              # [B, P+T-1]
    if seen:
        attention = seen(model.config, attention.bool(), attention.shape[1])
    hidden = model.base_model(input_ids=ids, attention_mask=attention, position_ids=position,
                              use_cache=False).last_hidden_state                    # [B, P+T-1, D]
    return hidden[:, prompt_mask.shape[1] - 1:]                                     # [B, T, D]


def token_scores(model, hidden, rollout, temperature, entropy, entropy_grad, max_logits,
                 where=None):
    """The LM head where a loss token is predicted, and nowhere else: no [B, T, V] tensor exists.
    hidden [B, T, D] of a rollout -> Scores. Chunks are computed again in the backward. where: the
    N loss tokens among all B·T places, [N], if they are known."""
    head, rows = head_of(model), max(1, max_logits // model.config.vocab_size)
    mask = rollout.mask                                                             # [B, T]
    where = mask.flatten().nonzero()[:, 0] if where is None else where              # [N]
    states, ids = (x.flatten(0, 1).index_select(0, where)                           # [N, D], [N]
                   for x in (hidden, rollout.response_ids))
    parts = list(zip(states.split(rows), ids.split(rows)))                          # [n, D], [n]
    call = token_logp if len(parts) == 1 else partial(checkpoint, token_logp, use_reentrant=False)
    found = [call(head, h, y, temperature, entropy, entropy_grad) for h, y in parts]
    empty = torch.zeros(mask.numel(), device=mask.device)                           # [B·T]
    values = [empty.index_copy(0, where, torch.cat(x)).view(mask.shape)             # [B, T] each
              for x in zip(*found)]
    return Scores(values[0], values[1] if entropy else None, hidden)


def head_of(model):
    """The LM head and what the model does to its logits afterwards: hidden [N, D] -> logits [N, V].
    In float32 also under bfloat16 autocast, whose rounding would be ten times GSPO's band."""
    linear, named = model.get_output_embeddings(), lambda name: getattr(model.config, name, None)
    scale = (named("logit_scale") or 1) * (named("lm_head_multiplier") or 1)  # Cohere; Falcon-H1
    power = 1 if model.config.model_type == "hyperclovax" else -1
    scale *= (named("logits_scaling") or 1)**power                            # Granite, MiniCPM3
    cap = named("final_logit_softcapping") or named("logits_soft_cap")        # Gemma

    def head(hidden):
        with torch.autocast(hidden.device.type, enabled=False):
            logits = linear(hidden.to(linear.weight.dtype)).float()                 # [N, V]
        logits = logits if scale == 1 else logits * scale                           # [N, V]
        return cap * (logits / cap).tanh() if cap else logits                       # [N, V]
    return head


def token_logp(head, hidden, targets, temperature, entropy=True, entropy_grad=False):
    """head (from `head_of`) and log-softmax: hidden [N, D], targets [N] -> (log-probs [N],) or
    (log-probs, entropies)."""
    logits = head(hidden)                                                           # [N, V]
    logits = logits if temperature == 1 else logits / temperature                   # [N, V]
    logp = logits.log_softmax(-1)                                                   # [N, V]
    chosen = logp.gather(-1, targets[:, None]).squeeze(-1)                          # [N]
    if not entropy:
        return (chosen,)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        return chosen, -(logp.exp() * logp).sum(-1)                                 # [N] each


if __name__ == "__main__":
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    vocabulary = {c: i for i, c in enumerate([*"0123456789+=,.", "<eos>"])}
    characters = Tokenizer(models.WordLevel(vocabulary))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>")
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=15, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, intermediate_size=128, eos_token_id=14, initializer_range=0.5))
    rollout = sample(model, tokenizer, ["3+8+5=", "9+9+1+4="], group_size=4, max_new_tokens=16)
    logp = response_logp(model, rollout).logp                                       # [B, T]
    for i, text in enumerate(rollout.texts):
        print(f"query {i // 4}   |y| {rollout.mask[i].sum():2}   log π(y|x) {logp[i].sum():7.2f}   "
              f"{'cut off' if rollout.truncated[i] else 'ended':8} {text.replace(' ', '')}")
    gap = (logp - rollout.sampler_logp).abs().max()
    print(f"log-probs of sampling against recomputed ones: largest difference {gap:.1e}")
