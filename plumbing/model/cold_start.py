"""The supervised warm-up of the built-in tiny MoE before RL (DeepSeek calls it the cold start).

The GSPO paper starts RL from such a model, which knows the format and is sometimes right. Ours is
trained on the answers of a teacher that makes a systematic error (running_sum.py): for a 9 it adds
8 more often than 9. The most likely response is therefore wrong, and RL has to raise the
probability of a less likely, right one; sharpening the distribution would not help. The model is
cached in runs/cold_start, in a folder named by a hash of everything that determines it (the code of
moe.py, routes.py and this file included), and shared by all algorithms.
"""

import ast
import copy
import hashlib
import inspect
import json
import os
import random
import shutil
import sys
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import Qwen3MoeConfig

from moe import TinyMoE
from plumbing.data import running_sum
from plumbing.data.task import encode_text
from plumbing.engines.responses import pad_right
from plumbing.parallel import processes
from plumbing.refusal import refuse_os_errors
from rollout import Rollout, Scorer, left_pad
from routes import expert_share, load_balancing_loss


CACHE = Path("runs/cold_start")
BATCH = 32              # rows per supervised step
WARMUP = 30             # steps in which the learning rate rises
BALANCE = 0.01          # load-balancing coefficient
INIT_STD = 0.08         # standard deviation of the random weights
SHALLOW = 4             # layers up to which the random weights are used as they are


def make_tiny_config(settings, tokenizer):
    """The shape of the built-in policy: a Qwen3-MoE, by default of about a million parameters in
    four layers (gspo.py's has two and half a million)."""
    K = settings.num_experts_per_tok
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=settings.hidden_size, num_attention_heads=4,
        num_hidden_layers=settings.num_hidden_layers, num_key_value_heads=4,
        head_dim=settings.hidden_size // 4, num_experts=settings.num_experts, num_experts_per_tok=K,
        moe_intermediate_size=2 * settings.hidden_size // K,  # active weights do not depend on K
        intermediate_size=2 * settings.hidden_size,
        norm_topk_prob=K > 1,  # one normalized gate is always 1: the router would get no gradient
        tie_word_embeddings=False, max_position_embeddings=2048, bos_token_id=None,
        initializer_range=INIT_STD, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id)


def load_cold_start(settings, task, device):
    """(policy, tokenizer) after the supervised warm-up, from the cache or trained now."""
    tokenizer = running_sum.builtin_tokenizer(task.characters)
    config = make_tiny_config(settings, tokenizer)
    recipe = dict(task=task.name, config=config.to_diff_dict(), steps=settings.cold_start_steps,
                  learning_rate=settings.cold_start_learning_rate, seed=settings.seed,
                  torch=torch.__version__,
                  code=[ast.unparse(ast.parse(inspect.getsource(sys.modules[name])))
                        for name in ("moe", "routes", __name__)],         # without comments
                  teacher=read_sources(inspect.getfile(task.teacher)),
                  problems=digest(repr([(p.prompt, p.answer, p.row) for p in task.train])))
    recipe = json.dumps(recipe, sort_keys=True)
    folder = CACHE / digest(recipe)[:12]
    # only the first process trains it: transformers lets no other process write a model
    processes.on_first(lambda: folder.is_dir() or train_cold_start(
        settings, task, config, tokenizer, device, folder, recipe))
    policy = TinyMoE.from_pretrained(folder).to(device)
    policy.name_or_path = str(folder.resolve())
    return policy, tokenizer


@refuse_os_errors()
def train_cold_start(settings, task, config, tokenizer, device, folder, recipe):
    """Train the tiny MoE and write it to the folder."""
    torch.manual_seed(settings.seed)
    policy = scale_residual(TinyMoE(config)).to(device)
    supervise(policy, tokenizer, task, settings)
    partial = folder.with_name(f".partial-{folder.name}-{os.getpid()}")
    policy.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / "recipe.json").write_text(recipe, encoding="utf-8")
    if folder.is_dir():                  # another run, which began with this one, has made it
        shutil.rmtree(partial)
    else:
        os.rename(partial, folder)       # at once, so that no folder is half written


