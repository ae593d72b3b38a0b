"""A run's settings as a trl.GRPOConfig of TRL 1.16: every name of TRL's, in one table.

Used by tools/export.py, by benchmarks/versus_trl.py, and by the tests that compare losses with
TRL's own (tests/concepts/test_losses_against_trl.py). The functions in SUBJECTS translate one
subject each. Each returns {field: value}, or ({field: value}, note, ...), or a text that names what
TRL lacks. A field with the value None keeps TRL's default.

The flags of features are read with `feature_flag`, so that deleting a feature breaks nothing here.
"""

from dataclasses import replace

from advantages import ADVANTAGES, group_advantages
from losses import OBJECTIVES
from plumbing.data.task import Task
from plumbing.data.tasks import prepare_task
from session.arguments import Settings, format_flags

# reductions that TRL has for rows of losses.OBJECTIVES with PPO's clip
REDUCTION = {"sequence-mean": "grpo", "token-mean": "dapo", "constant": "dr_grpo",
             "sequence-sum": "luspo"}
# loss_type of the other rows, which have one reduction each, by their ratio and clip
CLIP = {("token", "weight"): "cispo", ("token", "sigmoid"): "sapo", ("product", "gamma"): "vespo"}
CONSTANTS = {"tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg",
             "k_positive": "vespo_k_pos", "lambda_positive": "vespo_lambda_pos",
             "k_negative": "vespo_k_neg", "lambda_negative": "vespo_lambda_neg"}
MISMATCH_LEVEL = {"token": "token", "seq": "sequence"}

# what TRL lacks where the flag of a feature differs from its default
MISSING = {
    "distillation_coef": "distillation beside another advantage (DistillationTrainer has it alone)",
    "dynamic_sampling": "dynamic sampling",
    "environment": "environment (its environment_factory makes one, whose methods are tools)",
    "entropy_quantile": "quantile of the rollout batch's entropies (top_entropy_quantile is the "
                        "micro-batch's)",
    "overlong_cache": "overlong penalty (it is a reward function: trl.rewards)",
    "router_aux_loss_coef": "load-balancing loss over responses alone",
    "routing_replay": "routing replay",
    "stage2_step": "second stage",
    "top_k": "log-probs renormalized over the tokens that top-k keeps",
    "top_p": "log-probs renormalized over the tokens that top-p keeps",
    "use_kl_in_reward": "KL in the reward",
    "zero_variance_filter": "filter of zero-variance groups",
}


# ------------------------------------------------------------------------------- the whole config

def translate(settings):
    """(fields, missing, notes): {field of GRPOConfig: value}, a text that names what TRL lacks for
    these settings, if anything, and what it computes differently."""
    usual = Settings()
    fields = {}
    missing = [words for name, words in MISSING.items()
               if feature_flag(settings, name) not in (None, feature_flag(usual, name))]
    notes = []
    settings = with_length_limit(settings)
    for subject in SUBJECTS:
        result = subject(settings)
        if isinstance(result, str):
            missing.append(result)
            continue
        more, *comments = result if isinstance(result, tuple) else (result,)
        fields |= {name: value for name, value in more.items() if value is not None}
        notes += comments
    lacks = f"no equivalent in TRL 1.16: it has no {', no '.join(missing)}"
    return fields, missing and lacks, notes


def config_text(settings):
    """Comments and `trl.GRPOConfig(field=value, ...)`, or one comment that names what is
    missing."""
    fields, missing, notes = translate(settings)
    if missing:
        return f"# {missing}"
    known = {flag for flags in SUBJECTS.values() for flag in flags.split()}
    others = {flag: value for flag, value in settings.explicit_flags.items()
              if flag not in known | MISSING.keys()}         # those of MISSING are off
    if others:
        notes.append("not in trl.GRPOConfig, for GRPOTrainer or for code of your own: "
                     f"{format_flags(others)}")
    return "\n".join([f"# {settings.algorithm} by TRL 1.16", *(f"# {note}" for note in notes),
                      "trl.GRPOConfig(",
                      *(f"    {name}={value!r}," for name, value in fields.items()), ")"])


def with_length_limit(settings):
    """The Settings with the length limit of their task in max_completion_length. Reads no data."""
    limit = settings.max_completion_length or Task.max_completion_length
    if settings.builtin_task:
        limit = prepare_task(settings).max_completion_length
    return replace(settings, max_completion_length=limit)


def feature_flag(settings, name):
    """The value of a feature's flag; None if the feature was deleted."""
    return getattr(settings, name, None)


# ----------------------------------------------------------------------------------- the subjects

def trl_loss(row, reduction=None):
    """(loss_type, importance_sampling_level) of a row of losses.OBJECTIVES with this reduction
    (None: the row's), or None if TRL does not have it."""
    reduction = reduction or row.reduction
    if row.clip == "min" and row.ratio in ("token", "sequence") and reduction in REDUCTION:
        return REDUCTION[reduction], row.ratio
    if (row.ratio, row.clip) in CLIP and reduction == row.reduction:
        return CLIP[row.ratio, row.clip], "token"
    return None


