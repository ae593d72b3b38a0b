"""Environments of other forms, to copy: what stands between their classes and --environment.

    Calculator   tool calls in JSON, as Hermes and Qwen models write them, several in a turn
    FromTRL      a class for TRL's environment_factory, such as Counter, as it is
    FromGym      a class with Gymnasium's reset and step, such as Walk
    Examiner     a judge that asks further questions, behind an async client (pip install openai)

The chat template shows the tools of the first two, whose schemas this script writes:

    python recipes/adapters.py Calculator tools.json
    python train.py --model_name_or_path DIR --environment recipes/adapters.py:Calculator \\
        --chat_template_kwargs @tools.json
"""

import argparse
import asyncio
import functools
import inspect
import json
import os
import re
import sys
from pathlib import Path

# ------------------------------------------------------------ tool calls in JSON, several in a turn

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.S)
NEXT = "\n</tool_response>\n<tool_response>\n"     # what Qwen's template writes between two results


def answer_calls(tools, text):
    """The results of the tool calls in a turn as one text; "" without a call."""
    results = []
    for call in CALL.findall(text):
        try:
            call = json.loads(call)
            results.append(str(tools[call["name"]](**call["arguments"])))
        except Exception as error:               # the policy reads what was wrong with its call
            results.append(f"error: {error!r}")
    return NEXT.join(results)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number
        b: the other
    """
    return int(a) + int(b)


class Calculator:
    role = "tool"
    tools = {"add": add}

    def __init__(self, row):
        self.answer = row["answer"]

    def step(self, text):
        results = answer_calls(self.tools, text)
        return results, float(not results and text.strip() == self.answer), not results

    @staticmethod
    def rows():
        return [{"prompt": f"{a}+{a + 2}+{b}=", "answer": str(2 * a + 2 + b)}
                for a in range(10, 30) for b in range(40, 50)]


# --------------------------------------------------------------------- TRL's environment_factory

class Counter:
    """As it stands in a script for TRL."""

    def reset(self, target, **row):
        self.total = 0
        self.target = target
        return f"\nCount to {target}."

    def increase(self, by: int) -> int:
        """Increase the counter.

        Args:
            by: how much to add
        """
        self.total += by
        return self.total

    def get_reward(self):
        return float(self.total == self.target)


class FromTRL:
    role = "tool"
    kind = Counter                               # your class

    def __init__(self, row):
        self.game = self.kind()
        names = [name for name, _ in inspect.getmembers(self.kind, inspect.isfunction)
                 if name[0] != "_" and name not in ("reset", "get_reward")]
        self.tools = {name: getattr(self.game, name) for name in names}

    def reset(self, **row):
        return self.game.reset(**row)

    def step(self, text):
        results = answer_calls(self.tools, text)
        return results, 0.0 if results else self.game.get_reward(), not results

    @staticmethod
    def rows():
        return [{"prompt": "Use the counter.", "target": target} for target in range(20, 60)]


# ------------------------------------------------------------------- Gymnasium's reset and step

class Walk:
    """As with Gymnasium: from place 0 to 3, with a left and a right that may be exchanged."""

    def reset(self, seed=None, options=None):
        self.place = 0
        self.right = 1 if seed % 2 else -1
        return self.place, {}

    def step(self, action):
        self.place += self.right if action else -self.right
        return self.place, float(self.place == 3), self.place == 3, abs(self.place) > 5, {}

    def close(self):
        pass


class FromGym:
    def __init__(self, row):
        self.game = Walk()                       # your class, or gymnasium.make("…")

    def reset(self, seed):
        observation, info = self.game.reset(seed=seed)
        return self.show(observation), info

    def step(self, text):
        if text.strip() not in ("left", "right"):
            return "Write left or right.", 0.0, False
        observation, reward, terminated, truncated, _ = self.game.step(int(text.strip() == "right"))
        return self.show(observation), float(reward), terminated or truncated

    def close(self):
        self.game.close()

    @staticmethod
    def show(observation):                       # in words
        return f" You are at {observation}."

    @staticmethod
    def rows():
        return [{"prompt": "Go to 3. Write left or right.", "game": i} for i in range(100)]


# --------------------------------------------------------------------- a judge, asked by a client

SLOTS = asyncio.Semaphore(8)                     # questions at a time, of all responses


@functools.cache
def make_client():
    """Made once: all turns run in one event loop."""
    from openai import AsyncOpenAI
    return AsyncOpenAI(base_url=os.environ["JUDGE"] + "/v1", api_key="none", timeout=60)


class Examiner:
    def __init__(self, row):
        self.messages = [{"role": "system", "content": "You examine a student. Reply with one more "
                          "question, or with RIGHT or WRONG. " + row["prompt"]}]

    async def step(self, text):                  # the examiners of a batch answer side by side
        self.messages.append({"role": "user", "content": text})
        async with SLOTS:
            chat = make_client().chat.completions
            reply = await chat.create(model="judge", messages=self.messages)
        self.messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        words = self.messages[-1]["content"]
        return words, float("RIGHT" in words), "RIGHT" in words or "WRONG" in words


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")     # for consoles without Greek letters
    from transformers.utils import get_json_schema
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["Calculator", "FromTRL"])
    parser.add_argument("file", type=Path, help="the JSON that is written")
    options = parser.parse_args()
    kind = {"Calculator": Calculator, "FromTRL": FromTRL}[options.name]
    tools = [get_json_schema(tool) for tool in kind({"answer": ""}).tools.values()]
    options.file.write_text(json.dumps({"tools": tools}, indent=1) + "\n", encoding="utf-8")
