"""The nouns of a job: inputs, scorer, run, requests to the model, and the roles of its parts."""
