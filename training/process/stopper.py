"""Reasons for a stage to stop early: a signal, a parent that is gone, a params.yaml that changed."""

import os
from types import FrameType

from config.alive import is_alive, is_suspended
from config.differences import Watched
from config.errors import ParamsError
from config.records import LAUNCHER_VARIABLE, PIPELINE_VARIABLE


class Stopper:
    def __init__(self, params_file: Watched) -> None:
        self.params_file = params_file
        self.requested = False
        """This process received a signal to stop."""
        self.launcher = int(os.environ.get(LAUNCHER_VARIABLE, "0"))
        """Process id of the launcher of a stage with several processes; 0 without one."""
        pid, _, created = os.environ.get(PIPELINE_VARIABLE, "").partition(":")
        self._pipeline = (int(pid), float(created)) if pid else None

    def request(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler."""
        self.requested = True

    @property
    def has_pipeline(self) -> bool:
        """Whether a pipeline started this process, rather than a user by hand."""
        return self._pipeline is not None

    @property
    def orphaned(self) -> bool:
        """Whether the launcher, or the pipeline process that watches the budget, is gone or stands still."""
        if self.launcher not in (0, os.getppid()):
            return True
        pipeline = self._pipeline
        return pipeline is not None and (not is_alive(*pipeline) or is_suspended(pipeline[0]))

    def must_stop(self) -> bool:
        return self.requested or self.orphaned or self._params_changed()

    def _params_changed(self) -> bool:
        """params.yaml may be unreadable while it is being written: the next check decides."""
        try:
            return bool(self.params_file.differences())
        except ParamsError:
            return False
