"""The torch core: a transformers model walked layer by layer over a pack. It knows no files."""
