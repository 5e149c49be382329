"""Augmentation of whole batches on the device, with the draws and the results of the cpu engine."""
