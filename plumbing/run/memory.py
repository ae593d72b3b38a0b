"""Memory: an estimate of what a run needs on its device, computed before the run.

    always            weights, gradients, AdamW's two moments: 16 bytes per parameter; in 16 bits
                      with --use_peft or --optimizer_offload about 2 (plumbing/model/offload.py);
                      with --load_in_4bit 0.5 of a linear layer's (plumbing/model/fourbit.py)
    while sampling    the sampler's rounded copy of the weights; the KV cache; the logits of one
                      token per response
    while updating    what backward keeps of each token in each layer, and one chunk of logits
    while evaluating  the KV cache and logits of up to EVALUATION_ROWS responses

--sampler vllm has its own memory for sampling and evaluating, --vllm_gpu_memory_utilization of the
device's; on a GPU it gives that back for the updates (plumbing/engines/vllm.py).

benchmarks/memory.py makes the table of what fits where. tests/speed/test_gpu.py compares the
estimate with the peaks of a simulated GPU, tests/speed/test_fast_paths.py with peaks measured on a
CPU.
"""

import os
from dataclasses import dataclass, replace

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from plumbing.speed.fast import chunk_logits
from plumbing.engines.vllm import CPU_CACHE, GPU_SHARE
from plumbing.model.cold_start import tiny_config
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.parallel.processes import world
from rollout import MAX_LOGITS

GB = 1e9  # bytes; decimal, as in the names of GPUs
ROOM = 0.9  # share of a device that a run may fill; the rest is left for fragmentation
EVALUATION_ROWS = 256  # responses that an evaluation samples at a time
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
    evaluated: int = 0           # responses that an evaluation samples at a time
    engine: float = 0            # bytes of --sampler vllm, its copy of the weights included
    engine_stays: bool = False   # holds them during updates, too


def footprint(config, parameters, work):
    """Bytes by name: "state", the memory needed beyond it for "sampling", for "updating" and for
    "evaluating", and "peak", the largest total.

    config: a transformers config. parameters: how many the policy has.
    """
    D, H, d, H_kv, F = shape(config)
    L = config.num_hidden_layers
    V = config.vocab_size
    size = 2 if work.bf16 else 4
    head = V * D                                             # trained in float32, as embeddings are
    matrices = parameters - head * (1 if config.tie_word_embeddings else 2)
    held, cast = (2, 0) if work.bf16 and work.state != "full" else (4, 2 if work.bf16 else 0)
    if work.four_bit:
        held = FOUR_BIT
        cast = 0
    decode = (4 + size) * D * F if work.four_bit else 0      # of one matrix at a time
    weights = held * matrices + 4 * (parameters - matrices)
    lora = L * work.lora_r * (2 * D + 2 * H * d + 2 * D + 2 * H_kv * d + 3 * (D + F))
    trained = {"full": parameters, "lora": lora, "offload": 0}[work.state]
    reference = 4 * parameters if work.reference and work.state != "lora" else 0
    state = weights + 12 * trained + (4 * lora if work.state == "lora" else 0) + reference

    B = work.prompts * work.group_size
    P = work.prompt_tokens
    T = work.new_tokens
    cache = 2 * L * H_kv * d * B * (P + T) * size
    copy = 2 * parameters if work.bf16 and not work.four_bit else 0     # each rounded by itself
    sampling = copy + decode + cache * (1 + 2 / L) + 4 * B * V * 4
    wide = 2 if work.bf16 and work.state != "full" else 4   # without autocast, see eval.held_out
    shown = 2 * L * H_kv * d * work.evaluated * (P + T) * wide
    evaluating = decode + shown * (1 + 2 / L) + 4 * work.evaluated * V * 4 if work.evaluated else 0

    if work.engine:
        sampling = evaluating = 0 if work.engine_stays else work.engine
        state += work.engine if work.engine_stays else 0

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
    return {"state": state, "sampling": sampling, "updating": updating, "evaluating": evaluating,
            "logits": logits, "activations": activations,
            "peak": max(0 if work.four_bit else 4 * parameters,                 # as read, before
                        state + max(sampling, updating, evaluating))}


