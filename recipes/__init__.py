"""Recipes: the stages in order, for named models."""
