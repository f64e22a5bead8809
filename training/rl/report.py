"""Statistics of a rollout and of an update.

Shapes: B responses, T response tokens, N response tokens one after another.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from training.distributed.collectives import all_reduce_max, sum_of_all
from training.rl.ppo_math import PolicyLoss, ValueLoss, explained_variance

if TYPE_CHECKING:
    from training.rl.episodes import Episodes
    from training.rl.roles import Forward


SUMMED = ("policy_loss", "value_loss", "entropy", "ratio", "clip_fraction", "value_clip_fraction", "approx_kl")
OF_A_CRITIC = ("value_loss", "value_clip_fraction")


def rollout_statistics(
    episodes: "Episodes", ref_logprobs_BT: Tensor, score_B: Tensor, ended_B: Tensor, kl_coef: float
) -> dict[str, float]:
    """Means over the responses of a rollout; `kl` is in nats per response (k1), `kl_error` its standard error.

    Without a critic values and returns are left out.
    """
    mask_BT, values_BT, returns_BT = episodes.mask, episodes.values, episodes.returns
    kl_B = torch.where(mask_BT, episodes.logprobs - ref_logprobs_BT, 0.0).sum(dim=1)
    length_B = mask_BT.sum(dim=1).float()
    statistics = {
        "score": float(score_B.mean()), "score_std": _spread(score_B),
        "kl": float(kl_B.mean()), "kl_error": _spread(kl_B) / len(kl_B) ** 0.5, "kl_coef": kl_coef,
        "reward": float((score_B - kl_coef * kl_B).mean()),
        "length": float(length_B.mean()), "eos_rate": float(ended_B.float().mean()),
    }  # fmt: skip
    if values_BT is None or returns_BT is None:
        return statistics
    return {
        **statistics,
        "value": float(values_BT[mask_BT].mean()),
        "return": float(returns_BT[mask_BT].mean()),
        "explained_variance": explained_variance(values_BT, returns_BT, mask_BT),
    }


def _spread(x_B: Tensor) -> float:
    """Standard deviation, 0 of a single number."""
    return float(x_B.std()) if len(x_B) > 1 else 0.0


class UpdateStatistics:
    """Sums over the response tokens of an update, each counted once a pass; summed over processes at each optimizer
    step.
    """

    def __init__(self, critic: bool = True) -> None:
        self._names = SUMMED if critic else tuple(name for name in SUMMED if name not in OF_A_CRITIC)
        self._open: list[Tensor] = []
        """Sums and tokens of each micro-batch of the current mini-batch, in this process."""
        self._sums: dict[str, float] = {}
        self._mini_kl: list[float] = []
        self.grad_norms: list[float] = []
        self._first_ratio_error: Tensor | None = None
        self.first_ratio_error = 0.0
        """Largest |ratio - 1| of the first micro-batch, where new and old policy are the same: floating-point noise in
        a correct setup.
        """

    def begin(self) -> None:
        """Start a mini-batch, discarding sums of an unfinished one."""
        self._open = []

    def add(self, policy: PolicyLoss, value: ValueLoss | None, new: "Forward") -> None:
        """Add a micro-batch."""
        with torch.no_grad():
            log_ratio_N = policy.ratio.log()
            parts = {
                "policy_loss": policy.losses,
                "entropy": new.entropy,
                "ratio": policy.ratio,
                "clip_fraction": policy.clipped,
                "approx_kl": torch.expm1(log_ratio_N) - log_ratio_N,
                **({"value_loss": value.losses, "value_clip_fraction": value.clipped} if value is not None else {}),
            }
            sums = [parts[name].float().sum() for name in self._names]
            tokens = torch.full_like(sums[0], len(policy.ratio))
            self._open.append(torch.stack([*sums, tokens]))
            if self._first_ratio_error is None:
                self._first_ratio_error = (policy.ratio - 1).abs().max()

    def step(self, grad_norm: float) -> None:
        """Finish a mini-batch."""
        if not self.grad_norms:
            first_error = 0.0 if self._first_ratio_error is None else float(self._first_ratio_error)
            self.first_ratio_error = all_reduce_max(first_error)
        names = (*self._names, "tokens")
        sums = dict(zip(names, sum_of_all(self._open, len(names)), strict=True))
        self._sums = {name: self._sums.get(name, 0.0) + total for name, total in sums.items()}
        self._mini_kl.append(sums["approx_kl"] / sums["tokens"])
        self.grad_norms.append(grad_norm)

    def approx_kl(self) -> float:
        """Mean KL between old and new policy per token of the latest mini-batch, in nats."""
        return self._mini_kl[-1] if self._mini_kl else 0.0

    def summary(self) -> dict[str, float]:
        """Means per token over the update."""
        means = {name: total / self._sums["tokens"] for name, total in self._sums.items() if name != "tokens"}
        grad_norm = sum(self.grad_norms) / len(self.grad_norms)
        return {**means, "grad_norm": grad_norm, "first_ratio_error": self.first_ratio_error}
