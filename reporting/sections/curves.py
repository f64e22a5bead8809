"""Learning curves: one small chart per quantity and stage."""

from typing import NamedTuple

from markupsafe import Markup

from config.methods.registry import RECORDS, SAMPLING_METHODS
from config.sections.online import Kl
from reporting.charts import Reference, Series, legend, line_chart
from reporting.inputs import Curves, Findings
from reporting.numbers import count, decimal, percent
from reporting.parts import card, grid, group, missing, section


class Panel(NamedTuple):
    """A chart: metric names of runs/<stage>/metrics.jsonl with the labels to show."""

    title: str
    names: dict[str, str]
    note: str = ""
    shares: bool = False
    """The values are fractions."""


LOSSES = {"loss": "train", "validation_loss": "validation", "test_loss": "test"}
SFT = (
    Panel("Loss", LOSSES, "Mean negative log-likelihood of a reply token, in nats."),
    Panel(
        "Token accuracy",
        {"mean_token_accuracy": "train", "eval_mean_token_accuracy": "held out"},
        "How often the most likely token is correct.",
        True,
    ),
    Panel("Learning rate", {"learning_rate": "rate"}),
)
REWARD = (
    Panel("Loss", LOSSES, "Bradley-Terry; 0.693 is a coin toss."),
    Panel("Accuracy", {"accuracy": "train batch"}, "Pairs whose preferred reply scores higher.", True),
    Panel("Margin", {"margin": "train batch"}, "Score of the preferred reply minus the other's."),
)
PPO = (
    Panel("Score", {"score": "score"}, "Mean reward-model score of the sampled replies."),
    Panel("KL to SFT", {"kl": "KL"}, "Nats per reply: how far the policy has moved."),
    Panel("Entropy", {"entropy": "entropy"}, "Nats per token: the policy's uncertainty. Near zero it has collapsed."),
    Panel("Reply length", {"length": "length"}, "Tokens. A score that grows with length alone is a warning."),
    Panel("Replies that end", {"eos_rate": "ended"}, "Share with an end-of-sequence token in time.", True),
    Panel(
        "Clipped ratios",
        {"clip_fraction": "policy", "value_clip_fraction": "value"},
        "Share of tokens at the clip range; far above 20% the steps are too big.",
        True,
    ),
    Panel(
        "Explained variance",
        {"explained_variance": "value model"},
        "1: the value model foresees the return; 0: it knows no more than the mean.",
    ),
    Panel("Value loss", {"value_loss": "value"}),
    Panel("Policy loss", {"policy_loss": "policy"}, "The level means little; a jump indicates a problem."),
    Panel("Ratio", {"ratio": "mean ratio"}, "New over old probability of the sampled tokens; stays near 1."),
    Panel("KL coefficient", {"kl_coef": "coefficient"}, "Price of a nat of KL, in score."),
    Panel("Gradient norm", {"grad_norm": "before clipping"}),
)
DPO = (
    Panel("Loss", LOSSES, "With loss sigmoid, 0.693 is a coin toss."),
    Panel(
        "Accuracy",
        {"accuracy": "train batch"},
        "Pairs whose preferred reply gained more probability than the other.",
        True,
    ),
    Panel("Margin", {"margin": "train batch"}, "beta times what the preferred reply gained over the other, in nats."),
    Panel(
        "Reply log-probability",
        {"chosen_logps": "preferred", "rejected_logps": "other"},
        "Nats per reply. If both fall, probability goes to replies that were never compared.",
    ),
    Panel(
        "Implicit reward",
        {"chosen_reward": "preferred", "rejected_reward": "other"},
        "beta times the change of the log-probability.",
    ),
    Panel("Learning rate", {"learning_rate": "rate"}),
    Panel("Gradient norm", {"grad_norm": "before clipping"}),
)
KTO = (
    Panel("Loss", LOSSES, "Where both kinds weigh 1, 0.5 is a coin toss."),
    Panel("Margin", {"margin": "train batch"}, "Mean implicit reward of good replies minus that of bad ones."),
    Panel(
        "Implicit reward",
        {"good_reward": "good", "bad_reward": "bad"},
        "beta times the change of the log-probability.",
    ),
    Panel("KL to SFT", {"kl": "KL"}, "Nats per reply, estimated with replies to other prompts."),
    Panel("Learning rate", {"learning_rate": "rate"}),
    Panel("Gradient norm", {"grad_norm": "before clipping"}),
)
WITHOUT_CRITIC = (
    *(panel for panel in PPO if panel.title not in ("Explained variance", "Value loss")),
    Panel(
        "Prompts without a lesson",
        {"equal_groups": "equal scores"},
        "Share of prompts whose replies all have one score.",
        True,
    ),
)
DISTILL = (
    Panel(
        "Loss",
        {"loss": "per token"},
        "Nats per reply token: cross-entropy in the first distill.sft_updates, then the divergence from the teacher.",
    ),
    Panel(
        "Agreement",
        {"agreement": "same token"},
        "Share of reply tokens at which student and teacher have the same most likely token.",
        True,
    ),
    Panel("Reply length", {"length": "all replies", "student_length": "the student's"}),
    Panel("Replies that end", {"eos_rate": "all replies", "student_eos_rate": "the student's"}, "", True),
    Panel("Learning rate", {"learning_rate": "rate"}),
    Panel("Gradient norm", {"grad_norm": "before clipping"}),
)
TONES = ("accent", "second", "base")


