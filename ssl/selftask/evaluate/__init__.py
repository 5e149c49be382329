"""Judging frozen features: k-NN, linear probe, SVM, during a run and afterwards."""
