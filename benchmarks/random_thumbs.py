"""Is a model that learnt from thumbs drawn at random ever promoted?

    python -m benchmarks.random_thumbs --seeds 20 [--json]

A small helpdesk with a champion that is hardly more than its SFT model, in .bench/thumbs. Its replies to 200 prompts
are rated by a coin for each seed, KTO trains on them, and the contest and the gate decide, as in a retrain cycle. At
the end the same replies are rated by their gold score: that model has to be promoted. A seed takes 20 s on two cores.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # also as a script: the code beside it

from config.load import load, write  # noqa: E402
from config.methods.registry import stage_module  # noqa: E402
from config.schema import Params  # noqa: E402
from config.sections.data import HelpdeskSource  # noqa: E402
from config.workspace.retraining import Contest  # noqa: E402
from tasks.champions.promotion_gate import promotion_verdict  # noqa: E402
from tests.e2e.test_feedback import CONVERSATIONS, GOOD, SMALL  # noqa: E402
from training.inference.replies import answer  # noqa: E402
from training.inference.trained_models import TrainedModels  # noqa: E402
from training.worlds.helpdesk import gold_score, prompts  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print JSON, not lines")
    given = parser.parse_args()
    folder = ROOT / ".bench/thumbs"
    shutil.rmtree(folder, ignore_errors=True)
    champion = folder / "champion"
    params = begin(champion, "kto.max_steps=1")
    run(champion, "data", "sft", "reward", "kto", "evaluate")
    source = HelpdeskSource(
        kind="helpdesk", sft_rows=1, preference_rows=1, prompt_rows=CONVERSATIONS, temperature=0.1, quality=0.6
    )
    texts = [row["prompt"] for row in prompts(source, 77)]
    replies = answer(TrainedModels(champion), texts, params).texts
    promoted = []
    for seed in range(given.seeds):
        coin = random.Random(seed)
        promoted.append(
            promotes(champion, folder / "challenger", texts, replies, [coin.random() < 0.5 for _ in texts])
        )
        print(f"seed {seed}: {'promoted' if promoted[-1] else 'kept'}", file=sys.stderr)
    honest = [gold_score(*both) >= GOOD for both in zip(texts, replies, strict=True)]
    completed = {
        "random": given.seeds,
        "random_promoted": sum(promoted),
        "honest_promoted": promotes(champion, folder / "challenger", texts, replies, honest),
    }
    print(json.dumps(completed, indent=2) if given.json else completed)


def begin(root: Path, *changes: str) -> Params:
    """A project of the stages alone."""
    root.mkdir(parents=True)
    for name in ("recipes", "training"):  # the reward function and what it imports
        shutil.copytree(ROOT / name, root / name)
    params = load(ROOT / "recipes/demo.yaml", [*SMALL, *changes])
    write(params, root / "params.yaml")
    return params


def run(root: Path, *stages: str) -> None:
    for stage in stages:
        module = stage_module(stage)
        subprocess.run([sys.executable, "-m", module, stage], cwd=root, check=True, capture_output=True)


def promotes(champion: Path, root: Path, texts: Sequence[str], replies: Sequence[str], labels: Sequence[bool]) -> bool:
    """Whether a model that learnt from these thumbs passes the gate."""
    shutil.rmtree(root, ignore_errors=True)
    params = begin(root)
    for name in ("models/sft", "models/reward"):
        shutil.copytree(champion / name, root / name)
    rows = zip(texts, replies, labels, strict=True)
    lines = [json.dumps({"prompt": a, "completion": b, "label": good}) + "\n" for a, b, good in rows]
    (root / "data/labels").mkdir(parents=True)
    (root / "data/labels/feedback.jsonl").write_text("".join(lines), encoding="utf-8")
    run(root, "data", "kto", "evaluate")
    sides = ["--champion", str(champion), "--challenger", str(root), "--out", str(root / "contest.json")]
    subprocess.run(
        [sys.executable, "-m", "training.retraining.contest", *sides], cwd=root, check=True, capture_output=True
    )
    contest = Contest.model_validate_json((root / "contest.json").read_bytes())
    evaluation = json.loads((root / "metrics/evaluate.json").read_text())
    return promotion_verdict(contest, evaluation["reward_hacking"], "", 0.0, params.retrain).promotes


if __name__ == "__main__":
    main()
