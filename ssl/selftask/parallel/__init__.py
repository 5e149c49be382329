"""Work shared between ranks: gradients, activations, batch statistics."""
