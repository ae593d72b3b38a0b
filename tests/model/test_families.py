"""Any family of causal language models: right or refused, nothing in between.

    python -m pytest tests/model/test_families.py -m "slow or not slow"     # two minutes

Each family gets a tiny model with random weights, saved and loaded as a checkpoint. Either
sampling, the log-probs of every path (and their gradient) equal the model's own logits for
one unpadded sequence at a time, with prompts of unequal length that begin alike, at temperature
1.3; or loading refuses it in one line that says why.
"""

import pytest
import torch

import models
from models import gradient, own_logp
from plumbing.data.running_sum import builtin_tokenizer
from plumbing.model.actor import load_trained_policy
from plumbing.model.policy import load_policy
from plumbing.refusal import Refusal
from session.arguments import parse
from plumbing.speed import fast
from plumbing.speed.fast import fast_response_logp, fast_sample
from rollout import response_logp, sample
from tiny_run import slow

TOKENIZER = builtin_tokenizer()
TEMPERATURE, G, T = 1.3, 3, 8
SHAPE = dict(num_hidden_layers=3, max_position_embeddings=256)
GPT2 = dict(n_embd=32, n_layer=3, n_head=4, n_positions=256)
EXPERTS = dict(
    num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=24, moe_num_experts=4, moe_k=2, shared_expert_intermediate_size=16,
    n_shared_experts=1, num_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1)
LATENT = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
              num_key_value_heads=4)
WINDOW = dict(sliding_window=8)  # shorter than prompt and response
LINEAR = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
              linear_value_head_dim=8)


def layers(*kinds):
    names = dict(conv="conv", full="full_attention", linear="linear_attention",
                 sliding="sliding_attention")
    return dict(layer_types=[names[kind] for kind in kinds])


DENSE = {
    **dict.fromkeys("""llama qwen3 gemma phi phi3 stablelm starcoder2 olmo olmo2 glm glm4 nemotron
        smollm3 seed_oss arcee helium ernie4_5 hunyuan_v1_dense apertus diffllama bitnet persimmon
        jais2 internlm3 gpt_neox biogpt""".split(), {}),
    "qwen2": {"vocab_size": 20}, "youtu": LATENT, "gpt2": GPT2, "gptj": GPT2 | dict(rotary_dim=8),
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "xglm": dict(d_model=32, num_layers=3, attention_heads=4, ffn_dim=48),
    "falcon": dict(ffn_hidden_size=48, num_kv_heads=2, new_decoder_architecture=True),
    "llama, eager": {}, "gemma, eager": {}, "gpt2, eager": GPT2,
    "llama, yarn": dict(rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e4,
                                             original_max_position_embeddings=64)),
}
HEADS = {  # something follows the LM head, or stands before it
    "granite": dict(logits_scaling=2.0, embedding_multiplier=1.5, attention_multiplier=0.3),
    "cohere": dict(logit_scale=0.25), "cohere2": WINDOW | dict(logit_scale=0.5),
    "gemma2": WINDOW | dict(final_logit_softcapping=2.0, attn_logit_softcapping=5.0),
}
DISTANCES = {  # attention that depends on more than rotary positions
    "mistral": WINDOW, "ministral": WINDOW, "exaone4": WINDOW, "olmo3": WINDOW,
    "gemma3_text": WINDOW | layers("sliding", "sliding", "full"),
    "bloom": dict(n_head=4, n_layer=3), "mpt": dict(d_model=32, n_heads=4, n_layers=3),
    "falcon, alibi": dict(alibi=True, num_kv_heads=4, multi_query=False),
    "gpt_neo": dict(num_layers=3, attention_types=[[["global", "local", "global"], 1]],
                    window_size=8, num_heads=4),
}
MIXTURES = {
    **dict.fromkeys("""qwen3_moe qwen2_moe mixtral olmoe glm4_moe dots1 ernie4_5_moe hunyuan_v1_moe
        minimax_m2 phimoe flex_olmo""".split(), EXPERTS),
    **dict.fromkeys(["gpt_oss", "exaone_moe", "afmoe"], EXPERTS | WINDOW),
    **dict.fromkeys(["deepseek_v2", "deepseek_v3"], EXPERTS | LATENT),
    "granitemoe": EXPERTS | dict(logits_scaling=2.0), "jetmoe": EXPERTS | dict(kv_channels=8),
    "lfm2_moe": EXPERTS | layers("conv", "full", "conv"),
}
STATES = {  # with layers whose state cannot be copied for several responses: the plain way
    "lfm2": layers("conv", "full", "conv"),
    "jamba": EXPERTS | dict(mamba_d_state=4, mamba_dt_rank=4, attn_layer_period=2,
                            attn_layer_offset=1, use_mamba_kernels=False),
    "qwen3_next": EXPERTS | LINEAR | layers("linear", "full", "linear"),
}
REFUSED = {
    "mamba": dict(state_size=4),
    "recurrent_gemma": dict(lru_width=32, attention_window_size=8, num_key_value_heads=1),
    "rwkv": dict(attention_hidden_size=32, context_length=256),
}
EQUAL = DENSE | HEADS | DISTANCES | MIXTURES | STATES
QUICK = ("gemma2", "granite", "cohere", "mpt", "gpt_neo", "lfm2", "mamba",
         "gpt2", "opt", "bloom", "falcon, alibi", "gemma3_text",
         "llama, eager")  # one of each kind in the default tests


