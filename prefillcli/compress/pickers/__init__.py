"""The ways to pick tokens, a file each; `registry` lists them."""
