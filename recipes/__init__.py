"""Recipes: how the sample data, the sample tokenizer and the sample models are made."""
