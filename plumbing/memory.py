"""Footprint: what a run needs of memory, computed before it is needed.

    weights + gradients + AdamW's two moments     16 bytes per parameter, always there
    while sampling                                the keys and values of every row, one row of logits each
    while updating                                what backward keeps of each token in each layer, and one chunk of logits

The response's logits never exist at once (rollout.response_logp runs the LM head in chunks), so the vocabulary counts once per chunk and
not once per token. Gradient checkpointing keeps one hidden state per token and layer and makes one layer again at a time.
tests/test_fast_paths.py holds the sum against measured peaks on a CPU.
"""

from dataclasses import dataclass, replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout import MAX_LOGITS
from plumbing.policy import tiny_config
from plumbing.tasks import builtin_tokenizer

GB = 1e9                                                     # as GPUs are sold


@dataclass
class Work:
    """The part of a run that memory depends on."""
    prompts: int                 # queries per rollout batch
    group_size: int
    prompt_tokens: int
    new_tokens: int
    rows: int                    # responses per forward and backward
    bf16: bool = False
    gradient_checkpointing: bool = False
    share_prompt: bool = True
    reference: bool = False      # a frozen copy of the policy (--beta)


def floats_per_token(config, keys):
    """What backward keeps per token and layer, in numbers: (of the layer, of its attention's `keys` keys and values per token)."""
    D, H, d, H_kv = shape(config)
    E, K = getattr(config, "num_experts", 0) or 0, getattr(config, "num_experts_per_tok", 0) or 0
    normed = "qwen3" in config.model_type                    # RMSNorm on queries and keys
    norms = 6 * D                                            # of two RMSNorms: input, normed, scaled
    attention = (4 if normed else 2) * H * d + (3 if normed else 0) * H_kv * d
    feed_forward = K * (4 * config.moe_intermediate_size + 2 * D) + 3 * E if E else 4 * config.intermediate_size
    return norms + attention + feed_forward, 2 * H_kv * d * keys