def layer_bytes(config, work, tokens, response, alone):
    """The bytes that one layer keeps of `tokens` tokens for backward."""
    D, H, d, H_kv, F = shape(config)
    size = 2 if work.bf16 else 4
    frozen = work.state == "lora"
    E = getattr(config, "num_experts", 0) or 0
    K = getattr(config, "num_experts_per_tok", 0) or 0
    norms = 2 * (4 + (0 if frozen else 4)) * D  # float32 also under autocast: input, normed
    inputs = 5 * 2 * D if work.bf16 else 2 * 4 * D  # of linear layers; autocast casts each again
    attention = 2 * H * d * size                             # queries, outputs
    if "qwen3" in config.model_type:                         # RMSNorm on queries and keys
        attention += (6 if work.bf16 else 8) * (H + H_kv) * d
    dense = 4 * F * size
    width = widest_layer(config, "moe_intermediate_size") or F                       # Mixtral: F
    experts = K * (4 * width + 2 * D) * size + 3 * E * 4 if E else 0
    C = work.prompt_tokens + work.new_tokens                 # keys that a response token sees
    masked = work.padded or not alone                        # then keys are repeated for every head
    keys = 2 * (H if masked else H_kv) * d * size
    own = tokens if alone else response / work.new_tokens * C + tokens - response
    rows = (own if alone else response) / (C if alone else work.new_tokens)
    mask = rows * (C if alone else work.new_tokens) * C * size if masked else 0
    return tokens * (norms + inputs + attention + (experts or dense)) + own * keys + mask


def shape(config):
    """(hidden size, heads, head size, key-value heads, feed-forward size)"""
    D = config.hidden_size
    H = widest_layer(config, "num_attention_heads")
    d = widest_layer(config, "head_dim") or D // H
    H_kv = widest_layer(config, "num_key_value_heads") or H
    F = widest_layer(config, "intermediate_size", "ffn_dim", "n_inner") or 4 * D    # not in GPT-2
    return D, H, d, H_kv, F


def widest_layer(config, *names):
    """The largest value among the layers of the first of these sizes that the config has; None if
    it has none."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    for name in names:
        values = [getattr(layer, name, None) for layer in layers]
        values = [max(value) if isinstance(value, list) else value for value in values]
        if any(values):
            return max(filter(None, values))


def work_of(args, prompt_tokens, engine=0, engine_stays=False):
    """The Work of a run of train.py. prompt_tokens: the length of its longest prompt. engine,
    engine_stays: as engine_memory returns them."""
    prompts = args.prompts_per_step // args.steps_per_generation
    state = "lora" if args.use_peft else "offload" if args.optimizer_offload else "full"
    evaluated = args.eval_prompts * args.eval_samples        # greedy: one response per prompt
    return Work(args.prompts_per_step, args.num_generations, prompt_tokens,
                args.max_completion_length or 256,
                args.micro_batch_size or prompts * args.num_generations, bool(args.half),
                args.load_in_4bit, args.gradient_checkpointing, args.plain,
                bool(args.beta or args.teacher_model_name_or_path
                     or args.teacher_model_kind == "ema"), state, args.lora_r,
                max_logits=MAX_LOGITS if args.plain else chunk_logits("cuda"),
                evaluated=min(EVALUATION_ROWS, evaluated), engine=engine,
                engine_stays=engine_stays)


def engine_memory(args, parameters, capacity, kind):
    """(bytes of --sampler vllm on a device with `capacity` bytes, whether it holds them during
    updates); (0, False) with another sampler. kind: "cuda" or "cpu"."""
    if args.sampler != "vllm":
        return 0, False
    share = args.vllm_gpu_memory_utilization
    if kind == "cpu" and share is None:
        return CPU_CACHE + parameters * getattr(torch, args.sampler_dtype).itemsize, True
    return (share or GPU_SHARE) * capacity, kind == "cpu"


def fits(config, parameters, work, capacity):
    """The largest micro-batch that fits into `capacity` bytes, found by halving work.rows; 0 if
    none fits."""
    rows = work.rows
    while rows and not within(config, parameters, replace(work, rows=rows), capacity):
        rows //= 2
    return rows


def within(config, parameters, work, capacity):
    """Whether a run fits into `capacity` bytes."""
    return footprint(config, parameters, work)["peak"] <= ROOM * capacity


def capacity_of(device):
    """The bytes of memory of a torch device; for the CPU those of the machine. None: unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):            # Windows has no sysconf
        return None


def comparison(args, config, task, device):
    """One line before the first rollout batch: the estimate beside the device's memory and, if it
    is larger, what to change. "" for the tiny MoE on a CPU, which fits everywhere, and for several
    processes, which share the work.

    config: of the policy. task: its prompts have been encoded, so the longest one is known."""
    capacity = capacity_of(device)
    tiny = not args.model_name_or_path and device.type == "cpu"
    if tiny or world() > 1 or capacity is None:
        return ""
    parameters = parameters_of(config)
    engine = engine_memory(args, parameters, capacity, device.type)
    work = work_of(args, max(map(len, task.ids.values())), *engine)
    work = replace(work, new_tokens=task.max_completion_length,
                   evaluated=min(work.evaluated, len(task.test) * args.eval_samples))
    line = f"memory: {needed(config, parameters, work, capacity)}"
    if within(config, parameters, work, capacity):
        return line
    return f"{line}: this may not fit; {remedies(args, config, parameters, work, capacity)}"


