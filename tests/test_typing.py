"""Public signatures are typed for users: a type checker accepts correct code and rejects wrong code."""

import pathlib

from mypy import api

ROOT = pathlib.Path(__file__).parent.parent
HEAD = """
import jax
import jax.numpy as jnp
import numpy as np
import striped_attention as sa

mesh = jax.make_mesh((2,), ("sequence",))
x = jnp.zeros((1, 16, 2, 8))
"""
RIGHT = """
layout = sa.striped(stripe=4)
y: jax.Array = layout.permute(x, axis=1, mesh=mesh, axis_name="sequence")
mask = sa.documents(np.zeros((1, 16), np.int32)) & sa.sliding_window(8)
out: jax.Array = sa.attention(y, y, y, mesh=mesh, axis_name="sequence", layout=layout, mask=mask, softcap=3.0, tile=128)
cache = sa.KVCache.empty(1, 64, 2, 8, layout=layout, mesh=mesh, axis_name="sequence", dtype=jnp.float32)
first, cache = sa.prefill_attention(y, y, y, cache, positions=layout.order(16, 2)[None])
step = jax.jit(lambda x: sa.decode_attention(x, cache), compiler_options=sa.compiler_options())
seconds: float = sa.plan(8, 4096, mask=sa.prefix(12)).best.step_seconds
bias = sa.alibi(np.ones(2, np.float32))
"""
WRONG = {
    'sa.attention(1, "nonsense", foo=3)': "call-arg",
    'sa.attention(x, x, x, axis_name="sequence", layout="striped", mask=sa.causal())': "arg-type",
    'sa.attention_shard(x, x, x, axis_name="sequence", layout=sa.striped(), mask=None)': "arg-type",
    'sa.striped("4")': "arg-type",
    "sa.documents([0, 0, 1])": "arg-type",
    "sa.sliding_window(2.5)": "arg-type",
    "sa.KVCache.empty(1, 64, 2, 8, layout=sa.striped(), mesh=mesh)": "call-arg",
    'sa.KVCache.empty(1, 64, 2, "8", layout=sa.striped(), mesh=mesh, axis_name="sequence")': "arg-type",
    "sa.prefill_attention(x, x, x)": "call-arg",
    "sa.decode_attention(x, cash=None)": "call-arg",
    'sa.plan("8", 4096)': "arg-type",
    'sa.alibi("slopes")': "arg-type",
}


def errors(folder):
    """Return error codes by line, for a file with all correct code followed by one line per piece of wrong code."""
    path = folder / "user.py"
    path.write_text(HEAD + RIGHT + "\n".join(WRONG) + "\n")
    # The project's own settings, so that mypy reuses the cache of `make lint`.
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    said, trouble, _ = api.run([*options, "--show-error-codes", "--no-error-summary", str(path)])
    assert trouble == ""
    found = {}
    for line in said.splitlines():
        if ": error: " in line:
            found.setdefault(int(line.split(":")[1]), []).append(line.rsplit("[", 1)[1].rstrip("]"))
    return found


def test_right_code_is_accepted_and_wrong_code_refused(tmp_path):
    """A single test, because mypy is slow."""
    found = errors(tmp_path)
    last = (HEAD + RIGHT).count("\n")
    assert {line: kinds for line, kinds in found.items() if line <= last} == {}
    for line, (code, kind) in enumerate(WRONG.items(), last + 1):
        assert kind in found.get(line, []), code
