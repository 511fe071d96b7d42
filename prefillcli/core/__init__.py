"""The hooks of a job, and the features that use them."""
