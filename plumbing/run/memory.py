"""Memory: an estimate of what a run needs on its device, computed before the run.

    always            weights, gradients, AdamW's two moments: 16 bytes per parameter; in 16 bits
                      with --use_peft or --optimizer_offload about 2 (plumbing/model/offload.py);
                      with --load_in_4bit 0.5 of a linear layer's (plumbing/model/fourbit.py)
    while sampling    the sampler's rounded copy of the weights; the KV cache; the logits of one
                      token per response
    while updating    what backward keeps of each token in each layer, and one chunk of logits

benchmarks/memory.py makes the table of what fits where. tests/speed/test_gpu.py compares the
estimate with the peaks of a simulated GPU, tests/speed/test_fast_paths.py with peaks measured on a
CPU.
"""

from dataclasses import dataclass, replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from plumbing.speed.fast import chunk_logits
from plumbing.model.cold_start import tiny_config
from plumbing.data.running_sum import builtin_tokenizer
from rollout import MAX_LOGITS

GB = 1e9  # bytes; decimal, as in the names of GPUs
FOUR_BIT = 1 / 2 + 1 / 64 + 4 / (64 * 256)  # bytes of a weight, its scale, and the scales' scale


@dataclass
class Work:
    """The settings of a run on which its memory depends."""
    prompts: int                 # prompts per rollout batch
    group_size: int
    prompt_tokens: int
    new_tokens: int
    rows: int                    # responses per forward and backward
    bf16: bool = False           # or --fp16: as many bytes
    four_bit: bool = False       # --load_in_4bit
    gradient_checkpointing: bool = False
    plain: bool = False          # each row computes its own prompt
    reference: bool = False      # a frozen copy of the policy (--beta, or a teacher)
    state: str = "full"          # or "lora" (--use_peft), "offload" (--optimizer_offload)
    lora_r: int = 16
    padded: bool = True          # prompts of unequal length: attention needs a mask
    max_logits: int = MAX_LOGITS


