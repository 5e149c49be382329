"""How the ranks of a run share its work: gradients, activations, batch statistics."""
