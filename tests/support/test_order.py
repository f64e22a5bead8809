from types import SimpleNamespace

from tests.support.order import longest_first, record


def test_the_longest_files_come_first_and_each_keeps_its_order() -> None:
    tests = ["a.py::one", "a.py::two", "b.py::one", "new.py::one", "c.py::one", "c.py::two"]
    places = longest_first(tests, {"b.py": 3.0, "c.py": 90.0})
    assert [tests[place] for place in places] == [
        "c.py::one",
        "c.py::two",
        "b.py::one",
        "a.py::one",
        "a.py::two",
        "new.py::one",
    ]


def test_what_ran_is_recorded_by_file_and_the_others_stay() -> None:
    reports = [
        SimpleNamespace(nodeid=nodeid, duration=seconds)
        for nodeid, seconds in (("a.py::x", 4.0), ("a.py::x", 7.0), ("b.py::x", 0.1))
    ]
    assert record(reports, {"b.py": 30.0, "c.py": 5.0}) == {"a.py": 11, "c.py": 5}
