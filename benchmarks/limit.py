"""The speed limit of a machine, and the least arithmetic and memory traffic of a rollout batch."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from plumbing.run.metrics import Clock  # noqa: E402


def forward_flop(config, Q, P, G, T, prefix=0):
    """Floating-point operations of one forward over Q prompts of P tokens and G responses of T
    tokens to each prompt. The prompt is computed once for its G responses.

    prefix: number of first tokens that all prompts share, which are computed once.
    """
    D = config.hidden_size
    H = config.num_attention_heads
    d = getattr(config, "head_dim", None) or D // H
    E = getattr(config, "num_experts", 0)
    K = getattr(config, "num_experts_per_tok", 0)
    weights = 2 * D * H * d + 2 * D * config.num_key_value_heads * d  # q and o, k and v
    if E:
        weights += 3 * D * config.moe_intermediate_size * K + D * E
    else:
        weights += 3 * D * config.intermediate_size
    prompt = (prefix + Q * (P - prefix)) * (2 * weights + 4 * H * d * P / 2)
    response = Q * G * (T - 1) * (2 * weights + 4 * H * d * (P + T / 2))
    return config.num_hidden_layers * (prompt + response) + Q * G * T * 2 * D * config.vocab_size


def decode_bytes(policy, rows, P, T, size):
    """Bytes that T decoding steps must read: in each step all weights and the KV cache of every
    row."""
    config = policy.config
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * d * size
    return T * (sum(p.numel() for p in policy.parameters()) * size + rows * per_token * (P + T / 2))


def measure_limit(device):
    """Matrix-multiply FLOP/s, float32 on a CPU and bfloat16 on a GPU; on a GPU also the memory
    bandwidth in bytes per second."""
    n, dtype = (1024, torch.float32) if device.type == "cpu" else (8192, torch.bfloat16)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))

    def fastest(work, times):
        seconds = []
        for _ in range(times):
            clock = Clock(device)
            work()
            clock.lap("work")
            seconds.append(clock.laps["work"])
        return min(seconds)

    limit = {"flops": 2 * n ** 3 / fastest(lambda: a @ b, 20)}
    if device.type == "cuda":
        big = torch.empty(2 ** 30, device=device, dtype=torch.uint8)
        limit["bandwidth"] = 2 * len(big) / fastest(lambda: big.clone(), 10)
    return limit
