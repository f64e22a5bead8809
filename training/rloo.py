"""Stage `rloo`: REINFORCE leave-one-out of the SFT model against the reward model, PPO without a
critic.

data/prepared/prompts/train.jsonl, models/sft, models/reward -> models/rloo, metrics/rloo.json,
plots/rloo.csv

The loop is that of training/ppo.py. Its ratio and its clip range are per token as in PPO, where TRL
takes them of whole responses: the sum of the noise of hundreds of low-precision log-probabilities
is beyond any clip range.

    R_i = score_i - penalties - kl_coef * KL_i
    A_i = R_i - mean of R_j over the other responses j to the same prompt, the same for each token
    of response i
Source: Ahmadian et al. 2024 (arXiv:2402.14740).
"""

import sys

from training.ppo import INPUTS, ppo
from training.process.stage import Stage, run_stage
from training.rl.advantages import rloo_advantages

SECTIONS = ("seed", "model", "rloo")


def rloo(stage: Stage) -> None:
    ppo(stage, rloo_advantages)


if __name__ == "__main__":
    sys.exit(run_stage("rloo", SECTIONS, INPUTS, rloo))
