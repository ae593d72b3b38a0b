"""Models with random weights in the shapes of known ones, and rollouts of random tokens."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rollout import Rollout

# (model type, hidden, layers, heads, key-value heads, feed-forward, vocabulary[, head])
SHAPES = {"HuggingFaceTB/SmolLM2-135M": ("llama", 576, 30, 9, 3, 1536, 49152),
          "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 24, 14, 2, 4864, 151936),
          "Qwen/Qwen3-0.6B": ("qwen3", 1024, 28, 16, 8, 3072, 151936, 128),
          "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 8960, 151936),
          "Qwen/Qwen2.5-3B": ("qwen2", 2048, 36, 16, 2, 11008, 151936)}


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
    tensors = (ids(prompts, P), seen, ids(B, T), mask, torch.zeros(B, T),
               torch.zeros(B, dtype=torch.bool))
    return Rollout(*(x.to(device) for x in tensors), [""] * B, group)
