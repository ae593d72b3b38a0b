"""Where the policy comes from: a checkpoint, or a cold start of the built-in tiny MoE.

The GSPO paper starts RL from a cold-start model, which knows the format and is right now and then. Ours is supervised on a teacher
with a bad habit (tasks.running_sum): for a 9 it adds 8 more often than 9, so the likeliest answer is wrong and RL has to raise the
rarer, right one; sharpening would not do.
The result is cached under runs/, in a folder named by a hash of all that made it, and serves every algorithm.
"""

import copy
import hashlib
import json
import os
import random
import shutil
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, Qwen3MoeConfig

from plumbing import run as checkpoint
from plumbing import tasks
from advantages import ValueHead
from eval import evaluate, pass_at_1
from plumbing import fast
from moe import TinyMoE
from routes import Routes, has_routers, load_balancing_loss, record_routes
import rollout
from rollout import Rollout, left_pad, response_logp

CACHE = Path("runs/cold_start")
BATCH, WARMUP, BALANCE = 32, 30, 0.01            # rows per step, steps of warm-up, load-balancing coefficient
INIT_STD = 0.08                                  # of random weights
MUST_PASS = 0.3                                  # below this pass@1 the phase transition has not happened, and RL has nothing to work with


class Forward(NamedTuple):
    logp: torch.Tensor            # [B, T] float32
    entropy: torch.Tensor | None  # [B, T] float32
    values: torch.Tensor | None   # [B, T] float32, the critic's
    routes: Routes | None         # of the forwards of the policy, a row per response


class Actor(nn.Module):
    """The policy and, for PPO, its critic: all that is trained, and the one module that DDP or FSDP2
    wraps."""

    def __init__(self, policy, args):
        super().__init__()
        self.policy, self.bf16 = policy, args.bf16
        self.critic = ValueHead(policy.config.hidden_size) if args.advantage == "gae" else None
        self.response_logp = rollout.response_logp if args.plain else fast.response_logp
        self.checkpointed = checkpoint_layers(policy) if args.gradient_checkpointing else []
        routed = args.objective == "rspo" or args.routing_replay or args.router_aux_loss_coef
        if routed and not has_routers(policy):
            raise ValueError(f"--model_name_or_path {args.model_name_or_path} is dense: rspo, "
                             "--routing_replay and --router_aux_loss_coef need a mixture of experts")

    def forward(self, batch, record=False, **options):
        """A rollout under the policy -> Forward. record: its routes too."""
        for layer in self.checkpointed:
            layer.training = torch.is_grad_enabled()  # what is inside stays in eval mode: no dropout
        with record_routes(self.policy) if record else nullcontext() as routes:
            with torch.autocast(self.policy.device.type, torch.bfloat16, enabled=self.bf16):
                scores = self.response_logp(self.policy, batch, **options)
        if record and routes.passes[-1].indices.shape[1] != len(batch.prompt_ids):
            # equal responses shared a row of the last forward: a row for each
            routes = routes.rows([slice(None)] * (len(routes.passes) - 1) + [scores.rows])
        values = None if self.critic is None else self.critic(scores.hidden)        # [B, T]
        return Forward(scores.logp, scores.entropy, values, routes)


def checkpoint_layers(policy):
    """Let backward compute the layers again -> the modules that do so while in training mode."""
    policy.activation_checkpointing_enable()
    layers = [m for m in policy.modules() if getattr(m, "gradient_checkpointing", False)]
    for layer in layers:
        for name, value in list(vars(layer).items()):
            if "dropout" in name and isinstance(value, float):
                setattr(layer, name, 0.0)  # some layers call dropout as a function, not as a module
    return layers


def make_optimizer(args, actor):
    if args.optim == "sgd":
        return torch.optim.SGD(actor.parameters(), args.learning_rate)
    return torch.optim.AdamW(actor.parameters(), args.learning_rate, betas=(0.9, 0.95),
                             weight_decay=0.0, fused=True)


def reference_of(args, task, device):
    """The frozen starting policy that --beta holds on to, or None."""
    if not args.beta:
        return None
    return Actor(load_policy(args, task, device)[0], args).to(device).requires_grad_(False)


def sampling_copy(policy, dtype, keep=False):
    """The policy that samples: itself in float32, or a copy as an inference engine holds it, rounded as `dtype` says.

    keep: round into the copy of the last call, where compiled code looks for it.
    """
    if dtype == "float32":
        return policy
    copied = standing_copy(policy, dtype) if keep else copy_for(policy, dtype)
    for new, old in zip(copied.parameters(), policy.parameters(), strict=True):
        new.data.copy_(rounded(old.data, dtype))
    return copied


