"""Arguments: what a run is. One dataclass field per flag, one row of presets per algorithm, one refusal per impossible value.

The order of precedence is: a flag on the command line, then the algorithm's row in PRESETS, then DEFAULTS for the kind of policy
(the built-in tiny MoE, or a Hugging Face checkpoint), then the field's own default. `config.json` in the run folder shows the result.
Flags that mean what they mean in TRL or transformers carry their names.
"""

import difflib
import math
from dataclasses import dataclass, field, fields

import torch
from transformers import HfArgumentParser

from losses import OBJECTIVES, policy_loss


def arg(default, help, **metadata):
    return field(default=default, metadata={"help": help, **metadata})


@dataclass
class Arguments:
    # the algorithm: a row of choices
    algorithm: str = arg("gspo", "which row of PRESETS fills in the choices below")
    objective: str = arg("gspo", "row of losses.OBJECTIVES: ratio, clip and reduction")
    epsilon: float | None = arg(None, "lower edge of the band, 1 - epsilon (default: the paper's)")
    epsilon_high: float | None = arg(None, "upper edge of the band, 1 + epsilon_high (default: the paper's)")
    reduction: str | None = arg(None, "how tokens are averaged (default: the objective's own; see losses.token_weights)")
    advantage: str = arg("group", "group, leave_one_out, reinforce_plus_plus, reinforce_plus_plus_baseline or gae")
    scale_rewards: str = arg("group", "group, batch or none: what group advantages are divided by")
    token_credit: bool = arg(False, "per-token advantages: only tokens from the first wrong step on are blamed (built-in task)")
    gamma: float = arg(1.0, "discount of gae and reinforce_plus_plus")
    lam: float = arg(0.95, "lambda of gae")
    value_coef: float = arg(0.5, "weight of the critic's loss (gae)")
    dual_clip: float | None = arg(None, "for A < 0 no gradient once the token ratio exceeds this (token family)")
    beta: float = arg(0.0, "coefficient of the KL to the frozen starting policy, in the loss; 0 keeps no reference")
    kl_estimator: str = arg("k3", "k1, k2, k3, k3_is or k3_st (see losses.kl_penalty)")
    entropy_coef: float = arg(0.0, "coefficient of the entropy bonus")
    old_logp: str = arg("recompute", "recompute: score the rollout under the training policy; sampler: reuse the log-probs of sampling")
    sampler_dtype: str | None = arg(None, "precision of the copy that samples: float32, bfloat16, or its weights rounded per row to "
                                    "float8, int8, int6, int5, int4, int3 (default: float32, with --bf16 bfloat16)")
    mismatch: str | None = arg(None, "train/sampler mismatch weight: token_truncate, token_mask, seq_truncate, seq_mask, geo_truncate, geo_mask")
    mismatch_low: float = arg(0.5, "lower bound of the mismatch weight (mask modes)")
    mismatch_high: float = arg(2.0, "upper bound of the mismatch weight")
    routing_replay: bool = arg(False, "force the routers' old choices in every update (MoE)")
    router_aux_loss_coef: float = arg(0.0, "coefficient of the load-balancing loss in RL (MoE)")
    dynamic_sampling: bool = arg(False, "keep sampling until every group has both right and wrong answers (DAPO), at most 10 rounds")
    overlong_cache: float = arg(0.0, "DAPO's overlong penalty: the last share of max_completion_length in which it grows to -1")
    history_resampling: bool = arg(False, "at each epoch's end drop the prompts whose answers were all right (SRPO)")
    stage2_dataset_name: str | None = arg(None, "second source of problems (SRPO); for the built-in task: longer sums")
    stage2_step: int = arg(0, "rollout batch at which the second source joins (0: never)")

    # the policy
    model_name_or_path: str | None = arg(None, "hub id or folder of a causal LM, dense or MoE; none: the built-in tiny MoE, from scratch")
    hidden_size: int = arg(96, "tiny MoE: width")
    num_hidden_layers: int = arg(4, "tiny MoE: layers")
    num_experts: int = arg(8, "tiny MoE: experts per layer")
    num_experts_per_tok: int = arg(2, "tiny MoE: experts per token")
    moe_intermediate_size: int = arg(96, "tiny MoE: width of an expert")
    initializer_range: float = arg(0.08, "tiny MoE: standard deviation of its random weights")
    cold_start_steps: int = arg(320, "tiny MoE: supervised steps before RL")
    cold_start_learning_rate: float = arg(3e-3, "tiny MoE: their learning rate")

    # the task
    dataset_name: str | None = arg(None, "hub id, .jsonl/.json/.csv/.parquet file or reasoning_gym:NAME; none: the built-in running sum")
    test_dataset_name: str | None = arg(None, "held-out problems, if the dataset has no test split of its own")
    prompt_column: str | None = arg(None, "column of the query (default: prompt, question or problem)")
    answer_column: str | None = arg(None, "column of the answer (default: answer or solution)")
    verifier: str = arg("math", "math (math-verify), exact, or file.py:function")
    verifier_time_limit: float = arg(3.0, "seconds a verifier may take per answer; then the reward is 0 and verifier_errors counts it")
    chat_template: bool = arg(True, "use the tokenizer's chat template if it has one")
    stop: list[str] = field(default_factory=list, metadata={"help": "strings that end an answer; \\n stands for a line break"})
    min_terms: int = arg(8, "built-in task: fewest terms of a sum")
    max_terms: int = arg(12, "built-in task: most terms of a sum")
    habit: float = arg(0.6, "built-in task: how often the teacher of the cold start adds 8 for a 9")
    slip: float = arg(0.005, "built-in task: how often any step of the teacher is a random digit")
    verbose_answers: bool = arg(False, "built-in task: write every step as a+b=c (about three times as many tokens)")

    # the rollout batch
    steps: int = arg(50, "rollout batches")
    prompts_per_step: int = arg(32, "queries per rollout batch")
    num_generations: int = arg(8, "G: responses per query")
    steps_per_generation: int = arg(4, "mini-batches (optimiser steps) per rollout batch")
    max_prompt_length: int = arg(1024, "longest prompt in tokens; longer ones are refused")
    max_completion_length: int | None = arg(None, "longest response in tokens (default: the built-in task's longest answer, else 256)")
    temperature: float = arg(1.0, "of sampling and of log-probs alike")

    # the optimiser
    learning_rate: float = arg(4e-4, "AdamW, betas 0.9 and 0.95 (1e-6 for a checkpoint)")
    lr_scheduler_type: str = arg("cosine", "linear, cosine or constant_with_warmup")
    warmup_steps: int = arg(10, "optimiser steps of linear warm-up")
    weight_decay: float = arg(0.0, "AdamW's weight decay")
    max_grad_norm: float = arg(1.0, "clip the gradient's norm; 0: do not")
    optim: str = arg("adamw", "adamw or sgd")
    max_bad_steps: int = arg(3, "stop after this many non-finite updates in a row; each is skipped")

    # the machine
    micro_batch_size: int | None = arg(None, "rows per forward and backward (default: the mini-batch)")
    gradient_checkpointing: bool = arg(False, "recompute activations; takes the plain path without shared prompts")
    plain: bool = arg(False, "sample and score as rollout.py does, without plumbing/fast.py: slower, and easy to follow")
    bf16: bool | None = arg(None, "bfloat16 autocast (default: on CUDA with a checkpoint); weights, log-probs and losses stay float32")
    torch_compile: bool = arg(False, "compile the token step of sampling (static cache, CUDA graphs on a GPU); takes a minute or two at first")
    use_cpu: bool = arg(False, "stay on the CPU even if there is a GPU")
    shard: bool = arg(False, "with torchrun: FSDP2 instead of a replica per process")

    # the run
    output_dir: str | None = arg(None, "run folder (default: runs/<algorithm>, then runs/<algorithm>-2, ...)")
    overwrite_output_dir: bool = arg(False, "replace the run that is in output_dir")
    resume: bool = arg(False, "go on with the run in output_dir")
    save_steps: int = arg(0, "checkpoint every so many rollout batches; the last one is always saved")
    keep: int = arg(2, "how many checkpoints to keep")
    eval_steps: int = arg(0, "evaluate every so many rollout batches; 0: only before and after")
    eval_prompts: int = arg(256, "held-out queries of an evaluation")
    eval_samples: int = arg(4, "answers sampled per query; 0: no evaluation at all")
    seed: int = arg(0, "of everything")
    print_trl_config: bool = arg(False, "print the equivalent trl.GRPOConfig and stop")


