"""Stage `grpo`: group relative policy optimisation of the SFT model against the reward model, PPO
without a critic.

data/prepared/prompts/train.jsonl, models/sft, models/reward -> models/grpo, metrics/grpo.json,
plots/grpo.csv

The loop is that of training/ppo.py.

    S_i = score_i - penalties
    A_i = (S_i - mean of S_j) / std of S_j - kl_coef * (KL_i - mean of KL_j) over all responses j to
    the same prompt, the same for each token of response i

The paper has the KL penalty as a term of the loss; here its gradient comes with the advantage, on
the same scale.
Source: Shao et al. 2024 (arXiv:2402.03300). Its biases, and where we depart:
training/rl/advantages.py.
"""

import sys

from training.ppo import INPUTS, ppo
from training.process.stage import Stage, run_stage
from training.rl.advantages import grpo_advantages

SECTIONS = ("seed", "model", "grpo")


def grpo(stage: Stage) -> None:
    ppo(stage, grpo_advantages)


if __name__ == "__main__":
    sys.exit(run_stage("grpo", SECTIONS, INPUTS, grpo))
