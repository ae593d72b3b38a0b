"""Where the policy comes from: a checkpoint, or a cold start of the built-in tiny MoE.

The GSPO paper starts RL from a cold-start model, which knows the format and is right now and then.
Ours is supervised on a teacher with a bad habit (tasks.running_sum): for a 9 it adds 8 more often
than 9, so the likeliest answer is wrong and RL has to raise the rarer, right one; sharpening would
not do. It is kept under runs/, in a folder named by a hash of all that made it, and serves every
algorithm.
"""

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

import rollout as plain
from moe import TinyMoE
from plumbing.data import tasks
from plumbing.speed import fast, processes
from plumbing.model.adapters import add_adapters, base_of, is_adapter, merged
from plumbing.speed.cutting import response_routes
from plumbing.speed.experts import on_its_device
from plumbing.run.folder import write_text
from rollout import Rollout, left_pad, response_logp
from routes import (expert_share, has_sigmoid, load_balancing_loss, record_routes, replay_routes,
                    routers_of)

CACHE = Path("runs/cold_start")
BATCH, WARMUP = 32, 30  # cold start: rows per step, steps of warm-up
BALANCE = 0.01          # its load-balancing coefficient
INIT_STD = 0.08         # of random weights
MUST_PASS = 0.3         # below this pass@1 nothing has been learnt, and RL has nothing to work with
CLOSE = 1e-3            # nats that rounding may make of each nat of a log-prob


def load_policy(args, task, device, folder=None):
    """(policy, tokenizer) on the device in float32: from a checkpoint, ours or Hugging Face's, or
    the built-in tiny MoE after its cold start.

    Raises ValueError for a folder that is missing, unknown, or has no safetensors (nothing pickled
    is read, no remote code is run), and for a model that would be silently wrong here.
    """
    name = folder or args.model_name_or_path
    if name is None:
        return cold_start(args, task, device)
    name = str(name)
    if is_adapter(name):
        policy, tokenizer = load_policy(args, task, device, base_of(name))
        return merged(add_adapters(policy, args, name)), tokenizer
    try:
        policy, tokenizer = read_checkpoint(name)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        words = " ".join(str(error).split())
        if "CONVERSION" in words:  # transformers joins the experts' weights while it reads them
            words = "some experts' weights are missing or misshapen"
        raise ValueError(f"--model_name_or_path {name} cannot be loaded: {words[:300]}") from None

    policy = on_its_device(policy.float(), device).eval()
    policy.name_or_path = name
    try:
        check_length(policy.config, args)
        check_log_probs(policy, tokenizer)
        check_routers(policy, args)
    except ValueError as error:
        raise ValueError(f"--model_name_or_path {name}: {error}") from None
    return policy, tokenizer


def read_checkpoint(name):
    """(policy, tokenizer) from a folder or the hub, every weight from the checkpoint."""
    if Path(name).exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        if not (Path(name) / "config.json").is_file():
            raise ValueError("no config.json there; it must be a Hugging Face checkpoint folder or "
                             "a hub id")
        if not any(Path(name).glob("*.safetensors")):
            raise ValueError("no .safetensors weights there; pickled weights are not read (they "
                             "can run code), convert them")
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if config.model_type == "qwen3_moe":
        policy = TinyMoE.from_pretrained(name)
    else:
        policy, found = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
            output_loading_info=True)
        if found["missing_keys"]:
            raise ValueError(f"its weights lack {', '.join(sorted(found['missing_keys']))}, which "
                             "would be random numbers")
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if len(tokenizer) < 3:
        raise ValueError("it has no tokenizer, and transformers makes up an empty one")
    known = policy.get_output_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values())
    if largest >= known:
        raise ValueError(f"its tokenizer has token {largest}, its model has {known} tokens: they "
                         "do not belong together")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return policy, tokenizer


# ---------------------------------------------------------------- refused: what would be wrong here

def check_length(config, args):
    """Refuse rotary frequencies that follow the longest row of a batch: log-probs would too."""
    ropes = getattr(config, "rope_parameters", None) or {}
    ropes = [ropes] if "rope_type" in ropes else ropes.values()  # or one for each kind of layer
    for rope in ropes:
        if rope["rope_type"] not in ("dynamic", "longrope"):
            continue
        limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if args.max_prompt_length + args.max_completion_length > limit:
            raise ValueError(
                f"beyond {limit} tokens its {rope['rope_type']} RoPE follows the longest row of a "
                f"batch, and so would log-probs; --max_prompt_length {args.max_prompt_length} + "
                f"--max_completion_length {args.max_completion_length} may pass that: lower them")


