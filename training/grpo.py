"""Stage `grpo`: group relative policy optimisation of the SFT model against the reward model, PPO
without a critic.

data/prepared/prompts/train.jsonl, models/sft, models/reward -> models/grpo, metrics/grpo.json,
plots/grpo.csv

The loop is that of training/ppo.py.

    R_i = score_i - penalties - kl_coef * KL_i
    A_i = (R_i - mean of R_j) / std of R_j over all responses j to the same prompt, the same for
    each token of response i
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
