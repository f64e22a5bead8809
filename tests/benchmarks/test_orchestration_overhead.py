from benchmarks.orchestration_overhead import Timing, overhead


def test_overhead_is_what_the_stages_do_not_account_for_less_that_of_bare_processes() -> None:
    bare = [Timing(20.0, 19.0, 18.0), Timing(31.0, 29.0, 18.0), Timing(22.0, 20.5, 19.0)]
    flow = [Timing(40.0, 25.0, 27.0), Timing(38.0, 26.0, 26.0), Timing(99.0, 90.0, 28.0)]
    found = overhead("running", flow, bare)
    # median 12 less median 1.5
    assert (found.seconds, found.limit_seconds, found.kept) == (10.5, 15.0, True)
    assert found.cpu_seconds == 9.0
    assert not overhead("running", [Timing(40.0, 20.0, 20.0)], bare).kept
    assert overhead("temporary", [Timing(40.0, 20.0, 20.0)], bare).limit_seconds == 25.0
