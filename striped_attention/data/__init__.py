"""Data: sources in, batches out. A batch is a pure function of a seed and a place, so no loader has a state to save.

What a source is:
sources     what --data names, and how it becomes a corpus
files       the files of a source, and their kinds
raw         tokens as .npy and .bin

From files to tokens:
documents   what files hold, one document after the other
tables      Parquet and Arrow
unpack      gzip and zstandard
content     what a file holds, told by its bytes
columns     what of a record is text, and what of it counts in the loss
chat        conversations as text, by a model's template
counts      what was found, left out or bad
tokenizer   a Hugging Face tokenizer.json, and the files beside it
encoder     documents to tokens
build       a source tokenised, with progress
interrupt   Ctrl-C while that goes on
progress    what a person sees of that
store       the folder with the tokens
cache       sources that were tokenised before
command     `striped tokenize`

From tokens to batches:
corpus      all tokens of a source, and where its documents begin
mixture     several corpora, with weights
batch       rows: shuffled for training, in order for validation
places      where rows lie in their sources, in words
"""

from striped_attention.data.batch import Batch as Batch
from striped_attention.data.batch import Data as Data
from striped_attention.data.batch import drawn as drawn
from striped_attention.data.batch import read as read
from striped_attention.data.batch import rows_in_order as rows_in_order
from striped_attention.data.batch import whole_rows as whole_rows
from striped_attention.data.columns import Columns as Columns
from striped_attention.data.corpus import Corpus as Corpus
from striped_attention.data.encoder import BYTES as BYTES
from striped_attention.data.mixture import Mixture as Mixture
from striped_attention.data.places import describe_rows as describe_rows
from striped_attention.data.sources import Named as Named
from striped_attention.data.sources import all_raw as all_raw
from striped_attention.data.sources import check as check
from striped_attention.data.sources import has_raw as has_raw
from striped_attention.data.sources import kept_tokenizer as kept_tokenizer
from striped_attention.data.sources import load as load
from striped_attention.data.sources import need_tokenizer as need_tokenizer