def copy_for(policy, dtype):
    """bfloat16 is weights and arithmetic; the other types round weights and go on computing in float32."""
    copied = copy.deepcopy(policy)
    return copied.to(torch.bfloat16) if dtype == "bfloat16" else copied


standing_copy = lru_cache(maxsize=1)(copy_for)


def rounded(weight, dtype):
    """A weight [..., n] rounded row by row to `dtype` and back, symmetrically: the largest of a row lands on the largest number.

    int<b>: 2^b - 1 equally spaced levels; float8: e4m3. Vectors (norms, biases) stay as they are, as quantised engines leave them.
    """
    if weight.dim() < 2 or dtype == "bfloat16":
        return weight
    largest = weight.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)      # [..., 1]
    if dtype == "float8":
        return (weight / largest * 448).to(torch.float8_e4m3fn).to(weight.dtype) * (largest / 448)
    levels = 2 ** (int(dtype.removeprefix("int")) - 1) - 1
    return (weight / largest * levels).round() * (largest / levels)


def load_policy(args, task, device, folder=None):
    """(policy, tokenizer) on the device in float32: from a checkpoint, ours or Hugging Face's, or the built-in tiny MoE after its cold start.

    Raises ValueError for a folder that is missing, unknown, or has no safetensors: nothing pickled is read, no remote code is run.
    """
    name = folder or args.model_name_or_path
    if name is None:
        return cold_start(args, task, device)
    name = str(name)
    local = Path(name).exists() or name.startswith((".", "/", "~"))
    if local and not (Path(name) / "config.json").is_file():
        raise ValueError(f"--model_name_or_path {name}: no config.json there; it must be a Hugging Face checkpoint folder or a hub id")
    if local and not any(Path(name).glob("*.safetensors")):
        raise ValueError(f"--model_name_or_path {name}: no .safetensors weights there; pickled weights are not read (they can run code), "
                         "convert them")
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if config.model_type == "qwen3_moe":
            policy = TinyMoE.from_pretrained(name)
        else:
            policy, loading = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
                                                                   output_loading_info=True)
            if loading["missing_keys"]:
                raise ValueError(f"its weights lack {', '.join(sorted(loading['missing_keys']))}, which would be random numbers")
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        if len(tokenizer) < 3:
            raise ValueError("it has no tokenizer, and transformers makes up an empty one")
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        words = " ".join(str(error).split())
        if "CONVERSION" in words:  # transformers joins the experts' weights while it reads them
            words = "some experts' weights are missing or misshapen"
        raise ValueError(f"--model_name_or_path {name} cannot be loaded: {words[:300]}") from None
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    policy = policy.float().to(device).eval()
    check_policy(policy, name)
    return policy, tokenizer


@torch.no_grad()
def check_policy(policy, name):
    """Refuse a model whose log-probs would be silently wrong: one that does more to its logits than its LM head (soft caps, scales), or
    that computes something else where a prompt is computed once for several responses."""
    ids = torch.tensor([[0, 1]], device=policy.device)
    plain = policy.get_output_embeddings()(policy.base_model(input_ids=ids).last_hidden_state)            # [1, 2, V]
    if not torch.allclose(plain, policy(input_ids=ids).logits, atol=1e-4):
        raise ValueError(f"--model_name_or_path {name}: {type(policy).__name__} changes its logits after the LM head (a soft cap or a scale): "
                         "not supported")
    ids = (torch.arange(22, device=policy.device) % policy.config.vocab_size).split((10, 12))
    prompts, answers = [ids[0].tolist(), ids[0][:8].tolist()], ids[1].view(4, 3)                          # [B, T]
    batch = Rollout(*left_pad(prompts, 0, policy.device), answers, answers >= 0, None, None, None, 2)
    same = all(hasattr(layer, "batch_repeat_interleave") for layer in DynamicCache(config=policy.config).layers)   # not those of Mamba
    if same:
        plain, shared = rollout.response_hidden(policy, batch), fast.shared_hidden(policy, batch)               # [B, T, D]
        same = torch.allclose(plain, shared, atol=1e-3 * plain.abs().max().item())
    if not same:
        raise ValueError(f"--model_name_or_path {name}: {type(policy).__name__} cannot share a prompt's keys and values among responses: "
                         "not supported")


# -------------------------------------------------------------------------------------------------------------- cold start

