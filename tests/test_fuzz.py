"""Random layouts, masks, shapes, devices and options; `make fuzz` runs the same cases for as long as one likes."""

import pytest

from tests.fuzz import check_case


@pytest.mark.parametrize("program", range(6))
def test_random_programs_on_random_masks(program):
    for case in range(3):
        check_case(program, case)
