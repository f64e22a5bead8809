import os
import signal

from tasks.run.stop import on_signals


def test_ctrl_c_and_sigterm_are_requests_and_a_second_one_insists() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with on_signals() as request:
        assert not request.made
        os.kill(os.getpid(), signal.SIGINT)
        assert (request.made, request.insisted) == (True, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.insisted
    assert signal.getsignal(signal.SIGTERM) is before
