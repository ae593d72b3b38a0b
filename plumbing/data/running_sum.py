"""The built-in task: last digits of a running sum, and a teacher that makes a systematic error."""

import os
import random
import zlib

from plumbing.data.datafiles import Problem
from plumbing.data.task import CHARACTERS, Task


def running_sum(min_terms=8, max_terms=12, verbose=False, habit=0.6, slip=0.005, train_size=16384,
                test_size=512, seed=0):
    """Last digit of a running sum: `3+8+5+9=` -> `3,1,6,5.`, verbose `0+3=3,3+8=1,1+5=6,6+9=5.`

    min_terms, max_terms: number of terms per prompt; each term is 1 to 9. An answer has 2
    characters per term, or 6 with verbose. habit: the probability that the teacher adds 8 instead
    of 9. slip: the probability that a step of the teacher becomes a random digit. train_size,
    test_size: the largest number of distinct prompts per split. A prompt is in the test split if
    its CRC-32 is divisible by ten. All prompts are padded on the right with spaces (a token of the
    vocabulary) to the same width, so that a position has the same meaning in every row.
    """
    width = 6 if verbose else 2                              # characters of a step and separator

    def solution(terms, add=lambda total, term: (total + term) % 10):
        steps = []
        total = 0
        for term in terms:
            before = total
            total = add(total, term)
            steps.append(f"{before}+{term}={total}" if verbose else str(total))
        return ",".join(steps) + "."

    def verify(response, problem):
        return float(response == problem.answer)             # every step must be right

    def first_error(response, problem):
        if response == problem.answer:
            return None
        same = len(os.path.commonprefix([response, problem.answer]))
        if same % width == width - 1:                        # the response is too short or too long
            return same
        return same // width * width

    def teacher(problem, rng):
        def add(total, term):
            if term == 9 and rng.random() < habit:
                term = 8
            return rng.randrange(10) if rng.random() < slip else (total + term) % 10
        return solution([int(c) for c in problem.prompt if c.isdigit()], add)

    rng = random.Random(seed)
    seen = set()
    train = []
    test = []
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
        if len(seen) == before:                              # 4096 draws gave no new prompt
            break
    lengths = f"{min_terms}-{max_terms}" if min_terms < max_terms else f"{max_terms}"
    name = f"running sum of {lengths} terms{', verbose' if verbose else ''}"
    longest = max(len(problem.answer) for problem in train) + 1      # and the end-of-sequence token
    return Task(name, train, test, verify, first_error=first_error, teacher=teacher,
                one_width=True, max_completion_length=longest)


def builtin_tokenizer(characters=CHARACTERS):
    """A tokenizer with one token per character: 0-9 + = , . space <eos> <pad>, 17 tokens, or the
    given characters with <eos> and <pad>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    tokens = [*characters, "<eos>", "<pad>"]
    words = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    words.decoder = decoders.Fuse()                          # no spaces between tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", padding_side="left",
        clean_up_tokenization_spaces=False)
