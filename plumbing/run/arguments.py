"""Arguments: what a run is. One dataclass field per flag, one row of presets per algorithm, one
refusal per impossible value.

The order of precedence is: a flag on the command line, then the algorithm's row in PRESETS, then
the defaults for the kind of policy (the built-in tiny MoE, or a Hugging Face checkpoint), then the
field's own default. `config.json` in the run folder shows the result. Flags that mean what they
mean in TRL or transformers carry their names.
"""

import argparse
import re
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType
from typing import get_args, get_origin

import torch
from transformers.hf_argparser import string_to_bool

from losses import OBJECTIVES
from plumbing.run.checks import check_choice, check_combinations, check_values, nearest
from plumbing.run.trackers import TRACKERS


# A preset is data: its objective carries ratio, clip, band and reduction (losses.OBJECTIVES), the
# rest fills in flags that were not given.
PRESETS = {
    "reinforce": dict(objective="reinforce", scale_rewards="none"),
    "rloo": dict(objective="reinforce", reduction="sequence-sum", advantage="leave_one_out"),
    "reinforce_plus_plus": dict(objective="ppo", reduction="token-mean",
                                advantage="reinforce_plus_plus"),
    "ppo": dict(objective="ppo", advantage="gae"),
    "grpo": dict(objective="grpo"),
    "dr_grpo": dict(objective="dr_grpo", scale_rewards="none"),
    "dapo": dict(objective="dapo", dynamic_sampling=True, overlong_cache=0.2),
    "dapo_paper": dict(objective="dapo_paper", dynamic_sampling=True, overlong_cache=0.2),
    "gspo": dict(objective="gspo"),
    "gspo_token": dict(objective="gspo_token"),
    "gmpo": dict(objective="gmpo"),
    "rspo": dict(objective="rspo"),
    "cispo": dict(objective="cispo"),
    "scalerl": dict(objective="cispo", epsilon_high=4.0, reduction="group-token-mean",
                    scale_rewards="batch", old_logp="sampler"),
    "minirl": dict(objective="grpo", epsilon_high=0.27, reduction="sequence-sum",
                   scale_rewards="none", mismatch="token_truncate", mismatch_high=5.0),
    "maxrl": dict(objective="grpo", reduction="sequence-sum", scale_rewards="mean"),
    "dppo": dict(objective="dppo", old_logp="sampler"),
    "dppo_kl": dict(objective="dppo_kl", old_logp="sampler"),
    "sapo": dict(objective="sapo"),
    "luspo": dict(objective="luspo"),
    "vespo": dict(objective="vespo"),
    "srpo": dict(objective="dapo", stage2_step=20),
    "sequence_is": dict(objective="sequence_is"),
}


def arg(default, help, **limits):
    """A flag. limits: choices, at_least, above; section: the heading of --help that it begins."""
    several = isinstance(default, list)
    default = {"default_factory": default.copy} if several else {"default": default}
    return field(**default, metadata={"help": help, **limits})


