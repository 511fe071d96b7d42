"""SpecPrefill: a draft model picks the tokens that matter, and the target reads only those."""
