"""Text to batches: sources, tokens, held-out split, packing, shuffling, resumable iteration.

data = open_data(DataConfig("stdlib", seq_len=1024), vocab_size=257)
batches = make_train_iterator(data, batch_size=8)

Importing this needs numpy only; grain and tokenizers are imported where they are used.
"""

from jfsdp.trainer.data.corpus import Corpus, CorpusStats, Document, open_corpus
from jfsdp.trainer.data.documents import Documents
from jfsdp.trainer.data.files import standard_library_path
from jfsdp.trainer.data.iterator import DataIterator
from jfsdp.trainer.data.pipeline import make_eval_iterator, make_pass_iterator, make_train_iterator
from jfsdp.trainer.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from jfsdp.trainer.data.tokens import DataConfig, TokenData, open_data

__all__ = [
    "ByteTokenizer",
    "Corpus",
    "CorpusStats",
    "DataConfig",
    "DataIterator",
    "Document",
    "Documents",
    "TokenData",
    "Tokenizer",
    "load_tokenizer",
    "make_eval_iterator",
    "make_pass_iterator",
    "make_train_iterator",
    "open_corpus",
    "open_data",
    "standard_library_path",
]
