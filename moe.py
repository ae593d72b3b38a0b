"""The policy: a tiny Qwen3-MoE. routes.py records and replays its routers like those of any MoE.

TinyMoE has the architecture of `transformers.Qwen3MoeForCausalLM`, the same parameter names, the
same call and the same growing KV cache (DynamicCache); each can read the other's checkpoints. RoPE
scaling, sliding windows, attention dropout, layers without experts and activations other than SiLU
are not implemented; a config that asks for them raises ValueError.

Before you change it: the experts' weights are stacked in 3-D tensors, and a rule for "2-D weights"
(Muon's) reaches 15 % of the default policy's parameters. RL samples, scores and updates in eval
mode; only in the warm-up is `self.training` true. After a change the warm-up is made again, and
TinyMoE.from_pretrained warns if transformers' class computes another model from the same weights;
AutoModelForCausalLM loads them without a word. A bias that only chooses experts is recognized by
its name, `e_score_correction_bias` (routes.has_sigmoid); the balance loss of the warm-up
(plumbing/model/cold_start.py) is that of a softmax.

Next: routes.py, on what its routers choose.
"""

import sys
import warnings
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import (AutoConfig, DynamicCache, GenerationConfig, Qwen3MoeConfig,
                          Qwen3MoeForCausalLM)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

from routes import record_routes

# B sequences of S tokens, N = B·S, width D, H heads of width d, C keys (cached and new);
# E experts of width M, K of them per token.

CLOSE = 1e-3        # largest rounding error of a logit in float32


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and RMSNorm on queries and keys."""

    def __init__(self, config, layer):
        super().__init__()
        D = config.hidden_size
        bias = config.attention_bias
        H = config.num_attention_heads
        H_kv = config.num_key_value_heads
        d = getattr(config, "head_dim", None) or D // H
        self.layer = layer
        self.width = d
        self.grouped = H != H_kv
        self.q_proj = nn.Linear(D, H * d, bias=bias)
        self.o_proj = nn.Linear(H * d, D, bias=bias)
        self.k_proj = nn.Linear(D, H_kv * d, bias=bias)
        self.v_proj = nn.Linear(D, H_kv * d, bias=bias)
        self.q_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)

    def forward(self, x, cos, sin, mask, causal, cache):
        heads = (*x.shape[:2], -1, self.width)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)), cos, sin)              # [B, S, H, d]
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), cos, sin)           # [B, S, H_kv, d]
        v = self.v_proj(x).view(heads)                                          # [B, S, H_kv, d]
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))                           # [B, H, S, d]
        if cache is not None:
            k, v = cache.update(k, v, self.layer)                               # [B, H_kv, C, d]
        if mask is None and not causal and not self.grouped:  # one new token: faster on a CPU
            y = (q @ k.transpose(-1, -2) * self.width**-0.5).softmax(-1) @ v        # [B, H, 1, d]
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal,
                                               enable_gqa=self.grouped)             # [B, H, S, d]
        return self.o_proj(y.transpose(1, 2).flatten(2))                            # [B, S, D]


def rotate(x, cos, sin):
    """RoPE: rotate each pair (x_i, x_{i + d/2}) of x [B, S, H, d] by the `angles` of its position.
    """
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin                             # [B, S, H, d]


def angles(position_ids, d, theta, dtype):
    """cos and signed sin of the angles position · θ^(-2i/d): [B, S] -> two of [B, S, 1, d]."""
    pair = torch.arange(0, d, 2, device=position_ids.device, dtype=torch.float32)   # [d/2]
    angle = position_ids[:, :, None, None].float() / theta**(pair / d)              # [B, S, 1, d/2]
    cos = angle.cos()                                                               # [B, S, 1, d/2]
    sin = angle.sin()                                                               # [B, S, 1, d/2]
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


class TopKRouter(nn.Module):
    """Chooses K of the E experts for each token and computes their weights, the gates."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x):
        logits = F.linear(x, self.weight)                                           # [N, E]
        gates, indices = logits.softmax(-1, dtype=torch.float32).topk(self.top_k, -1)   # [N, K]
        if self.norm_topk_prob:
            gates = gates / gates.sum(-1, keepdim=True)                 # [N, K]  K = 1: no gradient
        return logits, gates.to(logits.dtype), indices


