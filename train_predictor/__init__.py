"""Predictors that guess which neurons fire."""
