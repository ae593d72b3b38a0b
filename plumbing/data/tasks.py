"""Tasks: a query x, where it comes from and how its answer is judged.

    built-in    running_sum(): last digits of a running sum, a teacher with a bad habit, a verifier
    your data   load_task("rows.jsonl"), load_task("openai/gsm8k"), load_task("reasoning_gym:NAME")

How rows are read and checked is in datafiles.py, how answers are judged in verifiers.py, which
queries come next in stream.py. Knows nothing of models or losses.
"""

import itertools
import random
import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Callable

import torch

from plumbing.speed import processes
from plumbing.data.datafiles import Problem, load_problems
from plumbing.data.verifiers import Verifier, in_parallel

CHARACTERS = "0123456789+=,. "   # of the built-in task: one is a token


@dataclass
class Task:
    name: str
    train: list                  # of Problem; no prompt is in both lists unless `notes` says so
    test: list
    verify: Callable             # (response, problem) -> float reward
    stop: tuple = ()             # strings that end a response, besides the end-of-sequence token
    chat: bool = False           # put prompts through the tokenizer's chat template, if it has one
    first_error: Callable | None = None  # (response, problem) -> character where it goes wrong
    teacher: Callable | None = None      # (problem, random.Random) -> a response, right or wrong
    sizes: tuple = ()            # train problems per source, in the order of `train`
    notes: list = field(default_factory=list)    # what loading did that a user should know
    verifiers: tuple = ()        # of Verifier; () for the built-in task
    parts: Callable | None = None        # (response, problem) -> {name: number} of all verifiers
    reward_weights: tuple = ()   # of the parts, in their order; (): 1 each
    ids: dict = field(default_factory=dict)      # problem -> token ids, made by `tokenizer`
    tokenizer: object = None
    told: int = 0                # how many verifier errors new_errors() has returned
    tool: Callable | None = None         # text so far -> text to insert next (rollout.sample)
    characters: str = CHARACTERS         # the vocabulary of a tiny MoE for this task

    @property
    def verifier_errors(self):
        """How often a verifier timed out or crashed so far: a Counter of "timeout" and "crash"."""
        return sum((verifier.errors for verifier in self.verifiers), Counter())

    def new_errors(self):
        """The number of verifier errors since the last call, in all processes."""
        before, self.told = self.told, sum(self.verifier_errors.values())
        return sum(processes.gather(self.told - before))

    @property
    def part_names(self):
        """The names of a reward's parts, K of them. An answer with 1 in the first one is right."""
        names = [name for v in self.verifiers for name in v.names or [v.name]]
        return list(dict.fromkeys(names)) or ["correct"]

    def weights(self, parts):
        """The weights of the columns of parts [B, K]; a column that is no verifier's weighs 1.

        Raises ValueError if --reward_weights has more or fewer than the verifiers have parts.
        """
        names, weights = self.part_names, self.reward_weights or [1.0] * len(self.part_names)
        if len(weights) != len(names):
            raise ValueError(f"--reward_weights holds {len(weights)} numbers, but the reward has "
                             f"{len(names)} parts: {', '.join(names)}")
        return [*weights, *[1.0] * (parts.shape[1] - len(weights))]

    def total(self, parts):
        """Rewards [B], the weighted sums of their parts [B, K]; equal parts give equal rewards."""
        return sum(weight * column for weight, column in zip(self.weights(parts), parts.T))

    def judge(self, texts, problems):
        """The rewards of N responses in parts, [N, K]. Several are verified at a time."""
        if self.parts is None:
            return torch.tensor([[self.verify(text, p)] for text, p in zip(texts, problems)])
        found = in_parallel(self.parts, texts, problems)
        for verifier in self.verifiers:
            verifier.complain()
        return torch.tensor([[row.get(name, 0.0) for name in self.part_names] for row in found])

    def encode(self, tokenizer, problems, chat, max_prompt_length):
        """Token ids of problems, each tokenised once. Raises ValueError as encode_prompt does."""
        if self.tokenizer is not tokenizer:
            self.tokenizer, self.ids = tokenizer, {}
        for problem in problems:
            if problem not in self.ids:
                self.ids[problem] = encode_prompt(tokenizer, problem, chat, max_prompt_length)
        return [self.ids[problem] for problem in problems]

    def keep_what_fits(self, tokenizer, chat, max_prompt_length):
        """Tokenise every prompt; those that encode_prompt refuses leave. Returns a note about them,
        or "". ValueError if that leaves a source of train prompts, or the test split, empty."""
        if self.teacher:                                     # its prompts have one width
            self.encode(tokenizer, self.train[:1], chat, max_prompt_length)
            return ""
        refused = []

        def fits(problem):
            try:
                return self.encode(tokenizer, [problem], chat, max_prompt_length)
            except ValueError as error:
                refused.append(str(error))

        def kept(problems, what):
            left = [problem for problem in problems if fits(problem)]
            if problems and not left:
                raise ValueError(f"none of the {len(problems)} {what} prompts fits; {refused[-1]}")
            return left
        ends = [sum(self.sizes[:i + 1]) for i in range(len(self.sizes))]
        sources = [kept(self.train[end - size:end], "train") for size, end in zip(self.sizes, ends)]
        total = len(self.train) + len(self.test)
        self.test = self.train if self.test is self.train else kept(self.test, "test")
        self.train, self.sizes = sum(sources, []), tuple(map(len, sources))
        return f"{len(refused)} of {total} prompts left out; {refused[0]}" if refused else ""


