"""Tasks: a query x, where it comes from and how its answer is judged.

    built-in    running_sum(): the last digit of a running sum, a teacher with a bad habit, a verifier that checks every step
    your data   load_task("rows.jsonl"), load_task("openai/gsm8k"), load_task("reasoning_gym:countdown")
    position    PromptStream: which queries come next; SRPO's two stages and history resampling

How rows are read and checked is in datafiles.py, how answers are judged in verifiers.py. Knows nothing of models or losses.
"""

import random
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Callable, NamedTuple

import torch

from plumbing.datafiles import checked_rows, file_or_hub_rows, gym_rows
from plumbing.verifiers import Verifier


class Problem(NamedTuple):
    prompt: str
    answer: str
    where: str = ""              # file and line, for error messages


@dataclass
class Task:
    name: str
    train: list                  # of Problem; no prompt is in both lists unless `notes` says so
    test: list
    verify: Callable             # (response, problem) -> float reward
    stop: tuple = ()             # strings that end a response, besides the end-of-sequence token
    chat: bool = False           # put prompts through the tokenizer's chat template, if it has one
    first_error: Callable | None = None     # (response, problem) -> index of the first character of the first wrong step, or None
    teacher: Callable | None = None         # (problem, random.Random) -> a response to imitate, right or wrong
    sizes: tuple = ()            # train problems per source, in the order of `train`; PromptStream draws from them
    notes: list = field(default_factory=list)              # what loading did that a user should know
    verifiers: tuple = ()        # what `verify` asks, for the built-in task nothing

    @property
    def verifier_errors(self):
        """Answers on which a verifier timed out or crashed, so far: a Counter of "timeout" and "crash". Their reward was 0."""
        return sum((verifier.errors for verifier in self.verifiers), Counter())


# ------------------------------------------------------------------------------------------------------------ built-in task

def running_sum(min_terms=8, max_terms=12, verbose=False, habit=0.6, slip=0.005, train_size=16384, test_size=512, seed=0):
    """The last digit of a running sum: `3+8+5+9=` -> `3,1,6,5.`, or verbose `0+3=3,3+8=1,1+5=6,6+9=5.`

    min_terms, max_terms: terms of 1-9 per query; an answer has 2 characters per term (6 if verbose): 4 to 128 terms, 8 to 256.
    habit: how often the teacher adds 8 for a 9. slip: how often any of its steps becomes a random digit. train_size, test_size:
    at most so many distinct queries (3 terms allow only 729). A query is in the test split if its CRC-32 is divisible by ten.
    Prompts are padded on the right with spaces, a token of the vocabulary, to one width: positions then mean the same everywhere.
    Raises ValueError for arguments out of range.
    """
    if not 1 <= min_terms <= max_terms:
        raise ValueError(f"min_terms {min_terms} and max_terms {max_terms}: 1 <= min_terms <= max_terms is needed")
    for name, value in (("habit", habit), ("slip", slip)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} {value} is not between 0 and 1: it is a probability")
    for name, value in (("train_size", train_size), ("test_size", test_size)):
        if value < 1:
            raise ValueError(f"{name} {value} is not at least 1")
    width = 6 if verbose else 2                              # characters per step, its separator included

    def solution(terms, add=lambda total, term: (total + term) % 10):
        steps, total = [], 0
        for term in terms:
            before, total = total, add(total, term)
            steps.append(f"{before}+{term}={total}" if verbose else str(total))
        return ",".join(steps) + "."

    def terms_of(problem):
        return [int(c) for c in problem.prompt if c.isdigit()]

    def verify(response, problem):
        return float(response == problem.answer)             # equal strings: every step is right, and there is one per term

    def first_error(response, problem):
        right = problem.answer
        if response == right:
            return None
        same = next((i for i, (a, b) in enumerate(zip(response, right)) if a != b), min(len(response), len(right)))
        at_separator = same % width == width - 1             # the step is right; the answer ends too early or too late
        return same if at_separator else same // width * width

    def teacher(problem, rng):
        def add(total, term):
            if term == 9 and rng.random() < habit:
                term = 8
            return rng.randrange(10) if rng.random() < slip else (total + term) % 10
        return solution(terms_of(problem), add)

    rng, seen, train, test = random.Random(seed), set(), [], []
    while len(train) < train_size or len(test) < test_size:
        before = len(seen)
        for _ in range(4096):
            terms = rng.choices("123456789", k=rng.randint(min_terms, max_terms))
            prompt = "+".join(terms) + "="
            split, size = (test, test_size) if zlib.crc32(prompt.encode()) % 10 == 0 else (train, train_size)
            if prompt not in seen and len(split) < size:
                split.append(Problem(prompt.ljust(2 * max_terms), solution(map(int, terms))))
            seen.add(prompt)
        if len(seen) == before:                              # 4096 draws and nothing new: there are no more queries
            break
    lengths = f"{min_terms}-{max_terms}" if min_terms < max_terms else f"{max_terms}"
    teacher_is = "" if (habit, slip) == (0.6, 0.005) else f", habit {habit:g}, slip {slip:g}"
    task = Task(f"running sum of {lengths} terms{', verbose' if verbose else ''}{teacher_is}", train, test, verify,
                first_error=first_error, teacher=teacher, sizes=(len(train),))
    if len(train) < train_size or len(test) < test_size:
        task.notes.append(f"there are only {len(train)} train and {len(test)} test queries of {lengths} terms")
    return task


