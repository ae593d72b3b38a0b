"""A few supervised steps on the right answers, for a model that is never right: RL needs a start.

    python recipes/supervised.py FLAGS OF TRAIN.PY --output_dir DIR
    python train.py FLAGS OF TRAIN.PY --model_name_or_path DIR

The prompts are those of the run. Of the flags that say how to train, --steps, --prompts_per_step,
--learning_rate and --seed count. Needs pip install accelerate.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

from plumbing.data import tasks
from plumbing.model.chat import find_turn_end
from plumbing.model.policy import load_policy
from plumbing.parallel.devices import find_device_type
from plumbing.refusal import Refusal
from session.arguments import parse
from session.errors import errors_in_one_line
from session.folder import check_folder


def rows(settings, task, tokenizer):
    """[{"input_ids", "labels"}]: each prompt as the policy reads it, and its right answer, which
    alone is in the loss."""
    turn_end = find_turn_end(tokenizer) if settings.chat_template else None
    end = tokenizer.eos_token if turn_end is None else tokenizer.convert_ids_to_tokens(turn_end)
    end = settings.stop[0] if settings.stop else end
    prompts = task.encode(tokenizer, task.train)
    answers = [tokenizer(problem.answer + end, add_special_tokens=False)["input_ids"]
               for problem in task.train]
    return [{"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}
            for prompt, answer in zip(prompts, answers)]


def main(argv):
    with errors_in_one_line():
        settings = parse(argv)
        if not (settings.output_dir and settings.dataset_name):
            raise Refusal("a few supervised steps need --output_dir, a folder for the "
                          "checkpoint, and --dataset_name")
        check_folder(settings)                               # no run is written over
        task = tasks.prepare_task(settings)
        policy, tokenizer = load_policy(settings, task, torch.device(find_device_type(settings)))
        policy.requires_grad_()                              # merged adapters come frozen
        task.filter_prompts(tokenizer)
        options = TrainingArguments(
            settings.output_dir, max_steps=settings.steps, seed=settings.seed,
            per_device_train_batch_size=settings.prompts_per_step,
            learning_rate=settings.learning_rate, save_strategy="no", report_to="none",
            logging_steps=10, use_cpu=policy.device.type == "cpu")
        trainer = Trainer(policy, options, train_dataset=rows(settings, task, tokenizer),
                          data_collator=DataCollatorForSeq2Seq(tokenizer))
        trainer.train()
        trainer.save_model(settings.output_dir)
        tokenizer.save_pretrained(settings.output_dir)
        print(f"python train.py … --model_name_or_path {settings.output_dir}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    main(sys.argv[1:])