@torch.no_grad()
def check_log_probs(policy, tokenizer):
    """Refuse a model whose log-probs would be silently wrong: sampled and scored, the plain and the
    quick way, with padding and a shared prefix, they must be those of its own logits for one
    unpadded sequence at a time."""
    ids = [(7 * i + 3) % policy.config.vocab_size for i in range(fast.MIN_PREFIX + 8)]
    prompts = [ids[:-5], ids[:-6] + ids[-4:]]  # they begin alike and are of unequal length
    uniforms = torch.tensor([[0.1, 0.3, 0.5], [0.9, 0.7, 0.5]]).repeat(2, 1)        # [B, T]
    wrong = []
    try:
        for name, way in (("plain", plain), ("quick", fast)):
            drawn = way.sample(policy, tokenizer, prompts, 2, 3, uniforms=uniforms)
            own = own_logp(policy, drawn)                                           # [B, T]
            scored = way.response_logp(policy, drawn, entropy=False).logp           # [B, T]
            for part, logp in (("sampling", drawn.sampler_logp), ("scoring", scored)):
                close = (logp - own).abs() < CLOSE * (1 + own.abs())      # [B, T]  nan is not close
                wrong += [] if close.all() else [f"{part} the {name} way"]
    except Exception as error:  # whatever the model's own code raises
        wrong = [f"sampling and scoring ({' '.join(str(error).split())[:200]})"]
    if wrong:
        raise ValueError(f"{type(policy).__name__} is not supported: in padded batches "
                         f"{', '.join(wrong)} does not give its own log-probs")


def own_logp(model, rollout):
    """Log-probs [B, T] of a rollout's tokens by the model's own logits, a forward per response."""
    logp, G = torch.zeros_like(rollout.sampler_logp), rollout.group_size            # [B, T]
    for row, mask in enumerate(rollout.mask):
        prompt = rollout.prompt_ids[row // G][rollout.prompt_mask[row // G]]        # [p]
        ids = torch.cat([prompt, rollout.response_ids[row][mask]])                  # [p+t]
        every = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)   # [p+t-1, V]
        logp[row, mask] = every.gather(-1, ids[1:, None])[len(prompt) - 1:, 0]      # [t]
    return logp


@torch.no_grad()
def check_routers(policy, args):
    """Refuse flags about routers that this policy has not, or not of a kind that they know."""
    asked = [flag for flag, on in (("rspo", args.objective == "rspo"),
                                   ("--routing_replay", args.routing_replay != "none"),
                                   ("--router_aux_loss_coef", args.router_aux_loss_coef)) if on]
    if asked and not routers_of(policy):
        raise ValueError("it is dense, or its routers are not modules of their own: no "
                         f"{', no '.join(asked)}")
    if not routers_of(policy):
        return
    ids = torch.tensor([[0, 1]], device=policy.device)
    with record_routes(policy) as routes:
        policy(input_ids=ids)
    if asked:
        with replay_routes(policy, routes):
            policy(input_ids=ids)
    if "rspo" in asked and has_sigmoid(policy):
        raise ValueError("rspo's router shift is one of probabilities, and the routers of "
                         f"{type(policy).__name__} score each expert by a sigmoid")


# -------------------------------------------------------------------------------------- cold start

def tiny_config(args, tokenizer):
    """The shape of the built-in policy: a Qwen3-MoE of about a million parameters."""
    K = args.num_experts_per_tok
    return Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=args.hidden_size, num_attention_heads=4,
        num_hidden_layers=args.num_hidden_layers, num_key_value_heads=4,
        head_dim=args.hidden_size // 4, num_experts=args.num_experts, num_experts_per_tok=K,
        moe_intermediate_size=2 * args.hidden_size // K,  # as many weights at work whatever K is
        intermediate_size=2 * args.hidden_size,
        norm_topk_prob=K > 1,  # a single renormalised gate is always 1: its router would not learn
        tie_word_embeddings=False, max_position_embeddings=2048, bos_token_id=None,
        initializer_range=INIT_STD, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id)