def builtin_tokenizer():
    """A transformers tokenizer of 17 tokens: ten digits, + = , . space, <eos>, <pad>. One character is one token, both ways."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    tokens = [*"0123456789+=,. ", "<eos>", "<pad>"]
    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()                     # nothing between tokens
    return PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>", pad_token="<pad>", padding_side="left",
                                   clean_up_tokenization_spaces=False)


# ---------------------------------------------------------------------------------------------------------------- your data

def load_task(dataset_name, test_dataset_name=None, dataset_config=None, prompt_column=None, answer_column=None, verifier="math",
              time_limit=3.0, stop=(), chat=True, size=1024, seed=0):
    """A task from a data file, a hub id, or `reasoning_gym:NAME` (`size` problems made with `seed`, judged by that package).

    Columns: prompt, question or problem; answer or solution; or as named. Numbers become text; of an answer with `####` only what
    follows counts (gsm8k). Only the first row of a prompt is kept. Test split: test_dataset_name, else the hub's own (test, or
    validation), and its prompts leave train; else the tenth of the prompts with the smallest CRC-32, 1 to 512 of them; of a
    single problem, that problem. verifier, time_limit (seconds per answer): see verifiers.py. The task's `notes` say what was
    left out. Raises ValueError or FileNotFoundError that names the file and the line.
    """
    if dataset_name.startswith("reasoning_gym:"):
        rows, own_test = gym_rows(dataset_name.partition(":")[2], size, seed), []
        number = {row["prompt"]: str(i) for i, (_, row) in reversed(list(enumerate(rows)))}      # how its verifier knows them
        verifier, prompt_column, answer_column = f"{dataset_name}:{seed}:{size}", None, None
    else:
        (rows, own_test), number = file_or_hub_rows(dataset_name, dataset_config), None
    if test_dataset_name:
        train_rows, test_rows = file_or_hub_rows(test_dataset_name, dataset_config)
        own_test = test_rows or train_rows
    train = [Problem(*row) for row in checked_rows(rows, dataset_name, prompt_column, answer_column)]
    test = []
    if own_test or test_dataset_name:
        test = [Problem(*row) for row in checked_rows(own_test, test_dataset_name or dataset_name, prompt_column, answer_column)]

    notes, total = [], len(train) + len(test)
    test = list({p.prompt: p for p in reversed(test)}.values())[::-1]                    # the first row of every prompt
    held_out = {p.prompt for p in test}
    train = [p for p in list({p.prompt: p for p in reversed(train)}.values())[::-1] if p.prompt not in held_out]
    if len(train) + len(test) < total:
        left_out = total - len(train) - len(test)
        notes.append(f"{left_out} of {total} rows left out: their prompt came before or is in the test split")
    if not train:
        raise ValueError(f"{dataset_name}: nothing to train on: every prompt is in the test split too")
    if not test and len(train) == 1:
        test = train
        notes.append("there is only one problem, so it is the test split too: the score says nothing about other problems")
    elif not test:
        by_hash = sorted(train, key=lambda p: (zlib.crc32(p.prompt.encode()), p.prompt))
        held_out = {p.prompt for p in by_hash[:min(512, max(1, len(train) // 10))]}
        test, train = [p for p in train if p.prompt in held_out], [p for p in train if p.prompt not in held_out]
        notes.append(f"no test split: {len(test)} problems held out, those whose prompts have the smallest CRC-32")

    check = Verifier(verifier, time_limit)
    if verifier == "math" and not any(check(p.answer, p.answer) for p in train[:8]):
        example = repr(train[0].answer[:40])
        notes.append(f"math-verify reads answers like {example} only in $…$ or \\boxed{{…}}: perhaps the verifier exact is meant")
        check.errors.clear()

    def verify(response, problem):
        return check(response, number[problem.prompt] if number else problem.answer)
    return Task(dataset_name, train, test, verify, tuple(stop), chat, sizes=(len(train),), notes=notes, verifiers=(check,))


def join(first, second):
    """Two tasks as one with two sources, for SRPO's stages: PromptStream(task.sizes, …) draws from the first, later from both."""
    if first.chat != second.chat:
        raise ValueError(f"{first.name} and {second.name}: one uses the chat template and the other does not")
    held_out = {p.prompt for p in first.test + second.test}
    parts = [[p for p in task.train if p.prompt not in held_out] for task in (first, second)]
    if not all(parts):
        raise ValueError(f"{first.name} and {second.name}: no train problem of one is left that is not in the other's test split")
    theirs = set(second.train + second.test)

    def verify(response, problem):
        return (second if problem in theirs else first).verify(response, problem)
    return Task(f"{first.name} + {second.name}", parts[0] + parts[1], first.test + second.test, verify,
                tuple(dict.fromkeys(first.stop + second.stop)), first.chat, sizes=tuple(map(len, parts)),
                notes=first.notes + second.notes, verifiers=first.verifiers + second.verifiers)