def tiny_config(args, tokenizer):
    """The shape of the built-in policy: a Qwen3-MoE of about a million parameters."""
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=args.hidden_size, num_hidden_layers=args.num_hidden_layers, num_attention_heads=4,
        num_key_value_heads=4, head_dim=args.hidden_size // 4, num_experts=args.num_experts, num_experts_per_tok=args.num_experts_per_tok,
        moe_intermediate_size=args.moe_intermediate_size, intermediate_size=args.moe_intermediate_size * args.num_experts_per_tok,
        norm_topk_prob=args.num_experts_per_tok > 1,         # a single renormalised gate is always 1: its router would not learn
        tie_word_embeddings=False, max_position_embeddings=2048, initializer_range=INIT_STD,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


def cold_start(args, task, device):
    """-> (policy, tokenizer), from the cache or trained now. Raises ValueError if it did not learn enough for RL to begin."""
    tokenizer = tasks.builtin_tokenizer()
    config = tiny_config(args, tokenizer)
    recipe = dict(task=task.name, config=config.to_diff_dict(), steps=args.cold_start_steps, learning_rate=args.cold_start_learning_rate,
                  batch=BATCH, warmup=WARMUP, balance=BALANCE, seed=args.seed, torch=torch.__version__,
                  problems=hashlib.sha256(json.dumps(task.train).encode()).hexdigest())          # and their order
    folder = CACHE / hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    if folder.is_dir():
        return TinyMoE.from_pretrained(folder).to(device), tokenizer
    torch.manual_seed(args.seed)
    policy = TinyMoE(config).to(device)
    supervise(policy, tokenizer, task, args)
    rewards = evaluate(policy, tokenizer, task, task.test[:128], 4, tasks.longest_answer(task))["rewards"]
    passed, _, _ = pass_at_1(rewards)
    if passed < MUST_PASS:
        raise ValueError(f"the cold start failed: pass@1 {passed:.2f}, RL needs at least {MUST_PASS}; try more --cold_start_steps "
                         f"(now {args.cold_start_steps}), another --seed or shorter sums")
    partial = folder.with_name(f".partial-{folder.name}-{os.getpid()}")
    policy.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    checkpoint.write_text(partial / "recipe.json", json.dumps(recipe | {"pass_at_1": passed}, indent=1))
    try:
        os.rename(partial, folder)
    except OSError:                                          # another run made the same one meanwhile
        shutil.rmtree(partial)
    return policy, tokenizer


def supervise(policy, tokenizer, task, args):
    """Next-token cross-entropy on the teacher's answers; prompts are given, not learnt."""
    rng = random.Random(args.seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.cold_start_learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    steps = args.cold_start_steps
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / WARMUP, 1.0) * half_cosine(i / max(steps, 1)))
    policy.train()
    for _ in tqdm(range(steps), desc="cold start", disable=None, leave=False):
        problems = [task.train[rng.randrange(len(task.train))] for _ in range(BATCH)]
        batch = taught(policy, tokenizer, problems, [task.teacher(p, rng) for p in problems])
        with record_routes(policy) as routes:
            logp = response_logp(policy, batch, entropy=False).logp                    # [B, T]
        _, logits = routes.responses(batch.prompt_ids.shape[1], len(problems))         # [L, B, T, E]
        balance = load_balancing_loss(logits, batch.mask, policy.config.num_experts_per_tok)
        loss = -logp.sum() / batch.mask.sum() + BALANCE * balance
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def half_cosine(progress):
    """1 for the first half, then down to 0 along a cosine."""
    return 1.0 if progress < 0.5 else 0.5 * (1 + torch.cos(torch.tensor(torch.pi * (2 * progress - 1))).item())


def taught(policy, tokenizer, problems, answers):
    """The teacher's answers in the form of a rollout: one response per prompt, its end-of-sequence token a loss token."""
    prompts = [tokenizer(p.prompt)["input_ids"] for p in problems]
    ids = [tokenizer(a)["input_ids"] + [tokenizer.eos_token_id] for a in answers]
    width = max(map(len, ids))
    prompt_ids, prompt_mask = left_pad(prompts, tokenizer.pad_token_id, policy.device)                          # [B, P]
    response = torch.tensor([i + [tokenizer.pad_token_id] * (width - len(i)) for i in ids], device=policy.device)   # [B, T]
    mask = torch.tensor([[True] * len(i) + [False] * (width - len(i)) for i in ids], device=policy.device)      # [B, T]
    return Rollout(prompt_ids, prompt_mask, response, mask, torch.zeros_like(response, dtype=torch.float32),
                   torch.zeros(len(ids), dtype=torch.bool), answers, 1)
