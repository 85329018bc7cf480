"""Weights that others wrote or are to read: files of Hugging Face and PyTorch, and names over them."""
