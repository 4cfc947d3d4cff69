"""Bad input raises one clear error: what is required, what was received, what to do."""

import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import striped_attention as sa
from striped_attention.kernels import xla as kernel_xla
from striped_attention.kernels.choice import KERNELS, choose
from striped_attention.kernels.contract import make_request
from tests.compare import mesh_of


def call(q=(1, 16, 4, 8), k=None, v=None, dtypes=("float32",) * 3, devices=4, **options):
    k = (*q[:2], 2, *q[3:]) if k is None else k
    arrays = [jnp.ones(shape, dtype) for shape, dtype in zip((q, k, v or k), dtypes, strict=True)]
    options = {
        "mesh": mesh_of(devices),
        "axis_name": "sequence",
        "layout": sa.striped(),
        "mask": sa.causal(),
        **options,
    }
    return sa.attention(*arrays, **options)


IDS = np.zeros((1, 16), int)

BAD_CALLS = {
    "query is not [batch, length, heads, dim]": (
        {"q": (16, 4, 8)},
        r"must be \[batch, length, heads, dim\]; got query \(16",
    ),
    "key and value differ": (
        {"v": (1, 16, 1, 8)},
        r"key and value must have the same batch, length and heads; got .*value \(1, 16, 1, 8\)",
    ),
    "keys are not padded": ({"k": (1, 13, 2, 8)}, r"a multiple of 4; got 13. Pad it to 16"),
    "batches differ": ({"k": (2, 16, 2, 8)}, r"same batch; got query \(1, 16, 4, 8\), key \(2, 16"),
    "dims differ": ({"k": (1, 16, 2, 4)}, r"same dim"),
    "nothing in it": ({"q": (0, 16, 4, 8)}, r"must not be empty"),
    "heads do not divide": ({"k": (1, 16, 3, 8)}, r"multiple of the number of key heads; got 4 and 3"),
    "dtypes differ": (
        {"dtypes": ("float32", "bfloat16", "float32")},
        r"the same dtype.*got float32, bfloat16, float32.*astype",
    ),
    "integers": ({"dtypes": ("int32",) * 3}, r"the same dtype, one of float32, bfloat16, .*got int32"),
    "an axis the mesh lacks": (
        {"axis_name": "seq"},
        r"must be an axis of the mesh, or a tuple of several; got 'seq', and the mesh has \('sequence',\)",
    ),
    "a length that does not divide": ({"q": (1, 18, 4, 8)}, r"multiple of 4; got 18. Pad it to 20: layout.permute"),
    "zigzag without an even split": (
        {"q": (1, 12, 4, 8), "layout": sa.zigzag()},
        r"zigzag\(\) needs .* in 2 equal rounds, a multiple of 8; got 12. Pad it to 16",
    ),
    "more tokens than slots": ({"length": 17}, r"between 1 and the arrays' length 16; got 17"),
    "no tokens": ({"length": 0}, r"length must be a whole number of at least 1; got 0"),
    "a mask for another length": (
        {"mask": sa.documents(IDS[:, :9]), "length": 16},
        r"made for a sequence of 9 tokens.*has 16",
    ),
    "a mask longer than the text": (
        {"mask": sa.documents(np.zeros((1, 20), int))},
        r"made for a sequence of 20 tokens.*pads to 20 on 4 devices; the arrays hold 16",
    ),
    "a mask shorter than the text": (
        {"mask": sa.documents(IDS[:, :9])},
        r"made for a sequence of 9 tokens.*pads to 12 on 4 devices; the arrays hold 16.*length=9",
    ),
    "a mask permuted for fewer slots": (
        {"mask": sa.documents(IDS[:, :9]).permute(sa.striped(), 4), "length": 9},
        r"permuted for arrays of 12 slots, but these have 16.*slots=16",
    ),
    "a mask for another batch": ({"mask": sa.documents(np.zeros((3, 16), int))}, r"each of the 1 sequences.*got 3"),
    "a mask for another layout": (
        {"mask": sa.documents(IDS).permute(sa.zigzag(), 4)},
        r"already in the order of zigzag\(\)",
    ),
    "a boolean mask": ({"mask": np.ones((16, 16), bool)}, r"mask must be made by causal\(\).*got ndarray"),
    "a layout's name": ({"layout": "striped"}, r"layout must be striped\(\), .*got 'striped'"),
    "an unknown kernel": ({"kernel": "fast"}, r"kernel must be one of .*'pallas_tpu', 'xla'\]; got 'fast'"),
    "a tile of 0": ({"tile": 0}, r"tile must be .*got 0"),
    "a tile of half": ({"tile": 0.5}, r"tile must be .*got 0.5"),
    "a tile of three": ({"tile": (8, 8, 8)}, r"tile must be .*got \(8, 8, 8\)"),
    "a softcap of 0": ({"softcap": 0.0}, r"softcap must be positive.*got 0.0"),
    "a traced scale": ({"scale": jnp.ones(())}, r"scale must be a finite Python number"),
    "sinks of another size": ({"sinks": jnp.ones(3)}, r"sinks must be .*\(4,\).*got float32\(3,\)"),
    "a bias for other heads": ({"bias": sa.alibi(np.ones(3, np.float32))}, r"one entry per query head, 4; got 3"),
    "a spec of the wrong order": ({"spec": P("sequence", None, None, None)}, r"spec must describe .*'sequence'.*got"),
    "a spec of three": (
        {"spec": P(None, "sequence", None)},
        r"spec must describe arrays \[batch, length, heads, dim\]",
    ),
    "a spec with an unknown axis": (
        {"spec": P("data", "sequence", None, None)},
        r"names the axis 'data', but the mesh has",
    ),
    "an infinite softcap": ({"softcap": float("inf")}, r"softcap must be .*finite.*got inf"),
    "a length that is not whole": ({"length": 13.5}, r"length must be a whole number.*got 13.5"),
    "a bias that is an array": ({"bias": np.ones(4)}, r"bias must be made by alibi.*got ndarray"),
    "a mesh that is a number": ({"mesh": 4}, r"mesh must be a jax.sharding.Mesh; got 4"),
    "a spec that names an axis twice": ({"spec": P("sequence", "sequence", None, None)}, r"each mesh axis only once"),
    "no mesh": ({"mesh": None}, r"needs a mesh: pass mesh=…, or .*jax.set_mesh"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_attention_refuses(name):
    options, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message):
        call(**options)


def test_heads_that_the_mesh_does_not_divide():
    mesh = jax.make_mesh((2, 4), ("sequence", "model"))
    with pytest.raises(
        ValueError, match=r"shards the query heads over 4 devices, so that dimension must be divisible by 4; got 6"
    ):
        call(q=(1, 16, 6, 8), mesh=mesh, spec=P(None, "sequence", "model", None))


BAD_PARTS = {
    "segment ids that are not runs": (
        lambda: sa.documents(np.array([[0, 1, 0]])),
        r"row 0 id 0 appears in 2 separate runs",
    ),
    "segment ids without a batch": (
        lambda: sa.documents(np.zeros(4, int)),
        r"shape \[batch, length\]; got int64\(4,\).*\[None",
    ),
    "segment ids that are floats": (lambda: sa.documents(np.zeros((1, 4))), r"must be whole numbers .*float64"),
    "a window of 0": (lambda: sa.sliding_window(0), r"at least 1; got 0"),
    "masks of two batches": (
        lambda: sa.documents(np.zeros((2, 4), int)) & sa.documents(np.zeros((3, 4), int)),
        r"the same batch; got \[2, 3\] rows",
    ),
    "a device that is not there": (lambda: sa.striped().positions(9, 16, 4), r"one of the 4 devices.*got 9"),
    "a list": (lambda: sa.striped().permute([1, 2], 2, 0), r"Only NumPy and JAX arrays .*got list"),
    "a reach that is not whole": (
        lambda: sa.relative_bias(np.ones((8, 2), np.float32), max_distance=12.5),
        r"max_distance must be a whole number.*got 12.5",
    ),
    "a negative prefix": (lambda: sa.prefix(-1), r"at least 0; got -1"),
    "a stripe of 0": (lambda: sa.striped(0), r"stripe must be .*at least 1; got 0"),
    "a stripe of half a token": (lambda: sa.striped(0.5), r"stripe must be a whole number.*got 0.5"),
    "no devices": (lambda: sa.striped().order(8, 0), r"devices must be .*got 0"),
    "no length": (lambda: sa.striped().order(0, 1), r"length must be .*got 0"),
    "positions past int32": (
        lambda: sa.striped().positions(0, 2**31, 8),
        r"int32.*at most 2147483647.*got length 2147483648",
    ),
    "padding past int32": (lambda: sa.striped().padded_length(2**31 - 1, 8), r"int32"),
    "a length that does not divide": (lambda: sa.contiguous().order(10, 4), r"multiple of 4; got 10. Pad it to 12"),
    "restore to more than there is": (
        lambda: sa.striped().restore(np.zeros(8), 4, 0, length=9),
        r"between 1 and .*8; got 9",
    ),
    "restore to half a token": (
        lambda: sa.striped().restore(np.zeros(8), 4, 0, length=2.5),
        r"length must be a whole number.*got 2.5",
    ),
    "an axis that is not there": (lambda: sa.striped().permute(np.zeros(8), 4, 1), r"1 dimensions; got axis=1"),
    "a dense picture of another length": (
        lambda: sa.documents(IDS).dense(8),
        r"made for a sequence of 16 tokens.*has 8",
    ),
    "a dense picture in layout order": (
        lambda: sa.documents(IDS).permute(sa.striped(), 4).dense(16),
        r"before mask.permute",
    ),
    "masks of two lengths": (
        lambda: sa.documents(IDS) & sa.documents(IDS[:, :8]),
        r"the same length and layout; got lengths 16 and 8",
    ),
    "slopes of two dimensions": (
        lambda: sa.alibi(np.ones((2, 2), np.float32)),
        r"shape \[heads\]; got float32\(2, 2\)",
    ),
    "a flat table": (lambda: sa.relative_bias(np.ones(8, np.float32)), r"\[buckets, heads\].*got float32\(8,\)"),
    "a short reach": (
        lambda: sa.relative_bias(np.ones((32, 2), np.float32), max_distance=9),
        r"larger than the 16 .*got 9",
    ),
}


@pytest.mark.parametrize("name", BAD_PARTS)
def test_parts_refuse(name):
    make, message = BAD_PARTS[name]
    with pytest.raises(ValueError, match=message):
        make()


SEQUENCE = P(None, "sequence")


def shard_call(mask, axis_name="sequence", mask_spec=SEQUENCE):
    x = jnp.ones((1, 16, 2, 8))
    attend = jax.shard_map(
        lambda x, mask: sa.attention_shard(x, x, x, axis_name=axis_name, layout=sa.striped(), mask=mask),
        mesh=jax.make_mesh((4,), ("sequence",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4]),
        in_specs=(P(None, "sequence"), mask_spec), out_specs=P(None, "sequence"),
    )  # fmt: skip
    return attend(x, mask)


def test_attention_shard_refuses_a_mask_that_did_not_enter_properly():
    mask = sa.documents(IDS)
    with pytest.raises(ValueError, match=r"in the order of striped\(1\) on 4 devices; this one is in sequence order"):
        shard_call(mask)
    with pytest.raises(ValueError, match=r"this one is in the order of zigzag\(\) on 4"):
        shard_call(mask.permute(sa.zigzag(), 4))
    with pytest.raises(ValueError, match=r"must cover as many slots as the query's, 4; got 16"):
        shard_call(mask.permute(sa.striped(), 4), mask_spec=P())


def test_attention_shard_refuses_an_unknown_axis():
    with pytest.raises(ValueError, match=r"'seq' is not. Outside shard_map, call `attention`"):
        shard_call(sa.causal(), axis_name="seq")
    with pytest.raises(ValueError, match=r"must be a mesh axis of the shard_map"):
        sa.attention_shard(*[jnp.ones((1, 4, 2, 8))] * 3, axis_name="sequence", layout=sa.striped(), mask=sa.causal())


def test_attention_inside_shard_map_points_to_attention_shard():
    mesh = jax.make_mesh((4,), ("sequence",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    attend = jax.shard_map(
        lambda x: sa.attention(x, x, x, mesh=mesh, axis_name="sequence", layout=sa.striped(), mask=sa.causal()),
        mesh=mesh,
        in_specs=SEQUENCE,
        out_specs=SEQUENCE,
    )
    with pytest.raises(ValueError, match=r"inside a shard_map over 'sequence': call `attention_shard` here"):
        attend(jnp.ones((1, 16, 2, 8)))


def test_what_a_kernel_cannot_do_names_the_one_that_can(monkeypatch):
    refuse = lambda request: None if request.softcap is None else "it has no softcap."  # noqa: E731
    limited = types.SimpleNamespace(**{**vars(kernel_xla), "unsupported": refuse})
    monkeypatch.setitem(KERNELS, "limited", limited)
    assert call(kernel="limited").shape == (1, 16, 4, 8)
    with pytest.raises(NotImplementedError, match=r"'limited' cannot do this: it has no softcap. Use kernel='xla'."):
        call(kernel="limited", softcap=1.0)


def test_a_platform_that_nobody_knows_gets_plain_jax():
    shape = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    where = dict(mask=sa.causal(), layout=sa.striped(), devices=4, platform="METAL")
    for name in ("auto", "xla"):
        assert choose(name, make_request(shape, shape, **where)).name == "xla"
    with pytest.raises(NotImplementedError, match=r"It runs on GPUs; this is a METAL\. Use kernel='xla'\."):
        choose("cudnn", make_request(shape, shape, **where))


def test_a_warning_that_is_an_error_comes_again():
    shape = jax.ShapeDtypeStruct((1, 64, 2, 64), jnp.bfloat16)
    where = dict(mask=sa.causal(), layout=sa.striped(), devices=3, platform="gpu", softcap=1.75)
    request = make_request(shape, shape, **where, device_kind="NVIDIA A100")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(sa.SlowKernelWarning):
                choose("auto", request)
