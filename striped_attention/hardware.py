"""Hardware: what a device could do at best. Dense bf16 FLOP/s, each with its source."""

# (what jax calls the device, in lower case; peak FLOP/s). The first name that a device's kind contains counts.
_PEAKS = (
    ("a100", 312e12),  # NVIDIA A100 data sheet
    ("h100 pcie", 756e12),  # NVIDIA H100 data sheet, 1513 TFLOP/s with sparsity
    ("h100", 989e12),  # the same, SXM: 1979 with sparsity
    ("h200", 989e12),  # NVIDIA H200 data sheet, 1979 with sparsity
    ("b200", 2250e12),  # NVIDIA HGX B200 data sheet, 4.5 PFLOP/s with sparsity
    ("tpu v4", 275e12),  # cloud.google.com/tpu/docs/v4
    ("tpu v5 lite", 197e12),  # cloud.google.com/tpu/docs/v5e
    ("tpu v5e", 197e12),
    ("tpu v5", 459e12),  # cloud.google.com/tpu/docs/v5p
    ("tpu v6 lite", 918e12),  # cloud.google.com/tpu/docs/v6e
    ("tpu v6e", 918e12),
)


def peak_flops(kind: str) -> float | None:
    """A device's peak by its `device_kind`; None if it is not known, as for every CPU."""
    return next((peak for name, peak in _PEAKS if name in kind.lower()), None)
