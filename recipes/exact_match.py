"""A reward function for answers that can be checked: 1 where the last number of the response is the last number of the
known answer, else 0.
"""

import re
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def score(prompt: Any, response: str, row: dict[str, Any]) -> float:
    """`row` holds the known answer as its completion, such as "... #### 72"."""
    answer, expected = last_number(response), last_number(row.get("completion", ""))
    return float(answer is not None and answer == expected)


def last_number(text: str) -> float | None:
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None
