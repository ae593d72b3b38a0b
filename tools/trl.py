"""The settings of a run as a trl.GRPOConfig of TRL 1.16, subject by subject (tools/export.py).

A subject returns {field: value}, or ({field: value}, note, ...), or the words for what TRL does not
have. tests/concepts/test_losses_against_trl.py gives what is printed to TRL and compares the
losses; tests/tools/test_trl.py trains with it.
"""

from advantages import ADVANTAGES, group_advantages
from losses import OBJECTIVES

NAME = "TRL 1.16"
ELSEWHERE = "not in trl.GRPOConfig, for GRPOTrainer or for code of your own"

# reductions that TRL has for rows of losses.OBJECTIVES with PPO's clip
REDUCTION = {"sequence-mean": "grpo", "token-mean": "dapo", "constant": "dr_grpo",
             "sequence-sum": "luspo"}
# loss_type of the other rows, which have one reduction each, by their ratio and clip
CLIP = {("token", "weight"): "cispo", ("token", "sigmoid"): "sapo", ("product", "gamma"): "vespo"}
CONSTANTS = {"tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg",
             "k_positive": "vespo_k_pos", "lambda_positive": "vespo_lambda_pos",
             "k_negative": "vespo_k_neg", "lambda_negative": "vespo_lambda_neg"}


def trl_loss(row, reduction=None):
    """(loss_type, importance_sampling_level) of a row of losses.OBJECTIVES with this reduction
    (None: its own), or None if TRL does not have it."""
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
        loss_type = "bnpo"                                   # the mini-batch's own tokens, exactly
    if loss_type in ("cispo", "vespo", "dapo") and settings.steps_per_generation > 1:
        notes.append("TRL divides by the rollout batch's mean number of tokens in a mini-batch")
    high = settings.epsilon_high
    if row.clip == "weight":
        high = 1 + high                                      # TRL's cap is absolute
    constants = {CONSTANTS[name]: value for name, value in settings.row.constants.items()}
    return {"loss_type": loss_type, "importance_sampling_level": level,
            "epsilon": settings.epsilon, "epsilon_high": high, **constants}, *notes


def advantage(settings):
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
        return {}, (f"--reward_weights {weights!r} has one number per part of the reward, TRL one "
                    "per function: split the function that returns the parts")
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
    return {"temperature": settings.temperature, "top_p": 1.0, "top_k": 0,
            "max_completion_length": settings.max_completion_length}


def stop(settings):
    if not settings.stop:
        return {}
    return {}, (f"stop strings {settings.stop!r}: under vLLM generation_kwargs={{'stop': ...}}; "
                "transformers' generate would need the tokenizer, which TRL does not give it")


def own_sampler(settings):
    if settings.sampler in (None, "vllm"):
        return {}
    return {}, f"TRL samples with transformers or vLLM, not with --sampler {settings.sampler}"


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
            "report_to": settings.report_to or "none",
            "logging_steps": settings.updates_per_batch,
            "use_cpu": True if settings.device == "cpu" else None,
            "router_aux_loss_coef": 0.0,                     # a feature's, which TRL has not
            "model_init_kwargs": {"dtype": "float32"}} | saving


# every subject, and the flags that it expresses, or refuses where they act
SUBJECTS = {
    objective: "algorithm epsilon epsilon_high reduction",
    advantage: "advantage scale_rewards",
    reward_weights: "reward_weights",
    batches: "steps prompts_per_step num_generations steps_per_generation num_iterations "
             "micro_batch_size",
    sampling: "old_logp temperature max_completion_length",
    stop: "stop",
    own_sampler: "sampler",
    optimizer: "learning_rate lr_scheduler_type warmup_steps max_grad_norm weight_decay optim bf16 "
               "fp16 gradient_checkpointing",
    run: "output_dir save_steps report_to device seed"}


def text(settings, keys):
    """`trl.GRPOConfig(field=value, ...)`, a line per field; TRL's defaults are left out."""
    fields = [f"    {key}={value!r}," for key, value in keys.items() if value is not None]
    return "\n".join(["trl.GRPOConfig(", *fields, ")"])
