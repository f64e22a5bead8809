"""The most important figure of a stage."""

from collections.abc import Mapping
from typing import Any

from reporting.inputs import finite
from reporting.numbers import count, decimal, percent


def key_figure(stage: str, metrics: Mapping[str, Any]) -> str:
    """The most important figures in metrics/<stage>.json, in a few words; empty if there are no metrics."""
    value = {name: number for name, content in metrics.items() if (number := finite(content)) is not None}
    match stage:
        case "data":
            rows = value.get("rows_kept", value.get("rows"))
            refused = value.get("rows_quarantined", 0)
            more = f", {count(refused)} refused: data/prepared/quarantine.jsonl" if refused else ""
            return f"{count(rows)} rows{more}" if rows is not None else ""
        case "sft":
            figures = [f"eval loss {decimal(value['eval_loss'])}"] if "eval_loss" in value else []
            return ", ".join([*figures, *overfits(value)])
        case "reward":
            limit = f" of {percent(value['bayes_accuracy'])} possible" if "bayes_accuracy" in value else ""
            if "accuracy" not in value and "score_mean" in value:
                return f"score {decimal(value['score_mean'])} for known replies"
            figures = [f"accuracy {percent(value['accuracy'])}{limit}"] if "accuracy" in value else []
            return ", ".join([*figures, *overfits(value)])
        case "dpo" | "kto":
            figures = [f"accuracy {percent(value['accuracy'])}"] if "accuracy" in value else []
            figures += [f"margin {decimal(value['margin'])}"] if "margin" in value else []
            return ", ".join([*figures, *overfits(value)])
        case "distill":
            share = value.get("parameters_student", 0) / value.get("parameters_teacher", 1)
            figures = [f"{percent(share)} of the weights"] if share else []
            if "agreement" in value:
                figures.append(f"agreement {percent(value['agreement'])}")
            return ", ".join(figures)
        case "evaluate":
            if "gold_sft" in value and "gold_aligned" in value:
                return f"gold {decimal(value['gold_sft'])} → {decimal(value['gold_aligned'])}"
            return f"win rate {percent(value['win_rate_reward'])}" if "win_rate_reward" in value else ""
        case _:
            figures = [f"{name} {decimal(value[name])}" for name in ("score", "kl") if name in value]
            return ", ".join(figures).replace("kl", "KL")


def overfits(metrics: Mapping[str, float]) -> list[str]:
    """The step after which the loss on validation rows rose beyond doubt, if it did."""
    step = metrics.get("overfits_from")
    return [f"overfits from step {count(step)}"] if step is not None else []
