"""Rollout: π_old samples G responses per prompt; log π(y|x) of given responses under any policy.

    sample()          prompt ─► one row per response ─► token by token ─► G responses
    response_logp()   prompt and response in one forward ─► log π of each token, with gradient

Both functions are the simple version: one row per response, correct for every causal LM of
transformers, and short. fast_sample and fast_response_logp of plumbing/speed/fast.py compute the
same in less time; tests check that the results are equal. train.py calls them through two small
objects: a Sampler, which another inference engine can replace, and a Scorer, a module that DDP and
FSDP can wrap.

Each token is drawn with one uniform random number, which belongs to its row and position. If the
caller passes these numbers, the rollout does not depend on how its rows are split into batches.
There is no repetition penalty: its distribution depends on the tokens before.

Next: train.py, the loop that joins sampling, advantages and loss.
"""

import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.generation import StopStringCriteria

# transformers 5.24 renames past_key_values to cache, the only name from 5.40 on; 5.14 lacks cache
warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)

from routes import Pass, Routes, find_routers, record_routes

MAX_LOGITS = 2**24          # the most logits that exist at a time: 64 MB in float32
MAX_LOGITS_ON_GPU = 2**26   # 256 MB: larger chunks read the LM head's weights less often


def left_padded():
    """A field of tensors [B, n, ...] that are padded along n on the left, as prompts are. Others
    are padded on the right, as responses are."""
    return field(metadata={"left": True})


def shared(**default):
    """A field that has no entry per response: one value for all of them."""
    return field(metadata={"shared": True}, **default)


@dataclass
class Rollout:
    """B = Q·G responses, one row each; the G responses to a prompt are adjacent. The prompts are
    repeated, too: 8,192 rows with prompts of 4,096 tokens take 300 MB. A field has an entry per
    response unless it is `shared`, and a tensor [B, n, ...] is padded on the right unless it is
    `left_padded`; whoever cuts, joins or merges rollouts goes over the fields."""

    prompt_ids: torch.Tensor = left_padded()         # [B, P]
    prompt_mask: torch.Tensor = left_padded()        # [B, P] bool
    response_ids: torch.Tensor   # [B, T]
    mask: torch.Tensor           # [B, T] bool: loss tokens, the end-of-sequence token included
    sampler_logp: torch.Tensor   # [B, T] float32, recorded while sampling
    truncated: torch.Tensor      # [B] bool: reached max_new_tokens without an end
    texts: list                  # B strings, each cut before its stop string
    group_size: int = shared()
    forced_routes: object = None     # which experts must be taken (features/routing_replay.py)
    turn_rewards: torch.Tensor | None = None     # [B, T] a turn's reward at its last token, else 0
    games: list = field(default_factory=list)    # of features.turns.Game, for each response
    prefix: int = shared(default=0)  # number of first tokens that all prompts share (FastSampler)
    own_prompts: bool = shared(default=False)    # the prompts of a group differ, by an
    #                                              environment's reset

    @property
    def readers(self):
        """The number of adjacent responses that have the same prompt."""
        return 1 if self.own_prompts else self.group_size

    def take(self, rows):
        """The responses numbered `rows` [n] (on the CPU) as a new Rollout: as many of every group
        that they belong to; anything else raises ValueError."""
        group = rows // self.group_size                                             # [n]
        size = int((group == group[0]).sum())
        if len(rows) % size or (group.view(-1, size) != group[::size, None]).any():
            raise ValueError(f"rows {rows.tolist()} cut through groups of {self.group_size}: take "
                             "as many of each")
        return replace(take_fields(self, rows), group_size=size)

    def resize(self, P, T):
        """The same with prompts of P and responses of T tokens: padded, or responses cut."""
        wide = {}
        for f in fields(self):
            x = getattr(self, f.name)
            if isinstance(x, torch.Tensor) and x.dim() > 1:
                left = "left" in f.metadata
                ends = (P - x.shape[1], 0) if left else (0, T - x.shape[1])
                wide[f.name] = F.pad(x, (0, 0) * (x.dim() - 2) + ends)
        return replace(self, **wide)

    def join(self, others):
        """These responses and those of other rollouts of the same group size. Narrower ones are
        padded."""
        parts = [self, *others]
        P, T = (max(getattr(r, name).shape[1] for r in parts) for name in ("prompt_ids", "mask"))
        prefix = min(r.prefix for r in parts)        # that all share, if they begin alike
        begins = {tuple(r.prompt_ids[0][r.prompt_mask[0]][:prefix].tolist()) for r in parts}
        return replace(join_fields([r.resize(P, T) for r in parts]),
                       prefix=prefix * (len(begins) == 1),
                       own_prompts=any(r.own_prompts for r in parts))

    def token_lists(self):
        """The token ids of each response as B lists: end-of-sequence token and observations
        included, padding not."""
        lengths = [game.length for game in self.games] or self.mask.sum(-1).tolist()
        return [ids[:n] for ids, n in zip(self.response_ids.tolist(), lengths)]