@refuse_os_errors()
def read_sources(file):
    """The text of all Python files that this process has loaded from the folder of one of them.
    Raises Refusal if there is no such file: what was typed into `python -` has none."""
    folder = Path(file).resolve(strict=True).parent
    loaded = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    return [Path(name).read_text(encoding="utf-8") for name in sorted(loaded)
            if name.endswith(".py") and "site-packages" not in name
            and Path(name).is_relative_to(folder)]


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


@torch.no_grad()
def scale_residual(policy):
    """Multiply the random weights of o_proj and down_proj, which write to the residual stream, so
    that L layers add as much variance to it as 4 (GPT-2, Radford et al. 2019, section 2.3, scales
    by 1 / sqrt(N)). Without it a TinyMoE of 48 layers learns nothing. Up to 4 layers change
    nothing."""
    layers = policy.config.num_hidden_layers
    for name, weight in policy.named_parameters():
        if layers > SHALLOW and ("o_proj" in name or "down_proj" in name):
            weight.mul_((SHALLOW / layers) ** 0.5)
    return policy


def supervise(policy, tokenizer, task, settings):
    """Train on the teacher's answers by next-token cross-entropy; prompt tokens are not in the
    loss."""
    rng = random.Random(settings.seed)
    steps = settings.cold_start_steps
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.cold_start_learning_rate,
                                  betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / WARMUP, 1.0) * half_cosine(i / max(steps, 1)))
    policy.train()
    scorer = Scorer(policy)
    for _ in tqdm(range(steps), desc="supervised warm-up", disable=None, leave=False):
        problems = [task.train[rng.randrange(len(task.train))] for _ in range(BATCH)]
        answers = [task.teacher(copy.deepcopy(p.row) if task.played else p, rng)
                   for p in problems]
        batch = make_teacher_rollout(policy, tokenizer, problems, answers)
        scores = scorer(batch, record=True)
        logp = scores.logp                                                          # [B, T]
        indices, logits = scores.routes                                             # [L, B, T, ·]
        share = expert_share(indices, batch.mask, logits.shape[-1])                 # [L, E]
        balance = load_balancing_loss(logits, batch.mask, share)
        loss = -logp.sum() / batch.mask.sum() + BALANCE * balance
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def half_cosine(progress):
    """Learning-rate factor: 1 for the first half of the steps, then a cosine decay to 0."""
    angle = torch.tensor(torch.pi * (2 * progress - 1))
    return 1.0 if progress < 0.5 else 0.5 * (1 + torch.cos(angle).item())


def make_teacher_rollout(policy, tokenizer, problems, answers):
    """The teacher's answers as a Rollout with one response per prompt. The end-of-sequence token is
    a loss token. An answer is a text, or for a game a list: turns, and before and between them what
    the policy reads, which is not in the loss."""
    prompts = [encode_text(tokenizer, p.prompt) for p in problems]
    ids = []
    written = []
    for answer in answers:
        texts = [answer] if isinstance(answer, str) else answer
        pieces = [encode_text(tokenizer, text) for text in texts]
        pieces[-1] = [*pieces[-1], tokenizer.eos_token_id]
        ids.append(sum(pieces, []))
        turn = len(pieces) % 2 == 0                          # the last piece is one
        written.append([(i % 2 == 1) == turn for i, piece in enumerate(pieces) for _ in piece])
    device = policy.device
    pad = tokenizer.pad_token_id
    response = pad_right(ids, pad).to(device)                                       # [B, T]
    mask = pad_right(written, False).to(device)                                         # [B, T]
    return Rollout(*left_pad(prompts, pad, device), response, mask, torch.zeros(mask.shape),
                   torch.zeros(len(ids), dtype=torch.bool), answers, 1)
