"""Models with random weights in the shapes of known ones, rollouts of random tokens, and an update
of such a model, whose peak memory simulate.py counts and gpu.py measures."""

from contextlib import nullcontext

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from features.lora import add_adapters
from losses import policy_loss
from plumbing.model.actor import make_scorer
from features.lora import round_frozen
from rollout import Rollout

# (model type, hidden, layers, heads, key-value heads, feed-forward, vocabulary[, head])
SHAPES = {"HuggingFaceTB/SmolLM2-135M": ("llama", 576, 30, 9, 3, 1536, 49152),
          "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 24, 14, 2, 4864, 151936),
          "Qwen/Qwen3-0.6B": ("qwen3", 1024, 28, 16, 8, 3072, 151936, 128),
          "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 8960, 151936),
          "Qwen/Qwen2.5-3B": ("qwen2", 2048, 36, 16, 2, 11008, 151936)}


ROWS = ("--dataset_name x --max_prompt_length 512 --max_completion_length 512 --prompts_per_step 8 "
        "--micro_batch_size 8")                          # the table of docs/speed.md
WAYS = {"bfloat16": "--bf16 true", "float32": "--bf16 false",
        "float32, `--gradient_checkpointing`": "--bf16 false --gradient_checkpointing",
        "float32, `--use_peft`": "--bf16 false --use_peft",
        "bfloat16, `--use_peft`": "--bf16 true --use_peft"}


def find_shape(name):
    """The shape of a model whose name begins with one of SHAPES. Raises ValueError for another."""
    for start, shape in SHAPES.items():
        if name and name.startswith(start):
            return shape
    raise ValueError(f"--model_name_or_path {name}: not among {', '.join(SHAPES)}; add its shape "
                     "to SHAPES of benchmarks/shapes.py")


def make_config(kind, D, L, H, H_kv, F, V, d=None, tied=True, **more):
    return AutoConfig.for_model(
        kind, hidden_size=D, num_hidden_layers=L, num_attention_heads=H, num_key_value_heads=H_kv,
        head_dim=d or D // H, intermediate_size=F, vocab_size=V, tie_word_embeddings=tied, **more)


def random_model(*shape, **more):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make_config(*shape, **more))


def random_rollout(V, prompts, group, P, T, unseen=0, device="cpu"):
    """Responses of full length, on the device; the first prompt is shorter by `unseen` tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = lambda *shape: torch.randint(0, V, shape, generator=generator)
    B = prompts * group
    seen = torch.ones(prompts, P, dtype=torch.bool)
    seen[0, :unseen] = False
    mask = torch.ones(B, T, dtype=torch.bool)
    prompt_ids, seen = (x.repeat_interleave(group, 0) for x in (ids(prompts, P), seen))  # [B, P]
    tensors = (prompt_ids, seen, ids(B, T), mask, torch.zeros(B, T),
               torch.zeros(B, dtype=torch.bool))
    return Rollout(*(x.to(device) for x in tensors), [""] * B, group)


def run_updates(settings, policy, phase=lambda name: nullcontext()):
    """Two optimizer steps on cuda:0: the first makes AdamW's moments; the second has two
    micro-batches, as gradients of the first are there during the second. phase(name): a
    context for "update", "step"."""
    G, rows = settings.num_generations, settings.mini_batch_rows
    if settings.use_peft:
        meta = policy.device.type == "meta"
        policy = add_adapters(policy.float(), settings)
        policy = policy.to_empty(device="meta") if meta else policy
    if settings.autocast_dtype:
        round_frozen(policy, settings.autocast_dtype)
    rows = min(settings.micro_batch_size or rows, rows)

    def make_batch(rows):
        return random_rollout(100, -(-rows // G), min(G, rows), settings.max_prompt_length,
                              settings.max_completion_length, unseen=7, device="cuda:0")
    batch = make_batch(rows)
    actor = make_scorer(settings, policy.to("cuda:0").eval())
    trained = [p for p in actor.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
    for micro_batches in (1, 2):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            with phase("update"):
                logp = actor(batch).logp
                advantages = torch.ones(len(logp), device="cuda:0")
                policy_loss("gspo", logp, logp.detach(), advantages, batch.mask)[0].backward()
                del logp
        with phase("step"):
            optimizer.step()
