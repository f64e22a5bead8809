"""Distillation: phases and memory of teacher and student (training/distill.py).

The teacher samples what the student does not, reads every response once, and its head is applied again in each pass
over them. The student is planned like the policy of the RL loop.
"""

from dataclasses import replace

from config.errors import CostError
from costs.formulas.compute import Work, forward_pass, gather
from costs.formulas.generation import generation
from costs.formulas.memory import Moment, frozen_role, generating, scoring
from costs.formulas.ppo import PhaseRow, gather_seconds, packed_sequences, passes_over, roles_of, scored, update_phase
from costs.formulas.ppo_memory import plus, update_moments
from costs.formulas.setting import Levers, Setting
from costs.formulas.states import gathered_bytes, optimizer_bytes, role_weights
from costs.formulas.time import duration
from costs.tables.shapes import ModelShape


def teacher_of(setting: Setting) -> ModelShape:
    """Raises CostError where the setting has none."""
    if setting.rlhf is None or setting.rlhf.teacher is None:
        raise CostError("stage distill needs a teacher's shape. Set rlhf.teacher in the setting.")
    return setting.rlhf.teacher


def teacher_levers(setting: Setting) -> Levers:
    """The teacher is frozen; it is stored like the base of adapters."""
    loop = roles_of(setting)
    return replace(setting.levers, tuning="frozen", weights_fp32=False, quantisation=loop.teacher_quantisation)


def distill_phases(setting: Setting) -> list[PhaseRow]:
    """(phase, work, seconds, bound) over all updates, on one device."""
    loop, teacher, held = roles_of(setting), teacher_of(setting), teacher_levers(setting)
    sequences = loop.batch / setting.gpus
    phases = []
    for name, shape, levers, share in (
        ("student_rollout", setting.model, setting.levers, loop.student_share),
        ("teacher_rollout", teacher, held, 1 - loop.student_share),
    ):
        if share > 0:
            phases.append(_rollout(setting, name, shape, levers, share * sequences))
    if loop.taught_share > 0:
        counted = replace(
            setting, workload=replace(setting.workload, steps=setting.workload.steps * loop.taught_share)
        )
        phases.append(scored(counted, "teacher_logprobs", teacher, False, sequences))
    name, work, seconds, bound = update_phase(setting, sequences)
    head = _teacher_head(setting, teacher, held, sequences)
    return [*phases, (name, work + head, seconds + duration(head, setting).seconds, bound)]


def _rollout(setting: Setting, name: str, shape: ModelShape, levers: Levers, responses: float) -> PhaseRow:
    """`responses` of a role in every update, on one device, averaged over the updates."""
    loop, steps = roles_of(setting), setting.workload.steps
    side_by_side = max(1.0, min(loop.rollout_batch, loop.batch / setting.gpus))
    batches = steps * responses / side_by_side
    (_, prefill, first, _), (_, decode, rest, bound) = generation(setting, shape, levers, batches, side_by_side)
    return (
        name,
        prefill + decode + gather(setting, shape, levers).times(steps),
        first + rest + gather_seconds(setting, shape) * steps,
        bound,
    )


def _teacher_head(setting: Setting, teacher: ModelShape, levers: Levers, responses: float) -> Work:
    """The teacher's probabilities at all response tokens, in every pass over them: a pass with its head less one
    without.
    """
    loop, work = roles_of(setting), setting.workload
    times, micro = passes_over(setting, responses / loop.mini_batches)
    at_responses = micro * work.response_mean

    def reading(vocabulary_tokens: float) -> Work:
        return forward_pass(setting, teacher, levers, micro, work.mean_tokens, vocabulary_tokens)

    head = reading(at_responses) + reading(0.0).times(-1)
    passes = work.steps * loop.taught_share * loop.ppo_epochs * loop.mini_batches * times
    return head.times(passes)


# ---------------------------------------------------------------- memory


def teacher_hidden_bytes(setting: Setting) -> float:
    """The teacher's last hidden states at every response token of an update, which every process keeps until the
    update ends.
    """
    work = setting.workload
    tokens = roles_of(setting).batch * work.response_mean
    return tokens * teacher_of(setting).width * setting.levers.dtype_bytes


def distill_moments(setting: Setting) -> list[Moment]:
    """Memory in each phase: the states of both roles stay, and the active role has its activations."""
    loop, work = roles_of(setting), setting.workload
    teacher, held = teacher_of(setting), teacher_levers(setting)
    resident = {
        "policy": {
            "weights": role_weights(setting, setting.model, setting.levers),
            "optimizer": optimizer_bytes(setting, setting.model, setting.levers),
        },
        "teacher": frozen_role(setting, teacher, held),
    }
    sequences = loop.batch / setting.gpus
    moments = []
    for name, role, shape, levers, share in (
        ("student_rollout", "policy", setting.model, setting.levers, loop.student_share),
        ("teacher_rollout", "teacher", teacher, held, 1 - loop.student_share),
    ):
        if share > 0:
            parts = generating(
                setting,
                shape,
                levers,
                max(1.0, min(loop.rollout_batch, sequences)),
                work.prompt_tokens + work.response_tokens,
                work.prompt_tokens,
            )
            parts["workspace"] += gathered_bytes(setting, shape, levers)
            moments.append(Moment(name, plus(resident, role, parts)))
    longest = packed_sequences(setting, sequences)
    passing = scoring(setting, teacher, held, longest, work.max_tokens, vocabulary=False)
    passing["workspace"] += gathered_bytes(setting, teacher, held)
    moments.append(Moment("teacher_logprobs", plus(resident, "teacher", passing)))
    kept = {"activations": teacher_hidden_bytes(setting)}
    return moments + update_moments(setting, plus(resident, "teacher", kept))
