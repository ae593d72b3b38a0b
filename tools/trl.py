"""The trl.GRPOConfig (TRL 1.16) that is equivalent to a run, or the reasons why there is none.

tests/concepts/test_losses_against_trl.py gives the printed config to TRL and compares the losses.
Settings that are not fields of the config are printed as comments.
"""

from dataclasses import MISSING, fields

import torch

from advantages import ADVANTAGES, group_advantages
from losses import OBJECTIVES
from plumbing.data.tasks import from_arguments
from plumbing.run import band

# {objective: (loss_type, importance_sampling_level)}, with the objective's own reduction
TRL_LOSS = {"grpo": ("grpo", "token"), "ppo": ("grpo", "token"), "dr_grpo": ("dr_grpo", "token"),
            "dapo": ("dapo", "token"), "gspo": ("grpo", "sequence"), "cispo": ("cispo", "token"),
            "sapo": ("sapo", "token"), "luspo": ("luspo", "sequence"), "vespo": ("vespo", "token")}
# reductions that TRL has for objectives with PPO's clip; bnpo averages over the tokens of the
# mini-batch
TRL_REDUCTION = {"sequence-mean": "grpo", "token-mean": "bnpo", "constant": "dr_grpo",
                 "sequence-sum": "luspo"}
TRL_CONSTANTS = {"sapo tau_positive": "sapo_temperature_pos",
                 "sapo tau_negative": "sapo_temperature_neg", "vespo k_positive": "vespo_k_pos",
                 "vespo lambda_positive": "vespo_lambda_pos", "vespo k_negative": "vespo_k_neg",
                 "vespo lambda_negative": "vespo_lambda_neg"}
TRL_LEVEL = {"token": "token", "seq": "sequence"}             # level of the mismatch weights
# flags that the config expresses, or that have no effect in a run that `missing` accepts
IN_CONFIG = set(
    "algorithm epsilon epsilon_high objective_constants teacher_model_name_or_path "
    "self_distillation hint_template distillation_coef "
    "reduction advantage advantage_clip scale_rewards dual_clip off_policy_mask "
    "entropy_quantile beta kl_estimator entropy_coef dynamic_sampling overlong_cache stage2_step "
    "old_logp sampler_dtype mismatch mismatch_high mismatch_mask mismatch_mask_bounds "
    "routing_replay router_aux_loss_coef reward_weights steps prompts_per_step num_generations "
    "steps_per_generation max_completion_length temperature learning_rate lr_scheduler_type "
    "warmup_steps max_grad_norm gradient_checkpointing bf16 fp16 device use_cpu "
    "seed save_tokens print_trl_config print_verl_config".split())
LORA = set("use_peft lora_r lora_alpha lora_target_modules".split())     # GRPOTrainer(peft_config=)


def missing(args):
    """The settings of this run that trl.GRPOConfig does not have, as a list of names."""
    row = OBJECTIVES[args.objective]
    reductions = TRL_REDUCTION if row.clip == "min" else (row.reduction,)
    sequence = row.ratio == "sequence"
    return [name for name, on in (
        (f"objective {args.objective}", args.objective not in TRL_LOSS),
        ("clip range that follows log s (--epsilon auto)", band.is_auto(args)),
        (f"advantage {args.advantage}",
         ADVANTAGES[args.advantage].function is not group_advantages),
        ("clip of the advantages", args.advantage_clip is not None),
        (f"reduction {args.reduction} for {args.objective}", args.reduction not in reductions),
        ("lower bound on CISPO's weight", row.clip == "weight" and args.epsilon < 1),
        ("dual clip inside the clip range",
         args.dual_clip and args.dual_clip < 1 + args.epsilon_high),
        (f"KL estimator {args.kl_estimator}", args.beta and (
            args.kl_estimator not in ("k3", "k3_is") or sequence and args.kl_estimator == "k3_is")),
        ("distillation beside another advantage (DistillationTrainer has it alone)",
         args.distillation_coef),
        ("overlong penalty (it is a reward function: trl.rewards)", args.overlong_cache),
        ("dynamic sampling", args.dynamic_sampling),
        ("history resampling", args.history_resampling),
        ("second stage", args.stage2_step),
        ("sampler's log-probs as old ones", args.old_logp == "sampler"),
        ("rounded sampler", args.sampler_dtype != str(args.half or torch.float32)[6:]),
        ("mismatch weights of this kind",
         (args.mismatch or args.mismatch_mask) and not vllm_options(args)),
        ("routing replay", args.routing_replay != "none"),
        ("advantages over the mean", args.scale_rewards == "mean"),
        ("quantile of the rollout batch's entropies (top_entropy_quantile is the micro-batch's)",
         args.entropy_quantile),
        ("off-policy mask against recomputed log-probs beside mismatch weights",
         args.off_policy_mask and (args.mismatch or args.mismatch_mask)),
        ("load-balancing loss over responses alone", args.router_aux_loss_coef),
    ) if on]


