"""A reward function of the helpdesk: 1 for a reply that names the customer's item and apologises where it should, else
0. Groups of replies that are all right or all wrong teach nothing: studies/refill.yaml.
"""

from typing import Any

from training.worlds.helpdesk import criteria


def score(prompt: Any, response: str, row: dict[str, Any]) -> float:
    met = criteria(prompt, response)
    return float(met["item"] and met["apology"])