def take(x, rows):
    """The rows [n] of x, which has one per response: a tensor, a list, a dict of such values, or an
    object with a method `take`. Anything else belongs to all rows and stays as it is."""
    if isinstance(x, torch.Tensor):
        return x[rows.to(x.device, non_blocking=True)]
    if isinstance(x, list):
        return x and [x[i] for i in rows.tolist()]
    if isinstance(x, dict):
        return {name: take(value, rows) for name, value in x.items()}
    return x.take(rows) if hasattr(x, "take") else x


def take_fields(x, rows):
    """A dataclass with `take` of each field that is not shared."""
    return replace(x, **{f.name: take(getattr(x, f.name), rows) for f in fields(x)
                         if not f.metadata.get("shared")})


def join(parts):
    """What `take` has cut, as one: tensors, lists or objects with a method `join`; None if there is
    nothing."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(parts)
    if isinstance(first, list):
        return sum(parts, [])
    return first and first.join(parts[1:])


def join_fields(parts):
    """Dataclasses as one, with `join` of each field that is not shared."""
    return replace(parts[0], **{f.name: join([getattr(part, f.name) for part in parts])
                                for f in fields(parts[0]) if not f.metadata.get("shared")})


# ---------------------------------------------------------------------------------------- sampling

class Sampler:
    """The old policy π_old with its sampling settings. Any object with the same `sample` method can
    replace it: a fast sampler, another inference engine."""

    def __init__(self, policy, tokenizer, max_new_tokens, temperature=1.0, stop=()):
        self.policy = policy
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.stop = stop

    def sample(self, prompts, group_size, uniforms=None, temperature=None, **options):
        """G responses to each of Q prompts (lists of token ids, or strings) -> Rollout. uniforms
        [B, max_new_tokens], options: see `sample` below. temperature: replaces the sampler's
        own."""
        temperature = self.temperature if temperature is None else temperature
        return sample(self.policy, self.tokenizer, prompts, group_size, self.max_new_tokens,
                      temperature, uniforms, self.stop, **options)


@torch.no_grad()
def sample(model, tokenizer, prompts, group_size, max_new_tokens, temperature=1.0, uniforms=None,
           stop=(), limits=None):
    """π_old samples G responses to each prompt -> `Rollout`, on the model's device.

    prompts      Q lists of token ids, or Q strings
    temperature  above 0: softmax(logits / temperature); 0: greedy
    uniforms     [B, max_new_tokens] numbers in [0, 1) that decide the tokens; None: draw new ones
    stop         strings that end a response. Their tokens are loss tokens, as is the
                 end-of-sequence token
    limits       [B] the largest number of tokens of each response; None: max_new_tokens
    """
    model.eval()
    device = model.device
    G = group_size
    T = max_new_tokens
    pad = pad_token(tokenizer)
    prompt_ids, prompt_mask = left_pad(token_ids(tokenizer, prompts), pad, device)  # [Q, P]
    B = len(prompts) * G
    uniforms = torch.rand(B, T, device=device) if uniforms is None else uniforms.to(device)
    is_end = end_test(model, tokenizer, stop)

    response = torch.full((B, T), pad, device=device)                               # [B, T]
    logp = torch.zeros(B, T, device=device)                                         # [B, T]
    lengths = torch.zeros(B, dtype=torch.long, device=device)                       # [B]
    ended = torch.zeros(B, dtype=torch.bool, device=device)                         # [B]
    limits = torch.full((B,), T, device=device) if limits is None else limits.to(device)   # [B]

    cache = DynamicCache(config=model.config)
    attention = prompt_mask.repeat_interleave(G, 0).long()                          # [B, P]
    position = (attention.cumsum(-1) - 1).clamp(min=0)                              # [B, P]
    logits = model(input_ids=prompt_ids.repeat_interleave(G, 0), attention_mask=attention,
                   position_ids=position, past_key_values=cache, use_cache=True,
                   logits_to_keep=1).logits[:, -1]                                  # [B, V]
    position = attention.sum(-1, keepdim=True)                                      # [B, 1]
    last = (position[:, 0] + limits).max() - 1           # a response that has ended goes no further

    for t in range(int(limits.max())):
        token, chosen = draw_token(logits, uniforms[:, t], temperature)             # [B], [B]
        over = ended | (t >= limits)                                                # [B]
        response[:, t] = token.masked_fill(over, pad)                               # [B]
        logp[:, t] = chosen                                                         # [B]
        lengths += ~over
        ended |= ~over & is_end(response[:, :t + 1])
        if (ended | (t + 1 >= limits)).all():
            break
        attention = F.pad(attention, (0, 1), value=1)                               # [B, P+t+1]
        logits = model(input_ids=response[:, t:t + 1], attention_mask=attention,
                       position_ids=(position + t).clamp(max=last), past_key_values=cache,
                       use_cache=True).logits[:, -1]                                # [B, V]
    return finish(tokenizer, stop, (prompt_ids, prompt_mask), G, response, logp, lengths, ended)


def token_ids(tokenizer, prompts):
    """Prompts as lists of token ids; a prompt may be a string or already a list of token ids."""
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
    """All token ids that end a response: the tokenizer's and those of the generation config."""
    known = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    known = known if isinstance(known, list) else [known]
    return sorted({*known, tokenizer.eos_token_id} - {None})


