"""Formats of exports besides plain tensors: ONNX, torch.export, Hugging Face, other libraries."""
