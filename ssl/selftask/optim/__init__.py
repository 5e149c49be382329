"""Optimizers, schedules, parameter groups, gradients."""
