"""Load the policy: a checkpoint, checked before use, or the built-in tiny MoE after its supervised
warm-up (cold_start.py)."""

import importlib.util
import math
import re
from functools import partial
from pathlib import Path

import torch
from transformers.cache_utils import DynamicLayer
from transformers import (MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM,
                          AutoTokenizer)

from moe import TinyMoE
from plumbing.model.adapters import find_base_model, is_adapter, read_adapters
from plumbing.model.chat import add_turn_end, describe_prompts
from plumbing.model.cold_start import load_cold_start
from plumbing.refusal import Refusal, is_bug
from plumbing.speed.experts import move_to_device
from plumbing.speed.fast import MIN_PREFIX, fast_response_logp, fast_sample
from rollout import response_logp, sample
from routes import UnknownRouter, find_routers, record_routes

SMOLLM2 = Path("checkpoints/SmolLM2-135M-Instruct")         # of the commands in docs/
CLOSE = 1e-3            # largest rounding error of a log-prob, relative to 1 + |log-prob|, in nats


def load_policy(settings, task, device, folder=None, transform=lambda policy: policy,
                base_only=False):
    """(policy, tokenizer) on the device in float32: a checkpoint, ours or Hugging Face's, or the
    built-in tiny MoE. transform: a function applied to the loaded policy. base_only: of an
    adapter's checkpoint, load its base model alone.

    Raises Refusal for a folder that is missing, is not a checkpoint or has no safetensors file
    (pickled weights are not read, remote code is not executed), and for a model whose log-probs
    would be wrong in this code without an error.
    """
    name = folder or settings.model_name_or_path
    if name is None:
        policy, tokenizer = load_cold_start(settings, task, device)
        return transform(policy).to(device), tokenizer
    name = str(name)
    if is_adapter(name):
        return load_with_adapters(settings, task, device, name, transform, base_only)
    try:
        policy, tokenizer = read_checkpoint(name)
    except Refusal as error:
        raise Refusal(f"--model_name_or_path {name} cannot be loaded: {error}") from error

    try:
        policy.name_or_path = name
        if task and task.chat_template and not settings.resume:
            add_turn_end(policy, tokenizer)
        policy = move_to_device(transform(policy), device).eval()
        check_log_probs(policy, tokenizer)
        check_length(policy, task)
        check_routers(policy)
    except Refusal as error:
        raise Refusal(f"--model_name_or_path {name}: {error}") from error
    return policy, tokenizer


def load_with_adapters(settings, task, device, name, transform, base_only):
    """load_policy of an adapter's checkpoint."""
    base_name = find_base_model(name)
    load = partial(load_policy, settings, task, device, base_name)
    try:
        base = load(transform) if base_only else load()
    except Refusal as error:
        raise Refusal(f"{name} needs its base model: {error}") from error
    if base_only:
        return base
    policy, tokenizer = base
    policy = read_adapters(policy, name)
    policy.name_or_path = name
    return transform(policy).to(device), tokenizer


# ------------------------------------------------------------------------------- reading the files

def read_checkpoint(name):
    """(policy, tokenizer) from a folder or the hub, in float32. Raises Refusal if that is not
    possible or a weight, the tokenizer or the config is missing."""
    if steps := [*Path(name).glob("checkpoints/step_*"), *Path(name).glob("step_*")]:
        names = ", ".join(sorted(map(str, steps)))
        raise Refusal(f"it is the folder of a run; its checkpoints: {names}")
    if message := explain_missing(name):
        raise Refusal(message)
    if Path(name).exists() and not (Path(name) / "config.json").is_file():
        raise Refusal("no config.json there; it must be a Hugging Face checkpoint folder or a "
                      "hub id")
    policy, loading = read_or_describe(read_model, name)
    if loading["missing_keys"]:
        lacking = ", ".join(sorted(loading["missing_keys"]))
        raise Refusal(f"its weights lack {lacking}, which would be random numbers")
    if loading["mismatched_keys"]:
        key, shape, needed = sorted(loading["mismatched_keys"])[0]
        raise Refusal(f"its weight {key} has the shape {list(shape)}, its config.json needs "
                      f"{list(needed)}")
    if getattr(policy, "is_quantized", False):
        raise Refusal("its weights are quantized, which cannot be trained: save them in 16 or "
                      "32 bits first")
    for key, weight in policy.named_parameters():
        if not weight.isfinite().all():
            raise Refusal(f"its weight {key} holds numbers that are not finite")
    policy = take_text_part(policy.float())
    policy.unused_weights = sorted(loading["unexpected_keys"])
    tokenizer = read_or_describe(AutoTokenizer.from_pretrained, name, trust_remote_code=False)
    check_tokenizer(policy, tokenizer)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return policy, tokenizer


