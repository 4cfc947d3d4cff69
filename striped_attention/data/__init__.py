"""Data: sources in, batches out.

corpus      all tokens of a source end to end
batch       rows of a corpus: shuffled for training, in order for validation
content     what a file holds, told by its bytes
tokenizer   a Hugging Face tokenizer.json
"""

from striped_attention.data.batch import Batch as Batch
from striped_attention.data.batch import read as read
from striped_attention.data.batch import rows_in_order as rows_in_order
from striped_attention.data.batch import whole_rows as whole_rows
from striped_attention.data.corpus import Corpus as Corpus
from striped_attention.data.corpus import check as check
from striped_attention.data.corpus import load as load