# A preset is data: it fills in flags that were not given. The objective carries ratio, clip, band and reduction (losses.OBJECTIVES).
PRESETS = {
    "reinforce": dict(objective="reinforce", scale_rewards="none"),
    "rloo": dict(objective="reinforce", reduction="sequence-sum", advantage="leave_one_out"),
    "reinforce_plus_plus": dict(objective="ppo", reduction="token-mean", advantage="reinforce_plus_plus"),
    "ppo": dict(objective="ppo", advantage="gae"),
    "grpo": dict(objective="grpo"),
    "dr_grpo": dict(objective="dr_grpo", scale_rewards="none"),
    "dapo": dict(objective="dapo", dynamic_sampling=True, overlong_cache=0.2),
    "gspo": dict(objective="gspo"),
    "gspo_token": dict(objective="gspo_token"),
    "gmpo": dict(objective="gmpo"),
    "rspo": dict(objective="rspo"),
    "cispo": dict(objective="cispo"),
    "sapo": dict(objective="sapo"),
    "luspo": dict(objective="luspo"),
    "vespo": dict(objective="vespo"),
    "srpo": dict(objective="dapo", history_resampling=True, stage2_step=20),
    "sequence_is": dict(objective="sequence_is"),
}

# What a checkpoint needs different from the tiny MoE: a smaller step, smaller batches.
CHECKPOINT_DEFAULTS = dict(learning_rate=1e-6, prompts_per_step=8, steps_per_generation=2, warmup_steps=5)

