"""An environment with tools, to copy: calls in JSON, as Hermes and Qwen models write them, several
in a turn. The chat template shows the tools, whose schemas this script writes:

    python recipes/tools.py tools.json

docs/data.md#an-environment has the command that trains with them.
"""

import json
import re
import sys
from pathlib import Path

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.S)
NEXT = "\n</tool_response>\n<tool_response>\n"     # what Qwen's template writes between two results


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
        results = []
        for call in CALL.findall(text):
            try:
                call = json.loads(call)
                results.append(str(self.tools[call["name"]](**call["arguments"])))
            except Exception as error:           # the policy reads what was wrong with its call
                results.append(f"error: {error!r}")
        return NEXT.join(results), float(not results and text.strip() == self.answer), not results

    @staticmethod
    def rows():
        return [{"prompt": f"{a}+{a + 2}+{b}=", "answer": str(2 * a + 2 + b)}
                for a in range(10, 30) for b in range(40, 50)]


if __name__ == "__main__":
    from transformers.utils import get_json_schema
    tools = [get_json_schema(tool) for tool in Calculator.tools.values()]
    Path(sys.argv[1]).write_text(json.dumps({"tools": tools}, indent=1) + "\n", encoding="utf-8")