# ------------------------------------------------------------------------------------ built-in task

def running_sum(min_terms=8, max_terms=12, verbose=False, habit=0.6, slip=0.005, train_size=16384,
                test_size=512, seed=0):
    """Last digit of a running sum: `3+8+5+9=` -> `3,1,6,5.`, verbose `0+3=3,3+8=1,1+5=6,6+9=5.`

    min_terms, max_terms: terms of 1-9 per query; an answer has 2 characters per term, 6 if verbose:
    4 to 128 terms, 8 to 256. habit: how often the teacher adds 8 for a 9. slip: how often any of
    its steps becomes a random digit. train_size, test_size: at most so many distinct queries. A
    query is in the test split if its CRC-32 is divisible by ten. Prompts are padded on the right
    with spaces, a token of the vocabulary, to one width: positions then mean the same everywhere.
    Raises ValueError for arguments out of range.
    """
    if not 1 <= min_terms <= max_terms:
        raise ValueError(f"min_terms {min_terms} and max_terms {max_terms}: "
                         "1 <= min_terms <= max_terms is needed")
    for name, value in (("habit", habit), ("slip", slip)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} {value} is not between 0 and 1: it is a probability")
    if min(train_size, test_size) < 1:
        raise ValueError(f"train_size {train_size}, test_size {test_size}: both are at least 1")
    width = 6 if verbose else 2                              # characters of a step and separator

    def solution(terms, add=lambda total, term: (total + term) % 10):
        steps, total = [], 0
        for term in terms:
            before, total = total, add(total, term)
            steps.append(f"{before}+{term}={total}" if verbose else str(total))
        return ",".join(steps) + "."

    def verify(response, problem):
        return float(response == problem.answer)             # so every step is right, one per term

    def first_error(response, problem):
        right = problem.answer
        if response == right:
            return None
        shorter = min(len(response), len(right))
        same = next((i for i in range(shorter) if response[i] != right[i]), shorter)
        if same % width == width - 1:                        # it ends too early or too late
            return same
        return same // width * width

    def teacher(problem, rng):
        def add(total, term):
            if term == 9 and rng.random() < habit:
                term = 8
            return rng.randrange(10) if rng.random() < slip else (total + term) % 10
        return solution([int(c) for c in problem.prompt if c.isdigit()], add)

    rng, seen, train, test = random.Random(seed), set(), [], []
    while len(train) < train_size or len(test) < test_size:
        before = len(seen)
        for _ in range(4096):
            terms = rng.choices("123456789", k=rng.randint(min_terms, max_terms))
            prompt = "+".join(terms) + "="
            held_out = zlib.crc32(prompt.encode()) % 10 == 0
            split, size = (test, test_size) if held_out else (train, train_size)
            if prompt not in seen and len(split) < size:
                split.append(Problem(prompt.ljust(2 * max_terms), solution(map(int, terms))))
            seen.add(prompt)
        if len(seen) == before:                              # 4096 draws and nothing new
            break
    lengths = f"{min_terms}-{max_terms}" if min_terms < max_terms else f"{max_terms}"
    usual = (habit, slip) == (0.6, 0.005)
    name = (f"running sum of {lengths} terms{', verbose' if verbose else ''}"
            + ("" if usual else f", habit {habit:g}, slip {slip:g}"))
    task = Task(name, train, test, verify, first_error=first_error, teacher=teacher,
                sizes=(len(train),))
    if len(train) < train_size or len(test) < test_size:
        task.notes.append(f"there are only {len(train)} train and {len(test)} test queries of "
                          f"{lengths} terms")
    return task


