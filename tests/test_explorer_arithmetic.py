"""The explorer's arithmetic, JavaScript that repeats the library's, gives Python's results."""

import itertools
import json
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from striped_attention.core.layout import named_layout
from striped_attention.core.mask import Mask, Rule, documents
from striped_attention.kernels import xla
from striped_attention.kernels.choice import Choice
from striped_attention.kernels.contract import make_request
from striped_attention.kernels.rates import Rate, Rates
from striped_attention.runtime.hardware import HARDWARE
from striped_attention.strategies.choice import TileCount, _gathered
from striped_attention.strategies.hops import needed_hops
from striped_attention.strategies.strategy import RING, Strategy
from striped_attention.strategies.timeline import passes
from striped_attention.strategies.work import count_pairs, count_tile_rows, count_tiles
from striped_attention.strategies.workload import Workload, adapted
from tests.browser import needs_browser, run

EFFICIENCY, AFFORDABLE = 0.6, 2**22  # as in the page


def rules(length):
    def some(least):
        return random.choice([least, random.randint(least, length), random.randint(least, 2 * length)])

    return random.choice([
        Rule(prefix=0), Rule(), Rule(window=some(1), prefix=0), Rule(window=some(1), ahead=some(1)),
        Rule(prefix=some(0)), Rule(window=some(1), prefix=some(0)), Rule(ahead=some(1)),
        Rule(window=some(1), prefix=some(1), ahead=some(1)),
    ])  # fmt: skip


def ends_of(length):
    """Return where packed documents end, or None: half of the masks have no documents."""
    if random.random() < 0.5:
        return None
    count = min(length, random.choice([1, 2, 5, 30]))
    return [*sorted(random.sample(range(1, length), count - 1)), length]


def mask_of(rule, ends):
    if ends is None:
        return Mask(rule)
    ids = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))[None]
    return documents(ids, causal=rule.prefix == 0) & Mask(rule)


def setting_of(length, devices):
    name = random.choice(["contiguous", "striped", "striped", "zigzag"])
    stripe = random.choice([1, 2, 3, 16, 64, random.randint(1, length)])
    tile = random.choice([[1, 1], [16, 16], [64, 64], [256, 256], [random.randint(1, 99), random.randint(1, 99)]])
    return {"name": name, "stripe": stripe, "length": length, "devices": devices, "tile": tile,
            "rule": vars(rules(length)), "ends": ends_of(length)}  # fmt: skip


TILES = """
const answer = SETTINGS.map(({ name, stripe, length, devices, tile, rule, ends, pair }) => {
  const { place, position, countBefore, countBeforeAll, lower, upper, countTiles } = arithmetic;
  const layout = arithmetic.layouts[name](stripe), mask = { ...rule, ends }, at = place(layout, length, devices);
  const slots = [...Array(at.slots).keys()].map(slot => position(at, pair[0], slot)), found = new Float64Array(devices);
  const start = slots.map(p => countBefore(at, pair[1], lower(mask, p, length)));
  const end = slots.map(p => countBeforeAll(at, upper(mask, p, length), found)[pair[1]]);
  const rows = countTiles(layout, mask, length, devices, tile);
  return { padded: at.padded, slots, start, end, rows: [...rows.tiles], exact: rows.exact,
    tiles: [...countTiles(layout, mask, length, devices, tile, { byQuery: true }).tiles],
    hops: arithmetic.neededHops(layout, mask, length, at.padded, devices),
    holders: [...Array(at.padded).keys()].map(p => arithmetic.holder(at, p)),
    pairs: arithmetic.visiblePairs(mask, length) };
})"""


