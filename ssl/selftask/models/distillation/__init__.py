"""Targets from frozen teachers and tokenizers, vector quantization, and networks for patches."""
