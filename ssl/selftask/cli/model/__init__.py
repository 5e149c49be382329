"""Commands that take a trained model."""
