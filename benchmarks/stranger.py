"""A stranger's seven tasks: each is one command line of train.py on a pretrained model, which is
printed, run and measured.

    python benchmarks/stranger.py                    all seven
    python benchmarks/stranger.py reversal lora      these
    python benchmarks/stranger.py lora --steps 5     what is not its own goes to train.py
    python benchmarks/stranger.py --list             only write the files and print the commands

The files that a user would write (rows, verifiers, judges, tools) are in FILES below; they are
written to runs/stranger/. results/stranger.json gets one entry per task, which a later run
replaces: held-out pass@1 and mean reward before and after training with their intervals, the mean
reward of each rollout batch, wall-clock seconds and CPU seconds.
"""

import argparse
import json
import random
import resource
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = Path("runs/stranger")     # relative to ROOT, where the commands run
MODEL = "checkpoints/SmolLM2-135M-Instruct"

WORDS = """cat dog sun map pen red big hat cup box run top car sea sky ice egg arm leg hand foot
head tree leaf rain snow wind fire gold iron milk salt cake rice fish bird bear wolf lion frog duck
goat king road ship boat door wall roof room desk lamp book page song drum bell ring coin sand rock
hill lake park farm town moon star cold warm fast slow good kind blue pink grey soft hard tall thin
dark open long time year work life home hour game team word line part name side back face
mind idea""".split()

# What a user writes. {home} stands for the folder.
FILES = {
    "reverse.txt": "cat -> tac\nstop -> pots\nfar -> raf\ntent -> tnet\n{prompt} ->",
    "reverse.py": '''
def partial(response, answer):
    """The share of letters at their right place."""
    text = response.strip()
    same = sum(a == b for a, b in zip(text, answer))
    return {"right": float(text == answer), "letters": same / max(len(text), len(answer))}
''',
    "judge.py": '''
import time

def judge(prompts, completions, answer, **columns):
    """Stands for a model that takes ten seconds to read a batch: half a mark for a word of the
    right length, half for its letters in any order."""
    time.sleep(10)
    marks = []
    for completion, right in zip(completions, answer):
        text = completion.strip()
        marks.append((len(text) == len(right)) / 2 + (sorted(text) == sorted(right)) / 2)
    return marks
''',
    "trl_reward.py": '''
import re

def accuracy(completions, ground_truth, **kwargs):
    """As TRL's documentation has it."""
    matches = [re.search(r"-?\\d+", completion) for completion in completions]
    contents = [match.group(0) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth)]
''',
    "code.txt": ("def double(x): return x + x  # twice x\n"
                 "def negate(x): return -x  # x with the other sign\n{prompt}"),
    "runs.py": '''
import secrets
import subprocess
import sys

def passes(response, answer, problem):
    """1 if the function passes the row's tests, in a Python of its own. See docs/data.md: what
    isolates it from this machine is a container or nsjail, not this."""
    done = secrets.token_hex(8)
    program = f"{problem['prompt']}{response}\\n{problem['tests']}\\nprint('{done}')\\n"
    try:
        ran = subprocess.run([sys.executable, "-I", "-"], input=program, text=True,
                             capture_output=True, timeout=2)
    except subprocess.TimeoutExpired:
        return 0.0
    return float(ran.stdout.strip().endswith(done))
''',
    "calculator.txt": ("117+225=<tool>117+225</tool>342\n"
                       "538+146=<tool>538+146</tool>684\n{prompt}"),
    "calculator.py": '''
import ast
import re

def calculate(text):
    """The sum in the last <tool>…</tool> of a response."""
    sums = ast.parse(re.findall(r"<tool>(.*?)</tool>", text, re.S)[-1].strip(), mode="eval").body
    return str(value(sums))

def value(node):
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return value(node.left) + value(node.right)
    raise ValueError("only whole numbers and +")

def last(response, answer):
    return float(response.rpartition("</tool>")[2].strip() == answer)
''',
}

SMALL = ("--no_chat_template --stop \\n --learning_rate 1.5e-5 --lr_scheduler_type "
         "constant_with_warmup --prompts_per_step 16 --steps_per_generation 4 --eval_prompts 128")
CHAIN = ("--dataset_name reasoning_gym:chain_sum?max_terms=2&max_digits=1&size=3000 "
         "--max_completion_length 5 --eval_samples 8")
ASK = "State the final answer to the following arithmetic problem:"
SHOTS = f"{ASK} 4 + 13 = 17\\n{ASK} 29 - 6 = 23\\n{ASK} 12 - 35 = -23\\n{{prompt}}"

