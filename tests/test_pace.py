"""Detection of slow steps. The tests supply durations and the clock, so they need not wait."""

import itertools

from striped_attention.training.pace import Pace


def remarks(seconds, clock=lambda: 0.0):
    """Return the reports on steps that take the given seconds, by step number."""
    pace = Pace(clock)
    said = {step: pace.remark(step, float(taken), 0.0) for step, taken in enumerate(seconds, 1)}
    return {step: text for step, text in said.items() if text is not None}


def test_a_step_is_slow_by_the_median_of_the_last_fifty():
    assert remarks([2.0] * 30 + [7.0] + [2.0] * 5) == {31: "Slow: step 31 took 7 s, 3.5 times the median of 2 s"}
    assert remarks([2.0] * 30 + [5.9]) == {}
    minutes = itertools.count(0.0, 60.0)
    slower = remarks([1.0] * 40 + [10.0] * 60 + [50.0], lambda: next(minutes))
    assert list(slower) == [*range(41, 66), 101], "until the slower pace is usual"


def test_first_steps_and_fractions_of_a_second_are_not_slow():
    assert remarks([300.0, 90.0] + [1.0] * 9 + [30.0]) == {}, "too few steps to compare with"
    assert remarks([0.01] * 30 + [0.9]) == {}


def test_many_slow_steps_are_told_of_once_a_minute():
    now = [0.0]

    def clock():
        now[0] += 20.0
        return now[0]

    said = remarks(([1.0] * 9 + [5.0]) * 8, clock)
    assert list(said) == [20, 50, 80]
    assert said[50].endswith("(2 other slow steps since the last report)")


def test_a_step_that_waited_for_its_batch_says_so():
    pace = Pace(lambda: 0.0)
    for step in range(20):
        pace.remark(step, 1.0, 0.5)
    text = pace.remark(20, 9.0, 8.25)
    assert text == "Slow: step 20 took 9 s, 9.0 times the median of 1 s, of which it waited 8.25 s for its batch"
