"""Small results of every kind that `striped report` draws, as the benchmarks would write them."""

import numpy as np

from striped_attention._version import __version__

LAYOUTS = ("contiguous()", "striped(1)", "striped(256)", "zigzag()")


def content(benchmark, **more):
    return {
        **{"benchmark": benchmark, "started": "2026-01-01T00:00:00+00:00", "git": {"commit": "a" * 40, "dirty": False}},
        **{"versions": {"striped-attention": __version__}, "configuration": {"devices": 2}, **more},
    }


def times(layout):
    return {"forward": 1.0, "both": 1.0} if layout == "contiguous()" else {"forward": 1.4, "both": 1.5}


def layouts():
    rows = [{"layout": x, "both": 1.0, "over_contiguous": times(x), "bound": 1.5} for x in LAYOUTS]
    wall = [{**row, "length": n} for row in rows for n in (1024, 2048)]
    paths = [{**row, "length": 2048, "devices": 4, "seconds": np.tri(4).tolist()} for row in rows]
    return content("layouts", wall={"devices": 2, "rows": wall}, critical_path={"rows": paths})


def tiles():
    rows = [(tile, x) for tile in (64, 128) for x in LAYOUTS]
    more = {"platform": "cpu", "mask": "causal", "length": 1024, "devices": 2, "both": 1.0, "bound": 1.5}
    return content(
        "tiles", rows=[{"tile": t, "layout": x, "over_contiguous": times(x)["both"], **more} for t, x in rows]
    )


BOUNDS = {"contiguous()": 1.0, "striped(1)": 1.75, "striped(256)": 1.6, "zigzag()": 0.9}


def masks(platform="cpu"):
    more = {"platform": platform, "devices": 4, "length": 1024}
    rows = [
        {**more, "mask": mask, "layout": x, "over_contiguous": times(x)["both"], "bound": BOUNDS[x]}
        for mask in ("causal", "documents(256)")
        for x in LAYOUTS
    ]
    return content("masks", rows=rows)


def scale(measured=False):
    """Return planned tokens per second, or those that were measured on CPUs."""
    common = {"preset": "1b", "length": 65_536, "hardware": "cpu" if measured else "h200", "measured": measured}
    rows = [{**common, "devices": n, "layout": "striped(1)", "tokens_per_second": 1e4 * n} for n in (8, 16)]
    return content("scale", rows=rows)


def positions():
    common = {"length": 1024, "layout": "striped(1)", "devices": 4}
    return content("positions", rows=[{**common, "positions": "rotary", "error": 1e-6}])


def overhead(*more):
    """Return a step of three components, and of more of 1 ms each."""
    parts = (("attention", 0.3, 2), ("feed-forward", 0.1, 2), ("loss", 0.4, 1), *((what, 0.001, 1) for what in more))
    rows = [{"length": 1024, "what": what, "seconds": s, "times": n} for what, s, n in parts]
    return content("overhead", rows=rows)


def trainers(fits=True):
    """Return results of two trainers on whole sequences and packed documents; without `fits` torch lacks memory."""
    rows = []
    for text, ours in (("whole", 30_123.0), ("documents", 75_432.0)):
        case = {"preset": "1b", "length": 32_768, "text": text}
        more = {"mfu": 0.45, "memory": 63_300_000_000}
        if fits:
            more |= {"over_torch": ours / 61_234, "loss_difference": 0.002}
        rows.append({**case, "trainer": "striped", "fits": True, "tokens_per_second": ours, **more})
        theirs = {"tokens_per_second": 61_234.0, "recompute": True, "over_torch": 1.0} if fits else {}
        rows.append({**case, "trainer": "torch", "fits": fits, **theirs})
    versions = {"striped-attention": __version__, "jax": "0.10.2", "torch": "2.9.0"}
    return content("trainers", trainers=rows, gpu={"name": "NVIDIA H200"}, versions=versions)


def evaluated(name="long", loss=1.0, found=3):
    ranges = [{"from": 0, "to": 255, "tokens": 9, "loss": 2.0}, {"from": 256, "to": 511, "tokens": 9, "loss": loss}]
    cells = [{"length": n, "depth": d, "draws": 4, "correct": found, "loss": 0.1} for n in (256, 512) for d in (0, 100)]
    more = {"perplexity": {"by_position": ranges}, "needle": {"cells": cells}, "devices": {"kind": "cpu", "mesh": {}}}
    return content("evaluate", **{**more, "configuration": {"model": f"runs/{name}"}})


def compiled(strategy="ring", kind="collective-permute", exposed=0):
    """Return what `striped compile --longest` found: 256k tokens fit on 16 chips and 512k do not."""
    sent = [{"name": f"{kind}.{n}", "kind": kind, "bytes": 8, "hidden": n >= exposed} for n in range(4)]
    fits = {"length": 262_144, "fits": True, "memory": 20_000_000_000, "available": None, "transfers": sent}
    large = {"length": 524_288, "fits": False, "memory": 40_000_000_000, "available": 33_000_000_000, "transfers": []}
    options = {"topology": "v4:2x2x4", "preset": "1b", "remat": "auto"}
    more = {"strategy": strategy, "remat": "attention", "libtpu_init_args": None, "configuration": options}
    return content("compile", device="TPU v4", devices=16, tried=[fits, large], **more)
