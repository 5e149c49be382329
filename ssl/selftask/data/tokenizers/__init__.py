"""Tokenizers, which convert texts to token ids, registered by name; they do not import torch."""
