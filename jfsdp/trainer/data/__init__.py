"""Batches of tokens from text: sources, tokenization, evaluation split, packing, shuffling, resumable iteration.

data = tokens.open_data(tokens.DataConfig("stdlib", seq_len=1024), vocab_size=257)
batches = pipeline.make_train_iterator(data, batch_size=8)

Importing it needs only numpy. grain and tokenizers are imported on use.
"""