def end_test(model, tokenizer, stop):
    """Returns a function of the tokens so far [b, t] -> [b] bool: whether the last token ends the
    response."""
    ends = torch.tensor(end_tokens(model, tokenizer), device=model.device)
    at_end = lambda ids: torch.isin(ids[:, -1], ends)                               # [b]
    if not stop:
        return at_end
    stops = StopStrings(tokenizer, list(stop))
    return lambda ids: at_end(ids) | stops(ids, None)


class StopStrings(StopStringCriteria):
    """Token ids [b, t] -> [b] bool: whether the last token of a row completes a stop string.
    transformers decodes each token after the prefix "abcdef", which not every tokenizer knows: here
    it is the first letter or digit of its own vocabulary. Raises ValueError for a string of which
    it has no token."""

    @staticmethod
    def clean_tokenizer_vocab(tokenizer, static_prefix=None, **options):
        prefix = min(filter(str.isalnum, tokenizer.get_vocab()), default="abcdef")
        return StopStringCriteria.clean_tokenizer_vocab(tokenizer, prefix, **options)


def finish(tokenizer, stop, prompts, group_size, response, logp, lengths, ended):
    """The Rollout of what was sampled: cut to the longest response, with its mask and texts, and
    nothing after the end of a response. prompts: (ids, mask), [Q, P] each."""
    width = int(lengths.max())
    mask = torch.arange(width, device=lengths.device) < lengths[:, None]            # [B, T]
    response = response[:, :width].masked_fill(~mask, pad_token(tokenizer))         # [B, T]
    logp = logp[:, :width].masked_fill(~mask, 0.0)                                  # [B, T]
    rows = [ids[:n] for ids, n in zip(response.tolist(), lengths.tolist())]
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    for string in stop:
        texts = [text.partition(string)[0] for text in texts]
    prompts = [x.repeat_interleave(group_size, 0) for x in prompts]                 # [B, P] each
    return Rollout(*prompts, response, mask, logp, ~ended, texts, group_size)


# --------------------------------------------------------------------------------------- log-probs

@dataclass
class Scores:
    """Log-probs, entropies and hidden states of a policy for the responses of a rollout."""

    logp: torch.Tensor            # [B, T] float32 log π(y_t | x, y_<t) in nats, 0 outside the mask
    entropy: torch.Tensor | None  # [B, T] float32 entropy of the next-token distribution in nats
    hidden: torch.Tensor | None   # [B, T, D] last hidden state that predicts token t, for a critic
    routes: Pass | None = None    # [L, B, T, ·] the routers' choice where token t is predicted
    passes: Routes | None = None  # the routes of each forward, in the form replay_routes needs
    values: torch.Tensor | None = None  # [B, T] float32, a critic's estimates