def footprint(config, parameters, work):
    """Bytes by name: "state", the memory needed beyond it for "sampling" and for "updating", and
    "peak", the largest total.

    config: a transformers config. parameters: how many the policy has.
    """
    D, H, d, H_kv, F = shape(config)
    L, V, size = config.num_hidden_layers, config.vocab_size, 2 if work.bf16 else 4
    head = V * D                                             # trained in float32, as embeddings are
    matrices = parameters - head * (1 if config.tie_word_embeddings else 2)
    held, cast = (2, 0) if work.bf16 and work.state != "full" else (4, 2 if work.bf16 else 0)
    if work.four_bit:
        held, cast = FOUR_BIT, 0
    decode = (4 + size) * D * F if work.four_bit else 0      # of one matrix at a time
    weights = held * matrices + 4 * (parameters - matrices)
    lora = L * work.lora_r * (2 * D + 2 * H * d + 2 * D + 2 * H_kv * d + 3 * (D + F))
    trained = {"full": parameters, "lora": lora, "offload": 0}[work.state]
    reference = 4 * parameters if work.reference and work.state != "lora" else 0
    state = weights + 12 * trained + (4 * lora if work.state == "lora" else 0) + reference

    B, P, T = work.prompts * work.group_size, work.prompt_tokens, work.new_tokens
    cache = 2 * L * H_kv * d * B * (P + T) * size
    copy = 2 * parameters if work.bf16 and not work.four_bit else 0     # each rounded by itself
    sampling = copy + decode + cache * (1 + 2 / L) + 4 * B * V * 4

    alone = work.plain or work.gradient_checkpointing        # a row computes its prompt itself
    tokens = work.rows * (P + T) if alone else work.rows / work.group_size * P + work.rows * T
    response = work.rows * T
    one = layer_bytes(config, work, tokens, response, alone)
    again = work.gradient_checkpointing
    activations = 4 * L * tokens * D if again else L * one
    chunk = min(response, max(1, work.max_logits // V))
    of_head = 0 if work.state == "lora" else (2 if response > chunk else 1) * 4 * head
    logits = 2 * 4 * response * D + max(                     # hidden states that predict, and
        3 * 4 * chunk * V + of_head / 2,                     # softmax and two gradients, or
        4 * chunk * V + of_head)                             # the head's gradient being added up
    backward = 3 * size * tokens * F + of_head / 2 + (one if again else 0)      # of one layer
    updating = decode + activations + cast * matrices + max(logits, backward)
    return {"state": state, "sampling": sampling, "updating": updating,
            "logits": logits, "activations": activations,
            "peak": max(0 if work.four_bit else 4 * parameters,                 # as read, before
                        state + max(sampling, updating))}


def layer_bytes(config, work, tokens, response, alone):
    """The bytes that one layer keeps of `tokens` tokens for backward."""
    D, H, d, H_kv, F = shape(config)
    size, frozen = 2 if work.bf16 else 4, work.state == "lora"
    E, K = getattr(config, "num_experts", 0) or 0, getattr(config, "num_experts_per_tok", 0) or 0
    norms = 2 * (4 + (0 if frozen else 4)) * D  # float32 also under autocast: input, normed
    inputs = 5 * 2 * D if work.bf16 else 2 * 4 * D  # of linear layers; autocast casts each again
    attention = 2 * H * d * size                             # queries, outputs
    if "qwen3" in config.model_type:                         # RMSNorm on queries and keys
        attention += (6 if work.bf16 else 8) * (H + H_kv) * d
    dense = 4 * F * size
    experts = K * (4 * config.moe_intermediate_size + 2 * D) * size + 3 * E * 4 if E else 0
    C = work.prompt_tokens + work.new_tokens                 # keys that a response token sees
    masked = work.padded or not alone                        # then keys are repeated for every head
    keys = 2 * (H if masked else H_kv) * d * size
    own = tokens if alone else response / work.new_tokens * C + tokens - response
    rows = (own if alone else response) / (C if alone else work.new_tokens)
    mask = rows * (C if alone else work.new_tokens) * C * size if masked else 0
    return tokens * (norms + inputs + attention + (experts or dense)) + own * keys + mask


def shape(config):
    """(hidden size, heads, head size, key-value heads, feed-forward size)"""
    H = config.num_attention_heads
    d = getattr(config, "head_dim", None) or config.hidden_size // H
    return config.hidden_size, H, d, config.num_key_value_heads, config.intermediate_size


def work_of(args, prompt_tokens):
    """The Work of a run of train.py. prompt_tokens: the length of its longest prompt."""
    prompts = args.prompts_per_step // args.steps_per_generation
    state = "lora" if args.use_peft else "offload" if args.optimizer_offload else "full"
    return Work(args.prompts_per_step, args.num_generations, prompt_tokens,
                args.max_completion_length or 256,
                args.micro_batch_size or prompts * args.num_generations, bool(args.half),
                args.load_in_4bit, args.gradient_checkpointing, args.plain,
                bool(args.beta or args.teacher_model_name_or_path
                     or args.teacher_model_kind == "ema"), state, args.lora_r,
                max_logits=MAX_LOGITS if args.plain else chunk_logits("cuda"))


def fits(config, parameters, work, capacity):
    """The largest micro-batch that fits into `capacity` bytes, found by halving work.rows; 0 if
    none fits."""
    rows = work.rows
    while rows and footprint(config, parameters, replace(work, rows=rows))["peak"] > 0.9 * capacity:
        rows //= 2                                           # a tenth is kept for fragmentation
    return rows


def advice(args, capacity):
    """After an out-of-memory error: one line that names the flags to change, and values that should
    fit into `capacity` bytes."""
    config, parameters = known_model(args.model_name_or_path, args)
    prompt_tokens = args.max_prompt_length if args.model_name_or_path else 2 * args.max_terms
    work, room = work_of(args, prompt_tokens), 0.9 * capacity
    need = {name: value / GB for name, value in footprint(config, parameters, work).items()}
    line = (f"out of GPU memory: about {need['peak']:.1f} GB needed of {capacity / GB:.1f} "
            f"(weights and optimizer {need['state']:.1f}, sampling {need['sampling']:.1f}, an "
            f"update {need['updating']:.1f}): ")
    if need["state"] * GB > room:
        less = " --optimizer_offload or --use_peft," if work.state == "full" and work.bf16 else ""
        less = " --load_in_4bit," if work.state == "lora" and not work.four_bit else less
        return line + f"try{less} a smaller model, or --shard over several GPUs"
    if (need["state"] + need["sampling"]) * GB > room:
        return line + "lower --prompts_per_step, --num_generations or --max_completion_length"
    shorter = f"lower --max_completion_length (now {work.new_tokens})"
    for flag in ("", " --gradient_checkpointing"):
        again = replace(work, gradient_checkpointing=bool(flag) or work.gradient_checkpointing)
        rows = fits(config, parameters, again, capacity)
        if rows:  # as many as now: the estimate was too low
            rows = rows if rows < work.rows or flag else max(1, rows // 2)
            return line + f"try --micro_batch_size {rows}{flag}, or {shorter}"
    return line + f"{shorter}, or take a smaller model"


def known_model(name, args):
    """(config, number of parameters) of a checkpoint, or (None) of the tiny MoE of `args`."""
    config = AutoConfig.from_pretrained(name) if name else tiny_config(args, builtin_tokenizer())
    return config, parameters_of(config)


def parameters_of(config):
    """The number of parameters of a model with this config; no memory is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