def read_or_describe(read, name, **options):
    """read(name, **options). Raises Refusal in place of the errors of every kind that configs,
    quantizers and tokenizers raise, and of moe.py's ValueError."""
    try:
        return read(name, **options)
    except Exception as error:
        if is_bug(error) and not isinstance(error, ValueError):
            raise
        raise Refusal(describe(error)) from error


def read_model(name):
    """(model, its "missing_keys", "mismatched_keys", …) as transformers loads it."""
    if AutoConfig.from_pretrained(name, trust_remote_code=False).model_type == "qwen3_moe":
        return TinyMoE.from_pretrained(name), dict.fromkeys(
            ("missing_keys", "mismatched_keys", "unexpected_keys"), ())
    return AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, use_safetensors=True, trust_remote_code=False,
        ignore_mismatched_sizes=True, output_loading_info=True)


def describe(error):
    """An error of transformers in one line: its kind and its first sentence."""
    words = " ".join(str(error).split())
    if "CONVERSION" in words:       # transformers joins the experts' weights while it reads them
        words = "some experts' weights are missing or misshapen."
    if "`tiktoken`" in words and not importlib.util.find_spec("sentencepiece"):
        words = "tokenizer.model needs a package: pip install sentencepiece."
    sentence = re.split(r"(?<=[^.\d])\.(?= [A-Z]|$)", words)[0]
    return f"{type(error).__name__}: {sentence[:300]} (GSPO_TRACEBACK=1 shows where)"


def take_text_part(model):
    """The language model inside a multimodal model, with the same weights; other models are
    returned as they are. Raises Refusal if transformers has no class for it alone."""
    config = model.config.get_text_config()
    if config is model.config:
        return model
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise Refusal(f"{type(model).__name__} is multimodal, and transformers has no class for "
                      "its text part alone")
    with torch.device("meta"):
        policy = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    setattr(policy, policy.base_model_prefix, model.get_decoder())
    policy.set_output_embeddings(model.get_output_embeddings())
    policy.generation_config = model.generation_config
    return policy


def explain_missing(name):
    """What to print about a local path that does not exist; "" for a path that exists, and for a
    name that may be a hub id."""
    local = name.startswith((".", "/", "~", "checkpoints/", "runs/")) or name.count("/") > 1
    if Path(name).exists() or not local:
        return ""
    makes = "; python tests/make_smollm2.py makes it" if Path(name) == SMOLLM2 else ""
    return f"there is no such folder{makes}"


# ---------------------------------------------------------------- refused: what would be wrong here

def check_tokenizer(policy, tokenizer):
    """Refuse a tokenizer that is made up, belongs to another model or cannot pad."""
    if len(tokenizer) < 3:
        raise Refusal("it has no tokenizer, and transformers makes up an empty one")
    known = policy.get_output_embeddings().weight.shape[0]
    largest = max(tokenizer.get_vocab().values())
    if largest >= known:
        raise Refusal(f"its tokenizer has token {largest}, its model has {known} tokens: they "
                      "do not belong together")
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None:
        raise Refusal("its tokenizer has neither an eos token, which ends a response, nor a pad "
                      'token: name them in tokenizer_config.json ("eos_token")')


