"""The settings of a run in TRL's words.

    python tools/export.py trl FLAGS OF TRAIN.PY      prints a trl.GRPOConfig for TRL 1.16

Flags that have an effect in train.py and no equivalent in TRL's config are named in a comment. The
model, the data and the reward functions are arguments of trl.GRPOTrainer. For verl and slime see
docs/speed.md.
"""

import dataclasses
import sys
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from plumbing.data.tasks import prepare_task
from session.arguments import Parser, Settings, parse

# reductions that TRL has for rows of losses.OBJECTIVES with PPO's clip
REDUCTION = {"sequence-mean": "grpo", "token-mean": "dapo", "constant": "dr_grpo",
             "sequence-sum": "luspo"}
# loss_type of the other rows, which have one reduction each, by their ratio and clip
CLIP = {("token", "weight"): "cispo", ("token", "sigmoid"): "sapo", ("product", "gamma"): "vespo"}
CONSTANTS = {"tau_positive": "sapo_temperature_pos", "tau_negative": "sapo_temperature_neg",
             "k_positive": "vespo_k_pos", "lambda_positive": "vespo_lambda_pos",
             "k_negative": "vespo_k_neg", "lambda_negative": "vespo_lambda_neg"}

# flags that TRL calls so, too
SAME = ("num_generations num_iterations temperature scale_rewards learning_rate lr_scheduler_type "
        "warmup_steps max_grad_norm weight_decay optim bf16 fp16 tf32 gradient_checkpointing seed "
        "beta entropy_coef mask_truncated_completions router_aux_loss_coef reward_weights "
        "chat_template_kwargs report_to vllm_gpu_memory_utilization").split()
# flags that `translate` reads
READ = ("algorithm epsilon epsilon_high constants entropy_quantile reduction dual_clip "
        "off_policy_mask kl_estimator steps max_completion_length prompts_per_step "
        "steps_per_generation micro_batch_size").split()
# flags of the trainer's arguments, and those that change no number
OTHERS = ("model_name_or_path dataset_name test_dataset_name columns verifier verifier_timeout "
          "system_prompt prompt_template chat_template min_terms max_terms "
          "hidden_size num_hidden_layers num_experts num_experts_per_tok cold_start_steps "
          "cold_start_learning_rate plain device config output_dir resume save_steps save_tokens "
          "eval_steps eval_prompts eval_samples").split()


def translate(settings):
    """({field of GRPOConfig: value}, the flags that have an effect and no equivalent in TRL)."""
    row = settings.row
    loss = trl_loss(row, settings.reduction)
    rows, passes = batch_rows(settings)
    config = {name: getattr(settings, name) for name in SAME}
    config |= {CONSTANTS[name]: value for name, value in row.constants.items() if loss}
    if loss:
        config["loss_type"], config["importance_sampling_level"] = loss
    config |= {
        "epsilon": settings.epsilon, "epsilon_high": settings.epsilon_high,
        "use_bias_correction_kl": settings.kl_estimator == "k3_is",
        "top_entropy_quantile": 1 - settings.entropy_quantile, "delta": row.dual_clip,
        "off_policy_mask_threshold": row.off_policy_mask,
        "max_completion_length": prepare_task(settings).max_completion_length,
        # TRL counts its steps_per_generation in micro-batches
        "steps_per_generation": settings.steps_per_generation * passes,
        "per_device_train_batch_size": rows, "gradient_accumulation_steps": passes,
        "max_steps": settings.steps * settings.updates_per_batch, "adam_beta2": 0.95}
    if row.clip == "weight":
        config["epsilon_high"] += 1                          # TRL's cap is absolute
    known = {*SAME, *READ, *OTHERS}
    missing = [f.name for f in dataclasses.fields(Settings) if f.name not in known
               and getattr(settings, f.name) != getattr(Settings(), f.name)]
    missing += [] if loss else ["algorithm"]
    missing += [] if settings.kl_estimator in ("k3", "k3_is") else ["kl_estimator"]
    return {name: value for name, value in config.items() if value not in (None, [], {})}, missing


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


def main(argv=None):
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=["trl"])
    _, words = parser.parse_known_args(argv)
    config, missing = translate(parse(words))
    if missing:
        print(f"# TRL 1.16 has no equivalent for: {', '.join(missing)}")
    print("trl.GRPOConfig(", *(f"    {name}={value!r}," for name, value in config.items()), ")",
          sep="\n")


if __name__ == "__main__":
    main()
