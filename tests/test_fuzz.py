"""Random layouts, masks, shapes, device counts and options; `make fuzz` runs as many such cases as you like."""

import pytest

from tests.fuzz import check_case


@pytest.mark.parametrize("program", range(6))
def test_random_programs_on_random_masks(program):
    for case in range(3):
        check_case(program, case)