@dataclass
class Arguments:
    algorithm: str = arg("gspo", "row of PRESETS: fills in what is not given",
                         section="the algorithm", choices=PRESETS)
    epsilon: float | None = arg(None, "lower edge of the band, 1 - epsilon; none: the paper's")
    epsilon_high: float | None = arg(None, "upper edge, 1 + epsilon_high; none: the paper's")
    reduction: str | None = arg(None, "how tokens are averaged; none: the objective's own",
                                choices=("sequence-mean", "token-mean", "group-token-mean",
                                        "constant", "sequence-sum"))
    advantage: str = arg("group", "how rewards become advantages; token_credit: as group, but only "
                         "what follows the first wrong step is to blame (built-in task)",
                         choices=("group", "gdpo", "leave_one_out", "reinforce_plus_plus",
                                  "reinforce_plus_plus_baseline", "gae", "token_credit"))
    scale_rewards: str = arg("group", "whose deviation divides group advantages, or their mean",
                             choices=("group", "batch", "none", "mean"))
    dual_clip: float | None = arg(None, "no gradient for A < 0 at token ratios above this", above=0)
    off_policy_mask: float | None = arg(None, "drop answers with A < 0 whose mean log-prob fell by "
                                        "more than this", above=0)
    entropy_quantile: float = arg(0.0, "learn from tokens of entropy at or above this quantile of "
                                  "the batch; 0: from all", at_least=0)
    beta: float = arg(0.0, "coefficient of the KL to the starting policy; 0: keep no reference",
                      at_least=0)
    kl_estimator: str = arg("k3", "how that KL is estimated",
                            choices=("k1", "k2", "k3", "k3_is", "k3_st"))
    entropy_coef: float = arg(0.0, "coefficient of the entropy bonus", at_least=0)
    dynamic_sampling: bool = arg(False, "sample until every group is mixed, right and wrong (DAPO)")
    overlong_cache: float = arg(0.0, "last share of the length where a penalty grows to -1 (DAPO)",
                                at_least=0)
    stage2_dataset_name: str | None = arg(None, "second source of problems; none: longer sums")
    stage2_step: int = arg(0, "rollout batch at which the second source joins (SRPO); 0: never",
                           at_least=0)

    old_logp: str = arg("recompute", "score the rollout again, or reuse what sampling recorded",
                        section="the sampler and the routers", choices=("recompute", "sampler"))
    sampler_dtype: str | None = arg(None, "the copy that samples is rounded to; none: as trained",
                                    choices=("float32", "bfloat16", "float8", "int8", "int6",
                                             "int5", "int4", "int3"))
    mismatch: str | None = arg(None, "weigh by trainer over sampler probability, from 0 to a cap",
                               choices=("token_truncate", "seq_truncate", "geo_truncate"))
    mismatch_high: float = arg(2.0, "that cap", above=0)
    mismatch_mask: str | None = arg(None, "reject tokens or answers whose ratio is out of bounds",
                                    choices=("token", "seq", "geo"))
    mismatch_mask_bounds: list[float] = arg([0.5, 5.0], "these: the lower and the upper one")
    routing_replay: str = arg("none", "routers take the experts that the old policy took, or the "
                              "sampler (MoE)", choices=("none", "old", "rollout"))
    router_aux_loss_coef: float = arg(0.0, "coefficient of the load-balancing loss (MoE)",
                                      at_least=0)

    model_name_or_path: str | None = arg(None, "hub id or folder of a causal LM; none: a tiny MoE",
                                         section="the policy")
    hidden_size: int = arg(96, "tiny MoE: width", at_least=1)
    num_hidden_layers: int = arg(4, "tiny MoE: layers", at_least=1)
    num_experts: int = arg(8, "tiny MoE: experts per layer", at_least=1)
    num_experts_per_tok: int = arg(2, "tiny MoE: experts per token", at_least=1)
    cold_start_steps: int = arg(320, "tiny MoE: supervised steps before RL", at_least=0)
    cold_start_learning_rate: float = arg(3e-3, "tiny MoE: their learning rate", above=0)

    use_peft: bool = arg(False, "train LoRA adapters beside frozen weights (pip install peft)",
                         section="adapters")
    lora_r: int = arg(16, "their rank", at_least=1)
    lora_alpha: int = arg(32, "their product counts lora_alpha / lora_r", at_least=1)
    lora_target_modules: list[str] = arg([], "modules that get one; none: every linear layer")
    merge: bool = arg(False, "at the end write output_dir/merged, a plain checkpoint")

    dataset_name: str | None = arg(None, "hub id, .jsonl, .json, .csv or .parquet file or "
                                   "reasoning_gym:NAME; none: a running sum", section="the task")
    test_dataset_name: str | None = arg(None, "held-out problems; none: the dataset's own split")
    columns: list[str] = arg([], "of query and answer; none: prompt, question or problem, and "
                                 "answer or solution")
    verifier: list[str] = arg(["math"], "math (math-verify), exact or file.py:function; of several "
                                        "the rewards are parts of one")
    reward_weights: list[float] = arg([], "of the parts, in their order; none: 1 each")
    chat_template: bool = arg(True, "use the tokenizer's chat template if it has one")
    stop: list[str] = arg([], "strings that end an answer; \\n stands for a line break")
    min_terms: int = arg(8, "running sum: fewest terms", at_least=1)
    max_terms: int = arg(12, "running sum: most terms")
    verbose_answers: bool = arg(False, "running sum: write a+b=c for every step")

    steps: int = arg(50, "rollout batches", section="the rollout batch", at_least=1)
    prompts_per_step: int = arg(32, "queries per rollout batch", at_least=1)
    num_generations: int = arg(8, "G: responses per query", at_least=1)
    steps_per_generation: int = arg(4, "mini-batches (optimiser steps) per rollout batch",
                                    at_least=1)
    max_prompt_length: int = arg(1024, "longest prompt in tokens", at_least=1)
    max_completion_length: int | None = arg(None, "longest response in tokens; none: what the "
                                                  "running sum needs, else 256", at_least=1)
    temperature: float = arg(1.0, "of sampling and of log-probs alike", above=0)

    learning_rate: float = arg(4e-4, "the highest; for a checkpoint 1e-6", section="the optimiser",
                               above=0)
    lr_scheduler_type: str = arg("cosine", "how it falls after the warm-up",
                                 choices=("linear", "cosine", "constant_with_warmup"))
    warmup_steps: int = arg(10, "optimiser steps of linear warm-up", at_least=0)
    max_grad_norm: float = arg(1.0, "clip the gradient's norm; 0: do not", at_least=0)

    micro_batch_size: int | None = arg(None, "rows per forward and backward; none: the mini-batch",
                                       section="the machine", at_least=1)
    gradient_checkpointing: bool = arg(False, "recompute activations; takes the plain path")
    plain: bool = arg(False, "a row per response, nothing shared: to read and to compare with")
    bf16: bool | None = arg(None, "bfloat16 autocast; none: for a checkpoint on CUDA")
    torch_compile: bool = arg(False, "compile the token step of sampling")
    optimizer_offload: bool = arg(False, "AdamW's numbers and float32 masters on the host")
    use_cpu: bool = arg(False, "stay on the CPU even if there is a GPU")
    shard: bool = arg(False, "with torchrun: FSDP2 instead of a replica per process")

    output_dir: str | None = arg(None, "run folder; none: runs/<algorithm>, numbered",
                                 section="the run")
    overwrite_output_dir: bool = arg(False, "replace the run that is in output_dir")
    resume: bool = arg(False, "go on with the run in output_dir")
    save_steps: int = arg(0, "checkpoint every so many rollout batches, keep two; 0: only the last",
                          at_least=0)
    save_tokens: bool | None = arg(None, "save a group's tokens per batch, for eval.py view; none: "
                                   "for the built-in task")
    eval_steps: int = arg(0, "evaluate every so many rollout batches; 0: only before and after",
                          at_least=0)
    eval_prompts: int = arg(256, "held-out queries of an evaluation", at_least=1)
    eval_samples: int = arg(4, "answers sampled per query; 0: no evaluation at all", at_least=0)
    seed: int = arg(0, "of everything", at_least=0)
    report_to: str | None = arg(None, "send the metrics there as well", choices=TRACKERS)
    print_trl_config: bool = arg(False, "print the equivalent trl.GRPOConfig and stop")

    @property
    def objective(self):
        """Row of losses.OBJECTIVES: ratio, clip and reduction."""
        return PRESETS[self.algorithm]["objective"]

    @property
    def history_resampling(self):
        """Whether an epoch's end drops the prompts whose answers were all right (SRPO)."""
        return self.algorithm == "srpo"


