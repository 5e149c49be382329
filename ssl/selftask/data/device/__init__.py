"""Augmentation of whole batches on the device, with the draws and results of the CPU engine."""