def check_length(policy, task):
    """Refuse rows that may be longer than those whose log-probs are right."""
    limit = find_max_length(policy)
    if task and limit and task.max_prompt_length + task.max_completion_length > limit:
        raise Refusal(
            f"its log-probs are right for rows of at most {limit} tokens: it has a table of so "
            "many positions, or a RoPE that depends on the longest row of a batch; lower "
            f"--max_prompt_length {task.max_prompt_length} or --max_completion_length "
            f"{task.max_completion_length}: their sum may be at most {limit}")


def find_max_length(policy):
    """The largest number of tokens in a row whose log-probs are right; None: any number. A model
    without rotary positions has a table of positions that ends (GPT-2, OPT); the frequencies of
    some RoPEs depend on the longest row of the batch."""
    config = policy.config
    longest = getattr(config, "max_position_embeddings", None)
    ropes = list_ropes(config)
    limits = [rope.get("original_max_position_embeddings") or longest
              for rope in ropes if rope["rope_type"] in ("dynamic", "longrope")]
    return min(limits, default=None) if ropes else longest


def list_ropes(config):
    """The parameters of the model's RoPEs, one for each kind of layer; [] without any."""
    ropes = getattr(config, "rope_parameters", None) or {}
    return [ropes] if "rope_type" in ropes else [*ropes.values()]


def describe_fit(policy, tokenizer, task):
    """Notes on prompts (describe_prompts), on weights of the checkpoint that the model does not
    use, and on rows longer than its positions."""
    notes = [] if task.one_width else describe_prompts(task, tokenizer)
    if unused := getattr(policy, "unused_weights", ()):
        notes.append(f"note: {type(policy).__name__} does not use {len(unused)} weight(s) of "
                     f"the checkpoint, such as {', '.join(unused[:3])}")
    known = getattr(policy.config, "max_position_embeddings", None) or math.inf
    known = max([known, *((rope.get("factor") or 1) * (
        rope.get("original_max_position_embeddings") or 0) for rope in list_ropes(policy.config))])
    longest = max(map(len, task.ids.values())) + task.max_completion_length
    if longest > known:
        notes.append(f"note: rows can have {longest} tokens, more than the model's "
                     f"max_position_embeddings of {known:g}")
    return "\n".join(notes)


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
            expected = score_one_by_one(policy, drawn)                              # [B, T]
            scored = score(policy, drawn, entropy=False).logp                       # [B, T]
            for part, logp in (("sampling", drawn.sampler_logp), ("scoring", scored)):
                error = (logp - expected).abs()                                     # [B, T]
                close = error < CLOSE * (1 + expected.abs())              # [B, T]  False for NaN
                wrong += [] if close.all() else [f"{part} ({name})"]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the model's own code may raise anything
        if is_bug(error) and not lacks_output(error):
            raise
        raise Refusal(f"{type(policy).__name__} is not supported: sampling or scoring fails: "
                      f"{describe(error)}") from error
    if wrong:
        raise Refusal(f"{type(policy).__name__} is not supported: in padded batches its "
                      f"log-probs are wrong in {', '.join(wrong)}")


def lacks_output(error):
    """Whether the error is about an attribute that the model's output does not have, or a layer of
    the cache that it has not filled."""
    lacks = getattr(error, "obj", None)
    return isinstance(lacks, DynamicLayer) or type(lacks).__module__.startswith("transformers.")


def score_one_by_one(model, rollout):
    """Log-probs [B, T] of the response tokens from the model's logits, one forward per response,
    without padding."""
    logp = torch.zeros_like(rollout.sampler_logp)                                   # [B, T]
    for row, mask in enumerate(rollout.mask):
        prompt = rollout.prompt_ids[row][rollout.prompt_mask[row]]                  # [p]
        ids = torch.cat([prompt, rollout.response_ids[row][mask]])                  # [p+t]
        every = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)   # [p+t-1, V]
        logp[row, mask] = every.gather(-1, ids[1:, None])[len(prompt) - 1:, 0]      # [t]
    return logp


@torch.no_grad()
def check_routers(policy):
    """Refuse a policy with routers of a kind that cannot be recorded."""
    if find_routers(policy):
        try:
            with record_routes(policy):
                policy(input_ids=torch.tensor([[0, 1]], device=policy.device))
        except UnknownRouter as error:
            raise Refusal(str(error)) from None
