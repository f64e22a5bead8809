import os
import signal

from tasks.run.stop import on_signals


def test_ctrl_c_and_sigterm_are_requests_and_a_second_one_insists() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with on_signals() as request:
        assert not request.requested
        os.kill(os.getpid(), signal.SIGINT)
        assert (request.requested, request.force) == (True, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.force
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_lost_terminal_asks_to_stop_and_insists_on_nothing_however_often_it_says_so() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with on_signals() as request:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        assert (request.requested, request.force) == (True, False)
    assert signal.getsignal(signal.SIGHUP) is before
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup starts a process
    try:
        with on_signals() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not request.requested
    finally:
        signal.signal(signal.SIGHUP, before)