def families(names):
    return pytest.mark.parametrize("name", [
        name if name in QUICK else slow(name) for name in names])


def checkpoint(name, folder):
    """Flags for a tiny model of a family with random weights, norms and biases included."""
    shape = SHAPE | (EQUAL | REFUSED)[name]
    if name.startswith("falcon") and "_" not in name:
        shape["head_dim"] = None                             # a property there
    model = models.make(name.split(",")[0], **shape).float()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.15 if weight.shape[-1] > 8 else 0.3)
            else:
                weight.add_(0.1 * torch.randn_like(weight))
        for part, buffer in model.named_buffers():
            if "correction_bias" in part:
                buffer.normal_(std=0.3)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return f"--model_name_or_path {folder}"


def loaded(flags):
    args = parse(f"{flags} --device cpu --max_prompt_length 64 --max_completion_length 64".split())
    return load_policy(args, None, torch.device("cpu"))[0]


@families(EQUAL)
def test_sampling_and_all_paths_of_scoring_equal_the_models_own_logits(name, tmp_path, monkeypatch):
    """Packed, in two forwards, plain: what cannot be packed must not be."""
    model = loaded(checkpoint(name, tmp_path))
    if "eager" in name:
        model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(1)
    tokens = lambda n: torch.randint(0, 15, (n,), generator=generator).tolist()
    alike = tokens(18)
    prompts = [alike + tokens(n) for n in (1, 4, 7)]
    uniforms = torch.rand(3 * G, T, generator=generator)
    for draw in (fast_sample, sample):
        drawn = draw(model, TOKENIZER, prompts, G, T, TEMPERATURE, uniforms)
        own = own_logp(model, drawn, TEMPERATURE)
        weights = torch.randn(own.shape, generator=torch.Generator().manual_seed(2))
        wanted = gradient(model, (own * weights).sum())
        assert (drawn.sampler_logp - own).abs().max() < 1e-3
        for score, most in ((fast_response_logp, fast.MAX_PACKED), (fast_response_logp, 0),
                            (response_logp, 0)):
            with monkeypatch.context() as patch:
                patch.setattr(fast, "MAX_PACKED", most)
                logp = score(model, drawn, TEMPERATURE).logp
            assert (logp - own).abs().max() < 2e-5
            found = gradient(model, (logp * weights).sum())
            assert (found - wanted).norm() < 1e-4 * wanted.norm()


@families(REFUSED)
def test_what_would_be_wrong_is_refused_in_one_line(name, tmp_path):
    with pytest.raises(Refusal, match="is not supported: in padded batches its log-probs are off"):
        loaded(checkpoint(name, tmp_path))


def test_rspo_on_routers_that_score_by_sigmoids_is_refused_by_name(tmp_path):
    flags = checkpoint("deepseek_v3", tmp_path)
    loaded(f"{flags} --router_aux_loss_coef 0.1")
    with pytest.raises(Refusal, match="softmax of routers, and DeepseekV3ForCausalLM has none"):
        load_trained_policy(parse(f"{flags} --algorithm rspo".split()), None, torch.device("cpu"))
