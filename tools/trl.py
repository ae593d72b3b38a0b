"""What TRL 1.16 calls the same thing: the trl.GRPOConfig that equals a run, or why there is none.

tests/concepts/test_losses_against_trl.py feeds what is printed to TRL's own loss: same value, same
gradient.
What a config cannot say stands beside it as a comment.
"""

from losses import OBJECTIVES
from plumbing.data.tasks import from_arguments

# objective: (loss_type, importance_sampling_level), with the objective's own reduction
TRL_LOSS = {"grpo": ("grpo", "token"), "ppo": ("grpo", "token"), "dr_grpo": ("dr_grpo", "token"),
            "dapo": ("dapo", "token"), "gspo": ("grpo", "sequence"), "cispo": ("cispo", "token"),
            "sapo": ("sapo", "token"), "luspo": ("luspo", "sequence"), "vespo": ("vespo", "token")}
# where the clip is PPO's, TRL can average differently; bnpo's tokens are those of the mini-batch
TRL_REDUCTION = {"sequence-mean": "grpo", "token-mean": "bnpo", "constant": "dr_grpo",
                 "sequence-sum": "luspo"}
TRL_LEVEL = {"token": "token", "seq": "sequence"}             # of mismatch weights


def missing(args):
    """What this run has and trl.GRPOConfig has not: a list of words."""
    row = OBJECTIVES[args.objective]
    reductions = TRL_REDUCTION if row.clip == "min" else (row.reduction,)
    sequence = row.ratio == "sequence"
    return [name for name, on in (
        (f"objective {args.objective}", args.objective not in TRL_LOSS),
        (f"advantage {args.advantage}", args.advantage != "group"),
        (f"reduction {args.reduction} for {args.objective}", args.reduction not in reductions),
        ("lower bound on CISPO's weight", row.clip == "weight" and args.epsilon < 1),
        ("dual clip inside the band", args.dual_clip and args.dual_clip < 1 + args.epsilon_high),
        (f"KL estimator {args.kl_estimator}", args.beta and (
            args.kl_estimator not in ("k3", "k3_is") or sequence and args.kl_estimator == "k3_is")),
        ("overlong penalty (it is a reward function: trl.rewards)", args.overlong_cache),
        ("dynamic sampling", args.dynamic_sampling),
        ("history resampling", args.history_resampling),
        ("second stage", args.stage2_step),
        ("sampler's log-probs as old ones", args.old_logp == "sampler"),
        ("rounded sampler", args.sampler_dtype != ("bfloat16" if args.bf16 else "float32")),
        ("such mismatch weights", (args.mismatch or args.mismatch_mask) and not vllm_options(args)),
        ("routing replay", args.routing_replay != "none"),
        ("advantages over the mean", args.scale_rewards == "mean"),
        ("quantile of the rollout batch's entropies (top_entropy_quantile is the micro-batch's)",
         args.entropy_quantile),
        ("off-policy mask against recomputed log-probs beside mismatch weights",
         args.off_policy_mask and (args.mismatch or args.mismatch_mask)),
        ("load-balancing loss over answers alone", args.router_aux_loss_coef),
    ) if on]


def vllm_options(args):
    """TRL corrects for a sampler that is not the trainer under vLLM alone: {} if not as we do."""
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


def trl_config(args):
    """The equivalent `trl.GRPOConfig(...)` as text, or one line that says why there is none."""
    lacks = missing(args)
    if lacks:
        return f"no equivalent in trl.GRPOConfig: it has no {', no '.join(lacks)}"
    if args.max_completion_length is None and args.dataset_name is None:
        from_arguments(args)                                 # fills it in
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
        max_steps=args.steps * args.steps_per_generation, bf16=args.bf16,
        gradient_checkpointing=args.gradient_checkpointing, seed=args.seed)
    if args.objective == "cispo":
        config["epsilon_high"] = 1 + args.epsilon_high       # TRL's cap is absolute
    config |= vllm_options(args)
    notes = []
    if args.scale_rewards != "none":
        notes.append("TRL divides by the deviation with G - 1: its advantages are a little smaller")
    if loss_type in ("cispo", "vespo") and args.steps_per_generation > 1:
        notes.append("TRL divides by the rollout batch's mean number of tokens in a mini-batch")
    if args.warmup_steps:
        notes.append("TRL's warm-up begins at 0, ours one step further")
    lines = [f"{key}={value!r}," for key, value in config.items() if value is not None]
    text = "\n".join(f"    {line}" for line in [*lines, *(f"# {note}" for note in notes)])
    return f"trl.GRPOConfig(\n{text}\n)"