def from_arguments(args):
    """The built-in task or the user's, as train.py's flags say, with a second source where SRPO's stages want one.

    Fills in args.max_completion_length where it was not given: the built-in task's longest answer, with room for
    the overlong penalty beyond it, else 256.
    """
    if args.dataset_name is None:
        task = running_sum(args.min_terms, args.max_terms, args.verbose_answers)
        longest = longest_answer(task)
        args.max_completion_length = args.max_completion_length or limit(longest, args.overlong_cache)
        if args.stage2_step:                                 # stage 2 adds the longer half of the sums
            terms = lambda problem: len(problem.prompt.split("+"))
            task.train.sort(key=terms)
            first = sum(terms(p) <= (args.min_terms + args.max_terms) // 2 for p in task.train)
            task.sizes = (first, len(task.train) - first)
        return task
    options = dict(prompt_column=args.prompt_column, answer_column=args.answer_column, verifier=args.verifier, stop=args.stop,
                   chat=args.chat_template, seed=args.seed)
    task = load_task(args.dataset_name, args.test_dataset_name, **options)
    if args.stage2_dataset_name:
        task = join(task, load_task(args.stage2_dataset_name, **options))
    args.max_completion_length = args.max_completion_length or 256
    return task


def overlong_zone(share, max_length):
    """Tokens before max_length in which DAPO's penalty grows to -1: a share of it, one at least."""
    return max(1, round(share * max_length))


def limit(longest, share):
    """The smallest length limit that leaves answers of `longest` tokens out of that zone."""
    if not 0 < share < 1:
        return longest
    length = longest
    while length - overlong_zone(share, length) < longest:
        length += 1
    return length


def longest_answer(task):
    """Tokens of the built-in task's longest answer, its end-of-sequence token included: a character is a token."""
    return max(len(p.answer) for p in task.train) + 1


def blamed(task, rollout, problems):
    """Which response tokens [B, T] stand at or after the first wrong step of their answer: a character
    of the built-in task is a token."""
    G, (B, T), device = rollout.group_size, rollout.mask.shape, rollout.mask.device
    errors = [task.first_error(text, problems[i // G]) for i, text in enumerate(rollout.texts)]
    first = torch.tensor([0 if e is None else e for e in errors], device=device)[:, None]    # [B, 1]
    return torch.arange(T, device=device) >= first                                           # [B, T]


def encode_prompt(tokenizer, problem, chat, max_prompt_length):
    """A prompt's token ids: through the chat template if `chat` and the tokenizer has one, else as plain text.

    Raises ValueError naming the row if the prompt is longer than max_prompt_length tokens, gives no token or cannot be tokenised.
    """
    where = f"{problem.where or repr(problem.prompt[:40])}: "
    if len(problem.prompt) > 100 * max_prompt_length:                # spares the tokenizer a million characters
        raise ValueError(f"{where}the prompt has {len(problem.prompt)} characters, far too many for {max_prompt_length} tokens")
    try:
        if chat and tokenizer.chat_template:
            messages = [{"role": "user", "content": problem.prompt}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        else:
            ids = tokenizer(problem.prompt)["input_ids"]
    except Exception as error:                                       # tokenizers raises bare Exceptions
        raise ValueError(f"{where}the prompt cannot be tokenised: {error}")
    if not 1 <= len(ids) <= max_prompt_length:
        raise ValueError(f"{where}the prompt has {len(ids)} tokens; between 1 and {max_prompt_length} fit")
    return ids


# ------------------------------------------------------------------------------------------------------------ data position

class PromptStream:
    """An endless shuffled sequence of problem numbers, epoch by epoch, and the place in it: `state_dict()` is a few JSON values.

    sizes: problems per source (Task.sizes). SRPO (arXiv 2504.14286) adds two things. second_after, its two stages: only the first
    source until so many problems are drawn, then a new epoch with all of them; None: all from the start. resample, its history
    resampling: at an epoch's end, problems whose last responses were all correct leave for good; mixed and all-wrong ones stay.
    say: called with a line of text when a stage begins or nothing is left to resample. Raises ValueError for impossible sizes.
    """

    def __init__(self, sizes, seed=0, second_after=None, resample=False, say=print):
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes {sizes}: every source needs at least one problem")
        if second_after is not None and len(sizes) < 2:
            raise ValueError(f"second_after {second_after} needs two sources of problems; sizes are {sizes}")
        self.sizes, self.seed, self.second_after, self.resample, self.say = list(sizes), seed, second_after, resample, say
        self.epoch = self.position = self.drawn = 0
        self.stage = 1 if second_after else 2
        self.solved, self.dropped = set(), set()
        self.shuffle()

    def shuffle(self):
        everything = range(sum(self.sizes) if self.stage == 2 else self.sizes[0])
        self.order = [i for i in everything if i not in self.dropped]
        if not self.order:
            self.say(f"epoch {self.epoch}: all responses to all problems were correct; history resampling starts again with all")
            self.dropped, self.order = set(), list(everything)
        random.Random(f"{self.seed} {self.epoch}").shuffle(self.order)

    def new_epoch(self):
        self.epoch, self.position = self.epoch + 1, 0
        if self.resample:
            self.dropped |= self.solved
            self.solved = set()
        self.shuffle()

    def next(self, n):
        """The next n problem numbers; an epoch that ends in between is followed by the next one."""
        if self.stage == 1 and self.drawn >= self.second_after:
            self.stage = 2
            self.say(f"stage 2: {sum(self.sizes[1:])} problems of the second source join after {self.drawn} problems")
            self.new_epoch()
        numbers = []
        while len(numbers) < n:
            if self.position == len(self.order):
                self.new_epoch()
            part = self.order[self.position:self.position + n - len(numbers)]
            self.position += len(part)
            numbers += part
        self.drawn += n
        return numbers

    def record(self, numbers, all_correct):
        """What history resampling needs: for each problem drawn, whether all its responses were correct."""
        for number, correct in zip(numbers, all_correct, strict=True):
            (self.solved.add if correct else self.solved.discard)(number)

    def state_dict(self):
        return {"sizes": self.sizes, "seed": self.seed, "epoch": self.epoch, "position": self.position, "drawn": self.drawn,
                "stage": self.stage, "solved": sorted(self.solved), "dropped": sorted(self.dropped)}

    def load_state_dict(self, state):
        if (state["sizes"], state["seed"]) != (self.sizes, self.seed):
            raise ValueError(f"the saved data position is of sizes {state['sizes']}, seed {state['seed']}; "
                             f"this task has sizes {self.sizes}, seed {self.seed}")
        self.epoch, self.position, self.drawn, self.stage = (state[key] for key in ("epoch", "position", "drawn", "stage"))
        self.solved, self.dropped = set(state["solved"]), set(state["dropped"])
        self.shuffle()


if __name__ == "__main__":
    task, rng = running_sum(), random.Random(4)
    problem = task.train[0]
    print(f"{task.name}: {len(task.train)} train and {len(task.test)} test problems, {len(problem.prompt)}-character prompts\n")
    wrong = next(a for a in (task.teacher(problem, rng) for _ in range(1000)) if a != problem.answer)
    error = task.first_error(wrong, problem)
    print(f"  query            {problem.prompt}")
    for name, response in (("right", problem.answer), ("teacher, wrong", wrong), ("last number only", problem.answer[-2:])):
        print(f"  {name:16} {response:28} reward {task.verify(response, problem):.0f}")
        if response == wrong:
            print(f"  {'first error':16} {' ' * error}^ character {error}")
    right = sum(task.verify(task.teacher(p, rng), p) for p in task.train[:4096]) / 4096
    print(f"\n  the teacher is right {right:.0%} of the time: for a 9 it mostly adds 8")
    print(f"  verbose: {running_sum(verbose=True, train_size=1, test_size=1).train[0].answer}")

    print()
    check = Verifier("math")
    for response in ("6*7", r"so \boxed{\frac{84}{2}}", "it is 41"):
        print(f"  {'maths, 42':16} {response:28} reward {check(response, '42'):.0f}")
    check.close()

    stream = PromptStream([6], resample=True)
    first = stream.next(6)
    stream.record(first, [number < 2 for number in first])
    print(f"\nprompts: epoch 0 {first}; all responses to 0 and 1 were correct; epoch 1 {stream.next(4)}")