def batch_rows(settings):
    """(responses per forward and backward pass, such passes per optimizer step): the largest size
    up to --micro_batch_size that divides the mini-batch, as TRL needs it."""
    rows = settings.mini_batch_rows
    micro = min(settings.micro_batch_size or rows, rows)
    micro = next(n for n in range(micro, 0, -1) if rows % n == 0)
    return micro, rows // micro


def objective(settings):
    row = OBJECTIVES[settings.objective]
    loss = trl_loss(row, settings.reduction)
    if not trl_loss(row):
        return f"objective {settings.objective}"
    if not loss:
        return f"reduction {settings.reduction} for {settings.objective}"
    if row.clip == "weight" and settings.epsilon < 1:
        return "lower bound on CISPO's weight"
    loss_type, level = loss
    accumulated = batch_rows(settings)[1]
    notes = []
    if loss_type == "dapo" and accumulated == 1:
        loss_type = "bnpo"                                   # the tokens of the mini-batch, exactly
    if loss_type in ("cispo", "vespo", "dapo") and settings.steps_per_generation > 1:
        notes.append("TRL divides by the rollout batch's mean number of tokens in a mini-batch")
    high = settings.epsilon_high
    if row.clip == "weight":
        high = 1 + high                                      # TRL's cap is absolute
    constants = {CONSTANTS[name]: value for name, value in settings.row.constants.items()}
    return {"loss_type": loss_type, "importance_sampling_level": level,
            "epsilon": settings.epsilon, "epsilon_high": high, **constants}, *notes


def bounds(settings):
    row = settings.row
    if row.dual_clip and row.dual_clip < 1 + settings.epsilon_high:
        return "dual clip inside the clip range"
    return {"delta": row.dual_clip, "off_policy_mask_threshold": row.off_policy_mask}


def advantage(settings):
    if settings.algorithm == "srpo":
        return "history resampling"
    if ADVANTAGES[settings.advantage].function is not group_advantages:
        return f"advantage {settings.advantage}"
    if settings.scale_rewards == "mean":
        return "advantages over the mean"
    scaled = {"scale_rewards": settings.scale_rewards}
    if settings.scale_rewards == "none":
        return scaled
    return scaled, "TRL divides by the standard deviation with G - 1: its advantages are smaller"


def reward_weights(settings):
    weights = settings.reward_weights
    if weights and len(weights) != max(1, len(settings.verifier)):
        return {}, (f"--reward_weights {weights!r} has one number per reward component, TRL one "
                    "per function: split the function that returns the components")
    return {"reward_weights": weights or None}


def batches(settings):
    rows, accumulated = batch_rows(settings)
    config = {"num_generations": settings.num_generations,
              # TRL counts its steps_per_generation in micro-batches
              "steps_per_generation": settings.steps_per_generation * accumulated,
              "per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulated,
              "num_iterations": settings.num_iterations,
              "max_steps": settings.steps * settings.updates_per_batch}
    notes = []
    if settings.num_iterations > 1:
        notes.append("TRL uses a batch again in the same order; train.py draws a new one")
    if settings.steps_per_generation > 1:
        notes.append("TRL shuffles responses into mini-batches; train.py keeps groups together")
    return config, *notes


def sampling(settings):
    if settings.old_logp == "sampler":
        return "sampler's log-probs as old ones"
    fields = {"temperature": settings.temperature, "top_p": 1.0, "top_k": 0,
              "max_completion_length": settings.max_completion_length}
    notes = []
    if settings.stop:
        notes.append(f"stop strings {settings.stop!r}: under vLLM generation_kwargs={{'stop': "
                     "...}; transformers' generate would need the tokenizer, which TRL does not "
                     "give it")
    return fields, *notes


def sampler(settings):
    if feature_flag(settings, "sampler_dtype") not in (None, settings.arithmetic):
        return "rounded sampler"
    if settings.sampler is None:
        return {}
    if settings.sampler != "vllm":
        return {}, f"TRL samples with transformers or vLLM, not with --sampler {settings.sampler}"
    fields = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True,
              "vllm_gpu_memory_utilization": feature_flag(settings, "vllm_gpu_memory_utilization")}
    names = ("mismatch", "mismatch_mask")
    if not any(feature_flag(settings, name) for name in names):         # TRL's default drops
        fields["vllm_importance_sampling_correction"] = False           # products of ratios > 3
    return fields, "vLLM in TRL: pip install trl[vllm], and a GPU"


