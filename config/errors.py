"""The exceptions a caller can meet, and the exit codes of a stage process.

RlhfError                 anything this project raises on purpose
├── UserError             exit 2: one line with the value, the rule and the place to change it
│   ├── ParamsError       params.yaml, a recipe, or a --set
│   ├── DataError         a data file, or its rows
│   ├── ModelError        a model folder, a tokenizer, or two that do not fit together
│   ├── CheckpointError   a checkpoint that cannot be used
│   ├── EnvironmentFault  disk, permission, port, a missing library or device
│   └── CostError         an unknown price, GPU or architecture; a plan that cannot be made
├── SmallerPieces         exit 77: out of memory where processes share a step; all start again in
                          smaller pieces
├── TrainingDiverged      exit 3: NaN, collapsed entropy, exploding ratio ...; a checkpoint is kept,
│                         and nothing is tried again: the same steps would diverge again
│   └── RolledBack        exit 1: the next attempt goes on from an earlier checkpoint
└── StageStopped          exit 75: asked to stop, checkpointed: start it again
    └── OverBudget        exit 76: a limit of `budget` is reached: do not, before it is raised
"""

EXIT_DONE = 0
EXIT_CRASHED = 1
EXIT_BAD_INPUT = 2
EXIT_DIVERGED = 3
EXIT_RESUMABLE = 75
"""EX_TEMPFAIL of sysexits.h: try again later."""
EXIT_OVER_BUDGET = 76
"""Not 75: an engine that restarts jobs that exit with 75 would spend more than the budget."""
EXIT_SMALLER_PIECES = 77
"""One of several processes ran out of memory: training.process.launch restarts all of them with smaller
micro-batches.
"""


EXIT_INTERRUPTED = 130
"""Ctrl-C where nothing is left to resume, as a shell reports SIGINT."""


class RlhfError(Exception):
    """Any error this project raises on purpose. `exit_code` is that of the process."""

    exit_code = EXIT_CRASHED


class UserError(RlhfError):
    """A mistake the user can fix. The message is one line: value, rule, place."""

    exit_code = EXIT_BAD_INPUT


class ParamsError(UserError):
    """params.yaml, a recipe, or a --set."""


class DataError(UserError):
    """A data file, or its rows."""


class ModelError(UserError):
    """A model folder, a tokenizer, or two that do not fit together."""


class CheckpointError(UserError):
    """A checkpoint that cannot be used."""


class EnvironmentFault(UserError):
    """Disk, permission, port, a missing library or device."""


class CostError(UserError):
    """An unknown price, GPU or architecture, or a plan that cannot be made."""


class SmallerPieces(RlhfError):
    """Out of memory during a collective step: all processes must restart with smaller micro-batches."""

    exit_code = EXIT_SMALLER_PIECES


class TrainingDiverged(RlhfError):
    """Training produced NaN, collapsed or exploded; the message names the quantity and its value."""

    exit_code = EXIT_DIVERGED


class RolledBack(TrainingDiverged):
    """Training diverged, and the next attempt resumes from an earlier checkpoint with lower learning rates."""

    exit_code = EXIT_CRASHED


class StageStopped(RlhfError):
    """The stage was asked to stop, wrote a checkpoint and can be resumed."""

    exit_code = EXIT_RESUMABLE


class OverBudget(StageStopped):
    """A limit of `budget` was reached. The stage has checkpointed and resumes under a higher one."""

    exit_code = EXIT_OVER_BUDGET