@needs_browser
def test_tiles_ranges_and_hops_equal_those_of_the_library(tmp_path):
    random.seed(20231103)
    settings = []
    for case in range(400):
        devices = random.choice([1, 2, 3, 4, 8, 13]) if case % 40 else random.randint(16, 64)
        setting = setting_of(random.choice([random.randint(1, 40), random.randint(devices, 1500)]), devices)
        settings.append(setting | {"pair": [random.randrange(devices), random.randrange(devices)]})
    for setting, found in zip(settings, run(TILES.replace("SETTINGS", json.dumps(settings)), tmp_path), strict=True):
        layout, mask = (
            named_layout(setting["name"], setting["stripe"]),
            mask_of(Rule(**setting["rule"]), setting["ends"]),
        )
        length, devices, tile = setting["length"], setting["devices"], tuple(setting["tile"])
        padded, (here, there) = layout.padded_length(length, devices), setting["pair"]
        positions = layout.positions(here, padded, devices)
        inside = np.minimum(positions, length - 1)
        held = Mask(mask.rule, *(None if x is None else x[:, inside] for x in (mask.lo, mask.hi)), mask.length)
        lo, hi = held.bounds(positions, length)
        rows, exact = count_tile_rows(layout, mask, length, devices, tile)
        hops = needed_hops(layout, mask.rule, length, padded, devices)
        assert (found["padded"], found["exact"], found["hops"]) == (padded, exact, list(hops)), setting
        order = layout.order(padded, devices)
        assert found["holders"] == (np.argsort(order) // (padded // devices)).tolist(), setting
        assert found["slots"] == positions.tolist(), setting
        assert found["start"] == layout.count_before(there, lo[0], padded, devices).tolist(), setting
        assert found["end"] == layout.count_before(there, hi[0], padded, devices).tolist(), setting
        assert found["rows"] == rows.reshape(-1).tolist(), setting
        assert found["tiles"] == count_tiles(layout, mask, length, devices, tile).reshape(-1).tolist(), setting
        assert found["pairs"] == count_pairs(layout, mask, length, devices).sum(), setting


FORWARD = """
const answer = SETTINGS.map(({ name, stripe, rule, ends, hardware, ...rest }) => {
  const layout = arithmetic.layouts[name](stripe), mask = { ...rule, ends }, lists = rows => rows.map(row => [...row]);
  const { begin, work, transfer, seconds, bytes, tiles, criticalPath, offsets, strategy } =
    arithmetic.forward({ ...rest, layout, mask, hardware: arithmetic.hardware[hardware] });
  return { begin: lists(begin.slice(0, -1)), work: lists(work), tiles: lists(tiles), transfer, seconds, bytes,
    criticalPath, offsets, strategy };
})"""


@needs_browser
def test_timelines_and_messages_equal_those_of_the_cost_model(tmp_path):
    """For all three strategies on real hardware, with one rate for all kernels; several thousand tokens per device."""
    random.seed(1109431)
    chips, settings = ("a100", "h100", "b200", "v5p", "v6e"), []
    for strategy, hardware, _ in itertools.product(("ring", "heads", "gather"), chips, range(14)):
        key_heads, devices = random.choice([1, 2, 3, 4, 8]), random.choice([2, 3, 6, 8, 16, 24])
        shape = {"heads": key_heads * random.choice([1, 3, 4, 8]), "keyHeads": key_heads, "dim": 64, "bytes": 2}
        setting = setting_of(random.randint(devices, 20_000), devices)
        settings.append(setting | shape | {"strategy": strategy, "hardware": hardware})
    for setting, found in zip(settings, run(FORWARD.replace("SETTINGS", json.dumps(settings)), tmp_path), strict=True):
        layout, mask = (
            named_layout(setting["name"], setting["stripe"]),
            mask_of(Rule(**setting["rule"]), setting["ends"]),
        )
        length, devices, tile = setting["length"], setting["devices"], tuple(setting["tile"])
        heads, key_heads, hardware = setting["heads"], setting["keyHeads"], HARDWARE[setting["hardware"]]
        slots = layout.padded_length(length, devices) // devices
        query, key = (jax.ShapeDtypeStruct((1, slots, n, setting["dim"]), jnp.bfloat16) for n in (heads, key_heads))
        named = {"ring": RING, "heads": Strategy(heads=math.gcd(devices, heads)), "gather": Strategy(gather=devices)}
        about = dict(mask=mask, layout=layout, devices=devices, platform=hardware.platform, length=length)
        plain = make_request(query, key, **about)
        workload = Workload(plain, mask, hardware, adapted(named[setting["strategy"]], plain))
        rate = Rate(EFFICIENCY)
        count = TileCount(mask, length, affordable=AFFORDABLE)
        tiles, _ = count(workload.request.layout, workload.request.devices, tile)
        tiles = _gathered(tiles, devices) if workload.strategy.gather > 1 else tiles
        chosen, needed = Choice("xla", xla, tile, Rates(rate, rate, "one rate"), 0.0), workload.needed()
        forward, _ = passes(workload, chosen, tiles, needed)
        expected, messages = forward.timeline(), workload.messages
        assert found["strategy"] == {"heads": workload.strategy.heads, "gather": workload.strategy.gather}, setting
        assert found["offsets"] == np.flatnonzero(needed).tolist(), setting
        assert found["tiles"] == tiles.T[needed].tolist(), setting
        assert found["criticalPath"] == tiles.T[needed].max(axis=1).sum(), setting
        assert found["bytes"] == messages.forward + messages.all_to_all, setting
        for name in ("begin", "work"):
            np.testing.assert_allclose(np.transpose(found[name]), getattr(expected, name), rtol=1e-12, atol=1e-15)
        assert found["seconds"] == pytest.approx(expected.seconds, rel=1e-12), setting