def builtin_tokenizer(characters=CHARACTERS):
    """A tokenizer of the 17 tokens 0-9 + = , . space <eos> <pad>, or of other characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    tokens = [*characters, "<eos>", "<pad>"]
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()                          # nothing between tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", padding_side="left",
        clean_up_tokenization_spaces=False)


def overlong_zone(share, max_length):
    """Tokens before max_length in which DAPO's penalty grows to -1: a share of it, one at least."""
    return max(1, round(share * max_length))


def limit(longest, share):
    """The smallest length limit that leaves answers of `longest` tokens out of that zone."""
    if not 0 < share < 1:
        return longest
    return next(n for n in itertools.count(longest) if n - overlong_zone(share, n) >= longest)


def longest_answer(task):
    """Tokens of the built-in task's longest answer, its end-of-sequence token included."""
    return max(len(p.answer) for p in task.train) + 1


# ---------------------------------------------------------------------------------------- your data

def load_task(dataset_name, test_dataset_name=None, dataset_config=None, prompt_column=None,
              answer_column=None, verifier="math", time_limit=3.0, stop=(), chat=True, size=1024,
              seed=0, reward_weights=()):
    """A task from a data file, a hub id, or `reasoning_gym:NAME`; see datafiles.load_problems.

    verifier: a kind or a list of them, each with time_limit seconds per answer; see verifiers.py.
    The task's `notes` say what was left out. Raises ValueError or FileNotFoundError.
    """
    kinds = [verifier] if isinstance(verifier, str) else list(verifier)
    if dataset_name.startswith("reasoning_gym:"):
        kinds = [f"{dataset_name}:{seed}:{size}"]
    train, test, row_of, notes = load_problems(dataset_name, test_dataset_name, dataset_config,
                                               prompt_column, answer_column, size, seed)
    verifiers = tuple(Verifier(kind, time_limit) for kind in kinds)

    def parts(response, problem):
        found = [v.parts(response, problem.answer, row_of[problem]) for v in verifiers]
        return {name: value for part in found for name, value in part.items()}

    def verify(response, problem):
        return task.total(task.judge([response], [problem])).item()

    task = Task(dataset_name, train, test, verify, tuple(stop), chat, sizes=(len(train),),
                notes=notes, verifiers=verifiers, parts=parts,
                reward_weights=tuple(reward_weights or ()))
    answers = [(p.answer, p.answer, row_of[p]) for p in train[:8]]
    notes += [note for v in verifiers if (note := v.try_on(answers))]
    if len(task.part_names) < sum(len(v.names or [v.name]) for v in verifiers):
        raise ValueError(f"--verifier {' '.join(kinds)}: two parts of the reward have one name, of "
                         f"{', '.join(task.part_names)}")
    return task


