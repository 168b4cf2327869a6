"""Small models with random weights, made by the scripts in this folder."""