def mismatch(settings):
    """TRL has mismatch weights with vLLM alone."""
    weights = feature_flag(settings, "mismatch") or ""
    mask = feature_flag(settings, "mismatch_mask")
    if not weights and not mask:
        return {}
    if settings.row.off_policy_mask:
        return "off-policy mask against recomputed log-probs beside mismatch weights"
    level = MISMATCH_LEVEL.get(weights.partition("_")[0])
    if not level or OBJECTIVES[settings.objective].clip == "gamma":     # TRL's enters VESPO's
        return "mismatch weights of this kind"
    mode = "truncate"
    low = None
    high = settings.mismatch_high
    if mask:                                                 # TRL: the weight, 0 out of bounds
        mode = "mask"
        low, high = settings.mismatch_mask_bounds or (0.5, 5.0)
        if MISMATCH_LEVEL.get(mask) != level or high > settings.mismatch_high:
            return "mismatch weights of this kind"
    prefix = "vllm_importance_sampling"
    return {"use_vllm": True, f"{prefix}_mode": f"{level}_{mode}", f"{prefix}_clip_min": low,
            f"{prefix}_clip_max": high}


def reference(settings):
    if not feature_flag(settings, "beta"):
        return {}
    corrected = settings.kl_estimator == "k3_is"
    sequence = OBJECTIVES[settings.objective].ratio == "sequence"
    if settings.kl_estimator not in ("k3", "k3_is") or sequence and corrected:
        return f"KL estimator {settings.kl_estimator}"
    fields = {"beta": settings.beta, "use_bias_correction_kl": corrected}
    if settings.sync_ref_model:                              # TRL counts optimizer steps
        steps = settings.ref_model_sync_steps * settings.updates_per_batch
        fields |= {"sync_ref_model": True, "ref_model_sync_steps": steps,
                   "ref_model_mixup_alpha": settings.ref_model_mixup_alpha}
    return fields


def entropy(settings):
    fields = {"entropy_coef": feature_flag(settings, "entropy_coef") or None}
    if not fields["entropy_coef"] or batch_rows(settings)[1] == 1:
        return fields
    return fields, ("entropy bonus: TRL takes the mean over the tokens of each micro-batch and "
                    "then the mean of these, here it is the mean over the mini-batch's tokens")


def truncated(settings):
    if not feature_flag(settings, "mask_truncated_completions"):
        return {}
    return {"mask_truncated_completions": True}, (
        "TRL lets AdamW step on its momentum where a mini-batch has no loss token; here it does "
        "not step")


def adapters(settings):
    if not feature_flag(settings, "use_peft"):
        return {}
    targets = settings.lora_target_modules or "all-linear"
    return {}, (f"for GRPOTrainer: peft_config=LoraConfig(r={settings.lora_r}, "
                f"lora_alpha={settings.lora_alpha}, target_modules={targets!r}, "
                "task_type='CAUSAL_LM')")


def optimizer(settings):
    notes = []
    if settings.warmup_steps:
        notes.append("TRL's warm-up starts at learning rate 0, ours one step later")
    if settings.weight_decay:
        notes.append("weight decay: TRL leaves out biases and the weights of norms, here every "
                     "weight decays")
    return {"learning_rate": settings.learning_rate,
            "lr_scheduler_type": settings.lr_scheduler_type,
            "warmup_steps": settings.warmup_steps, "max_grad_norm": settings.max_grad_norm,
            "weight_decay": settings.weight_decay, "optim": settings.optim,
            "adam_beta1": 0.9, "adam_beta2": 0.95, "bf16": settings.bf16, "fp16": settings.fp16,
            "gradient_checkpointing": settings.gradient_checkpointing}, *notes


def run(settings):
    """The fields that are about the run, not about what it computes."""
    saving = {"save_strategy": "no"}
    if settings.save_steps:
        saving = {"save_strategy": "steps",
                  "save_steps": settings.save_steps * settings.updates_per_batch}
    return {"seed": settings.seed,
            "output_dir": settings.output_dir or f"runs/trl-{settings.algorithm}",
            "report_to": feature_flag(settings, "report_to") or "none",
            "logging_steps": settings.updates_per_batch,
            "use_cpu": True if settings.device == "cpu" else None,
            "router_aux_loss_coef": 0.0,                     # TRL would read the model's
            "model_init_kwargs": {"dtype": "float32"}} | saving


# every subject, and the flags that it translates, or refuses where they have an effect
SUBJECTS = {
    objective: "algorithm epsilon epsilon_high reduction",
    bounds: "dual_clip off_policy_mask",
    advantage: "advantage scale_rewards",
    reward_weights: "reward_weights",
    batches: "steps prompts_per_step num_generations steps_per_generation num_iterations "
             "micro_batch_size",
    sampling: "old_logp temperature max_completion_length stop",
    sampler: "sampler sampler_dtype vllm_gpu_memory_utilization",
    mismatch: "mismatch mismatch_high mismatch_mask mismatch_mask_bounds",
    reference: "beta kl_estimator sync_ref_model ref_model_mixup_alpha ref_model_sync_steps",
    entropy: "entropy_coef",
    truncated: "mask_truncated_completions",
    adapters: "use_peft lora_r lora_alpha lora_target_modules",
    optimizer: "learning_rate lr_scheduler_type warmup_steps max_grad_norm weight_decay optim bf16 "
               "fp16 gradient_checkpointing",
    run: "output_dir save_steps report_to device seed"}