def cold_start(args, task, device):
    """-> (policy, tokenizer), from the cache or trained now. Raises ValueError if it did not learn
    enough for RL to begin."""
    tokenizer = tasks.builtin_tokenizer(task.characters)
    config = tiny_config(args, tokenizer)
    recipe = dict(task=task.name, config=config.to_diff_dict(), steps=args.cold_start_steps,
                  learning_rate=args.cold_start_learning_rate, batch=BATCH, warmup=WARMUP,
                  balance=BALANCE, seed=args.seed, torch=torch.__version__,
                  problems=digest(task.train))  # and their order
    folder = CACHE / digest(recipe)[:12]
    # one process makes it: of several, transformers lets only the first write a model
    processes.on_first(lambda: folder.is_dir() or make_cold_start(args, task, config, tokenizer,
                                                                  device, folder, recipe))
    policy = on_its_device(TinyMoE.from_pretrained(folder), device)
    policy.name_or_path = str(folder.resolve())
    return policy, tokenizer


def make_cold_start(args, task, config, tokenizer, device, folder, recipe):
    """Train it and write it to the folder. Raises ValueError if it learnt too little."""
    torch.manual_seed(args.seed)
    policy = on_its_device(TinyMoE(config), device)
    supervise(policy, tokenizer, task, args)
    passed = share_right(policy, tokenizer, task)
    if passed < MUST_PASS:
        raise ValueError(f"the cold start failed: pass@1 {passed:.2f}, RL needs at least "
                         f"{MUST_PASS}; try more --cold_start_steps (now {args.cold_start_steps}), "
                         "another --seed or shorter sums")
    partial = folder.with_name(f".partial-{folder.name}-{os.getpid()}")
    policy.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    write_text(partial / "recipe.json", json.dumps(recipe | {"pass_at_1": passed}, indent=1))
    try:
        os.rename(partial, folder)
    except OSError:  # another run made the same one meanwhile
        shutil.rmtree(partial)


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def share_right(policy, tokenizer, task, samples=4):
    """The share of right answers to up to 128 held-out problems."""
    problems, width = task.test[:128], tasks.longest_answer(task)
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(len(problems) * samples, width, generator=generator)      # [B, T]
    rollout = fast.sample(policy, tokenizer, [p.prompt for p in problems], samples, width,
                          uniforms=uniforms, tool=task.tool)
    right = [task.verify(text, problems[i // samples]) for i, text in enumerate(rollout.texts)]
    return sum(reward >= 1 for reward in right) / len(right)


def supervise(policy, tokenizer, task, args):
    """Next-token cross-entropy on the teacher's answers; prompts are given, not learnt."""
    rng, steps = random.Random(args.seed), args.cold_start_steps
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.cold_start_learning_rate,
                                  betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / WARMUP, 1.0) * half_cosine(i / max(steps, 1)))
    policy.train()
    for _ in tqdm(range(steps), desc="cold start", disable=None, leave=False):
        problems = [task.train[rng.randrange(len(task.train))] for _ in range(BATCH)]
        batch = taught(policy, tokenizer, problems, [task.teacher(p, rng) for p in problems],
                       task.tool)
        with record_routes(policy) as routes:
            logp = response_logp(policy, batch, entropy=False).logp                 # [B, T]
        indices, logits = response_routes(routes, batch)                            # [L, B, T, ·]
        share = expert_share(indices, batch.mask, logits.shape[-1])                 # [L, E]
        balance = load_balancing_loss(logits, batch.mask, share)
        loss = -logp.sum() / batch.mask.sum() + BALANCE * balance
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def half_cosine(progress):
    """1 for the first half, then down to 0 along a cosine."""
    angle = torch.tensor(torch.pi * (2 * progress - 1))
    return 1.0 if progress < 0.5 else 0.5 * (1 + torch.cos(angle).item())


def taught(policy, tokenizer, problems, answers, tool=None):
    """The teacher's answers in the form of a rollout: one response per prompt, its end-of-sequence
    token a loss token, what the tool inserted none."""
    prompts = [tokenizer(p.prompt)["input_ids"] for p in problems]
    ids = [tokenizer(a)["input_ids"] + [tokenizer.eos_token_id] for a in answers]
    width, pad, device = max(map(len, ids)), tokenizer.pad_token_id, policy.device
    response = torch.tensor([i + [pad] * (width - len(i)) for i in ids], device=device)  # [B, T]
    lengths = torch.tensor([len(i) for i in ids], device=device)                    # [B]
    mask = torch.arange(width, device=device) < lengths[:, None]                    # [B, T]
    for row, answer in enumerate(answers if tool else ()):   # a character is a token
        read = 0
        while read < len(answer):
            read += 1
            said = len(tool(answer[:read]))
            mask[row, read:read + said] = False
            read += said
    return Rollout(*left_pad(prompts, pad, device), response, mask, torch.zeros(mask.shape),
                   torch.zeros(len(ids), dtype=torch.bool), answers, 1)