def advice(args, capacity):
    """After an out-of-memory error: one line that names the flags to change, and values that should
    fit into `capacity` bytes."""
    config, parameters = known_model(args.model_name_or_path, args)
    prompt_tokens = args.max_prompt_length if args.model_name_or_path else 2 * args.max_terms
    work = work_of(args, prompt_tokens, *engine_memory(args, parameters, capacity, "cuda"))
    return (f"out of GPU memory: {needed(config, parameters, work, capacity)}: "
            f"{remedies(args, config, parameters, work, capacity)}")


def needed(config, parameters, work, capacity):
    """The estimate and its parts, beside the memory of the device."""
    need = {name: f"{x / GB:.1f}" for name, x in footprint(config, parameters, work).items()}
    return (f"about {need['peak']} GB needed of {capacity / GB:.1f} (weights and optimizer "
            f"{need['state']}, sampling {need['sampling']}, an update {need['updating']}, an "
            f"evaluation {need['evaluating']})")


def remedies(args, config, parameters, work, capacity):
    """What to try: a smaller share for vLLM, batches that should fit, and LoRA."""
    shares = []
    state = footprint(config, parameters, work)["state"]
    if work.engine and not work.engine_stays and state + work.engine > ROOM * capacity:
        share = int(100 * (ROOM - state / capacity)) / 100
        if share * capacity > 1.2 * parameters * getattr(torch, args.sampler_dtype).itemsize:
            shares = [f"--vllm_gpu_memory_utilization {share}"]
            work = replace(work, engine=share * capacity)
    if shares and within(config, parameters, work, capacity):
        return f"try {shares[0]}"
    tries = shares + smaller_batches(args, config, parameters, work, capacity)
    last = [f"a --max_completion_length below {work.new_tokens}"]
    if not tries:
        last = ["a smaller model", "--shard over several GPUs (torchrun)"]
    if args.model_name_or_path and work.state != "lora":
        lora = replace(work, state="lora")
        enough = within(config, parameters, lora, capacity)
        more = [] if enough else smaller_batches(args, config, parameters, lora, capacity)[:1]
        tries.append(f"LoRA ({' '.join(['--use_peft', *more])})")
    if work.state == "full" and work.bf16:
        tries.append("--optimizer_offload")
    if work.state == "lora" and not work.four_bit:
        tries.append("--load_in_4bit")
    *first, last = [*tries, *last]
    return f"try {', '.join(first)} or {last}"


def smaller_batches(args, config, parameters, work, capacity):
    """Flags with the largest batches that should fit, each beside the smallest of the others; [] if
    not even the smallest fit. Where `work` fits, the estimate was too low, and they are halves."""
    def largest(name, sizes, again=True):
        least = dict(rows=1, prompts=1, evaluated=0, gradient_checkpointing=again)
        return next((n for n in sizes if within(
            config, parameters, replace(work, **least | {name: n}), capacity)), None)

    need = footprint(config, parameters, work)
    room = ROOM * capacity
    tries = []
    if not largest("rows", [1]):
        return []
    fitting = need["peak"] <= room
    if fitting or need["state"] + need["updating"] > room:
        G = work.group_size
        most = max(1, work.rows // 2) if fitting else work.rows
        sizes = [n for n in range(most, 0, -1) if n % G == 0 or G % n == 0]
        rows = largest("rows", sizes, work.gradient_checkpointing)
        flag = "" if rows else " --gradient_checkpointing"
        tries.append(f"--micro_batch_size {rows or largest('rows', sizes)}{flag}")
    step = args.steps_per_generation
    most = work.prompts if need["state"] + need["sampling"] > room else work.prompts // 2
    prompts = largest("prompts", range(most - most % step, 0, -step))
    if not work.engine:                                      # which has the same memory for fewer
        tries.append(f"--prompts_per_step {prompts}" if prompts else "a smaller --num_generations")
    if need["state"] + need["evaluating"] > room and not work.engine:
        evaluated = largest("evaluated", range(work.evaluated, 0, -1)) or 1
        tries.append(f"--eval_prompts {max(1, evaluated // args.eval_samples)}")
    return tries


def known_model(name, args):
    """(config, number of parameters) of a checkpoint, or (None) of the tiny MoE of `args`."""
    config = AutoConfig.from_pretrained(name) if name else tiny_config(args, builtin_tokenizer())
    return config, parameters_of(config)


def parameters_of(config):
    """The number of parameters of a model with this config; no memory is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