# What --help shows first.
FIRST = ("algorithm", "model_name_or_path", "dataset_name", "verifier", "steps", "learning_rate",
         "num_generations", "max_completion_length", "output_dir", "seed")

# What a checkpoint needs different from the tiny MoE: a smaller step, smaller batches.
CHECKPOINT_DEFAULTS = dict(learning_rate=1e-6, prompts_per_step=8, steps_per_generation=2,
                           warmup_steps=5)


# ------------------------------------------------------------------------------- the command line

def parse(argv):
    """Command line -> Arguments, resolved and checked.

    Raises ValueError with one line that names the flag and what would be right.
    """
    parser = make_parser()
    argv = [re.sub("^--[^=]*", lambda name: name[0].replace("-", "_").replace("__", "--", 1), a)
            for a in argv]                                   # --learning-rate is --learning_rate
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        near = nearest(unknown[0].split("=")[0], [f"--{f.name}" for f in fields(Arguments)])
        raise ValueError(f"unknown argument {unknown[0]}{near}; train.py --help lists all")
    check_choice(known, "algorithm", PRESETS)
    preset = {key: value for key, value in PRESETS[known.algorithm].items() if key != "objective"}
    parser.set_defaults(**(CHECKPOINT_DEFAULTS if known.model_name_or_path else {}) | preset)
    args = Arguments(**vars(parser.parse_args(argv)))
    args.stop = [s.replace("\\n", "\n") for s in args.stop]
    check_values(args)
    check_combinations(args)
    objective = OBJECTIVES[args.objective]
    args.epsilon = objective.epsilon if args.epsilon is None else args.epsilon
    args.epsilon_high = objective.epsilon_high if args.epsilon_high is None else args.epsilon_high
    args.reduction = args.reduction or objective.reduction
    if args.bf16 is None:
        args.bf16 = bool(args.model_name_or_path) and torch.cuda.is_available() and not args.use_cpu
    if args.save_tokens is None:
        args.save_tokens = not args.model_name_or_path
    args.sampler_dtype = args.sampler_dtype or ("bfloat16" if args.bf16 else "float32")
    return args


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """argparse itself would print the whole usage."""
        raise ValueError(message)


