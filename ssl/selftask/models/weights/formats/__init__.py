"""Export formats other than plain tensors: ONNX, torch.export, Hugging Face, other libraries."""
