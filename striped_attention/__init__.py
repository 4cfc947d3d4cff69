"""Exact sequence-parallel attention for JAX: Ring Attention, Striped Attention and everything between."""

from striped_attention._version import __version__ as __version__
from striped_attention.attention import attention as attention
from striped_attention.attention import attention_shard as attention_shard
from striped_attention.bias import alibi as alibi
from striped_attention.bias import relative_bias as relative_bias
from striped_attention.cache import KVCache as KVCache
from striped_attention.cached_attention import decode_attention as decode_attention
from striped_attention.cached_attention import prefill_attention as prefill_attention
from striped_attention.kernel import Partial as Partial
from striped_attention.kernel import merge as merge
from striped_attention.layout import contiguous as contiguous
from striped_attention.layout import striped as striped
from striped_attention.layout import zigzag as zigzag
from striped_attention.mask import causal as causal
from striped_attention.mask import documents as documents
from striped_attention.mask import full as full
from striped_attention.mask import prefix as prefix
from striped_attention.mask import sliding_window as sliding_window
from striped_attention.mesh import make_mesh as make_mesh
from striped_attention.plan import plan as plan
