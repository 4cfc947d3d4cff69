"""Work: tiles per device and step, counted by `striped_attention.strategies.work`."""

from striped_attention.strategies.work import Counts as Counts
from striped_attention.strategies.work import count_pairs as count_pairs
from striped_attention.strategies.work import count_tile_rows as count_tile_rows
from striped_attention.strategies.work import count_tiles as count_tiles
