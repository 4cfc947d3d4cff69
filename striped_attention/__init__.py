"""Exact sequence-parallel attention for JAX: Ring Attention, Striped Attention and everything between."""

from striped_attention._version import __version__ as __version__
from striped_attention.attention import attention as attention
from striped_attention.attention import attention_shard as attention_shard
from striped_attention.core.bias import alibi as alibi
from striped_attention.core.bias import relative_bias as relative_bias
from striped_attention.core.layout import contiguous as contiguous
from striped_attention.core.layout import striped as striped
from striped_attention.core.layout import zigzag as zigzag
from striped_attention.core.mask import causal as causal
from striped_attention.core.mask import documents as documents
from striped_attention.core.mask import full as full
from striped_attention.core.mask import prefix as prefix
from striped_attention.core.mask import ranges as ranges
from striped_attention.core.mask import sliding_window as sliding_window
from striped_attention.core.mask import window as window
from striped_attention.core.partial import Partial as Partial
from striped_attention.core.partial import merge as merge
from striped_attention.errors import SlowKernelWarning as SlowKernelWarning
from striped_attention.inference.attention import decode_attention as decode_attention
from striped_attention.inference.attention import prefill_attention as prefill_attention
from striped_attention.inference.cache import KVCache as KVCache
from striped_attention.planning.layouts import best_layout as best_layout
from striped_attention.planning.plan import plan as plan
from striped_attention.runtime.compiler import compiler_options as compiler_options
from striped_attention.runtime.mesh import make_mesh as make_mesh
from striped_attention.strategies.strategy import strategy as strategy