def vllm_options(args):
    """The fields for mismatch weights, which TRL has only with vLLM; {} without an equivalent."""
    level, _, _ = (args.mismatch or "").partition("_")
    if level not in TRL_LEVEL or args.objective == "vespo":  # TRL's enters VESPO's own weight
        return {}
    mode, low, high = f"{TRL_LEVEL[level]}_truncate", None, args.mismatch_high
    if args.mismatch_mask:                                   # TRL: the weight, 0 out of bounds
        mode, (low, high) = f"{TRL_LEVEL[level]}_mask", args.mismatch_mask_bounds
        if args.mismatch_mask != level or high > args.mismatch_high:
            return {}
    prefix = "vllm_importance_sampling"
    return {"use_vllm": True, f"{prefix}_mode": mode, f"{prefix}_clip_min": low,
            f"{prefix}_clip_max": high}


def beside(args):
    """Lines about settings of this run that are not fields of GRPOConfig."""
    notes = []
    if args.use_peft:
        targets = args.lora_target_modules or "all-linear"
        notes.append(f"beside it: GRPOTrainer(peft_config=peft.LoraConfig(r={args.lora_r}, "
                     f"lora_alpha={args.lora_alpha}, target_modules={targets!r}, lora_dropout=0.0, "
                     "task_type='CAUSAL_LM'))")
    if args.stop:
        notes.append(f"stop strings {args.stop!r}: under vLLM generation_kwargs={{'stop': ...}}; "
                     "transformers' generate would need the tokenizer, which TRL does not give it")
    if args.reward_weights:
        notes.append("reward_weights: one for each of GRPOTrainer(reward_funcs=[...]), in the "
                     "order of the parts here")
    known = IN_CONFIG | (LORA if args.use_peft else set()) | {"stop"}
    others = other_flags(args, known)
    return notes + ([f"not in GRPOConfig: {' '.join(others)}"] if others else [])


def other_flags(args, known):
    """The flags of this run that are neither in `known` nor at their defaults, as they are given on
    a command line."""
    return [f"--{f.name} {getattr(args, f.name)!r}" for f in fields(args)
            if f.name not in known and getattr(args, f.name) != default_of(f)]


def default_of(f):
    return f.default_factory() if f.default is MISSING else f.default


def trl_config(args):
    """The equivalent `trl.GRPOConfig(...)` as text, or one line that says why there is none."""
    lacks = missing(args)
    if lacks:
        return f"no equivalent in trl.GRPOConfig: it has no {', no '.join(lacks)}"
    if args.max_completion_length is None and args.dataset_name is None:
        from_arguments(args)                                 # sets max_completion_length
    loss_type, level = TRL_LOSS[args.objective]
    if OBJECTIVES[args.objective].clip == "min":
        loss_type = TRL_REDUCTION[args.reduction]
    rows = args.prompts_per_step * args.num_generations // args.steps_per_generation
    config = dict(
        loss_type=loss_type, importance_sampling_level=level, scale_rewards=args.scale_rewards,
        epsilon=args.epsilon, epsilon_high=args.epsilon_high, delta=args.dual_clip, beta=args.beta,
        use_bias_correction_kl=args.kl_estimator == "k3_is", entropy_coef=args.entropy_coef,
        router_aux_loss_coef=0.0, num_generations=args.num_generations,
        temperature=args.temperature, top_p=1.0, top_k=0,
        off_policy_mask_threshold=args.off_policy_mask,
        max_completion_length=args.max_completion_length or 256,
        learning_rate=args.learning_rate, lr_scheduler_type=args.lr_scheduler_type,
        warmup_steps=args.warmup_steps, max_grad_norm=args.max_grad_norm, weight_decay=0.0,
        optim="adamw_torch_fused", adam_beta1=0.9, adam_beta2=0.95,
        steps_per_generation=args.steps_per_generation,
        per_device_train_batch_size=rows, gradient_accumulation_steps=1,
        max_steps=args.steps * args.steps_per_generation, bf16=args.bf16, fp16=args.fp16,
        reward_weights=args.reward_weights or None,
        gradient_checkpointing=args.gradient_checkpointing, seed=args.seed)
    config |= {TRL_CONSTANTS[f"{args.objective} {name}"]: value
               for name, value in args.constants.items()}
    if args.objective == "cispo":
        config["epsilon_high"] = 1 + args.epsilon_high       # TRL's cap is absolute
    config |= vllm_options(args)
    notes = []
    if args.scale_rewards != "none":
        notes.append("TRL divides by the standard deviation with G - 1: its advantages are smaller")
    if loss_type in ("cispo", "vespo") and args.steps_per_generation > 1:
        notes.append("TRL divides by the rollout batch's mean number of tokens in a mini-batch")
    if args.warmup_steps:
        notes.append("TRL's warm-up starts at learning rate 0, ours one step later")
    notes += beside(args)
    lines = [f"{key}={value!r}," for key, value in config.items() if value is not None]
    text = "\n".join(f"    {line}" for line in [*lines, *(f"# {note}" for note in notes)])
    return f"trl.GRPOConfig(\n{text}\n)"