class Experts(nn.Module):
    """E SwiGLU experts, whose weights are stacked in two tensors."""

    def __init__(self, config):
        super().__init__()
        E = config.num_experts
        D = config.hidden_size
        M = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * M, D))
        self.down_proj = nn.Parameter(torch.empty(E, D, M))

    def forward(self, x, gates, indices):
        """Sort the tokens by expert, so that each expert gets one block of rows, and multiply the
        blocks; a token has one row for each of its K experts."""
        expert, order = indices.flatten().sort(stable=True)                         # [N·K]
        token = order // indices.shape[1]                                           # [N·K]
        numbers = torch.arange(len(self.down_proj), device=x.device)                # [E]
        ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)      # [E]

        device = x.device.type  # autocast does not cover grouped_mm, so cast here
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        rows = x.index_select(0, token).to(dtype)                                   # [N·K, D]
        up = self.gate_up_proj.to(dtype)
        down = self.down_proj.to(dtype)
        gate, up = expert_product(rows, up, ends).chunk(2, -1)                      # [N·K, M]
        y = expert_product(F.silu(gate) * up, down, ends)                           # [N·K, D]
        y = y * gates.flatten().index_select(0, order)[:, None]                     # [N·K, D]
        return torch.zeros_like(x).index_add(0, token, y.to(x.dtype))               # [N, D]


def expert_product(rows, weight, ends):
    """rows [n, D] -> [n, M]: multiply the rows of each expert e, rows[ends[e-1]:ends[e]], by its
    weight [M, D], which is weight[e] of [E, M, D]."""
    odd = weight.shape[1] % 8 or weight.shape[2] % 8  # torch's grouped product refuses these
    if odd or rows.dtype == torch.float64 or not has_grouped_product(rows.device):
        blocks = rows.tensor_split(ends[:-1].tolist())
        return torch.cat([F.linear(block, w) for block, w in zip(blocks, weight)])
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)


def has_grouped_product(device):
    return device.type != "mps"


class MoE(nn.Module):
    """The feed-forward of a layer."""

    def __init__(self, config):
        super().__init__()
        self.gate = TopKRouter(config)
        self.experts = Experts(config)

    def forward(self, x):
        tokens = x.flatten(0, 1)                                                    # [N, D]
        _, gates, indices = self.gate(tokens)                                       # [N, K]
        return self.experts(tokens, gates, indices).view_as(x)                      # [B, S, D]


class Layer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MoE(config)

    def forward(self, x, *context):
        x = x + self.self_attn(self.input_layernorm(x), *context)                   # [B, S, D]
        return x + self.mlp(self.post_attention_layernorm(x))                       # [B, S, D]


