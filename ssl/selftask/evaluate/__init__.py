"""Evaluation of frozen features, during and after a run: k-NN, linear probe, SVM, retrieval."""
