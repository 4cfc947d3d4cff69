"""Random layouts, masks, shapes, devices and options; `make fuzz` runs the same cases for as long as one likes."""

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz import check_case


@settings(max_examples=12, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(program=st.integers(0, 10**6), cases=st.lists(st.integers(0, 10**6), min_size=3, max_size=3, unique=True))
def test_random_programs_on_random_masks(program, cases):
    for case in cases:
        check_case(program, case)