class Backbone(nn.Module):
    """Token ids -> hidden states."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None,
                use_cache=None):
        x = self.embed_tokens(input_ids)                                            # [B, S, D]
        cache = past_key_values
        recompute = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if use_cache and cache is None and not recompute:
            cache = DynamicCache(config=self.config)

        S = x.shape[1]
        past = 0 if cache is None else cache.get_seq_length()
        steps = torch.arange(S, device=x.device) + past                # [S]  positions in the cache
        if position_ids is None:
            count = steps[None] + 1 if attention_mask is None else attention_mask.long().cumsum(-1)
            position_ids = (count - 1).clamp(min=0)[:, -S:]                         # [B, S]
        d = self.layers[0].self_attn.width
        theta = self.config.rope_parameters["rope_theta"]
        cos, sin = angles(position_ids, d, theta, x.dtype)                          # [B, S, 1, d]
        mask, causal = attention_pattern(steps, attention_mask, past + S)   # [B, 1, S, C] or None

        for layer in self.layers:
            call = partial(checkpoint, layer, use_reentrant=False) if recompute else layer
            x = call(x, cos, sin, mask, causal, cache)                              # [B, S, D]
        return MoeModelOutputWithPast(self.norm(x), cache)    # transformers 5.24 renames the second


def attention_pattern(steps, attention_mask, C):
    """(mask [B or 1, 1, S, C] or None, is_causal): the query at position steps[s] of the cache
    attends to the keys at positions <= steps[s], except padding. C: number of keys."""
    S = len(steps)
    if attention_mask is not None and attention_mask.dim() == 4:  # the caller's own mask
        return attention_mask, False
    if attention_mask is None and S == C > 1:
        return None, True   # nothing cached: causal attention without a mask is fastest
    if attention_mask is None and S == 1:
        return None, False  # one new token sees the whole cache
    key = torch.arange(C, device=steps.device)                                      # [C]
    mask = (key <= steps[:, None])[None, None]                                      # [1, 1, S, C]
    if attention_mask is not None:
        real = F.pad(attention_mask.bool(), (0, C - attention_mask.shape[1]))       # [B, C]
        itself = key == steps[:, None]             # [S, C]  padding sees itself: no NaN
        mask = mask & real[:, None, None] | itself                                  # [B, 1, S, C]
    return mask, False


class TinyMoE(nn.Module):
    """Qwen3-MoE as a causal language model with the call of transformers' models. Raises ValueError
    for a `transformers.Qwen3MoeConfig` that asks for what this file does not implement."""

    def __init__(self, config):
        super().__init__()
        check_config(config)
        self.config = config
        self.model = Backbone(config)
        self.generation_config = GenerationConfig.from_model_config(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=config.initializer_range)
        self.tie_weights()

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None,
                use_cache=None, logits_to_keep=0):
        """input_ids [B, S] -> .logits [B, S, V] (only the last logits_to_keep positions if that is
        not 0) and .past_key_values"""
        out = self.model(input_ids, attention_mask, position_ids, past_key_values, use_cache)
        logits = self.lm_head(out.last_hidden_state[:, -logits_to_keep:])           # [B, S, V]
        cache = out.to_tuple()[1] if len(out) > 1 else None
        return MoeCausalLMOutputWithPast(None, None, logits, cache)

    base_model = property(lambda self: self.model)
    device = property(lambda self: self.lm_head.weight.device)
    get_output_embeddings = lambda self: self.lm_head

    def activation_checkpointing_enable(self):
        self.model.gradient_checkpointing = True

    def tie_weights(self):
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def save_pretrained(self, directory):
        """Write a checkpoint of transformers' Qwen3MoeForCausalLM."""
        with torch.device("meta"):
            twin = Qwen3MoeForCausalLM(self.config)
        twin.load_state_dict(self.state_dict(), assign=True)
        twin.tie_weights()
        twin.generation_config = self.generation_config
        twin.save_pretrained(directory)

    @classmethod
    def from_pretrained(cls, directory):
        """Read a Qwen3-MoE checkpoint, written by this class or by transformers, in the precision
        it was saved in. Raises OSError if there is no checkpoint; ValueError for another
        architecture and for missing, unexpected or misshapen weights, because none of them is
        filled with random numbers. Warns if transformers' class has other logits in float32."""
        check_config(AutoConfig.from_pretrained(directory))
        twin, loading = Qwen3MoeForCausalLM.from_pretrained(
            directory, dtype="auto", use_safetensors=True, ignore_mismatched_sizes=True,
            output_loading_info=True)
        for kind, keys in loading.items():  # missing_keys, unexpected_keys, mismatched_keys, ...
            if keys:
                raise ValueError(f"{directory}: the weights do not fit config.json: {len(keys)} "
                                 f"{kind}, for example {sorted(keys)[0]}")
        with torch.device("meta"):
            model = cls(twin.config)
        model.load_state_dict(twin.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = twin.generation_config  # has all tokens that end a response
        model.eval()             # as transformers' class
        ids = torch.arange(8)[None]                                                 # [1, S]
        errors = (model(ids).logits - twin(ids).logits).abs().amax(-1)              # [1, S]
        error = errors.median()  # not of a token whose K-th and next expert are equal but rounded
        if twin.dtype == torch.float32 and error > CLOSE:
            warnings.warn("moe.py has been changed: checkpoints would load in transformers as "
                          f"another model, off by {error:.2g} nats")
        return model


def check_config(config):
    """Raise ValueError for a config that TinyMoE does not implement."""
    values = config.to_dict()
    values |= values.get("rope_parameters") or {}
    supported = dict(model_type="qwen3_moe", rope_type="default", hidden_act="silu",
                     sliding_window=None, attention_dropout=0, decoder_sparse_step=1,
                     mlp_only_layers=[])
    for name, value in supported.items():
        if values[name] != value:
            raise ValueError(f"{name} {values[name]!r} is not implemented in TinyMoE, which "
                             f"supports only {value!r}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    torch.manual_seed(0)
    model = TinyMoE(Qwen3MoeConfig(
        vocab_size=128, hidden_size=96, num_hidden_layers=4, num_attention_heads=4, head_dim=24,
        num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96))
    ids = torch.tensor([list("experts flip".encode())])                             # [1, S]
    with record_routes(model) as routes, torch.no_grad():
        model(ids)                                                                  # [1, S, V]
    print("a character's experts in 4 layers\n")
    for character, experts in zip(ids[0].tolist(), routes.indices[:, 0].transpose(0, 1)):
        print(f"   {character:c}  ", *(f"  {a} {b}" for a, b in experts.sort(-1).values.tolist()))