def make_parser():
    """A flag per field of Arguments, in sections; what matters first comes first."""
    parser = Parser(prog="train.py", usage="train.py [--flag value ...]", allow_abbrev=False,
                    description="GSPO and its relatives on a tiny MoE or a checkpoint. In brackets "
                                "[]: what holds if a flag is not given.")
    flags = {f.name: f for f in fields(Arguments)}
    section = parser.add_argument_group("the ten that matter first")
    for name in FIRST:
        add_flag(section, flags.pop(name))
    for f in fields(Arguments):
        if "section" in f.metadata:
            section = parser.add_argument_group(f.metadata["section"])
        if f.name in flags:
            add_flag(section, f)
    return parser


def add_flag(section, f):
    """--name VALUE; a list takes several values, a switch none (--no_name turns it off)."""
    kind = next(t for t in (*get_args(f.type), f.type) if t is not NoneType)     # X of X | None
    default = f.default_factory() if f.default is MISSING else f.default
    options = {"type": kind, "metavar": kind.__name__, "help": f.metadata["help"]}
    if kind is bool:
        options |= {"type": string_to_bool, "nargs": "?", "const": True}
    if get_origin(f.type) is list:
        options["nargs"] = "+"
    if "choices" in f.metadata:
        options["help"] += f": {', '.join(f.metadata['choices'])}"
    if default not in (None, False, []):
        options["help"] += f" [{default}]"
    section.add_argument(f"--{f.name}", default=default, **options)
    if default is True:
        hidden = {"help": argparse.SUPPRESS, "default": True}
        section.add_argument(f"--no_{f.name}", dest=f.name, action="store_false", **hidden)
