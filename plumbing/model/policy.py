"""Load the policy: a checkpoint, checked before use, or the built-in tiny MoE after its cold start
(cold_start.py)."""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from moe import TinyMoE
from plumbing.model.checksums import check_sound, checkpoints_in
from plumbing.model.cold_start import cold_start
from plumbing.speed.experts import on_its_device
from plumbing.speed.fast import MIN_PREFIX, fast_response_logp, fast_sample
from rollout import response_logp, sample
from routes import record_routes, routers_of

POSITIONS = re.compile(r"\bwpe$|pos\w*_emb|emb\w*_pos|_positions?$")     # names of their embeddings
SMOLLM2 = Path("checkpoints/SmolLM2-135M-Instruct")         # of the commands in docs/
CLOSE = 1e-3            # largest rounding error of a log-prob, relative to 1 + |log-prob|, in nats


def load_policy(settings, task, device, folder=None, change=None, apart=False):
    """(policy, tokenizer) on the device in float32: a checkpoint, ours or Hugging Face's, or the
    built-in tiny MoE after its cold start. change: a function of the policy as it was read -> what
    takes its place. apart: of a checkpoint that adds to another one, such as adapters, the other
    one alone.

    Raises ValueError for a folder that is missing, is not a checkpoint or has no safetensors file
    (pickled weights are not read, remote code is not executed), and for a model whose log-probs
    would be wrong in this code without an error.
    """
    name = folder or settings.model_name_or_path
    if name is None:
        policy, tokenizer = cold_start(settings, task, device)
        return (change(policy).to(device) if change else policy), tokenizer
    name = str(name)
    check_sound(name, "--model_name_or_path")
    if reader := settings.reader_of(name):
        return load_both(settings, task, device, name, reader, change, apart)
    try:
        policy, tokenizer = read_checkpoint(name)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        words = " ".join(str(error).split())
        if "CONVERSION" in words:  # transformers joins the experts' weights while it reads them
            words = "some experts' weights are missing or misshapen"
        raise ValueError(f"--model_name_or_path {name} cannot be loaded: {words[:300]}") from None

    policy = policy.float()
    try:
        policy.name_or_path = name
        policy = on_its_device(change(policy) if change else policy, device).eval()
        check_length(policy, settings.max_prompt_length, task)
        check_log_probs(policy, tokenizer)
        check_routers(policy)
    except ValueError as error:
        raise ValueError(f"--model_name_or_path {name}: {error}") from None
    return policy, tokenizer


def load_both(settings, task, device, name, reader, change, apart):
    """load_policy of a checkpoint that adds to another one. reader: the feature that reads it."""
    try:
        base = load_policy(settings, task, device, reader.base_of(name), change if apart else None)
    except ValueError as error:
        raise ValueError(f"{name} needs its base model: {error}") from None
    if apart:
        return base
    policy, tokenizer = base
    policy = reader.read(policy, name)
    policy.name_or_path = name
    return (change(policy).to(device) if change else policy), tokenizer


def read_checkpoint(name):
    """(policy, tokenizer) from a folder or the hub. Raises ValueError if a weight, the tokenizer or
    the config is missing from the checkpoint."""
    if steps := checkpoints_in(Path(name) / "checkpoints") or checkpoints_in(Path(name)):
        raise ValueError(f"it is the folder of a run; its checkpoint is {steps[-1][1]}")
    if words := not_there(name):
        raise ValueError(words)
    if Path(name).exists():
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
        policy, loading = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
            output_loading_info=True)
        if loading["missing_keys"]:
            lacking = ", ".join(sorted(loading["missing_keys"]))
            raise ValueError(f"its weights lack {lacking}, which would be random numbers")
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


def not_there(name):
    """What to say of a local path that does not exist; "" for a path that exists, and for a name
    that may be a hub id."""
    local = name.startswith((".", "/", "~", "checkpoints/", "runs/")) or name.count("/") > 1
    if Path(name).exists() or not local:
        return ""
    makes = "; python tests/make_smollm2.py makes it" if Path(name) == SMOLLM2 else ""
    return f"there is no such folder{makes}"


# ---------------------------------------------------------------- refused: what would be wrong here

