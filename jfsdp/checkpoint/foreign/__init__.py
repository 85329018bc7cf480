"""Other libraries' formats: weights of Hugging Face, PyTorch and PEFT, and mappings of their names."""