# name: (what it shows, flags; {home} stands for the folder)
TASKS = {
    "reversal": ("word reversal with partial credit: the mean reward rises", [
        *SMALL.split(), *"--dataset_name {home}/words.jsonl --test_dataset_name "
        "{home}/words_test.jsonl --prompt_template @{home}/reverse.txt "
        "--verifier {home}/reverse.py:partial --reward_weights 0 1 --max_completion_length 6 "
        "--steps 9 --eval_samples 2".split()]),
    "chain_sum": ("reasoning_gym by flags alone", [
        *SMALL.split(), *CHAIN.split(), "--prompt_template", SHOTS, "--steps", "9"]),
    "lora": ("chain_sum with LoRA adapters", [
        *SMALL.split(), *CHAIN.split(), "--prompt_template", SHOTS, "--steps", "9", "--use_peft",
        "--learning_rate", "2e-4"]),
    "judge": ("a judge that takes ten seconds for a batch", [
        *SMALL.split(), *"--dataset_name {home}/words.jsonl --test_dataset_name "
        "{home}/words_test.jsonl --prompt_template @{home}/reverse.txt "
        "--verifier {home}/judge.py:judge --max_completion_length 6 --steps 3 "
        "--eval_prompts 16".split()]),
    "trl": ("a reward function of TRL, unchanged", [
        *SMALL.split(), *"--dataset_name {home}/sums.jsonl --columns question ground_truth "
        "--verifier {home}/trl_reward.py:accuracy --max_completion_length 5 --steps 3 "
        "--eval_prompts 32 --prompt_template".split(), "3+4=7\\n12+7=19\\n{prompt}"]),
    "code": ("a verifier that runs code", [
        *SMALL.split(), *"--dataset_name {home}/code.jsonl --prompt_template @{home}/code.txt "
        "--verifier {home}/runs.py:passes --max_completion_length 16 --steps 3 "
        "--eval_prompts 16".split()]),
    "calculator": ("a calculator, called by the policy", [
        *SMALL.split(), *"--dataset_name {home}/large_sums.jsonl --tool "
        "{home}/calculator.py:calculate --prompt_template @{home}/calculator.txt --verifier "
        "{home}/calculator.py:last --max_completion_length 24 --steps 5 --eval_prompts 32 "
        "--save_tokens".split()]),
}


def rows():
    """The rows of the data sets as {file: rows}; the same at every call."""
    rng = random.Random(0)
    words = [{"prompt": w, "answer": w[::-1]} for w in WORDS]
    small = [(a, b) for a in range(1, 30) for b in range(1, 30)]
    large = [(rng.randrange(100, 900), rng.randrange(100, 900)) for _ in range(400)]
    sums = {"triple": "x + x + x", "square": "x * x", "half": "x / 2", "next": "x + 1",
            "previous": "x - 1", "ten_times": "10 * x", "is_zero": "x == 0", "cube": "x * x * x"}
    code = [{"prompt": f"def {name}{suffix}(x):", "answer": f" return {body}",
             "tests": f"assert all({name}{suffix}(x) == ({body}) for x in (0, 2, 6, -4))"}
            for name, body in sums.items() for suffix in ("", "_of", "_it", "_number")]
    return {
        "words.jsonl": [word for i, word in enumerate(words) if i % 4],
        "words_test.jsonl": words[::4],
        "sums.jsonl": [{"question": f"{a}+{b}=", "ground_truth": str(a + b)} for a, b in small],
        "large_sums.jsonl": [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in large],
        "code.jsonl": code}


def write_files():
    home = ROOT / HOME
    home.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (home / name).write_text(text.lstrip("\n"))
    for name, found in rows().items():
        (home / name).write_text("".join(json.dumps(row) + "\n" for row in found))


def command(name, model, more=()):
    """The command line of a task, as a list of words."""
    flags = [flag.replace("{home}", str(HOME)) for flag in TASKS[name][1]]
    return ["python", "train.py", "--model_name_or_path", model, *flags,
            "--output_dir", str(HOME / name), "--overwrite_output_dir", *more]


def run(name, model, more=()):
    """Run a task and return its summary.json without the texts."""
    words = command(name, model, more)
    used = processor_seconds()
    subprocess.run([sys.executable, *words[1:]], cwd=ROOT, check=True)
    found = json.loads((ROOT / HOME / name / "summary.json").read_text())
    lines = (ROOT / HOME / name / "metrics.jsonl").read_text().splitlines()
    kept = ("pass_at_1", "interval", "reward", "reward_interval", "reward_parts")
    figures = {f"{key}_{when}": found.get(f"{key}_{when}") for key in kept
               for when in ("before", "after")}
    return {"what": TASKS[name][0], "command": shlex.join(words), "steps": found["steps"],
            **figures, "batches": [json.loads(line)["reward"] for line in lines],
            "seconds": found["seconds"],
            "processor_seconds": processor_seconds() - used}


def processor_seconds():
    """Processor seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(TASKS))
    parser.add_argument("--list", action="store_true", help="only write files, print commands")
    parser.add_argument("--model", default=MODEL, help="a checkpoint of the SmolLM2 kind")
    parser.add_argument("--out", type=Path, default=ROOT / "results/stranger.json")
    own, more = parser.parse_known_args(argv)
    unknown = sorted({*own.names} - {*TASKS})
    if unknown:
        parser.error(f"there is no task {', '.join(unknown)}; there are {', '.join(TASKS)}")
    write_files()
    for name in own.names or TASKS:
        print(f"\n{name}: {TASKS[name][0]}\n{shlex.join(command(name, own.model, more))}",
              flush=True)
        if own.list:
            continue
        found = run(name, own.model, more)
        results = json.loads(own.out.read_text()) if own.out.exists() else {}
        own.out.write_text(json.dumps(results | {name: found}, indent=1) + "\n")
        print(f"{name}: pass@1 {found['pass_at_1_before']} -> {found['pass_at_1_after']}, mean "
              f"reward {found['reward_before']} -> {found['reward_after']}, "
              f"{found['seconds']:.0f} s by the clock, "
              f"{found['processor_seconds']:.0f} s of processor time")


if __name__ == "__main__":
    main()