def footprint(config, parameters, work):
    """Bytes by name, and the peaks of the two phases: {"state", "sampling", "updating", "peak", "logits", "activations"}.

    config: a transformers config. parameters: how many the policy has.
    """
    D, H, d, H_kv = shape(config)
    L, V, size = config.num_hidden_layers, config.vocab_size, 2 if work.bf16 else 4
    state = 16 * parameters + (4 * parameters if work.reference else 0)
    casts = 2 * parameters if work.bf16 else 0               # the copy that samples, then autocast's copies

    B, P, T = work.prompts * work.group_size, work.prompt_tokens, work.new_tokens
    cache = 2 * L * H_kv * d * B * (P + T + 32) * size
    sampling = cache * (1 + 1 / L) + casts + 4 * B * V * 4

    shared = work.share_prompt and not work.gradient_checkpointing
    prompts = work.rows / work.group_size if shared else work.rows
    tokens, response = prompts * P + work.rows * T, work.rows * T
    layer, keys = floats_per_token(config, (P + T) / T if shared else 1)
    one = (tokens * layer + response * keys) * size
    activations = one + L * tokens * D * size if work.gradient_checkpointing else L * one
    chunk = min(response, max(1, MAX_LOGITS // V))
    logits = 3 * chunk * V * 4 + (2 * response * D * 4)      # logits, their softmax, the gradient; the hidden states that predict
    updating = activations + logits + casts
    return {"state": state, "sampling": sampling, "updating": updating, "peak": state + max(sampling, updating), "logits": logits,
            "activations": activations}


def shape(config):
    H = config.num_attention_heads
    return config.hidden_size, H, getattr(config, "head_dim", None) or config.hidden_size // H, config.num_key_value_heads


def work_of(args, prompt_tokens):
    """What a run of train.py asks for; prompt_tokens: its longest prompt."""
    rows = args.micro_batch_size or args.prompts_per_step // args.steps_per_generation * args.num_generations
    return Work(args.prompts_per_step, args.num_generations, prompt_tokens, args.max_completion_length or 256, rows, bool(args.bf16),
                args.gradient_checkpointing, not args.plain, bool(args.beta))


def fits(config, parameters, work, capacity):
    """The largest micro-batch of at most work.rows rows that fits into `capacity` bytes, halving; 0 if not even one row does."""
    rows = work.rows
    while rows and footprint(config, parameters, replace(work, rows=rows))["peak"] > 0.9 * capacity:   # the rest: fragments
        rows //= 2
    return rows


def advice(args, capacity):
    """After an out-of-memory error: one line that names the flags to lower, and values that should fit into `capacity` bytes."""
    config, parameters = known_model(args.model_name_or_path, args)
    work = work_of(args, args.max_prompt_length if args.model_name_or_path else 2 * args.max_terms)
    need = footprint(config, parameters, work)
    line = (f"out of GPU memory: about {need['peak'] / GB:.1f} GB needed of {capacity / GB:.1f} (weights and AdamW {need['state'] / GB:.1f}, "
            f"sampling {need['sampling'] / GB:.1f}, an update {need['updating'] / GB:.1f}): ")
    if need["state"] > 0.9 * capacity:
        return line + "take a smaller model, or --shard over several GPUs"
    if need["state"] + need["sampling"] > 0.9 * capacity:
        return line + "lower --prompts_per_step, --num_generations or --max_completion_length"
    for flag in ("", " --gradient_checkpointing"):
        rows = fits(config, parameters, replace(work, gradient_checkpointing=bool(flag) or work.gradient_checkpointing), capacity)
        if rows:
            rows = rows if rows < work.rows or flag else max(1, rows // 2)                   # the estimate was too low: halve it
            return line + f"try --micro_batch_size {rows}{flag}, or lower --max_completion_length (now {work.new_tokens})"
    return line + f"lower --max_completion_length (now {work.new_tokens}), or take a smaller model"


# name: (model type, hidden, layers, heads, key-value heads, feed-forward, vocabulary)
MODELS = {"SmolLM2 135M": ("llama", 576, 30, 9, 3, 1536, 49152), "Qwen 0.5B": ("qwen2", 896, 24, 14, 2, 4864, 151936),
          "Qwen 1.5B": ("qwen2", 1536, 28, 12, 2, 8960, 151936), "Qwen 3B": ("qwen2", 2048, 36, 16, 2, 11008, 151936)}


def known_model(name, args=None):
    """(config, number of parameters) of a row of MODELS, a checkpoint, or (None) the tiny MoE of `args`; nothing is allocated."""
    if name in MODELS:
        kind, D, L, H, H_kv, F, V = MODELS[name]
        config = AutoConfig.for_model(kind, hidden_size=D, num_hidden_layers=L, num_attention_heads=H, num_key_value_heads=H_kv,
                                      intermediate_size=F, vocab_size=V, tie_word_embeddings=True)
    else:
        config = tiny_config(args, builtin_tokenizer()) if name is None else AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return config, sum(p.numel() for p in model.parameters())


def table():
    """What fits where, as text."""
    sizes = (8, 16, 24, 80)
    lines = ["rows per micro-batch that fit: 8 queries x 8 responses, 512 + 512 tokens, bfloat16 autocast over float32 weights, AdamW",
             "(GC: only with --gradient_checkpointing; -: not even one row). Computed, not measured.", "",
             f"{'':14}{'parameters':>12}{'state':>10}" + "".join(f"{f'{gb} GB':>10}" for gb in sizes)]
    for name in MODELS:
        config, parameters = known_model(name)
        cells = []
        for gb in sizes:
            rows, again = (fits(config, parameters, Work(8, 8, 512, 512, 32, bf16=True, gradient_checkpointing=gc), gb * GB) for gc in (False, True))
            cells.append(str(rows) if rows else f"{again} GC" if again else "-")
        lines.append(f"{name:14}{parameters / 1e6:10.0f} M{16 * parameters / GB:7.1f} GB" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