def curves_section(findings: Findings) -> Markup:
    """All stages that logged something."""
    method = findings.params.align.method
    record = RECORDS[method]
    offline = {"dpo": DPO, "kto": KTO}
    panels = offline[method] if not record.samples else PPO if record.has_critic else WITHOUT_CRITIC
    row = "update" if record.samples else "step"
    trains_a_reward_model = findings.params.trained_reward is not None
    stages: list[tuple[str, str, tuple[Panel, ...], str]] = [
        ("sft", "Supervised fine-tuning", SFT, "step"),
        *([("reward", "Reward model", REWARD, "step")] if trains_a_reward_model else []),
        (method, method.upper(), panels, row),
    ]
    if findings.params.distill is not None:
        stages.append(("distill", "Distillation", DISTILL, "update"))
    groups = [_group(findings, *stage) for stage in stages]
    return section("curves", "Learning curves", "Hover over a curve to read its values.", *groups)


def _group(findings: Findings, stage: str, title: str, panels: tuple[Panel, ...], step_name: str) -> Markup:
    curves = findings.curves.get(stage, {})
    panels_html = [
        _panel(panel, curves, findings, stage, step_name)
        for panel in panels
        if any(name in curves for name in panel.names)
    ]
    content = grid(*panels_html) if panels_html else missing(f"The stage {stage} logged nothing in this run.")
    return group(title, content)


def _panel(panel: Panel, curves: Curves, findings: Findings, stage: str, step_name: str) -> Markup:
    present = [name for name in panel.names if name in curves]
    series = [Series(panel.names[name], curves[name], TONES[i % 3]) for i, name in enumerate(present)]
    shown = percent if panel.shares else decimal
    description = ", ".join(f"{s.name} from {shown(s.points[0][1])} to {shown(s.points[-1][1])}" for s in series)
    references = _references(panel, findings, stage)
    step = findings.value(stage, "overfits_from") if panel.title == "Loss" else None
    note = panel.note if step is None else f"{panel.note} It overfits from step {count(step)}."
    picture = line_chart(
        series,
        f"{stage} {panel.title.lower()} by {step_name}: {description}",
        step_name,
        references,
        shares=panel.shares,
    )
    return card(panel.title, legend(series) if len(series) > 1 else None, picture, note=note or None)


def _references(panel: Panel, findings: Findings, stage: str) -> list[Reference]:
    """Lines to compare a curve with."""
    if (
        stage in ("reward", "dpo")
        and panel.title == "Accuracy"
        and (limit := findings.value("reward", "bayes_accuracy")) is not None
    ):
        return [Reference("best possible", limit)]
    if stage in SAMPLING_METHODS and panel.title == "KL to SFT":
        penalty: Kl = getattr(findings.params, stage).kl
        return [Reference("target", penalty.target)] if penalty.controller == "adaptive" else []
    return []
