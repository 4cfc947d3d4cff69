"""`sa.best_layout`: the best layout depends on the mask, the strategy and the hardware."""

import logging

import numpy as np
import pytest

import striped_attention as sa
from striped_attention.core.mask import packed

LENGTH = 262_144


@pytest.mark.parametrize(("hardware", "one"), [("h200", sa.zigzag()), ("v5p", sa.striped(1024))])
def test_a_ring_takes_zigzag_for_one_document_and_wide_stripes_for_packed_ones(hardware, one):
    """On TPUs, wide stripes for both."""
    best = lambda mask: sa.best_layout(LENGTH, 8, mask=mask, strategy="ring", hardware=hardware)  # noqa: E731
    assert best(sa.causal()) == best(None) == one
    assert best(packed(LENGTH, 1800)) == sa.striped(128 if hardware == "h200" else 1024)
    assert best(sa.full()) == sa.contiguous()


def test_devices_that_have_the_whole_sequence_need_no_permutation():
    for mask in (sa.causal(), packed(LENGTH, 1800)):
        assert sa.best_layout(LENGTH, 8, mask=mask, strategy="heads", hardware="h200") == sa.contiguous()


def test_it_is_the_fastest_of_a_plan():
    """It equals the best layout of the planner, which compares the same layouts for whole training steps."""
    mask, stripes = packed(65_536, 1800), [sa.striped(128), sa.striped(256)]
    plan = sa.plan(8, 65_536, mask=mask, hardware="h200", model="llama3-8b")
    found = sa.best_layout(65_536, 8, mask=mask, strategy="ring", hardware="h200")
    assert found in stripes
    assert plan.best.layout in stripes


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("length", [1001, 65_537, 65_544])
def test_odd_lengths_are_padded_for_every_layout(devices, length):
    for mask, kernel in ((sa.causal(), "cudnn"), (sa.causal(), "xla"), (sa.full(), "xla")):
        options = dict(mask=mask, strategy="ring", kernel=kernel, hardware="h100")
        assert sa.best_layout(length, devices, **options).padded_length(length, devices) >= length


def test_every_strategy_is_compared_with_its_own_stripes():
    """As in a plan: here head parallelism among neighbours wins, with stripes that together are as wide as a tile."""
    mask = packed(2**20, 1800)
    assert sa.best_layout(2**20, 16, mask=mask, hardware="h100") == sa.plan(16, 2**20, mask=mask).fastest.layout


def test_a_kernel_leaves_out_layouts_that_it_cannot_do():
    assert sa.best_layout(LENGTH, 8, mask=sa.causal(), strategy="ring", kernel="cudnn", hardware="h200") == sa.zigzag()
    with pytest.raises(NotImplementedError, match="Kernel 'cudnn' cannot do this"):
        sa.best_layout(LENGTH, 8, mask=packed(LENGTH, 1800), kernel="cudnn", hardware="h200")


def test_by_default_it_is_for_the_devices_of_this_machine_and_says_why(caplog):
    with caplog.at_level(logging.INFO, "striped_attention"):
        found = sa.best_layout(65_536, 8, strategy="ring")
    assert found == sa.best_layout(65_536, 8, strategy="ring", hardware="cpu")
    (why,) = {record.getMessage() for record in caplog.records if "best_layout" in record.getMessage()}
    planned = "with strategy ring, planned for one layer's attention on 8 × cpu: contiguous() "
    assert why.startswith(f"best_layout selects {found!r} {planned}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(length=0), "length must be a whole number of at least 1; got 0"),
        (dict(devices=2.5), "devices must be a whole number"),
        (dict(hardware="h300"), "hardware must be one of .*h200.*; got 'h300'"),
        (dict(kernel="fast"), "kernel must be one of"),
        (dict(strategy=sa.strategy(heads=3)), "must divide the 8 devices"),
        (dict(heads=6, kv_heads=4), "heads must be a multiple of kv_heads; got 6 and 4"),
        (dict(heads=0), "heads must be a whole number"),
        (dict(mask="causal"), "mask must be a mask, like sa.causal"),
        (dict(mask=sa.documents(np.zeros((1, 64), int))), "64"),
        (dict(mask=sa.documents(np.zeros((1, 128), int)).permute(sa.striped(), 8)), "before mask.permute"),
    ],
)
def test_bad_arguments(arguments, message):
    given = dict(length=128, devices=8) | arguments
    with pytest.raises(ValueError, match=message):
        sa.best_layout(given.pop("length"), given.pop("devices"), **given)
