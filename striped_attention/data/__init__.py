"""Data pipeline: from source files to training batches.

A batch is a pure function of the seed and its position in the run, so there is no loader state to save.

Sources:
sources     parse --data and load every source as a corpus
files       find the files of a source and their kinds
splits      reject sources that mix the splits of a dataset
raw         token files: .npy and .bin

From files to tokens:
documents   read the documents of a file
records     read JSON lines and JSON arrays
tables      read Parquet and Arrow
unpack      decompress gzip and zstandard
content     check the content of a file against its name
columns     the columns that hold the text and its loss spans
chat        render conversations with a model's chat template
counts      count documents that were found, left out or bad
tokenizer   a Hugging Face tokenizer.json and the files beside it
encoder     turn documents into tokens
build       tokenise a source, with progress
interrupt   handle Ctrl-C during tokenisation
progress    show the progress of tokenisation
store       the folder format for tokens
cache       the cache of tokenised sources
command     `striped tokenize`

From tokens to batches:
corpus      the tokens of one source and its document boundaries
mixture     several corpora, sampled by weight
batch       rows: shuffled for training, in order for validation
places      describe where the rows of a batch come from
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
