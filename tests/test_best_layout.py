"""`sa.best_layout`: the best layout depends on the mask, the strategy and the hardware."""

import logging

import numpy as np
import pytest

import striped_attention as sa
from striped_attention.core.mask import packed

LENGTH = 262_144


@pytest.mark.parametrize("hardware", ["h200", "v5p"])
def test_a_ring_takes_zigzag_for_one_document_and_wide_stripes_for_packed_ones(hardware):
    best = lambda mask: sa.best_layout(LENGTH, 8, mask=mask, strategy="ring", hardware=hardware)  # noqa: E731
    assert best(sa.causal()) == best(None) == sa.zigzag()
    assert best(packed(LENGTH, 1800)) == sa.striped(1024)
    assert best(sa.full()) == sa.contiguous()


def test_devices_that_have_the_whole_sequence_need_no_permutation():
    for mask in (sa.causal(), packed(LENGTH, 1800)):
        assert sa.best_layout(LENGTH, 8, mask=mask, strategy="heads", hardware="h200") == sa.contiguous()


def test_it_is_the_fastest_of_a_plan():
    """It equals the best layout of the planner, which compares the same layouts for whole training steps."""
    mask = packed(65_536, 1800)
    plan = sa.plan(8, 65_536, mask=mask, hardware="h200", model="llama3-8b")
    assert sa.best_layout(65_536, 8, mask=mask, strategy="ring", hardware="h200") == plan.best.layout


def test_a_kernel_leaves_out_layouts_that_it_cannot_do():
    assert sa.best_layout(LENGTH, 8, mask=sa.causal(), strategy="ring", kernel="cudnn", hardware="h200") == sa.zigzag()
    with pytest.raises(NotImplementedError, match="Kernel 'cudnn' cannot do this"):
        sa.best_layout(LENGTH, 8, mask=packed(LENGTH, 1800), kernel="cudnn", hardware="h200")


def test_by_default_it_is_for_the_devices_of_this_machine_and_says_why(caplog):
    with caplog.at_level(logging.INFO, "striped_attention"):
        found = sa.best_layout(65_536, 8, strategy="ring")
    assert found == sa.best_layout(65_536, 8, strategy="ring", hardware="cpu")
    (why,) = {record.getMessage() for record in caplog.records if "best_layout" in record.getMessage()}
    assert why.startswith(f"best_layout selects {found!r}, planned for one layer's attention on 8 × cpu: contiguous() ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(length=0), "length must be a whole number of at least 1; got 0"),
        (dict(devices=2.5), "devices must be a whole number"),
        (dict(hardware="h300"), "hardware must be one of .*h200.*; got 'h300'"),
        (dict(kernel="fast"), "kernel must be one of"),
        (dict(strategy=sa.strategy(heads=3)), "must divide the 8 devices"),
        (dict(mask=sa.documents(np.zeros((1, 64), int))), "64"),
        (dict(mask=sa.documents(np.zeros((1, 128), int)).permute(sa.striped(), 8)), "before mask.permute"),
    ],
)
def test_bad_arguments(arguments, message):
    given = dict(length=128, devices=8) | arguments
    with pytest.raises(ValueError, match=message):
        sa.best_layout(given.pop("length"), given.pop("devices"), **given)