def check_length(policy, longest, task):
    """Refuse rows that may be longer than those whose log-probs are right. longest: tokens of a
    prompt."""
    limit = most_tokens(policy)
    if task and limit and longest + task.max_completion_length > limit:
        raise ValueError(
            f"its log-probs are right for rows of at most {limit} tokens: it has a table of so "
            "many positions, or a RoPE that depends on the longest row of a batch; lower "
            f"--max_prompt_length {longest} or --max_completion_length "
            f"{task.max_completion_length}: their sum may be at most {limit}")


def most_tokens(policy):
    """The largest number of tokens in a row whose log-probs are right; None: any number. Beyond it
    a table of position embeddings ends, or the frequencies of a RoPE depend on the longest row of
    the batch."""
    config = policy.config
    ropes = getattr(config, "rope_parameters", None) or {}
    ropes = [ropes] if "rope_type" in ropes else ropes.values()  # or one for each kind of layer
    limits = [rope.get("original_max_position_embeddings") or config.max_position_embeddings
              for rope in ropes if rope["rope_type"] in ("dynamic", "longrope")]
    table = positions_in_table(policy)
    return min(limits if table is None else [*limits, table], default=None)


def positions_in_table(policy):
    """The number of positions in a model's table of position embeddings (GPT-2, OPT, GPT-J); None
    for a model that computes them (RoPE, ALiBi)."""
    limit = getattr(policy.config, "max_position_embeddings", None)
    tables = [module.num_embeddings - getattr(module, "offset", 0) for name, module
              in policy.named_modules()
              if isinstance(module, torch.nn.Embedding) and POSITIONS.search(name)]
    tables += [buffer.shape[0] for name, buffer in policy.named_buffers()
               if POSITIONS.search(name) and buffer.shape[:1] == (limit,)]
    return min(tables, default=None)


@torch.no_grad()
def check_log_probs(policy, tokenizer):
    """Refuse a model whose log-probs would be wrong in padded batches. The log-probs of sampling
    and of scoring, plain and fast, with padding and a shared prefix, must equal those of the
    model's own logits for each unpadded sequence by itself."""
    ids = [(7 * i + 3) % policy.config.vocab_size for i in range(MIN_PREFIX + 8)]
    prompts = [ids[:-5], ids[:-6] + ids[-4:]]  # they begin alike and are of unequal length
    uniforms = torch.tensor([[0.1, 0.3, 0.5], [0.9, 0.7, 0.5]]).repeat(2, 1)        # [B, T]
    wrong = []
    try:
        for name, draw, score in (("plain", sample, response_logp),
                                  ("fast", fast_sample, fast_response_logp)):
            drawn = draw(policy, tokenizer, prompts, 2, 3, uniforms=uniforms)
            own = own_logp(policy, drawn)                                           # [B, T]
            scored = score(policy, drawn, entropy=False).logp                       # [B, T]
            for part, logp in (("sampling", drawn.sampler_logp), ("scoring", scored)):
                close = (logp - own).abs() < CLOSE * (1 + own.abs())      # [B, T]  False for NaN
                wrong += [] if close.all() else [f"{part} ({name})"]
    except Exception as error:  # the model's own code may raise anything
        wrong = [f"sampling or scoring ({' '.join(str(error).split())[:200]})"]
    if wrong:
        raise ValueError(f"{type(policy).__name__} is not supported: in padded batches its "
                         f"log-probs are wrong in {', '.join(wrong)}")


def own_logp(model, rollout):
    """Log-probs [B, T] of the response tokens from the model's own logits, one forward per
    response."""
    logp = torch.zeros_like(rollout.sampler_logp)                                   # [B, T]
    G = rollout.group_size
    for row, mask in enumerate(rollout.mask):
        prompt = rollout.prompt_ids[row // G][rollout.prompt_mask[row // G]]        # [p]
        ids = torch.cat([prompt, rollout.response_ids[row][mask]])                  # [p+t]
        every = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)   # [p+t-1, V]
        logp[row, mask] = every.gather(-1, ids[1:, None])[len(prompt) - 1:, 0]      # [t]
    return logp


@torch.no_grad()
def check_routers(policy):
    """Refuse a policy with routers of a kind that cannot be recorded."""
    if routers_of(policy):
        with record_routes(policy):
            policy(input_ids=torch.tensor([[0, 1]], device=policy.device))