CHOICES = {
    "advantage": ("group", "leave_one_out", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"),
    "scale_rewards": ("group", "batch", "none"),
    "reduction": ("sequence-mean", "token-mean", "group-token-mean", "constant", "sequence-sum"),
    "kl_estimator": ("k1", "k2", "k3", "k3_is", "k3_st"),
    "old_logp": ("recompute", "sampler"),
    "sampler_dtype": ("float32", "bfloat16", "float8", "int8", "int6", "int5", "int4", "int3"),
    "mismatch": ("token_truncate", "token_mask", "seq_truncate", "seq_mask", "geo_truncate", "geo_mask"),
    "lr_scheduler_type": ("linear", "cosine", "constant_with_warmup"),
    "optim": ("adamw", "sgd"),
}
AT_LEAST_1 = ("steps", "prompts_per_step", "num_generations", "steps_per_generation", "max_prompt_length", "max_completion_length", "keep",
              "micro_batch_size", "hidden_size", "num_hidden_layers", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
              "min_terms", "max_bad_steps", "eval_prompts")
AT_LEAST_0 = ("save_steps", "eval_steps", "eval_samples", "warmup_steps", "cold_start_steps", "stage2_step", "seed", "weight_decay",
              "max_grad_norm", "beta", "entropy_coef", "value_coef", "router_aux_loss_coef", "mismatch_low")
POSITIVE = ("temperature", "initializer_range", "verifier_time_limit", "learning_rate", "cold_start_learning_rate", "mismatch_high",
            "dual_clip")
SHARES = ("habit", "slip", "gamma", "lam", "overlong_cache")


def parse(argv):
    """Command line -> Arguments, resolved and checked. Raises ValueError with one line that names the flag and what would be right."""
    parser = HfArgumentParser(Arguments, prog="train.py", allow_abbrev=False,
                              description="GSPO and its relatives on a tiny MoE or a Hugging Face checkpoint.")

    def refuse(message):
        raise ValueError(message)
    parser.error = refuse                                    # argparse would print the whole usage, hundreds of lines
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [s for action in parser._actions for s in action.option_strings]
        raise ValueError(f"unknown argument {unknown[0]}{nearest(unknown[0].split('=')[0], flags)}; train.py --help lists all")
    if known.algorithm not in PRESETS:
        raise ValueError(f"--algorithm {known.algorithm} is unknown{nearest(known.algorithm, PRESETS)}; known: {', '.join(PRESETS)}")
    parser.set_defaults(**(CHECKPOINT_DEFAULTS if known.model_name_or_path else {}))
    parser.set_defaults(**PRESETS[known.algorithm])
    args, = parser.parse_args_into_dataclasses(argv)
    args.stop = [s.replace("\\n", "\n") for s in args.stop]
    check(args)
    objective = OBJECTIVES[args.objective]
    args.epsilon = objective.epsilon if args.epsilon is None else args.epsilon
    args.epsilon_high = objective.epsilon_high if args.epsilon_high is None else args.epsilon_high
    args.reduction = args.reduction or objective.reduction
    if args.bf16 is None:
        args.bf16 = bool(args.model_name_or_path) and torch.cuda.is_available() and not args.use_cpu
    args.sampler_dtype = args.sampler_dtype or ("bfloat16" if args.bf16 else "float32")
    return args


def nearest(word, known):
    """', did you mean X?' if something known is close."""
    match = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {match[0]}?" if match else ""


def check(args):
    """Refuse what cannot run, before anything is written."""
    def refuse(name, must):
        raise ValueError(f"--{name} {getattr(args, name)} {must}")

    for f in fields(args):
        value = getattr(args, f.name)
        if isinstance(value, float) and not math.isfinite(value):
            refuse(f.name, "is not a finite number")
        if value is None:
            continue
        if f.name in CHOICES and value not in CHOICES[f.name]:
            refuse(f.name, f"is unknown{nearest(value, CHOICES[f.name])}; known: {', '.join(CHOICES[f.name])}")
        if f.name in AT_LEAST_1 and value < 1:
            refuse(f.name, "is not at least 1")
        if f.name in AT_LEAST_0 and value < 0:
            refuse(f.name, "is not at least 0")
        if f.name in POSITIVE and value <= 0:
            refuse(f.name, "is not above 0")
        if f.name in SHARES and not 0 <= value <= 1:
            refuse(f.name, "is not between 0 and 1")
    if args.seed >= 2 ** 32:
        refuse("seed", "is not below 2^32, as NumPy's must be")
    if args.objective not in OBJECTIVES:
        refuse("objective", f"is unknown{nearest(args.objective, OBJECTIVES)}; known: {', '.join(OBJECTIVES)}")
    for name in ("epsilon", "epsilon_high"):
        value, cap = getattr(args, name), 1 if OBJECTIVES[args.objective].clip != "weight" else math.inf   # CISPO's clamp may be wide
        if value is not None and not 0 < value < cap:
            refuse(name, "is not between 0 and 1: the band is [1 - epsilon, 1 + epsilon_high]; GSPO's paper uses 3e-4 and 4e-4")
    if args.num_generations < 2 and args.advantage in ("group", "leave_one_out", "reinforce_plus_plus_baseline"):
        refuse("num_generations", f"is too few: --advantage {args.advantage} compares the responses of a group, so at least 2")
    if args.prompts_per_step % args.steps_per_generation:
        refuse("steps_per_generation", f"does not divide --prompts_per_step {args.prompts_per_step}: mini-batches are made of whole groups")
    if args.micro_batch_size and args.micro_batch_size % args.num_generations and args.num_generations % args.micro_batch_size:
        refuse("micro_batch_size", f"must divide --num_generations {args.num_generations} or be a multiple of it")
    if args.num_experts_per_tok > args.num_experts:
        refuse("num_experts_per_tok", f"is more than --num_experts {args.num_experts}")
    if args.hidden_size % 8:
        refuse("hidden_size", "is not a multiple of 8 (4 attention heads of an even width)")
    if args.max_terms < args.min_terms:
        refuse("max_terms", f"is below --min_terms {args.min_terms}")
    if args.dataset_name and not args.model_name_or_path:
        refuse("dataset_name", "needs --model_name_or_path: the built-in tiny MoE knows only the 17 characters of its own task")
    for name in ("test_dataset_name", "stage2_dataset_name"):
        if getattr(args, name) and not args.dataset_name:
            refuse(name, "needs --dataset_name: the built-in task makes its own")
    if args.stage2_dataset_name and not args.stage2_step:
        refuse("stage2_dataset_name", "needs --stage2_step: the rollout batch at which it joins")
    if args.stage2_step and args.dataset_name and not args.stage2_dataset_name:
        refuse("stage2_step", "needs --stage2_dataset_name: the problems that join then")
    if args.stage2_step and not args.dataset_name and args.max_terms == args.min_terms:
        refuse("stage2_step", f"needs --max_terms above --min_terms {args.min_terms}: the longer half of the built-in sums joins then")
    if args.mismatch_low > args.mismatch_high:
        refuse("mismatch_low", f"is above --mismatch_high {args.mismatch_high}")
    if args.token_credit and (args.dataset_name or args.model_name_or_path):
        refuse("token_credit", "needs the built-in task, whose verifier marks the first wrong step")
    if args.token_credit and args.advantage not in ("group", "leave_one_out"):
        refuse("token_credit", f"cannot be combined with --advantage {args.advantage}, which is per token already")
    per_token = args.token_credit or args.advantage in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    probe = torch.zeros(2, 2)                                # what the loss itself refuses (losses.policy_loss), before the run begins
    try:
        policy_loss(args.objective, probe, probe, probe if per_token else probe[0], probe == 0, epsilon=args.epsilon, epsilon_high=args.epsilon_high,
                    weights=probe, router_shift=probe + 1 if args.objective == "rspo" else None, dual_clip=args.dual_clip)
    except ValueError as error:
        raise ValueError(f"--objective {args.objective}: {error}") from None
    if args.objective == "rspo" and args.old_logp == "sampler":
        refuse("old_logp", "cannot serve rspo: the router shift needs the old routers' logits, which only recompute records")
    if args.routing_replay and args.old_logp == "sampler":
        refuse("old_logp", "cannot serve --routing_replay: routes are recorded while log-probs are recomputed")
    if args.advantage == "gae" and args.old_logp == "sampler":
        refuse("old_logp", "cannot serve gae: the critic's old values come from the pass that recomputes log-probs")
    if args.mismatch and args.old_logp == "sampler":
        refuse("mismatch", "weighs recomputed against sampling log-probs: it needs --old_logp recompute")
    if args.torch_compile and args.shard:
        refuse("torch_compile", "cannot be combined with --shard: the gathered weights that sample lie elsewhere at every batch")
    if args.resume and args.overwrite_output_dir:
        refuse("resume", "contradicts --overwrite_output_dir: go on with the run, or replace it")
    if (args.resume or args.overwrite_output_dir) and not args.output_dir:
        refuse("resume" if args.resume else "overwrite_output_dir", "needs --output_dir: which run?")


# What TRL calls the same thing: (loss_type, importance_sampling_level). Verified value by value in tests/test_losses_against_trl.py.
TRL_LOSS = {"grpo": ("grpo", "token"), "ppo": ("grpo", "token"), "dr_grpo": ("dr_grpo", "token"), "dapo": ("dapo", "token"),
            "gspo": ("grpo", "sequence"), "cispo": ("cispo", "token"), "sapo": ("sapo", "token"), "luspo": ("luspo", "sequence"),
            "vespo": ("vespo", "token")}


def trl_config(args):
    """The equivalent `trl.GRPOConfig(...)` as text, or one line that says why there is none."""
    missing = [name for name, on in (
        (f"objective {args.objective}", args.objective not in TRL_LOSS), (f"advantage {args.advantage}", args.advantage != "group"),
        ("routing replay", args.routing_replay), ("dynamic sampling", args.dynamic_sampling), ("history resampling", args.history_resampling),
        ("per-token credit", args.token_credit), ("an entropy bonus", args.entropy_coef), ("dual clip", args.dual_clip),
        (f"KL estimator {args.kl_estimator}", args.beta and args.kl_estimator not in ("k3", "k3_is"))) if on]
    if missing:
        return f"no equivalent in trl.GRPOConfig: it has no {', no '.join(missing)}"
    loss_type, level = TRL_LOSS[args.objective]
    config = dict(
        loss_type=loss_type, importance_sampling_level=level, epsilon=args.epsilon,
        epsilon_high=1 + args.epsilon_high if args.objective == "cispo" else args.epsilon_high,   # TRL's CISPO cap is absolute
        scale_rewards=args.scale_rewards, beta=args.beta, num_generations=args.num_generations, temperature=args.temperature,
        top_p=1.0, top_k=0, max_completion_length=args.max_completion_length or 256, learning_rate=args.learning_rate,
        lr_scheduler_type=args.lr_scheduler_type, warmup_steps=args.warmup_steps, adam_beta1=0.9, adam_beta2=0.95,
        weight_decay=args.weight_decay, max_grad_norm=args.max_grad_norm, steps_per_generation=args.steps_per_generation,
        gradient_accumulation_steps=1, per_device_train_batch_size=args.prompts_per_step * args.num_generations // args.steps_per_generation,
        max_steps=args.steps * args.steps_per_generation, use_bias_correction_kl=args.kl_estimator == "k3_is", seed=args.seed)
    return "trl.GRPOConfig(\n" + "".join(f"    {key}={value!r},\n" for key, value in config.items() if value is not None) + ")"
