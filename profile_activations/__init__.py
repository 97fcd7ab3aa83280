"""Activation statistics of a model: stream, report, plot."""