def join(first, second):
    """Two tasks as one with two sources, for SRPO's stages: see PromptStream."""
    if first.chat != second.chat:
        raise ValueError(f"{first.name} and {second.name}: only one uses the chat template")
    held_out = {p.prompt for p in first.test + second.test}
    sources = [[p for p in task.train if p.prompt not in held_out] for task in (first, second)]
    if not all(sources):
        raise ValueError(f"{first.name} and {second.name}: no train problem of one is left that is "
                         "not in the other's test split")
    theirs = set(second.train + second.test)

    def verify(response, problem):
        return (second if problem in theirs else first).verify(response, problem)

    def parts(response, problem):
        return (second if problem in theirs else first).parts(response, problem)
    return Task(f"{first.name} + {second.name}", sources[0] + sources[1], first.test + second.test,
                verify, tuple(dict.fromkeys(first.stop + second.stop)), first.chat,
                sizes=tuple(map(len, sources)), notes=first.notes + second.notes, parts=parts,
                verifiers=first.verifiers + second.verifiers, reward_weights=first.reward_weights)


def from_arguments(args):
    """The built-in task or the user's, as train.py's flags say, with SRPO's second source.

    Fills in args.max_completion_length where it was not given: 256, or for the built-in task its
    longest answer, with room for DAPO's overlong penalty behind it.
    """
    if args.dataset_name is None:
        task = running_sum(args.min_terms, args.max_terms, args.verbose_answers)
        longest = limit(longest_answer(task), args.overlong_cache)
        args.max_completion_length = args.max_completion_length or longest
        if args.stage2_step:                                 # stage 2 adds the longer half
            task.train.sort(key=lambda problem: problem.prompt.count("+"))
            middle = (args.min_terms + args.max_terms) // 2
            first = sum(p.prompt.count("+") < middle for p in task.train)
            task.sizes = (first, len(task.train) - first)
        return task
    prompt, answer = args.columns or (None, None)
    options = dict(prompt_column=prompt, answer_column=answer,
                   verifier=args.verifier, stop=args.stop, chat=args.chat_template,
                   seed=args.seed, reward_weights=args.reward_weights)
    task = load_task(args.dataset_name, args.test_dataset_name, **options)
    if args.stage2_dataset_name:
        task = join(task, load_task(args.stage2_dataset_name, **options))
    task.weights(torch.zeros(1, len(task.part_names)))       # refuses a wrong number of them now
    args.max_completion_length = args.max_completion_length or 256
    return task


def encode_prompt(tokenizer, problem, chat, max_prompt_length):
    """A prompt's token ids: through the chat template if `chat` and the tokenizer has one.

    Raises ValueError naming the row if it has no token, more than max_prompt_length, or cannot be
    tokenised.
    """
    where, characters = problem.where or repr(problem.prompt[:40]), len(problem.prompt)
    if characters > 100 * max_prompt_length:                 # spares the tokenizer a million
        raise ValueError(f"{where}: the prompt has {characters} characters, far too many for "
                         f"{max_prompt_length} tokens")
    try:
        if chat and tokenizer.chat_template:
            messages = [{"role": "user", "content": problem.prompt}]
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        else:
            ids = tokenizer(problem.prompt)["input_ids"]
    except Exception as error:                               # tokenizers raises bare Exceptions
        raise ValueError(f"{where}: the prompt cannot be tokenised: {error}")
    if not 1 <= len(ids) <= max_prompt_length:
        raise ValueError(f"{where}: the prompt has {len(ids)} tokens; between 1 and "
                         f"{max_prompt_length} fit")
    return ids


if __name__ == "__main__":
    task, rng = running_sum(), random.Random(4)
    problem = task.train[0]
    answers = (task.teacher(problem, rng) for _ in range(1000))
    wrong = next(answer for answer in answers if answer != problem.answer)
    print(f"{task.name}\n\n  query            {problem.prompt}")
    for name, response in (("right", problem.answer), ("teacher, wrong", wrong),
                           ("last number only", problem.answer[-2:])):
        print(f"  {name:16} {response:28} reward {task.verify(response, problem):.0f}")
    print(f"  first error of the teacher: character {task.first_error(wrong, problem)}")
    right = sum(task.verify(task.teacher(p, rng), p) for p in task.train[:4096]) / 4096
    print(f"  the teacher is right {right:.0%} of the time: for a 9 it mostly adds 8")