class Scorer(nn.Module):
    """A policy as a module that maps a rollout to its Scores: scorer(rollout). The Actor of
    plumbing/model/actor.py adds a critic, 16-bit autocast, gradient checkpointing and the fast
    response_logp."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy
        self.routed = bool(find_routers(policy))             # whether there are routers to record

    def forward(self, rollout, temperature=1.0, entropy=False, record=False):
        """record: also return the experts that the routers chose."""
        with record_routes(self.policy) if record else nullcontext() as passes:
            scores = response_logp(self.policy, rollout, temperature, entropy)
        if record:  # token t is predicted at position P - 1 + t of the row
            first = rollout.prompt_mask.shape[1] - 1
            scores.passes = passes
            scores.routes = Pass(*(x[:, :, first:] for x in passes.passes[0]))       # [L, B, T, ·]
        return scores


def response_logp(model, rollout, temperature=1.0, entropy=True):
    """log π(y_t | x, y_<t) of the response tokens of a rollout -> Scores.

    temperature: the one they were sampled with. entropy: also compute the entropy."""
    hidden = response_hidden(model, rollout)                                        # [B, T, D]
    return token_scores(model, hidden, rollout, temperature, entropy)


def response_hidden(model, rollout, make_mask=None):
    """One forward over prompt and response, one row per response -> [B, T, D], the hidden states
    that predict the response tokens. make_mask: a function that replaces the attention mask [B, N]
    (fast.py)."""
    T = rollout.mask.shape[1]
    ids = torch.cat([rollout.prompt_ids, rollout.response_ids[:, :T - 1]], 1)       # [B, P+T-1]
    attention = F.pad(rollout.prompt_mask.long(), (0, T - 1), value=1)              # [B, P+T-1]
    position = (attention.cumsum(-1) - 1).clamp(min=0)                              # [B, P+T-1]
    if make_mask:
        attention = make_mask(model.config, attention.bool(), attention.shape[1])
    hidden = model.base_model(input_ids=ids, attention_mask=attention, position_ids=position,
                              use_cache=False).last_hidden_state                    # [B, P+T-1, D]
    return hidden[:, rollout.prompt_mask.shape[1] - 1:]                             # [B, T, D]


def token_scores(model, hidden, rollout, temperature, entropy):
    """hidden [B, T, D] of a rollout -> Scores. The LM head runs only at the positions that predict
    a loss token, so that no [B, T, V] tensor is allocated; if it runs in several chunks, they are
    recomputed in the backward pass."""
    head = make_head(model)
    max_logits = MAX_LOGITS_ON_GPU if hidden.device.type == "cuda" else MAX_LOGITS
    rows = max(1, max_logits // model.config.vocab_size)
    mask = rollout.mask                                                             # [B, T]
    where = mask.flatten().nonzero()[:, 0]                           # [N] of the B·T positions
    states, ids = (x.flatten(0, 1).index_select(0, where)                           # [N, D], [N]
                   for x in (hidden, rollout.response_ids))
    parts = list(zip(states.split(rows), ids.split(rows)))                          # [n, D], [n]
    call = token_logp if len(parts) == 1 else partial(checkpoint, token_logp, use_reentrant=False)
    chunks = [call(head, h, y, temperature, entropy) for h, y in parts]
    empty = torch.zeros(mask.numel(), device=mask.device)                           # [B·T]
    values = [empty.index_copy(0, where, torch.cat(x)).view(mask.shape)             # [B, T] each
              for x in zip(*chunks)]
    return Scores(values[0], values[1] if entropy else None, hidden)


def make_head(model):
    """The LM head with the model's own scaling and soft cap of the logits: a function hidden [N, D]
    -> logits [N, V]. The head runs in its own precision also under autocast: bfloat16 would round a
    logit between 8 and 16 by up to 0.03, and GSPO clips s at 0.0003 from 1."""
    linear = model.get_output_embeddings()
    named = lambda name: getattr(model.config, name, None)
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


def token_logp(head, hidden, targets, temperature, entropy=True):
    """LM head (see `make_head`) and log-softmax: hidden [N, D], targets [N] -> (log-probs [N],), or
    with entropy (log-probs [N], entropies [N])."""
    logits = head(hidden)                                                           # [N, V]
    logits = logits if temperature == 1 else logits / temperature                   # [N, V]
    logp = logits.log_softmax(-1)                                                   # [N, V]
    chosen = logp.gather(-1, targets[:, None]).squeeze(-1)                          # [N]
    if not entropy:
        return (chosen,)
    least = torch.finfo(logp.dtype).min         # a logit of -inf: 0 · log 0 = 0, not NaN
    return chosen, -(logp.exp() * logp.clamp(min=least)).sum(-1)                    # [N] each


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
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
        print(f"prompt {i // 4}   |y| {rollout.mask[i].sum():2}   log π(y|x) {logp[i].sum():7.2f} "
              f"  {'cut off' if rollout.truncated[i] else 'ended':8} {text.replace(' ', '')}")
    gap = (logp - rollout.sampler_logp).abs().max()
    print(f"log-probs of sampling against recomputed ones: largest difference {gap:.1e}")
